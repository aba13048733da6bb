"""Files by glob and URI: each once, on any store, and one error for what is not there."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vocab.counts import TokenCounts, count_by_source
from vocab.errors import VocabError
from vocab.files import find_files
from vocab.inputs import largest_id, read_batches

TABLE = pa.table({"token_ids": [[1, 2, 3], [], [3]], "loss_mask": [[True, False, True], [], [True]]})


@pytest.fixture
def bucket() -> Iterator[str]:
    """The same rows in each format, in a store that is not the file system."""
    files = fsspec.filesystem("memory")
    parquet, arrow = io.BytesIO(), io.BytesIO()
    pq.write_table(TABLE, parquet)
    with pa.ipc.new_stream(arrow, TABLE.schema) as writer:
        writer.write_table(TABLE)
    lines = "".join(json.dumps(row) + "\n" for row in TABLE.to_pylist()).encode()
    for name, data in {
        "a.parquet": parquet.getvalue(), "b.arrow": arrow.getvalue(), "c.jsonl": lines, "d.jsonl.gz": gzip.compress(lines),
    }.items():  # fmt: skip
        files.pipe_file(f"/ids/{name}", data)
    yield "memory://ids"
    files.rm("/ids", recursive=True)


def test_every_format_counts_alike_on_object_storage(bucket: str) -> None:
    paths = find_files([f"{bucket}/*", f"{bucket}/a.parquet"], "files")
    assert [path.rsplit("/", 1)[1] for path in paths] == ["a.parquet", "b.arrow", "c.jsonl", "d.jsonl.gz"]
    for path in paths:
        total = TokenCounts.empty(5)
        for batch in read_batches([path], ""):
            total += count_by_source(batch.token_ids, batch.loss_mask, batch.lengths, batch.sources, 5)
        assert total.total().tolist() == [0, 1, 0, 2, 0], path
    assert largest_id(paths) == 3


def test_a_file_named_twice_is_found_once(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    found = find_files([str(tmp_path / "*.jsonl"), f"file://{tmp_path}/a.jsonl"], "files")
    assert [Path(path).name for path in found] == ["a.jsonl", "b.jsonl"]


def test_what_is_not_there_is_named(bucket: str, tmp_path: Path) -> None:
    for missing in (f"{bucket}/*.csv", f"{bucket}/x.parquet", str(tmp_path / "*.parquet"), str(tmp_path)):
        with pytest.raises(VocabError, match="vocab.files: .*: no such file"):
            find_files([missing], "vocab.files")
    with pytest.raises(VocabError, match="vocab.files: nowhere://x/y: cannot be read"):
        find_files(["nowhere://x/y"], "vocab.files")
