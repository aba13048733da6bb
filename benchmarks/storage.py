"""How fast and how small the store is, beside the ceiling and the peers, all in one run on a SeaweedFS of its own.

    python -m benchmarks.storage                    # medians of 7
    python -m benchmarks.storage --quick            # within three minutes on 2 cores; medians of 5, a smaller corpus
    python -m benchmarks.storage --json out.json --only reading,writing

GB are logical bf16 bytes. CPU is that of this process, all threads, without the server's. Wall times are only as good as
the machine is idle: the limits are ratios within a run, in shuffled order, so that drift strikes everybody alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.corpus import HIDDEN, Corpus, fill_dataset, fill_files, plan_corpus, synthetic_states, torch_bytes
from benchmarks.memory import measure
from benchmarks.opening import CountingStore, length_table, plan_lengths, write_without_states
from benchmarks.opening import contract as kimi_like
from benchmarks.planning import measure as with_tokens
from benchmarks.proxy import proxy_process
from benchmarks.readers import READERS, Reader, safetensors_parallel
from benchmarks.real_states import order_0_bound, smollm2_states
from benchmarks.report import Report, arguments
from benchmarks.seaweed import BUCKET, NoServer, seaweedfs
from benchmarks.storage_bars import BARS
from benchmarks.tokens import measure_tokens
from storage import layout
from storage.codecs import codec_by_name
from storage.kernels import kernels
from storage.objects import open_store
from storage.reader import Dataset
from storage.writer import ShardWriter

THREADS = 8
LINK, DELAY = 200e6, 0.030


class Settings:
    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.repetitions = 5 if quick else 7
        self.sequences, self.per_repetition = (8, 3) if quick else (32, 12)
        self.synthetic_tokens, self.real_tokens = (320, 512) if quick else (576, 8192)
        self.stream_bytes = 10_000_000_000
        self.written = 1 if quick else 6
        self.planned_with_tokens = 20_000 if quick else 1_000_000


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """(wall seconds, CPU seconds of this process)."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def shuffled(actions: dict[str, Callable[[], object]], repetitions: int) -> dict[str, list[tuple[float, float]]]:
    """Times each action `repetitions` times, as `in_turn` does."""
    return in_turn({name: partial(timed, action) for name, action in actions.items()}, repetitions)


def in_turn(
    actions: dict[str, Callable[[], tuple[float, float]]], repetitions: int
) -> dict[str, list[tuple[float, float]]]:
    """Each action `repetitions` times after one that does not count, in an order that is drawn anew each time."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for action in actions.values():
        action()
    for repetition in range(repetitions):
        names = list(actions)
        random.Random(repetition).shuffle(names)
        for name in names:
            found[name].append(actions[name]())
    return found


def codecs(report: Report, settings: Settings) -> None:
    """Size and error of every codec, on real states and on synthetic ones."""
    samples: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # name: states, sample for the offsets
    block = synthetic_states(settings.synthetic_tokens, seed=3)
    samples["synthetic H=7168"] = block[64:], block[:64]
    drift = np.exp(np.random.default_rng(9).normal(0, 0.3, (1, *block.shape[1:]))).astype(np.float32)
    moved = ((block[:64].astype(np.uint32) << 16).view(np.float32) * drift).view(np.uint32) >> 16
    samples["synthetic H=7168, offsets of another domain"] = block[64:], moved.astype(np.uint16)
    try:
        real = smollm2_states(settings.real_tokens)
    except ImportError as error:
        why = f"not installed: {error.name}"
        report.absent("real states", why)
        report.unmeasured(why, *(name for name in BARS["codecs"] if "real" in name))
    else:
        everything = np.concatenate(list(real.values()))
        samples["real SmolLM2"] = everything, everything[:: max(1, len(everything) // 512)]
        code = real.pop("code")
        samples["real SmolLM2, offsets of code"] = np.concatenate(list(real.values())), code
    for name, (bits, sample) in samples.items():
        bound = order_0_bound(bits) / bits.nbytes
        chunk = 32 if bits.shape[-1] == HIDDEN else 128
        for codec_name in ("lossless", "bitround(4)", "bitround(3)", "fp8", "raw"):
            codec = codec_by_name(codec_name)
            offset, stored, wrong, given = codec.calibrate(sample), 0, 0.0, 0.0
            for low in range(0, len(bits) // chunk * chunk, chunk):
                part = bits[low : low + chunk]
                planes = codec.split(part, offset)
                stored += sum(len(codec.compress(plane)) + 4 for plane in planes)
                if codec.lossy:
                    back = np.empty_like(part)
                    codec.join(planes, offset, back)
                    before, after = (
                        (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in (part, back)
                    )
                    wrong, given = wrong + float(((before - after) ** 2).sum()), given + float((before**2).sum())
            share = stored / (len(bits) // chunk * chunk * bits[0].nbytes)
            note = f"relative L2 error {np.sqrt(wrong / given):.4f}" if codec.lossy else f"order-0 bound {bound:.4f}"
            report.row(f"stored / raw, {codec_name}, {name}", "share", [share], note=note)
            if codec_name == "lossless":
                key = ("real" if "real" in name else "synthetic") + ("_other_offsets" if "offsets" in name else "")
                report.measured(f"over_order_0_bound_{key}", share / bound)
                if name == "real SmolLM2":
                    report.measured("stored_over_raw_real_states", share)


def make_corpus(report: Report, settings: Settings) -> Corpus:
    lengths = np.clip(np.random.default_rng(0).lognormal(7.1, 0.6, settings.sequences), 200, 2400).astype(int)
    corpus, table = plan_corpus(f"s3://{BUCKET}/corpus", lengths, synthetic_states(2600))
    stored = fill_dataset(corpus, table)
    for kind in ("safetensors", "torch"):
        fill_files(corpus, open_store(corpus.uri), kind)
    raw = int(corpus.lengths.sum()) * corpus.plan.geometry.bytes_per_token
    report.row(
        "corpus, raw", "GB", [raw / 1e9], note=f"{settings.sequences} sequences, {stored / raw:.4f} of it stored"
    )
    return corpus


def some_rows(corpus: Corpus, settings: Settings, seed: int = 5) -> tuple[list[int], float]:
    """Rows to read, and their GB."""
    rows = np.random.default_rng(seed).permutation(len(corpus.lengths))[: settings.per_repetition].tolist()
    return rows, int(corpus.lengths[rows].sum()) * corpus.plan.geometry.bytes_per_token / 1e9


def reading(report: Report, settings: Settings, corpus: Corpus) -> None:
    rows, gigabytes = some_rows(corpus, settings)
    actions: dict[str, Callable[[], object]] = {}
    absent: dict[str, str] = {}
    for name, make in READERS.items():
        try:
            read = make(corpus, THREADS)
        except ImportError as error:
            absent[name] = f"not installed: {error.name}"
            report.absent(f"reading: {name}", absent[name])
            continue
        states = read(0)
        assert states is None or bool((np.asarray(states) == corpus.states(0)).all()), name
        actions[name] = _all(read, rows)
    found = shuffled(actions, settings.repetitions)
    speed, cpu = {}, {}
    for name, values in found.items():
        speed[name] = report.row(f"reading: {name}", "GB/s", [gigabytes / wall for wall, _ in values])
        cpu[name] = report.row(f"reading: {name}", "CPU s/GB", [used / gigabytes for _, used in values])

    raw, peers = "raw GETs of the same bytes", ("safetensors, one GET", "torch.save, one GET")
    for bar, of, others in (
        ("read_over_raw_gets", speed, (raw,)),
        ("read_cpu_over_raw_gets", cpu, (raw,)),
        ("read_over_peers", speed, peers),
        ("read_over_zarr_python", speed, ("zarr-python on the same store",)),
        ("read_over_tuned_safetensors", speed, ("safetensors, parallel GETs, reused buffer",)),
    ):
        if known := [of[other] for other in others if other in of]:
            report.measured(bar, of["Statehouse"] / max(known))
        else:
            report.unmeasured("; ".join(absent[other] for other in others), bar)
    report.row("compiled loops (numba)", "yes = 1", [float(kernels().compiled)])


def _all(read: Reader, rows: list[int]) -> Callable[[], object]:
    return lambda: [read(row) for row in rows]


def _streamed(corpus: Corpus, rows: list[int]) -> Callable[[], object]:
    dataset = Dataset(open_store(corpus.dataset_uri), threads=THREADS)
    return lambda: sum(len(states.token_ids) for states in dataset.stream(rows, ahead_bytes=400_000_000))


def _two_at_once(corpus: Corpus, rows: list[int]) -> Callable[[], object]:
    """Reading ahead for safetensors: two tuned readers, each with its buffer, so that the link never waits."""
    readers, pool = [safetensors_parallel(corpus, THREADS) for _ in range(2)], ThreadPoolExecutor(2)
    return lambda: list(pool.map(lambda turn: [readers[turn](row) for row in rows[turn::2]], range(2)))


def far_away(report: Report, settings: Settings, corpus: Corpus, endpoint: str) -> None:
    """Through a link of 200 MB/s, and through one that also adds 30 ms to every request."""
    rows, gigabytes = some_rows(corpus, settings)
    tokens = int(corpus.lengths[rows].sum())
    with proxy_process(endpoint, bandwidth=LINK) as slow:
        os.environ["AWS_ENDPOINT_URL"] = slow
        found = shuffled(
            {"Statehouse": _streamed(corpus, rows), "tuned safetensors": _two_at_once(corpus, rows)},
            settings.repetitions,
        )
    rate = {n: report.row(f"200 MB/s: {n}", "tokens/s", [tokens / wall for wall, _ in found[n]]) for n in found}
    report.measured("slow_link_over_tuned_safetensors", rate["Statehouse"] / rate["tuned safetensors"])
    with proxy_process(endpoint, bandwidth=LINK, delay=DELAY) as distant:
        os.environ["AWS_ENDPOINT_URL"] = distant
        dataset = Dataset(open_store(corpus.dataset_uri), threads=THREADS)

        def stream() -> None:
            for _ in dataset.stream(rows, ahead_bytes=400_000_000):
                pass

        waits = shuffled({"stream": stream}, settings.repetitions)["stream"]
    os.environ["AWS_ENDPOINT_URL"] = endpoint
    stored = sum(range_bytes(dataset, corpus, row) for row in rows)
    limit = stored / LINK + DELAY
    median = report.row("30 ms and 200 MB/s: Statehouse", "GB/s", [gigabytes / wall for wall, _ in waits])
    report.row(
        "30 ms and 200 MB/s: the limit", "GB/s", [gigabytes / limit], note="stored bytes / bandwidth + one delay"
    )
    report.measured("far_link_over_limit", median / (gigabytes / limit))


def range_bytes(dataset: Dataset, corpus: Corpus, row: int) -> int:
    """Bytes that must come over the network for one sequence."""
    geometry = corpus.plan.geometry
    shard, first = divmod(int(corpus.plan.column("start")[row]), geometry.shard_tokens)
    last = (first + int(corpus.lengths[row]) - 1) // geometry.chunk_tokens
    return dataset._reader.footer(shard).chunk_range(first // geometry.chunk_tokens, last)[1]


def writing(report: Report, settings: Settings, corpus: Corpus) -> None:
    """One shard, norms, NaN scan, digest and receipt included, beside torch.save of its sequences; both PUT to S3."""
    units = list(corpus.plan.units())[: settings.written]
    states = [np.concatenate([corpus.states(int(row)) for row in unit.rows]) for unit in units]
    gigabytes = sum(one.nbytes for one in states) / 1e9
    store = open_store(corpus.uri)
    writer = ShardWriter.from_uri(corpus.dataset_uri)
    writer.offset()

    def write() -> None:
        for unit, bits in zip(units, states, strict=True):
            store.delete(f"dataset/{layout.shard_key(unit.shard)}")
            assert writer.write(unit.shard, bits, len(unit.rows)).created

    def save() -> None:
        for unit in units:
            for row in unit.rows.tolist():
                store.put(f"torch/{row}", torch_bytes(corpus.states(row)))

    actions: dict[str, Callable[[], object]] = {"Statehouse": write}
    try:
        import torch  # noqa: F401
    except ImportError:
        report.absent("writing: torch.save", "not installed: torch")
        report.unmeasured("not installed: torch", "write_cpu_over_torch_save")
    else:
        actions["torch.save"] = save
    found = shuffled(actions, settings.repetitions)
    cpu = {}
    for name, values in found.items():
        report.row(f"writing: {name}", "GB/s", [gigabytes / wall for wall, _ in values])
        cpu[name] = report.row(f"writing: {name}", "CPU s/GB", [used / gigabytes for _, used in values])
    if "torch.save" in cpu:
        report.measured("write_cpu_over_torch_save", cpu["Statehouse"] / cpu["torch.save"])


def memory(report: Report, settings: Settings, corpus: Corpus) -> None:
    """10 GB in random order, read ahead by 512 MB."""
    ahead = 512_000_000
    found = measure(corpus.dataset_uri, ahead, settings.stream_bytes)
    longest = int(corpus.lengths.max()) * corpus.plan.geometry.bytes_per_token
    # The setting, the sequence that the caller holds, and what stream's docstring names.
    allowed = ahead + longest + THREADS * (16 * 2**20 + 2 * corpus.plan.geometry.chunk_bytes) + 512 * 2**20
    grown = found["most"] - found["before"]
    report.row(
        "stream of 10 GB, 512 MB ahead: memory",
        "GB",
        [grown / 1e9],
        note=f"{found['bytes'] / 1e9:.1f} GB read at {found['bytes'] / found['seconds'] / 1e9:.2f} GB/s, bound {allowed / 1e9:.2f} GB",
    )
    report.measured("stream_memory_over_bound", grown / allowed)


def planning(report: Report, settings: Settings) -> None:
    code = """
import json, time
from benchmarks.memory import peak
from benchmarks.opening import contract, length_table, plan_lengths
table = length_table(1_000_000)
began = time.perf_counter()
plan = plan_lengths(table, contract(), "lossless")
units, hash = sum(1 for _ in plan.units()), plan.hash
print(json.dumps([time.perf_counter() - began, peak(),
    plan.geometry.tokens / plan.tokens - 1, plan.tokens]))
"""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    seconds, peak, padding, tokens = json.loads(done.stdout.splitlines()[-1])
    report.row("planning 1,000,000 sequences", "s", [seconds], note=f"{tokens:,} tokens")
    report.measured("plan_seconds", seconds)
    report.measured("plan_gib", peak / 2**30)
    report.measured("plan_padding", padding)
    # With the tokens, from Parquet: a fiftieth of them in --quick, since a file of 7 GB takes longer to make than to plan.
    found = with_tokens(settings.planned_with_tokens)
    name, note = f"{found['sequences']:,} sequences with their tokens", f"{found['tokens']:,} tokens"
    report.row(f"planning {name}", "s", [found["plan_seconds"]], note=f"from Parquet, ids made again, {note}")
    report.row(f"storing {name}", "s", [found["publish_seconds"]], note="to a folder")
    report.row(f"both: memory of {name}", "GiB", [found["peak_bytes"] / 2**30], note="peak resident")


def opening(report: Report, settings: Settings) -> None:
    store = open_store(f"s3://{BUCKET}/million")
    write_without_states(store, plan_lengths(length_table(1_000_000), kimi_like(), "lossless"))
    counting: Any = CountingStore(store)
    seconds = [timed(lambda: Dataset(counting))[0] for _ in range(settings.repetitions)]
    median = report.row("opening 1,000,000 sequences", "s", seconds)
    report.measured("open_seconds", median)
    report.measured("open_requests", sum(counting.calls.values()) / settings.repetitions)
    command = [
        sys.executable,
        "-c",
        "import time; t = time.perf_counter(); import storage; print(time.perf_counter() - t)",
    ]
    imports = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(5)]
    report.measured("import_seconds", report.row("import storage", "s", imports))


PARTS = ("codecs", "reading", "far_away", "tokens", "writing", "memory", "planning", "opening")


def main() -> None:
    args = arguments("storage", __doc__, PARTS)
    wanted = args.only
    report, settings = Report("storage", args.quick), Settings(args.quick)
    for part in wanted:
        for name, (limit, better, what) in BARS.get(part, {}).items():
            report.expect(name, limit, better, what)
    began = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server must not outlive this process
    alone = set(wanted) <= {"codecs", "planning"}
    with contextlib.nullcontext("") if alone else seaweedfs() as endpoint:
        if set(wanted) & {"reading", "far_away", "writing", "memory"}:
            corpus = make_corpus(report, settings)
        steps: dict[str, Callable[[], None]] = {
            "reading": lambda: reading(report, settings, corpus),
            "far_away": lambda: far_away(report, settings, corpus, endpoint),
            "tokens": lambda: measure_tokens(
                report, f"s3://{BUCKET}/tokens", endpoint, LINK, DELAY, timed, settings.repetitions
            ),
            "memory": lambda: memory(report, settings, corpus),
            "writing": lambda: writing(report, settings, corpus),
            "opening": lambda: opening(report, settings),
            "planning": lambda: planning(report, settings),
            "codecs": lambda: codecs(report, settings),
        }
        for name, step in steps.items():
            if name in wanted:
                step()
                print(f"{name} done after {time.perf_counter() - began:.0f} s", file=sys.stderr)
    report.row("this benchmark", "s", [time.perf_counter() - began])
    report.show(args.json)


if __name__ == "__main__":
    try:
        main()
    except NoServer as error:
        sys.exit(f"error: {error}")
