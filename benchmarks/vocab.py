"""How fast are tokens counted and a draft vocabulary chosen, and does the cost grow with anything but tokens?

    python -m benchmarks.vocab [--quick] [--json out.json] [--folder DIR]

Counting in one process against np.bincount on the same ids in memory; counting and mapping from local disk against
SpecForge's and speculators' own functions (when $STATEHOUSE_PEERS_PYTHON is a Python that has them), each from its own
format; counting with Ray Data from a dataset on local disk, with the memory of its workers; and the growth from 10 M to
1 B tokens. Ids are Zipf-like over 163,840, an eighth of every sequence carries no loss. Everything is synthetic. Rows
go to stderr as they come; with --quick all of it takes less than three minutes on two cores, a minute of which is the
peers'.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memory import peak
from benchmarks.report import Report, arguments
from benchmarks.vocab_data import LENGTH, VOCAB, loss_mask, write_dataset, write_parquet, zipf_ids

DRAFT = 32_000
_ROOT = Path(__file__).parent.parent
_PEERS = _ROOT / "tests" / "vocab" / "peer_vocab.py"
_FASTER = {"specforge": 100.0, "speculators": 20.0}


def timed(function: Callable[[], Any], repeats: int) -> tuple[list[float], str]:
    """Seconds of each call, and the CPU seconds of the quickest one in words: other work on the machine hurts them less."""
    times, cpu = [], []
    for _ in range(repeats):
        began, cpu_began = time.perf_counter(), time.process_time()
        function()
        times.append(time.perf_counter() - began)
        cpu.append(time.process_time() - cpu_began)
    return times, f"{min(cpu):.3f} CPU s"


def in_memory(report: Report, tokens: int, repeats: int) -> None:
    """count_tokens against np.bincount, interleaved, so that other work on the machine hurts both."""
    from vocab.counts import count_tokens

    ids, mask = zipf_ids(tokens), loss_mask(tokens)
    wide = ids.astype(np.int64)
    rates: dict[str, list[float]] = {"bincount": [], "plain": [], "masked": []}
    for _ in range(repeats):
        for name, function in (
            ("bincount", lambda: np.bincount(wide, minlength=VOCAB)),
            ("plain", lambda: count_tokens(ids, None, VOCAB)),
            ("masked", lambda: count_tokens(ids, mask, VOCAB)),
        ):
            rates[name] += [tokens / seconds / 1e6 for seconds in timed(function, 1)[0]]
    report.row("np.bincount of int64 in memory", "M tokens/s", rates["bincount"])
    report.row("count_tokens of int32 in memory, no mask", "M tokens/s", rates["plain"])
    report.row("count_tokens of int32 in memory, with mask", "M tokens/s", rates["masked"])
    shares = [ours / theirs for ours, theirs in zip(rates["masked"], rates["bincount"], strict=True)]
    median = report.row("count_tokens with mask / np.bincount", "share", shares)
    said = "count_tokens with a loss mask, against np.bincount of the same ids"
    report.bar("count_share_of_bincount", median, 0.6, "higher", said)


def count_and_map(batches: Iterator[Any]) -> Any:
    """What a peer's two functions do: counts of what is on disk, then the draft vocabulary."""
    from vocab.ahead import ahead
    from vocab.counts import TokenCounts, count_by_source
    from vocab.mapping import DraftVocab

    total = TokenCounts.empty(VOCAB)
    for batch in ahead(batches):
        total += count_by_source(batch.token_ids, batch.loss_mask, batch.lengths, batch.sources, VOCAB)
    return DraftVocab.from_counts(total.total(), DRAFT)


def from_dataset(uri: str) -> Iterator[Any]:
    """The batches of a sealed dataset, without Ray."""
    from ray_jobs.counting import dataset_tasks, open_all, task_batches

    for task in dataset_tasks(open_all([uri]), cores=0)[0]:
        yield from task_batches(task, None)


def from_files(paths: list[Path]) -> Iterator[Any]:
    from vocab.inputs import read_batches

    return read_batches([str(path) for path in paths], "prompt_group")


def against_peers(report: Report, folder: Path, tokens: int, repeats: int) -> None:
    """Counting and mapping: ours from a dataset, from Parquet and from the peers' own Arrow files; theirs from those."""
    for peer, limit in _FASTER.items():
        said = f"{peer}'s time over ours, each from its own format on local disk"
        report.expect(f"times_faster_than_{peer}", limit, "higher", said)
    path, uri = folder / "peers.parquet", str(folder / "peers")
    write_parquet(path, tokens)
    write_dataset(uri, tokens)
    what = f"counting and mapping {tokens / 1e6:.0f} M tokens"
    seconds, cpu = timed(lambda: count_and_map(from_dataset(uri)), repeats)
    ours = report.row(f"{what} from a dataset", "s", seconds, note=cpu)
    seconds, cpu = timed(lambda: count_and_map(from_files([path])), repeats)
    report.row(f"{what} from Parquet", "s", seconds, note=cpu)
    mine = ids_hash(count_and_map(from_files([path])))
    peers = os.environ.get("STATEHOUSE_PEERS_PYTHON")
    if not peers:
        for peer in _FASTER:
            report.absent(f"{peer}: {what}", "not installed")
            report.unmeasured("not installed", f"times_faster_than_{peer}")
        return
    command = [peers, str(_PEERS), str(path), str(VOCAB), str(DRAFT), str(folder)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        missing = set(_FASTER)
        for line in process.stdout:
            if line.startswith("RESULT "):
                row = json.loads(line[7:])
                missing.discard(row["peer"])
                peer_rows(report, row, what, ours, mine)
        process.wait()
        errors.seek(0)
        said = " ".join(errors.read().split())[-160:]
    for peer in sorted(missing):
        report.absent(f"{peer}: {what}", f"failed: {said}")
        report.unmeasured("it failed", f"times_faster_than_{peer}")
    if files := sorted((folder / "peers-dataset").glob("*.arrow")):
        seconds, cpu = timed(lambda: count_and_map(from_files(files)), repeats)
        report.row(f"{what} from the peers' Arrow files", "s", seconds, note=cpu)


def peer_rows(report: Report, row: dict[str, Any], what: str, ours: float, mine: str) -> None:
    peer, same = row["peer"], "the same ids" if row["hash"] == mine else "ids of equal count differ"
    note = f"{row['cpu_seconds']:.1f} CPU s; peak {row['peak_mb']:.0f} MB; {same}"
    report.row(f"{peer}: {what}", "s", [row["seconds"]], note=note)
    report.measured(f"times_faster_than_{peer}", row["seconds"] / ours)


def ids_hash(vocabulary: Any) -> str:
    return hashlib.sha256(vocabulary.target_ids.astype("<i8").tobytes()).hexdigest()


class WorkerMemory:
    """The most memory that a worker of this process's Ray had of its own at any time, watched every 20 ms.

    Of its own: what it has written into Ray's shared store is not counted, it lies there for the driver.
    """

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> WorkerMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        import psutil  # type: ignore[import-untyped]

        workers = [one for one in psutil.Process().children(recursive=True) if one.name().startswith("ray::")]
        while not self._ended.wait(0.02):
            for one in workers:
                with contextlib.suppress(OSError):  # Ray ends idle ones
                    status = Path(f"/proc/{one.pid}/status").read_text()
                    own = next((line for line in status.splitlines() if line.startswith("RssAnon")), "- 0")
                    self.peak_mb = max(self.peak_mb, int(own.split()[1]) / 1024)


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
        count_all(tasks[:cores], VOCAB, split)  # workers start and import
        found: list[float] = []
        with WorkerMemory() as memory:
            for _ in range(repeats):
                began = time.perf_counter()
                counts = count_all(tasks, VOCAB, split)
                found.append(tokens / (time.perf_counter() - began) / 1e6)
                assert counts.folds.total().tokens + counts.held_out.tokens == planned
        peaks[tokens] = memory.peak_mb
        name = f"Ray Data, {cores} cores, dataset of {tokens / 1e6:.0f} M tokens"
        rates[tokens] = report.row(name, "M tokens/s", found, note=f"largest worker {peaks[tokens]:.0f} MB")
    ray.shutdown()
    largest, smallest = max(sizes), min(sizes)
    said = f"Ray Data on {cores} cores from a dataset of {largest / 1e6:.0f} M tokens on local disk"
    report.bar("ray_m_tokens_per_s", rates[largest], 70, "higher", said)
    said = f"largest worker's own memory at {largest / 1e6:.0f} M tokens over that at {smallest / 1e6:.0f} M"
    report.bar("ray_memory_growth", peaks[largest] / peaks[smallest], 1.25, "lower", said)


def growth(report: Report, sizes: list[int]) -> None:
    """Nanoseconds a token at growing sizes, and the peak memory, in a fresh process each."""
    cost: dict[int, float] = {}
    for tokens in sizes:
        program = f"from benchmarks.vocab import count_synthetic; count_synthetic({tokens})"
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=_ROOT)
        row = json.loads(done.stdout)
        values = [1e9 * seconds / tokens for seconds in row["seconds"]]
        note = f"peak {row['peak_mb']:.0f} MB"
        cost[tokens] = report.row(f"one process, {tokens / 1e6:,.0f} M tokens", "ns a token", values, note=note)
    large, small = max(sizes), min(sizes)
    said = f"cost of a token at {large / 1e6:,.0f} M over that at {small / 1e6:,.0f} M: linear is 1"
    report.bar("cost_growth", cost[large] / cost[small], 1.3, "lower", said)


def count_synthetic(tokens: int) -> None:
    """Count `tokens` ids, a block of 10 M over and over, and print the times and the peak memory as JSON."""
    from vocab.counts import count_tokens

    block = min(tokens, 10_000_000)
    ids, mask = zipf_ids(block), loss_mask(block + LENGTH)[:block]
    count_tokens(ids, mask, VOCAB)  # the first pass also fetches pages
    seconds = []
    for _ in range(max(1, min(9, 100_000_000 // tokens))):
        counts = np.zeros(VOCAB, np.int64)
        began = time.perf_counter()
        for _ in range(tokens // block):
            count_tokens(ids, mask, VOCAB, into=counts)
        seconds.append(time.perf_counter() - began)
        assert counts.sum() == mask.sum() * (tokens // block)
    print(json.dumps({"seconds": seconds, "peak_mb": peak() / 2**20}))


def main() -> None:
    args = arguments("vocab", __doc__, folder=True)
    report = Report("vocab", args.quick)
    repeats = 3 if args.quick else 7
    million = 1_000_000 // LENGTH * LENGTH
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        in_memory(report, 20 * million, repeats)
        growth(report, [10_000_000, 100_000_000, 1_000_000_000])
        with_ray(report, folder, [40 * million, (100 if args.quick else 200) * million], repeats)
        against_peers(report, folder, 20 * million, repeats)
    report.show(args.json)


if __name__ == "__main__":
    main()
