"""Planning a corpus with its tokens, which fit no memory: `python -m benchmarks.planning SEQUENCES [FOLDER]`.

Makes a Parquet file of so many sequences (1,000,000 are 1.7 billion tokens: 7 GB, and 16 GB more while they are planned and
stored), plans it in a process of its own and stores the plan's objects in a folder. Prints JSON: seconds of both, peak
resident bytes, tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.corpus import contract
from benchmarks.memory import peak
from benchmarks.opening import length_mix
from storage.commit import publish_plan
from storage.objects import open_store
from storage.plan import make_plan
from storage.sequences import TOKENS_SCHEMA, Sequence, sequence_id, tokens_table
from storage.spool import SequenceSpool

_ROWS = 2048


def make_file(path: Path, count: int) -> None:
    """Sequences are windows of one block of ids with a few of its own, so that making them takes less than planning them."""
    random, lengths = np.random.default_rng(0), length_mix(count)
    block = np.minimum(random.zipf(1.2, 1 << 22), 999).astype(np.int32)  # as skewed as text is
    mask = random.random(len(block)) < 0.6
    with pq.ParquetWriter(path, TOKENS_SCHEMA, compression="none", use_dictionary=["source"]) as file:
        for low in range(0, count, _ROWS):
            rows = []
            for row in range(low, min(low + _ROWS, count)):
                start, length = row * 7919 % (len(block) - 8192), int(lengths[row])
                ids = block[start : start + length].copy()
                ids[: 4 if length > 4 else 0] = row >> 20, row >> 10 & 511, row & 511, row >> 9 & 1
                rows.append(Sequence("chat", f"g{row // 2}", ids, mask[start : start + length]))
            keys = [sequence_id(one.token_ids, one.loss_mask) for one in rows]
            file.write_table(tokens_table(keys, rows))


def plan_file(path: Path, uri: str) -> dict[str, float]:
    with SequenceSpool(path.parent) as spool:
        began = time.perf_counter()
        spool.add_parquet(path)
        sequences = spool.finish()
        plan = make_plan(sequences, contract(), "lossless")
        planned = time.perf_counter()
        publish_plan(open_store(uri), plan, sequences)
        return {
            "sequences": len(sequences),
            "tokens": plan.tokens,
            "plan_seconds": planned - began,
            "publish_seconds": time.perf_counter() - planned,
            "peak_bytes": peak(),
        }


def measure(count: int, folder: str | None = None) -> dict[str, float]:
    """Runs both steps in processes of their own."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        found = ""
        for step in ("make", "plan"):
            command = [sys.executable, "-m", "benchmarks.planning", "--step", step, str(count), place]
            found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        return json.loads(found.splitlines()[-1])


def main(arguments: list[str]) -> None:
    if arguments[:1] != ["--step"]:
        print(json.dumps(measure(int(arguments[0]), *arguments[1:2])))
        return
    path = Path(arguments[3]) / "tokens.parquet"
    if arguments[1] == "make":
        make_file(path, int(arguments[2]))
    else:
        print(json.dumps(plan_file(path, str(path.parent / "dataset"))))


if __name__ == "__main__":
    main(sys.argv[1:])
