"""How fast training is fed: the loader, the sampler, waiting for data, Ray's overhead; on a SeaweedFS of its own.

    python -m benchmarks.training                    # medians of 7
    python -m benchmarks.training --quick            # fewer repetitions, every figure
    STATEHOUSE_PEERS_PYTHON=... python -m benchmarks.training --json out.json --only loader,local

GB are logical bf16 bytes. CPU is that of this process, all threads, without the server's. The limits are ratios within a
run, in shuffled order.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.corpus import Corpus, fill_dataset, fill_files, plan_corpus, synthetic_states
from benchmarks.proxy import proxy_process
from benchmarks.readers import raw_gets, safetensors_one_get, torch_one_get
from benchmarks.report import Report, arguments
from benchmarks.rounds import ROOT, RoundFailed, Rounds, answer
from benchmarks.seaweed import BUCKET, seaweedfs
from benchmarks.small_training import make_small
from benchmarks.storage import in_turn, shuffled, timed
from drafter.batch import PackedBatch, Planes
from drafter.loader import Loader
from drafter.recipe import LoaderSection, TrainingSection
from drafter.sampler import WINDOW, Epoch, Rows, mixing
from drafter.sources import Items
from storage.buffers import BufferPool
from storage.mix import Mixture, Part
from storage.objects import open_store
from storage.reader import open_dataset

STEP_TOKENS, STEP_S, LINK = 8192, 1.0, 1e9
THREADS = 8


class Settings:
    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.repetitions = 5 if quick else 7
        self.sequences, self.per_repetition = (8, 4) if quick else (32, 12)
        self.local_sequences, self.local_tokens = (6, 1024) if quick else (16, 2048)
        self.peer_workers = (0,) if quick else (0, 2)
        self.steps = 5 if quick else 15
        self.trainings, self.epochs = (2, 2) if quick else (3, 6)
        self.loaders: tuple[int, ...] = (1, 2, 4) if quick else (1, 2, 4, 8)
        self.rounds = 3 if quick else 5
        self.samplers = 3 if quick else 5


def make_corpus(settings: Settings, files: bool) -> Corpus:
    """files: in the peers' formats, too."""
    lengths = np.clip(np.random.default_rng(0).lognormal(7.1, 0.6, settings.sequences), 200, 2400).astype(int)
    corpus, table = plan_corpus(f"s3://{BUCKET}/training", lengths, synthetic_states(2600))
    fill_dataset(corpus, table)
    for kind in ("safetensors", "torch") if files else ():
        fill_files(corpus, open_store(corpus.uri), kind)
    return corpus


def make_loader(uri: str, batches: list[np.ndarray], buffers: BufferPool | None = None) -> Callable[[], Loader]:
    """A loader of these micro-batches for each call, over one open dataset and memory that is used again, as within a run."""
    dataset, section = open_dataset(uri), LoaderSection()
    mixture = Mixture([dataset], [Part(uri)])
    items, memory = Items.of(mixture, TrainingSection()), buffers or BufferPool(section.ahead_bytes)
    return lambda: Loader(mixture, items, batches, section, buffers=memory)


def consume(uri: str, batches: list[np.ndarray], buffers: BufferPool | None = None) -> Callable[[], object]:
    """Reads these micro-batches and looks at every row, as `peer_loaders` does."""
    made = make_loader(uri, batches, buffers)

    def read() -> float:
        with made() as loader:
            return sum(_look(batch) for batch in loader)

    return read


def _look(batch: PackedBatch | Planes) -> float:
    assert isinstance(batch, PackedBatch)
    return sum(float(states[:, ::2048].float().sum()) for states in (batch.features_TF, batch.final_TD))


def packed(rows: np.ndarray, size: int = 2) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def loader(report: Report, settings: Settings, corpus: Corpus) -> None:
    """Packed batches in random order from the server, beside raw GETs of the same bytes and the peers' formats."""
    rows = np.random.default_rng(5).permutation(len(corpus.lengths))[: settings.per_repetition]
    gigabytes = int(corpus.lengths[rows].sum()) * corpus.plan.geometry.bytes_per_token / 1e9
    raw, safetensors, torch_save = (make(corpus, THREADS) for make in (raw_gets, safetensors_one_get, torch_one_get))
    found = shuffled(
        {
            "raw GETs": lambda: [raw(int(row)) for row in rows],
            "Statehouse": consume(corpus.dataset_uri, packed(rows)),
            "safetensors": lambda: [safetensors(int(row)) for row in rows],
            "torch.save": lambda: [torch_save(int(row)) for row in rows],
        },
        settings.repetitions,
    )
    speed = {
        name: report.row(f"loader, S3: {name}", "GB/s", [gigabytes / wall for wall, _ in found[name]]) for name in found
    }
    for name, values in found.items():
        report.row(f"loader, S3: {name}", "CPU s/GB", [cpu / gigabytes for _, cpu in values])
    report.bar("loader_over_raw_gets", speed["Statehouse"] / speed["raw GETs"], 0.65, "higher", "packed batches, GB/s over raw GETs of the same bytes")  # fmt: skip
    report.bar("loader_over_peers_formats", speed["Statehouse"] / max(speed["safetensors"], speed["torch.save"]), 2.0, "higher", "GB/s over the better of one GET per safetensors or torch.save file")  # fmt: skip


def local(report: Report, settings: Settings, folder: Path) -> None:
    """From a warm page cache, in turn with the peers' own loaders on their own formats."""
    lengths = np.full(settings.local_sequences, settings.local_tokens)
    corpus, table = plan_corpus(str(folder / "local"), lengths, synthetic_states(settings.local_tokens + 600))
    stored = fill_dataset(corpus, table)
    gigabytes = int(lengths.sum()) * corpus.plan.geometry.bytes_per_token / 1e9
    report.row("local: bytes stored / raw", "share", [stored / gigabytes / 1e9])
    read = consume(corpus.dataset_uri, packed(np.random.default_rng(5).permutation(len(lengths)), 1))
    python = os.environ.get("STATEHOUSE_PEERS_PYTHON")
    report.expect(bar := "local_loader_over_peers", 1.0, "higher", "GB/s from the page cache over the fastest of the peers' own loaders")  # fmt: skip
    with contextlib.ExitStack() as stack:
        actions: dict[str, Callable[[], tuple[float, float]]] = {"Statehouse": lambda: timed(read)}
        for workers in settings.peer_workers:
            started = {}
            for peer in ("specforge", "speculators"):
                command = [
                    python or "", str(ROOT / "benchmarks/peer_loaders.py"), str(folder / peer), "--peer", peer,
                    "--workers", str(workers), "--sequences", str(len(lengths)), "--tokens", str(settings.local_tokens),
                ]  # fmt: skip
                name = f"{peer}, {workers} workers"
                if python:
                    started[name] = stack.enter_context(Rounds(command))
                else:
                    report.absent(f"loader, page cache: {name}", "not measured: STATEHOUSE_PEERS_PYTHON is not set")
            for name, rounds in started.items():
                try:
                    rounds.ready()
                    rounds()  # what fails, fails the first time
                except RoundFailed as error:
                    report.absent(f"loader, page cache: {name}", f"not measured: {error}")
                else:
                    actions[name] = rounds
        found = in_turn(actions, settings.repetitions)
    speed = {}
    for name, values in found.items():
        speed[name] = report.row(f"loader, page cache: {name}", "GB/s", [gigabytes / wall for wall, _ in values])
        if not name.endswith("2 workers"):  # they do not count the CPU of their processes
            report.row(f"loader, page cache: {name}", "CPU s/GB", [cpu / gigabytes for _, cpu in values])
    peers = [rate for name, rate in speed.items() if name != "Statehouse"]
    if peers:
        report.measured(bar, speed["Statehouse"] / max(peers))
    else:
        report.unmeasured("STATEHOUSE_PEERS_PYTHON names no Python that has them", bar)


def waiting(report: Report, settings: Settings, corpus: Corpus, endpoint: str) -> None:
    """A step of 1 s for 8,192 tokens at H = 7168, fed through a link of 1 GB/s."""
    random, batches = np.random.default_rng(3), []
    for _ in range(settings.steps + 2):
        order = random.permutation(len(corpus.lengths))
        batches.append(order[np.cumsum(corpus.lengths[order]) <= STEP_TOKENS])
    bytes_per_token = corpus.plan.geometry.bytes_per_token
    several = batches[: 2 if settings.quick else 4]
    gigabytes = sum(int(corpus.lengths[part].sum()) for part in several) * bytes_per_token / 1e9
    with proxy_process(endpoint, bandwidth=LINK) as slow:
        os.environ["AWS_ENDPOINT_URL"] = slow
        try:
            raw, buffers = raw_gets(corpus, THREADS), BufferPool(LoaderSection().ahead_bytes)
            # What the link, the proxy and the machine give, whoever asks; and what the loader makes of it.
            ceiling = {
                "raw GETs": lambda: [raw(int(row)) for part in several for row in part],
                "Statehouse": consume(corpus.dataset_uri, several, buffers),
            }
            for name, found in shuffled(ceiling, 3).items():
                report.row(f"loader, 1 GB/s: {name}", "GB/s", [gigabytes / wall for wall, _ in found])
            with make_loader(corpus.dataset_uri, batches, buffers)() as made:
                for _ in range(2):  # a run's first batches cannot be read ahead
                    made.next()
                    time.sleep(STEP_S)
                before, began, tokens, busy = made.counts(), time.perf_counter(), 0, cores_busy()
                for _ in range(settings.steps):
                    taken = made.next()
                    assert taken is not None
                    tokens += len(taken.token_ids_T)
                    time.sleep(STEP_S * len(taken.token_ids_T) / STEP_TOKENS)
                wall = time.perf_counter() - began
                spent, busy = made.counts().since(before), cores_busy() - busy
        finally:
            os.environ["AWS_ENDPOINT_URL"] = endpoint
    share = spent.waited_s / wall
    wanted = STEP_TOKENS / STEP_S * bytes_per_token / 1e9
    note = f"{tokens:,} tokens, {wanted:.2f} GB/s wanted, {busy / wall:.2f} of {os.cpu_count()} cores busy"
    report.row("steps of 1 s for 8,192 tokens, 1 GB/s: waiting", "share", [share], note=note)
    report.bar("wait_share_simulated", share, 0.05, "lower", "share of the time waiting for data, 1 s for 8,192 tokens of H = 7168, 1 GB/s")  # fmt: skip


def real_training(report: Report, settings: Settings, folder: Path) -> None:
    """A real training of a small drafter from the server, in this process's way and by Ray Train."""
    root, hidden = f"s3://{BUCKET}/small", 256
    verifier = make_small(root, folder / "small", sequences=64, hidden=hidden)
    options = [
        f"training.epochs={settings.epochs}", "training.global_batch_tokens=1024", "training.micro_batch_tokens=1024",
        "training.dtype=float32", "training.checkpoint_every=10000", "drafter.ttt_steps=3", "training.trackers=[]",
    ]  # fmt: skip
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps({
        "name": "small", "verifier": {"model": str(verifier)}, "prompts": [{"path": "none.jsonl"}],
        "dataset": {"uri": f"{root}/dataset"}, "training": {"draft_vocabulary": f"{root}/vocab"},
    }))  # fmt: skip
    seconds: dict[str, list[float]] = {"plain": [], "ray": []}
    typical: dict[str, list[float]] = {"plain": [], "ray": []}
    waits = []
    for repetition in range(settings.trainings):
        for way in ("plain", "ray")[:: -1 if repetition % 2 else 1]:
            run = f"{root}/dataset-runs/{way}-{repetition}"
            if way == "plain":
                _module(["drafter.train", "--dataset", f"{root}/dataset", "--draft-vocab", f"{root}/vocab", "--verifier", str(verifier), "--run", run, *options])  # fmt: skip
                waits.append(json.loads(open_store(run).get("summary.json"))["wait_share"])
            else:
                _module(["ray_jobs.train", str(recipe), *options, f"training.run={way}-{repetition}"])
            lines = [json.loads(line) for line in open_store(run).get("metrics.jsonl").decode().splitlines()]
            updates = [line["seconds"] for line in lines[3:]]
            seconds[way].append(statistics.mean(updates))
            typical[way].append(statistics.median(updates))
    for way, name in (("plain", "plain"), ("ray", "Ray Train")):
        note = f"medians {', '.join(f'{one:.4f}' for one in typical[way])}"
        report.row(f"update of a small drafter, {name}", "s", seconds[way], note=note)
    wait = report.row("a real training on CPU: waiting", "share", waits)
    report.bar("wait_share_real", wait, 0.02, "lower", f"share of a real training on CPU (H = {hidden}) spent waiting for data")  # fmt: skip
    report.bar("ray_over_plain", min(seconds["plain"]) / min(seconds["ray"]), 0.97, "higher", "steps/s under TorchTrainer with one worker over the plain loop, best run of each")  # fmt: skip


def _module(command: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise SystemExit(f"error: {command[0]} ended with {done.returncode}: {done.stderr[-2000:]}")


def sampler(report: Report, settings: Settings) -> None:
    code = """
import json, time
from pathlib import Path
import numpy as np
random = np.random.default_rng(0)
lengths = np.clip(random.lognormal(7.13, 0.8, 1_000_000), 1, 8192).astype(np.int64)
began = time.perf_counter()
from drafter.sampler import Epoch, Rows
rows = Rows.of_one(lengths, np.arange(1_000_000) // 5)
epoch = Epoch(0, 0, rows, global_batch_tokens=16384, micro_batch_tokens=8192)
first = epoch[0]
seconds = time.perf_counter() - began
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps([seconds, 1024 * int(status["VmHWM"].split()[0])]))
"""
    results = []
    for _ in range(settings.samplers):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    seconds = report.row("sampler: 1,000,000 sequences to the first batch", "s", [one[0] for one in results])
    report.bar("sampler_seconds", seconds, 2.0, "lower", "1,000,000 sequences to the first batch, imports included")
    report.bar("sampler_gib", max(one[1] for one in results) / 2**30, 1.0, "lower", "peak memory of that process")
    # As a planner leaves them: 8,192 tokens to a shard, of one length class, and of one source as they were extracted.
    random = np.random.default_rng(0)
    lengths = np.sort(np.clip(random.lognormal(7.13, 0.8, 40_000), 1, 8192).astype(np.int64))
    shards = np.cumsum(lengths) // 8192
    source = random.choice(4, int(shards.max()) + 1, p=[0.5, 0.3, 0.15, 0.05])[shards]
    rows = Rows.of_one(lengths, shards)
    for window in (1, 16, 64, 256):
        epoch = Epoch(0, 0, rows, global_batch_tokens=16384, micro_batch_tokens=8192, window=window)
        for name, labels in (("sources", source), ("length classes", np.searchsorted(np.quantile(lengths, np.arange(0.1, 1, 0.1)), lengths))):  # fmt: skip
            measured = mixing(epoch, labels)
            report.row(f"mixing: {name} in an update, window of {window} shards", "entropy / full shuffle", [measured["entropy"]], note=f"neighbours alike x {measured['neighbours_alike']:.3f}")  # fmt: skip
            if window == WINDOW:
                report.bar(f"mixing_{name.replace(' ', '_')}", measured["entropy"], 0.98, "higher", f"entropy of {name} within an update over that of a full shuffle")  # fmt: skip
    ranks, times = 64, np.zeros(len(lengths), np.int64)
    epoch = Epoch(0, 0, rows, global_batch_tokens=64 * 8192, micro_batch_tokens=8192)
    for batch in epoch:
        for rank in range(ranks):
            for part in batch[rank::ranks]:
                np.add.at(times, part, 1)
    report.bar("every_sample_once", float((times == 1).mean()), 1.0, "higher", "share of 40,000 sequences that 8 x 8 simulated ranks read exactly once an epoch")  # fmt: skip


def scaling(report: Report, settings: Settings, corpus: Corpus) -> None:
    """More and more loader processes against the one server."""
    rates, most = {}, max(settings.loaders)
    command = [
        sys.executable, "-m", "benchmarks.training", "--worker", corpus.dataset_uri, str(settings.per_repetition)
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        loaders = [stack.enter_context(Rounds([*command, str(seed)])) for seed in range(most)]
        for one in loaders:
            one.ready()
        for count in settings.loaders:
            found, busy = [], []
            for _ in range(settings.rounds):
                began, cpu = time.perf_counter(), cores_busy()
                for one in loaders[:count]:
                    one.begin()
                total = sum(one.found() for one in loaders[:count])
                wall = time.perf_counter() - began
                found.append(total / 1e9 / wall)
                busy.append((cores_busy() - cpu) / wall)
            note = f"{statistics.median(busy):.2f} of {os.cpu_count()} cores busy, the server's part included"
            rates[count] = report.row(f"{count} loader processes", "GB/s", found, note=note)
    report.bar("scaling_kept", rates[most] / max(rates.values()), 0.8, "higher", f"GB/s of {most} loader processes together over the best number of them: saturation, no collapse")  # fmt: skip


def cores_busy() -> float:
    """Seconds that the cores of this machine have worked so far, whoever they worked for."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _worker(uri: str, count: int, seed: int) -> None:
    dataset = open_dataset(uri)
    rows = np.random.default_rng(seed).permutation(len(dataset))[:count]
    read = consume(uri, packed(rows))
    size = int(dataset.sequences["length"].to_numpy()[rows].sum()) * dataset.plan.geometry.bytes_per_token
    read()  # connections, indexes and memory are there

    def again() -> int:
        read()
        return size

    answer(again)


PARTS = ("loader", "local", "waiting", "real_training", "sampler", "scaling")


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        _worker(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    args = arguments("training", __doc__, PARTS)
    wanted = args.only
    report, settings = Report("training", args.quick), Settings(args.quick)
    began = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server must not outlive this process
    alone = set(wanted) <= {"sampler", "local"}
    server = contextlib.nullcontext("") if alone else seaweedfs()
    with tempfile.TemporaryDirectory(prefix="statehouse-bench-") as temporary, server as endpoint:
        folder = Path(temporary)
        corpus: Any = (
            make_corpus(settings, "loader" in wanted) if set(wanted) & {"loader", "waiting", "scaling"} else None
        )
        steps: dict[str, Callable[[], None]] = {
            "loader": lambda: loader(report, settings, corpus),
            "waiting": lambda: waiting(report, settings, corpus, endpoint),
            "scaling": lambda: scaling(report, settings, corpus),
            "local": lambda: local(report, settings, folder),
            "real_training": lambda: real_training(report, settings, folder),
            "sampler": lambda: sampler(report, settings),
        }
        took = {"server and corpus": time.perf_counter() - began}
        for name, step in steps.items():
            if name in wanted:
                part_began = time.perf_counter()
                step()
                took[name] = time.perf_counter() - part_began
    parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in took.items())
    report.row("this benchmark", "s", [time.perf_counter() - began], note=parts)
    report.show(args.json)


if __name__ == "__main__":
    main()
