"""How fast are tokens counted and a draft vocabulary chosen, and does the cost grow with anything but tokens?

    python -m benchmarks.vocab [--quick] [--json out.json] [--folder DIR]

Counting in one process against np.bincount on the same ids in memory; counting and mapping from local disk against
SpecForge's and speculators' own functions (when $STATEHOUSE_PEERS_PYTHON is a Python that has them); counting with Ray
Data from a dataset on local disk, with the memory of its workers; and the growth from 10 M to 1 B tokens (0.1 B with
--quick). Ids are Zipf-like over 163,840, an eighth of every sequence carries no loss. Everything is synthetic.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Report

VOCAB, DRAFT, LENGTH = 163_840, 32_000, 1024
_PEERS = Path(__file__).parent.parent / "tests" / "vocab" / "peer_vocab.py"


def zipf_ids(tokens: int, seed: int = 0, dtype: type = np.int32) -> np.ndarray:
    """[tokens] ids with frequency about 1 / rank^1.05, ranks shuffled over the vocabulary."""
    random = np.random.default_rng(seed)
    share = np.cumsum(1.0 / np.arange(1, VOCAB + 1) ** 1.05)
    ids = np.random.default_rng(0).permutation(VOCAB).astype(dtype)
    out = np.empty(tokens, dtype)
    for start in range(0, tokens, 1 << 22):
        draws = random.random(min(1 << 22, tokens - start)) * share[-1]
        out[start : start + draws.size] = ids[np.searchsorted(share, draws)]
    return out


def loss_mask(tokens: int) -> np.ndarray:
    mask = np.ones((tokens // LENGTH, LENGTH), np.bool_)
    mask[:, : LENGTH // 8] = False
    return mask.reshape(-1)


def timed(function: Callable[[], Any], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return times


def in_memory(report: Report, tokens: int, repeats: int) -> None:
    """count_tokens against np.bincount, interleaved, so that other work on the machine hurts both."""
    from vocab.counts import count_tokens

    ids, mask = zipf_ids(tokens), loss_mask(tokens)
    wide = ids.astype(np.int64)
    rates: dict[str, list[float]] = {"bincount": [], "plain": [], "masked": []}
    for _ in range(repeats):
        rates["bincount"] += [tokens / s / 1e6 for s in timed(lambda: np.bincount(wide, minlength=VOCAB), 1)]
        rates["plain"] += [tokens / s / 1e6 for s in timed(lambda: count_tokens(ids, None, VOCAB), 1)]
        rates["masked"] += [tokens / s / 1e6 for s in timed(lambda: count_tokens(ids, mask, VOCAB), 1)]
    report.row("np.bincount of int64 in memory", "M tokens/s", rates["bincount"])
    report.row("count_tokens of int32 in memory, no mask", "M tokens/s", rates["plain"])
    report.row("count_tokens of int32 in memory, with mask", "M tokens/s", rates["masked"])
    shares = [ours / theirs for ours, theirs in zip(rates["masked"], rates["bincount"], strict=True)]
    median = report.row("count_tokens with mask / np.bincount", "share", shares)
    report.bar(
        "count_share_of_bincount",
        median,
        0.6,
        "higher",
        "count_tokens with a loss mask, against np.bincount of the same ids",
    )


def write_parquet(path: Path, tokens: int) -> None:
    """One Parquet file of token_ids and loss_mask, a million tokens a row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("token_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.bool_()))])
    block = 1 << 20
    with pq.ParquetWriter(path, schema, compression="lz4", use_dictionary=False) as writer:
        for start in range(0, tokens, block):
            size = min(block, tokens - start)
            offsets = pa.array(np.arange(0, size + 1, LENGTH, dtype=np.int32))
            ids = pa.ListArray.from_arrays(offsets, pa.array(zipf_ids(size, seed=start)))
            mask = pa.ListArray.from_arrays(offsets, pa.array(loss_mask(size)))
            writer.write_table(pa.Table.from_arrays([ids, mask], schema=schema))


def count_and_map(paths: list[Path]) -> Any:
    """What a peer's two functions do: counts of files on disk, then the draft vocabulary."""
    from vocab.counts import TokenCounts, count_by_source
    from vocab.inputs import read_batches
    from vocab.mapping import DraftVocab

    total = TokenCounts.empty(VOCAB)
    for batch in read_batches([str(path) for path in paths], "prompt_group"):
        total += count_by_source(batch.token_ids, batch.loss_mask, batch.lengths, batch.sources, VOCAB)
    return DraftVocab.from_counts(total.total(), DRAFT)


def against_peers(report: Report, folder: Path, tokens: int, repeats: int) -> None:
    """Counting and mapping, from Parquet and from the very Arrow files that the peers read where they are installed."""
    path = folder / "peers.parquet"
    write_parquet(path, tokens)
    what = f"counting and mapping {tokens / 1e6:.0f} M tokens"
    ours = report.row(f"{what} from Parquet", "s", timed(lambda: count_and_map([path]), repeats))
    peers = os.environ.get("STATEHOUSE_PEERS_PYTHON")
    if not peers:
        for peer in ("specforge", "speculators"):
            report.absent(f"{peer}: {what}", "not installed")
        return
    command = [peers, str(_PEERS), str(path), str(VOCAB), str(DRAFT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if files := sorted((folder / "peers-dataset").glob("*.arrow")):
        ours = report.row(f"{what} from the peers' Arrow files", "s", timed(lambda: count_and_map(files), repeats))
    mine = sorted_hash(count_and_map([path]))
    for row in rows:
        same = "the same ids" if row["hash"] == mine else "ids of equal count differ"
        report.row(f"{row['peer']}: {what}", "s", [row["seconds"]], note=f"peak {row['peak_mb']:.0f} MB; {same}")
        limit = {"specforge": 100.0, "speculators": 20.0}[row["peer"]]
        said = f"{row['peer']}'s time over ours, both from the same files on local disk"
        report.bar(f"times_faster_than_{row['peer']}", row["seconds"] / ours, limit, "higher", said)
    if len(rows) < 2:
        report.absent("a peer", f"failed: {' '.join(done.stderr.split())[-160:]}")


def sorted_hash(vocabulary: Any) -> str:
    import hashlib

    return hashlib.sha256(vocabulary.target_ids.astype("<i8").tobytes()).hexdigest()


def write_dataset(uri: str, tokens: int) -> None:
    """A sealed dataset with one captured layer of width 8, so that its states are small beside its tokens."""
    import ml_dtypes
    import pyarrow as pa

    from storage.commit import publish_plan
    from storage.contract import Contract
    from storage.objects import open_store
    from storage.plan import make_plan
    from storage.seal import seal_dataset
    from storage.sequences import Sequence, sequence_table
    from storage.writer import ShardWriter

    ids, mask = zipf_ids(tokens), loss_mask(tokens)
    names = ("chat", "code", "maths")
    table: pa.Table = sequence_table(
        Sequence(
            names[at % 3],
            f"group-{at // 2}",
            ids[at * LENGTH : (at + 1) * LENGTH],
            mask[at * LENGTH : (at + 1) * LENGTH],
        )
        for at in range(tokens // LENGTH)
    )
    contract = Contract.model_validate(
        {"verifier": "synthetic", "config_hash": "c", "weights_hash": "w", "vocab_size": VOCAB, "hidden_size": 8,
         "num_layers": 8, "tokenizer_hash": "t", "capture_layers": (1,), "engine": "none", "engine_version": "1",
         "engine_dtype": "bfloat16"}
    )  # fmt: skip
    plan = make_plan(table, contract, "raw")
    publish_plan(open_store(uri), plan, table)
    writer = ShardWriter.from_uri(uri)
    lengths = plan.column("length")
    for unit in plan.units():
        rows = int(sum(int(lengths[int(row)]) for row in unit.rows))
        bits = np.zeros((rows, plan.geometry.layers, 8), ml_dtypes.bfloat16).view(np.uint16)
        if not writer.calibrated:
            writer.calibrate(bits)
        writer.write(unit.shard, bits, len(unit.rows))
    seal_dataset(open_store(uri), plan)


def with_ray(report: Report, folder: Path, sizes: list[int], repeats: int) -> None:
    """Rate and memory of the first pass over datasets of growing size; Ray is up and its workers have imported us."""
    from ray_jobs import job
    from ray_jobs.counting import count_all, dataset_tasks, open_all
    from vocab.counting import Split

    os.environ.pop("RAY_ADDRESS", None)
    job.start_ray()
    import ray  # after start_ray, which says how Ray authenticates before Ray reads it

    cores = int(job.cluster_size()[0])
    split = Split(folds=5, held_out=0.02)
    rates: dict[int, float] = {}
    peaks: dict[int, float] = {}
    for tokens in sizes:
        uri = str(folder / f"dataset-{tokens}")
        write_dataset(uri, tokens)
        tasks, planned = dataset_tasks(open_all([uri]), cores)
        count_all(tasks[:2], VOCAB, split)  # workers start and import
        found: list[float] = []
        for _ in range(repeats):
            began = time.perf_counter()
            counts = count_all(tasks, VOCAB, split)
            found.append(tokens / (time.perf_counter() - began) / 1e6)
            assert counts.folds.total().tokens + counts.held_out.tokens == planned
        peaks[tokens] = max(ray.get([_peak.remote() for _ in range(2 * cores)]))
        rates[tokens] = report.row(
            f"Ray Data, {cores} cores, dataset of {tokens / 1e6:.0f} M tokens",
            "M tokens/s",
            found,
            note=f"largest worker {peaks[tokens]:.0f} MB",
        )
    largest, smallest = max(sizes), min(sizes)
    report.bar(
        "ray_m_tokens_per_s",
        rates[largest],
        70,
        "higher",
        f"Ray Data on {cores} cores from a dataset of {largest / 1e6:.0f} M tokens on local disk",
    )
    if largest > smallest:
        growth = peaks[largest] / peaks[smallest]
        report.bar(
            "ray_memory_growth",
            growth,
            1.5,
            "lower",
            f"largest worker's peak memory at {largest / 1e6:.0f} M tokens over that at {smallest / 1e6:.0f} M",
        )
    ray.shutdown()


def _make_peak() -> Any:
    import ray

    @ray.remote
    def peak() -> float:
        time.sleep(0.2)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3

    return peak


class _Peak:
    """The remote function, made when Ray is first needed."""

    def remote(self) -> Any:
        return _make_peak().remote()


_peak = _Peak()


def growth(report: Report, sizes: list[int]) -> None:
    """Seconds a token at growing sizes, ids made a block at a time, and the peak memory of a fresh process."""
    seconds: dict[int, float] = {}
    for tokens in sizes:
        program = f"from benchmarks.vocab import count_synthetic; count_synthetic({tokens})"
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent.parent,
        )
        row = json.loads(done.stdout)
        seconds[tokens] = row["seconds"] / tokens
        report.row(
            f"one process, {tokens / 1e6:,.0f} M tokens",
            "ns a token",
            [seconds[tokens] * 1e9],
            note=f"peak {row['peak_mb']:.0f} MB",
        )
    ratio = seconds[max(sizes)] / seconds[min(sizes)]
    report.bar(
        "cost_growth",
        ratio,
        1.3,
        "lower",
        f"cost of a token at {max(sizes) / 1e6:,.0f} M over that at {min(sizes) / 1e6:,.0f} M: linear is 1",
    )


def count_synthetic(tokens: int) -> None:
    """Count `tokens` ids, a block of 10 M over and over, and print the time and the peak memory as JSON."""
    from vocab.counts import count_tokens

    block = 10_000_000
    ids, mask = zipf_ids(block), loss_mask(block + LENGTH)[:block]
    counts = np.zeros(VOCAB, np.int64)
    began = time.perf_counter()
    for _ in range(tokens // block):
        counts += count_tokens(ids, mask, VOCAB)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps({"seconds": seconds, "peak_mb": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vocab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="every figure, smaller sizes")
    parser.add_argument("--json", metavar="OUT", help="write machine, rows and bars to this file")
    parser.add_argument("--folder", help="where synthetic data is written (a temporary folder)")
    args = parser.parse_args()
    report = Report("vocab", args.quick)
    repeats = 3 if args.quick else 7
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        in_memory(report, 20_000_000 // LENGTH * LENGTH, repeats)
        against_peers(report, folder, 20_000_000 // LENGTH * LENGTH, repeats)
        million = 1_000_000 // LENGTH * LENGTH
        with_ray(
            report, folder, [25 * million, 100 * million] if args.quick else [50 * million, 400 * million], repeats
        )
        growth(report, [10_000_000, 100_000_000] if args.quick else [10_000_000, 100_000_000, 1_000_000_000])
    report.show(args.json)


if __name__ == "__main__":
    main()
