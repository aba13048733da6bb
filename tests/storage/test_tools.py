"""cp, gc, stats, diff, card: what they say is so, and what they change is only what they say."""

from __future__ import annotations

import json
import os
import re
import time
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from tiny import HIDDEN, LAYERS, contract, fails, fill, planned, sealed, sequences, states_of, unit_states

from storage import layout, open_dataset
from storage.card import card_html
from storage.cli import main
from storage.commit import publish_plan
from storage.copy import copy_dataset
from storage.diff import diff_datasets
from storage.errors import DatasetNotSealed, PlanConflict, ShardCorrupt, StatehouseError
from storage.gc import delete_garbage, find_garbage
from storage.objects import LocalStore, ObjectStore, open_store
from storage.plan import make_plan
from storage.seal import seal_dataset
from storage.stats import dataset_stats
from storage.verify import verify
from storage.writer import ShardWriter


def objects(store: ObjectStore) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.sizes()}


def test_a_copy_is_equal_to_the_byte_and_making_it_again_sends_nothing(uri: str, tmp_path: Path) -> None:
    sealed(f"{uri}/a")
    source, target = open_store(f"{uri}/a"), LocalStore(tmp_path / "copy")
    assert copy_dataset(source, target, full=True).ok
    assert objects(target) == objects(source)
    written = {key: (target.root / key).stat().st_mtime_ns for key in target.sizes()}
    assert copy_dataset(source, target).ok
    assert {key: (target.root / key).stat().st_mtime_ns for key in target.sizes()} == written
    back = open_store(f"{uri}/b")  # and from a folder to the store
    assert copy_dataset(target, back).ok
    assert objects(back) == objects(source)


class Stops(LocalStore):
    left = 6

    def create(self, key: str, data: bytes) -> bool:
        if not key.startswith("probe"):
            self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().create(key, data)


def test_a_copy_that_was_cut_off_is_no_sealed_dataset_and_is_carried_on(tmp_path: Path) -> None:
    sealed(str(tmp_path / "a"))
    source, target = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    with pytest.raises(KeyboardInterrupt):
        copy_dataset(source, Stops(tmp_path / "b"))
    assert target.exists(layout.PLAN)
    with pytest.raises((DatasetNotSealed, ShardCorrupt)):
        open_dataset(str(tmp_path / "b"))
    assert copy_dataset(source, target).ok
    assert objects(target) == objects(source)


def test_damage_is_not_copied_and_nothing_is_overwritten(tmp_path: Path) -> None:
    sealed(str(tmp_path / "a"))
    source, target = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    for key in ("tokens/c/0", layout.shard_key(1)):
        good = source.get(key)
        source.put(key, good[:30] + bytes([good[30] ^ 1]) + good[31:])
        with pytest.raises(ShardCorrupt, match=rf"{key}.*statehouse verify"):
            copy_dataset(source, target)
        assert not target.exists(key)
        source.put(key, good)
    target.put(layout.shard_key(2), b"something else")
    with pytest.raises(ShardCorrupt, match="hidden/c/0/2/0/0: holds something else.*statehouse repair"):
        copy_dataset(source, target)
    sealed(str(tmp_path / "c"), sequences(seed=3))
    with pytest.raises(PlanConflict, match="already holds another dataset"):
        copy_dataset(source, LocalStore(tmp_path / "c"))
    planned(str(tmp_path / "d"))
    with pytest.raises(DatasetNotSealed):
        copy_dataset(LocalStore(tmp_path / "d"), LocalStore(tmp_path / "e"))


def test_cp_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sealed(str(tmp_path / "a"))
    main(["cp", str(tmp_path / "a"), str(tmp_path / "b"), "--full"])
    assert "all is well" in capsys.readouterr().out
    main(["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert "yes: equal fingerprints" in capsys.readouterr().out
    assert "no dataset here" in fails(capsys, "cp", str(tmp_path / "none"), str(tmp_path / "c"))


def old(path: Path, days: float) -> None:
    when = time.time() - days * 86400
    os.utime(path, (when, when))


def test_gc_takes_old_unplanned_keys_of_sealed_datasets_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed(str(tmp_path))
    sealed(str(tmp_path / "nested" / "dataset"))
    before = objects(LocalStore(tmp_path))
    for name in ("hidden/c/0/999/0/0", "probe-0123", "hidden/c/0/0/0/.tmp-dead", "young"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"garbage")
    store, later = LocalStore(tmp_path), datetime.now(UTC) + timedelta(days=2)
    with pytest.raises(StatehouseError, match="only what is older than 24 hours"):
        find_garbage(store)
    for name in ("hidden/c/0/999/0/0", "probe-0123", "hidden/c/0/0/0/.tmp-dead"):
        old(tmp_path / name, 0)
    old(tmp_path / "young", -1.9)
    found = find_garbage(store, now=later)
    assert [one.key for one in found] == ["hidden/c/0/0/0/.tmp-dead", "hidden/c/0/999/0/0", "probe-0123"]
    main(["gc", str(tmp_path), "--older-than", "0"])  # dry: nothing changes
    assert "--delete removes them" in capsys.readouterr().out
    assert (tmp_path / "probe-0123").exists()
    assert delete_garbage(store, found) == 21
    assert objects(store) == {**before, "young": b"garbage"}
    main(["gc", str(tmp_path), "--older-than", "0", "--delete", "--json"])
    assert [one["key"] for one in json.loads(capsys.readouterr().out)["garbage"]] == []  # young: written in the future
    assert verify(store).ok


def test_gc_leaves_unsealed_datasets_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(str(tmp_path))
    assert "not sealed" in fails(capsys, "gc", str(tmp_path), "--delete")


@pytest.mark.usefixtures("s3_server")
def test_gc_on_object_storage(capsys: pytest.CaptureFixture[str]) -> None:
    uri = f"s3://statehouse/gc-{os.getpid()}"
    sealed(uri)
    open_store(uri).put("left-over", b"x")
    main(["gc", uri, "--older-than", "0", "--delete", "--json"])
    assert json.loads(capsys.readouterr().out)["freed_bytes"] == 1
    assert not open_store(uri).exists("left-over")
    assert verify(open_store(uri)).ok


def test_stats_are_those_of_the_states_that_were_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = sequences()
    sealed(str(tmp_path), table)
    stats = dataset_stats(open_dataset(str(tmp_path)), sample=len(table))
    lengths = [len(ids) for ids in table["token_ids"].to_pylist()]
    everything = np.concatenate(
        [states_of(key, length) for key, length in zip(table["id"].to_pylist(), lengths, strict=True)]
    )
    values = (everything.astype(np.uint32) << 16).view(np.float32)
    assert stats.sampled_tokens == stats.tokens == len(values)
    assert stats.channel_rms == pytest.approx(np.sqrt((values.astype(np.float64) ** 2).mean(0)), rel=1e-6)
    assert [layer.rms for layer in stats.layers] == pytest.approx(
        np.sqrt((values.astype(np.float64) ** 2).mean((0, 2))).tolist(), rel=1e-6
    )
    assert [layer.name for layer in stats.layers] == ["layer 1", "layer 3", "layer 4", "final"]
    assert sum(count for _, _, count in stats.histogram) == len(table)
    for low, high, count in stats.histogram:
        assert count == sum(low <= length < high for length in lengths)
    assert {source.name: source.sequences for source in stats.sources} == {"chat": 20, "code": 20, "maths": 20}
    assert sum(source.loss_tokens for source in stats.sources) == stats.loss_tokens
    rms = stats.channel_rms[0]
    expected = {int(channel) for channel in np.flatnonzero(rms >= 20 * np.median(rms))}
    assert {channel for channel, _ in stats.layers[0].outliers} == expected
    main(["stats", str(tmp_path)])
    assert "channels over 20x" in capsys.readouterr().out
    main(["stats", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["sequences"] == 60


def test_diff_tells_contract_layout_sequences_and_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = sequences()
    plan, _ = sealed(str(tmp_path / "a"), table)
    sealed(str(tmp_path / "raw"), table, "raw")
    found = diff_datasets(open_dataset(str(tmp_path / "a")), open_dataset(str(tmp_path / "raw")))
    assert not found.same
    assert found.layout == ["codec: lossless != raw"]
    assert (found.shared, found.only_a, found.only_b) == (60, 0, 0)
    assert found.states.equal == found.states.compared == 32
    assert set((found.states.relative_l2 or {}).values()) == {0.0}

    sealed(str(tmp_path / "part"), table.slice(0, 40))
    found = diff_datasets(open_dataset(str(tmp_path / "a")), open_dataset(str(tmp_path / "part")))
    assert (found.shared, found.only_a, found.only_b) == (40, 20, 0)
    assert found.only_a_tokens == sum(len(ids) for ids in table["token_ids"][40:].to_pylist())

    other = str(tmp_path / "other")
    publish_plan(open_store(other), make_plan(table, contract(engine="e2", config_hash="z"), "lossless"), table)
    writer = ShardWriter.from_uri(other)
    plan = make_plan(table, contract(engine="e2", config_hash="z"), "lossless")
    for unit in plan.units():
        bits = unit_states(plan, unit) ^ 1
        if not writer.calibrated:
            writer.calibrate(bits)
        writer.write(unit.shard, bits, len(unit.rows))
    seal_dataset(open_store(other), plan)
    with pytest.raises(SystemExit) as caught:
        main(["diff", str(tmp_path / "a"), other, "--json"])
    assert caught.value.code == 1
    document = json.loads(capsys.readouterr().out)
    assert document["contract"] == ["config_hash: 'c' != 'z'"]
    assert document["recorded"] == ["engine: 'test' != 'e2'"]
    assert document["states"]["equal"] == 0
    assert all(0 < error < 0.01 for error in document["states"]["relative_l2"].values())


def test_diff_of_equal_plans_names_the_shards_that_differ(tmp_path: Path) -> None:
    plan, _ = sealed(str(tmp_path / "a"), sequences(120))
    uri = str(tmp_path / "b")
    publish_plan(open_store(uri), plan, sequences(120))
    writer = ShardWriter.from_uri(uri)
    writer.calibrate(unit_states(plan, next(iter(plan.units()))))
    for unit in plan.units():
        bits = unit_states(plan, unit)
        bits[0, 0, 0] ^= unit.shard in (1, 4)
        writer.write(unit.shard, bits, len(unit.rows))
    seal_dataset(open_store(uri), plan)
    assert diff_datasets(open_dataset(str(tmp_path / "a")), open_dataset(uri)).shards == [1, 4]


class Page(HTMLParser):
    """Checks nesting and collects what a page would load."""

    void = frozenset({"meta", "line", "rect", "polyline", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_card_is_one_page_that_loads_nothing_and_escapes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = sequences()
    plan = make_plan(table, contract(verifier="<script>alert(1)</script>"), "lossless")
    uri = str(tmp_path / "x<b>&")
    publish_plan(open_store(uri), plan, table)
    fill(uri, plan)
    seal = seal_dataset(open_store(uri), plan)
    dataset = open_dataset(uri)
    html = card_html(dataset, dataset_stats(dataset))
    page = Page()
    page.feed(html)
    assert page.open == []
    assert page.loads == []
    assert "script" not in page.tags
    assert "b" in page.tags
    assert page.tags.count("svg") == 4
    assert not re.search(r"\bnan\b|\binf\b", html)
    for part in (seal.fingerprint, "chat", "layer 3", f"{seal.sequences:,}", "outputs of decoder layers"):
        assert part in html
    main(["card", uri, "-o", str(tmp_path / "card.html")])
    assert (tmp_path / "card.html").read_text().startswith("<!doctype html>")
    assert "wrote" in capsys.readouterr().out
    assert "No such file" in fails(capsys, "card", uri, "-o", str(tmp_path / "none" / "card.html"))


def test_every_command_teaches_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    commands = (
        "ls",
        "info",
        "head",
        "stats",
        "diff",
        "card",
        "verify",
        "seal",
        "repair",
        "gc",
        "cp",
        "convert",
        "export",
    )
    for name in commands:
        assert re.search(rf"^    {name}\b", text, re.MULTILINE), name
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0
        assert "example:" in capsys.readouterr().out


def test_bad_input_of_every_command_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = str(tmp_path / "nowhere")
    for arguments in (
        ["stats", nowhere],
        ["diff", nowhere, nowhere],
        ["card", nowhere],
        ["verify", nowhere],
        ["seal", nowhere],
        ["repair", nowhere],
        ["gc", nowhere],
        ["cp", nowhere, str(tmp_path / "b")],
        ["export", "specforge", nowhere, str(tmp_path / "c")],
        ["convert", "specforge", nowhere, str(tmp_path / "d")],
        ["convert", "speculators", nowhere, str(tmp_path / "d")],
    ):
        fails(capsys, *arguments)
    assert (LAYERS, HIDDEN) == (4, 64)
