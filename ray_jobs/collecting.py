"""Blocks of tokenised rows, in order -> prompts.parquet, rejects, and the counts of prepare's summary. Pure but for log lines."""

from __future__ import annotations

import io
import time
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ray_jobs import job
from ray_jobs.prompt_files import PromptFile
from ray_jobs.prompts import PROMPTS_SCHEMA, REJECTS_SCHEMA
from storage.errors import RecipeError, StatehouseError

# About 20 MB in memory.
ROW_GROUP_TOKENS = 1 << 22


class Collected:
    """Puts blocks together, in order: prompts.parquet as it grows, rejects, and the counts of the summary."""

    def __init__(self, files: list[PromptFile]) -> None:
        self.files = files
        self.rows = self.prompts = self.duplicates = self.tokens = self.loss_tokens = 0
        self.sources: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()
        self._rejects: list[pa.Table] = []
        self._seen: set[bytes] = set()
        self._place, self._in_file = (0, 0), 0
        self._closed: list[int] = []
        self._held: list[pa.Table] = []
        self._held_tokens = 0
        self._sink = io.BytesIO()
        self._writer = pq.ParquetWriter(self._sink, PROMPTS_SCHEMA, compression="zstd")
        self._began = self._told = time.monotonic()

    def add(self, block: pa.Table) -> None:
        """Raises RecipeError for a file that could not be read, StatehouseError when rows are missing or out of order."""
        kept = []
        names = ("at", "number", "rows", "error", "code", "id")
        for index, (at, number, rows, error, code, key) in enumerate(
            zip(*(block[name].to_pylist() for name in names), strict=True)
        ):
            if error is not None:
                raise RecipeError(error)
            if rows is not None:
                self._close(at, rows)
                continue
            if (at, number) < self._place or at in self._closed:
                raise StatehouseError(
                    f"{self.files[at].path}:{number} came out of order; run prepare again and report it"
                )
            if (at, number) != self._place:
                self._place = (at, number)
                self.rows += 1
                self._in_file += 1
            if code is not None:
                self.codes[code] += 1
                continue
            identity = bytes.fromhex(key)
            if identity in self._seen:
                self.duplicates += 1
                continue
            self._seen.add(identity)
            kept.append(index)
        self._keep(block.take(pa.array(kept, pa.int64())).select(PROMPTS_SCHEMA.names))
        if (refused := block.filter(pa.compute.is_valid(block["code"]))).num_rows:
            self._rejects.append(self._named(refused))
        if (now := time.monotonic()) - self._told >= 5:
            self._told = now
            job.log.info(
                "prepare files=%d/%d rows=%s tokens=%s tokens_per_s=%s rejects=%d", len(self._closed), len(self.files),
                f"{self.rows:,}", f"{self.tokens:,}", f"{self.tokens / (now - self._began):,.0f}", self.codes.total(),
            )  # fmt: skip

    def _keep(self, prompts: pa.Table) -> None:
        if not prompts.num_rows:
            return
        self.prompts += prompts.num_rows
        self.tokens += pa.compute.sum(pa.compute.list_value_length(prompts["token_ids"])).as_py()
        self.loss_tokens += pa.compute.sum(pa.compute.list_flatten(prompts["loss_mask"])).as_py() or 0
        self.sources.update(prompts["source"].to_pylist())
        self.kinds.update(prompts["kind"].to_pylist())
        # A row group ends behind the row that fills it, wherever the blocks do: equal rows make equal bytes.
        ends = (
            np.cumsum(pa.compute.list_value_length(prompts["token_ids"]).to_numpy().astype(np.int64))
            + self._held_tokens
        )
        while prompts.num_rows and ends[-1] >= ROW_GROUP_TOKENS:
            cut = int(np.searchsorted(ends, ROW_GROUP_TOKENS)) + 1
            self._held.append(prompts.slice(0, cut))
            self._flush()
            prompts, ends = prompts.slice(cut), ends[cut:] - ends[cut - 1]
        if prompts.num_rows:
            self._held.append(prompts)
            self._held_tokens = int(ends[-1])

    def _flush(self) -> None:
        if self._held:
            self._writer.write_table(pa.concat_tables(self._held).combine_chunks())
            self._held, self._held_tokens = [], 0

    def _close(self, at: int, rows: int) -> None:
        if rows != self._in_file:
            raise StatehouseError(
                f"{self.files[at].path}: {rows} rows were read and {self._in_file} came back; run prepare again and report it"
            )
        self._closed.append(at)
        self._in_file = 0

    def _named(self, refused: pa.Table) -> pa.Table:
        files = [self.files[at] for at in refused["at"].to_pylist()]
        columns = {
            "source": [file.source for file in files],
            "file": [file.path for file in files],
            "row": refused["number"],
        }
        columns |= {name: refused[name] for name in ("code", "reason", "text")}
        return pa.table(columns, schema=REJECTS_SCHEMA)

    @property
    def rejects(self) -> pa.Table:
        return pa.concat_tables([REJECTS_SCHEMA.empty_table(), *self._rejects])

    def finish(self) -> bytes:
        """prompts.parquet. Raises StatehouseError when a file did not come to its end."""
        if sorted(self._closed) != list(range(len(self.files))):
            missing = next(file.path for at, file in enumerate(self.files) if at not in self._closed)
            raise StatehouseError(f"{missing}: did not come to its end; run prepare again and report it")
        self._flush()
        self._writer.close()
        return self._sink.getvalue()
