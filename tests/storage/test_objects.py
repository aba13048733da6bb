from __future__ import annotations

import threading
from pathlib import Path

import pytest

from storage.errors import StoreError
from storage.object_store import ObjectChanged
from storage.objects import LocalStore, ObjectMissing, open_store


def test_an_object_comes_back_whole_and_in_parts(uri: str) -> None:
    store = open_store(uri)
    data = bytes(range(256)) * 40
    assert store.create("a/b", data)
    assert store.get("a/b") == data
    assert store.get_range("a/b", 100, 50) == data[100:150]
    assert store.get_tail("a/b", 30)[:2] == (data[-30:], len(data))
    assert store.get_tail("a/b", 1 << 20)[:2] == (data, len(data))
    assert store.sizes() == {"a/b": len(data)}
    assert store.folders() == ["a"]
    store.delete("a/b")
    store.delete("a/b")
    assert not store.exists("a/b")


def test_a_missing_object_is_named(uri: str) -> None:
    store = open_store(uri)
    for read in (lambda: store.get("x/y"), lambda: store.get_range("x/y", 0, 3), lambda: store.get_tail("x/y", 3)):
        with pytest.raises(ObjectMissing, match="x/y"):
            read()


def test_a_tag_tells_an_object_from_the_one_that_replaced_it(uri: str) -> None:
    store = open_store(uri)
    store.create("key", b"first" * 100)
    tag = store.get_tail("key", 10).tag
    assert tag is not None
    assert bytes(store.get_view("key", 5, 10, tag)) == b"firstfirst"
    store.delete("key")
    with pytest.raises(ObjectMissing):
        store.get_view("key", 5, 10, tag)
    store.create("key", b"other" * 100)
    with pytest.raises(ObjectChanged):
        store.get_view("key", 5, 10, tag)
    assert bytes(store.get_view("key", 5, 10, store.get_tail("key", 1).tag)) == b"otherother"


def test_of_many_creators_exactly_one_wins_and_its_bytes_stay(uri: str) -> None:
    store = open_store(uri)
    for key in map(str, range(2)):
        won: list[int] = []
        barrier = threading.Barrier(8)

        def create(number: int, key: str = key, barrier: threading.Barrier = barrier, won: list[int] = won) -> None:
            barrier.wait()
            if store.create(key, f"{number}".encode() * 1000):
                won.append(number)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.get(key) == f"{won[0]}".encode() * 1000


def test_the_probe_accepts_real_stores_and_leaves_nothing(uri: str) -> None:
    store = open_store(uri)
    store.probe()
    assert store.sizes() == {}


class Overwriting(LocalStore):
    def create(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


def test_the_probe_refuses_a_store_that_overwrites(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="create-only"):
        Overwriting(tmp_path).probe()


def test_a_half_written_temporary_is_no_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("a/b", b"1")
    (tmp_path / "a" / ".tmp-0123").write_bytes(b"half")
    assert store.sizes() == {"a/b": 1}


def test_a_file_in_the_way_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="dataset.uri"):
        LocalStore(tmp_path / "file").create("a", b"1")


@pytest.mark.parametrize("uri", ["s3:/bucket/x", "file://out/x", "foo://x/y", "a\0b"])
def test_what_is_no_uri_is_refused_not_taken_for_a_folder(uri: str) -> None:
    with pytest.raises(StoreError):
        open_store(uri).get("plan.json")


def test_file_uris_and_home_folders_lead_where_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/a b").uri == str(tmp_path / "a b")
    assert open_store(f"file://{tmp_path}/a%20b").uri == str(tmp_path / "a b")


@pytest.mark.usefixtures("s3_server")
def test_a_missing_bucket_is_named() -> None:
    with pytest.raises(StoreError, match="no bucket 'absent-bucket'"):
        open_store("s3://absent-bucket/x").probe()


@pytest.mark.usefixtures("s3_server")
@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_named_and_not_printed(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "wrong-value")
    with pytest.raises(StoreError, match="refused these credentials") as caught:
        open_store("s3://statehouse/x").probe()
    assert "wrong-value" not in str(caught.value)


def test_a_server_that_is_not_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    with pytest.raises(StoreError, match="AWS_ENDPOINT_URL"):
        open_store("s3://bucket/x").get("a")
