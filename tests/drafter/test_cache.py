"""The cache on a local disk: never trusted, never above its limit, never a reason to fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_training import Tiny, small_disk_at

from drafter.cache import CachedStore, cached_opener
from drafter.recipe import LoaderSection
from storage.objects import LocalStore, ObjectStore, open_store


class Far(LocalStore):
    """A store that counts the ranges it gives, and is not taken for a folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.given = 0

    def get_view(self, key: str, start: int, length: int, tag: str | None = None) -> memoryview:
        self.given += 1
        return memoryview(bytes(super().get_view(key, start, length, tag)))


def stored(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def far(tmp_path: Path) -> Far:
    store = Far(tmp_path / "far")
    for number in range(8):
        store.put(f"hidden/{number}", np.random.default_rng(number).bytes(1000))
    return store


def cache(far: ObjectStore, folder: Path, limit: int = 1 << 20, name: str | None = "print") -> CachedStore:
    made = CachedStore(far, folder, limit)
    made.name = name
    return made


def view(store: ObjectStore, number: int, start: int = 0, length: int = 1000) -> bytes:
    return bytes(store.get_view(f"hidden/{number}", start, length))


def test_what_was_fetched_is_there_the_next_time_and_for_the_next_process(far: Far, tmp_path: Path) -> None:
    first = cache(far, tmp_path / "cache")
    whole = [view(first, number) for number in range(8)]
    assert (first.counts.hits, first.counts.misses, far.given) == (0, 8, 8)
    for one in (first, cache(far, tmp_path / "cache")):
        assert [view(one, number) for number in range(8)] == whole
    assert far.given == 8
    assert first.counts.hits == 8
    assert view(first, 0, 5, 10) == whole[0][5:15]  # another range is another file
    assert far.given == 9
    assert view(first, 0, 990, 50) == whole[0][990:]  # short at the end: not kept
    assert view(first, 0, 990, 50) == whole[0][990:]
    assert far.given == 11


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "longer"])
def test_a_damaged_file_is_a_miss_and_is_made_anew(far: Far, tmp_path: Path, damage: str) -> None:
    one = cache(far, tmp_path / "cache")
    whole = view(one, 0)
    (path,) = stored(tmp_path / "cache")
    data = path.read_bytes()
    changed = {"flipped": bytes([data[0] ^ 1]) + data[1:], "short": data[:-1], "empty": b"", "longer": data + b"x"}
    path.write_bytes(changed[damage])
    assert view(one, 0) == whole
    if damage != "longer":  # what follows the checksum is not looked at
        assert one.counts.damaged == 1
    assert view(one, 0) == whole
    assert path.read_bytes()[:1004] == data


def test_it_never_grows_above_its_limit_and_keeps_what_it_has(far: Far, tmp_path: Path) -> None:
    one = cache(far, tmp_path / "cache", limit=3100)
    for number in range(8):
        view(one, number)
        assert sum(path.stat().st_size for path in stored(tmp_path / "cache")) <= 3100
    assert one.counts.refused == 5
    before = far.given
    for number in range(8):
        view(one, number)
    assert far.given - before == 5  # three of eight are hits, in any order of reading


def test_files_of_other_datasets_make_room(far: Far, tmp_path: Path) -> None:
    old = cache(far, tmp_path / "cache", limit=3100, name="old")
    for number in range(3):
        view(old, number)
    new = cache(far, tmp_path / "cache", limit=3100, name="new")
    for number in range(3):
        view(new, number)
    assert {path.parent.name for path in stored(tmp_path / "cache")} == {"new"}
    assert new.counts.refused == 0


def test_two_workers_share_the_limit(far: Far, tmp_path: Path) -> None:
    workers = [cache(far, tmp_path / "cache", limit=5100) for _ in range(2)]
    for number in range(8):
        view(workers[number % 2], number)
    assert len(stored(tmp_path / "cache")) == 5


def test_nothing_is_kept_without_a_fingerprint(far: Far, tmp_path: Path) -> None:
    one = cache(far, tmp_path / "cache", name=None)
    view(one, 0)
    assert not stored(tmp_path)[0].is_relative_to(tmp_path / "cache")
    assert far.given == 1


def test_a_folder_that_cannot_be_written_is_no_error(
    far: Far, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    one = cache(far, tmp_path / "cache")
    whole = view(one, 0)
    assert view(one, 0) == whole
    assert one.counts.refused == 2
    assert len([record for record in caplog.records if "going on without" in record.message]) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 256 KiB."""
    with small_disk_at(tmp_path / "disk", "256k") as folder:
        yield folder


def test_a_full_disk_is_no_error(far: Far, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = cache(far, small_disk)
    for _ in range(2):
        for number in range(8):
            for start in range(0, 1000, 100):  # a page of 4 KiB each: 320 KiB
                assert view(one, number, start, 100) == view(far, number, start, 100)
    assert one.counts.hits > 0
    assert one.counts.refused > 0
    assert one.counts.damaged == 0
    assert not list(small_disk.rglob(".tmp-*"))
    assert len([record for record in caplog.records if "No space left" in record.message]) == 1


def test_a_folder_needs_no_cache_and_a_bucket_gets_one(tiny: Tiny, s3_server: str, tmp_path: Path) -> None:
    import uuid

    section = LoaderSection(cache=str(tmp_path / "cache"))
    assert isinstance(cached_opener(section)(f"{tiny.root}/dataset").store, LocalStore)
    from storage.copy import copy_dataset

    uri = f"s3://statehouse/{uuid.uuid4().hex}"
    copy_dataset(open_store(f"{tiny.root}/dataset"), open_store(uri))
    dataset = cached_opener(section)(uri)
    assert isinstance(dataset.store, CachedStore)
    for _ in range(2):
        dataset.read(0)
    assert (dataset.store.counts.hits, dataset.store.counts.misses) == (1, 1)
    assert [path.parent.name for path in stored(tmp_path / "cache")] == [dataset.fingerprint]
