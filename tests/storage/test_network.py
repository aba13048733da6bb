"""A network that breaks: every fault of the proxy, on reading and on writing, recovers or ends in one named error."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from tiny import fill, planned, sealed, sequences, states_of

from benchmarks.proxy import Fault, Proxy
from storage import layout, open_dataset, remote_store
from storage.errors import StatehouseError, StoreError
from storage.objects import open_store
from storage.seal import load_seal, seal_dataset


@pytest.fixture(scope="module")
def whole(s3_server: str) -> str:
    uri = f"s3://statehouse/network-{uuid.uuid4().hex}"
    sealed(uri, sequences(12, 300))
    return uri


@pytest.fixture
def through(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Fault | None], Proxy]]:
    """Puts a proxy with a fault between this process and the server. Where requests stall, they are given up after 1 s."""
    host, port = s3_server.split("//")[1].split(":")
    proxies: list[Proxy] = []
    remote = remote_store.RemoteStore.__init__

    def impatient(self: remote_store.RemoteStore, uri: str) -> None:
        fault = proxies[-1].fault if proxies else None
        remote(self, uri, timeout_s=1.0 if fault is not None and fault.kind == "stall" else 60.0)

    def start(fault: Fault | None) -> Proxy:
        proxies.append(Proxy((host, int(port)), fault=fault))
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxies[-1].endpoint)
        return proxies[-1]

    monkeypatch.setattr(remote_store.RemoteStore, "__init__", impatient)
    yield start
    for proxy in proxies:
        proxy.close()


def read_all(uri: str) -> int:
    """Sequences read; each must be right."""
    count = 0
    for states in open_dataset(uri).stream():
        assert (states.hidden.view(np.uint16) == states_of(states.id, len(states.token_ids))).all()
        count += 1
    return count


def also_slow(*names: str) -> list[ParameterSet]:
    """Faults of a kind that another one stands for where time is short."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("kind", ["503", "half", "flip", *also_slow("500", "reset", "lost")])
def test_reading_recovers_when_the_first_get_of_every_object_fails(
    whole: str, through: Callable[[Fault | None], Proxy], kind: str
) -> None:
    proxy = through(Fault(kind))
    assert read_all(whole) == 12
    assert proxy.counts[kind] > 5


@pytest.mark.parametrize("kind", ["stall", "half"])
def test_reading_recovers_when_shards_stall_or_break_off_again_and_again(
    whole: str, through: Callable[[Fault | None], Proxy], kind: str
) -> None:
    proxy = through(Fault(kind, times=2, path="hidden/c/0/[01]/"))
    assert read_all(whole) == 12
    assert proxy.counts[kind] == 4


@pytest.mark.parametrize("kind", ["flip", *also_slow("short")])
@pytest.mark.parametrize("path", ["plan.json", "sequences.parquet", "exponent_offset", "tokens/c/0", "seal.json", "shards.parquet", "hidden/c"])  # fmt: skip
def test_an_object_that_always_comes_damaged_is_an_error_that_names_it(
    whole: str, through: Callable[[Fault | None], Proxy], kind: str, path: str
) -> None:
    through(Fault(kind, times=-1, path=path))
    with pytest.raises(StatehouseError) as caught:
        read_all(whole)
    assert path.split("/")[0] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["503", *also_slow("reset")])
def test_a_store_that_never_answers_is_one_named_error(
    whole: str, through: Callable[[Fault | None], Proxy], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "_MAX_RETRIES", 2)
    through(Fault(kind, times=-1))
    with pytest.raises(StoreError, match=r"plan\.json: the store failed .*AWS_ENDPOINT_URL"):
        open_dataset(whole)


@pytest.mark.parametrize("kind", ["503", *also_slow("500", "reset", "half", "lost")])
def test_writing_recovers_and_nothing_is_written_twice(through: Callable[[Fault | None], Proxy], kind: str) -> None:
    """`lost` and `half`: the object was stored and only the answer is missing, so the next try finds and adopts it."""
    uri = f"s3://statehouse/{uuid.uuid4().hex}"
    proxy = through(Fault(kind, method="PUT"))
    plan = planned(uri, sequences(12, 300))
    created = fill(uri, plan)
    seal_dataset(open_store(uri), plan)
    assert proxy.counts[kind] >= plan.geometry.shards
    if kind in ("503", "500", "reset"):
        assert all(created)
    through(None)
    assert read_all(uri) == 12
    assert load_seal(open_store(uri)).shards == plan.geometry.shards


def test_a_probe_of_the_proxy_itself(through: Callable[[Fault | None], Proxy], tmp_path: Path) -> None:
    """Without a fault everything passes unchanged, lists included."""
    proxy = through(None)
    uri = f"s3://statehouse/{uuid.uuid4().hex}"
    store = open_store(uri)
    store.probe()
    data = bytes(range(256)) * 5000
    assert store.create("a/b", data)
    assert store.get("a/b") == data
    assert bytes(store.get_view("a/b", 1000, 2000)) == data[1000:3000]
    assert store.sizes() == {"a/b": len(data)}
    assert proxy.counts["PUT"] >= 3
    assert layout.shard_key(0) not in store.sizes()
