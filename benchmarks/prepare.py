"""How fast are prompts tokenised, does it grow with the cores, and does the driver's memory stay small?

    python -m benchmarks.prepare [--quick] [--json out.json]

One JSONL file of synthetic chats (three turns each, all masked in), SmolLM2's tokeniser and template. Three rates: rows
through `prepare_line` in one process, which is the limit of a core; `ray_jobs.prepare.collect` on a Ray of one CPU; and
on one of every CPU. Starting Ray and loading the tokeniser in its workers (a first, small run) is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.memory import peak
from benchmarks.report import Report

_WORDS = [
    f"{a}{b}" for a in ("so", "pre", "con", "in", "ta", "lu") for b in ("ber", "tion", "lor", "mi", "que", "sted")
]


def write_chats(path: Path, rows: int) -> None:
    rng = random.Random(0)

    def text(words: int) -> str:
        return " ".join(rng.choices(_WORDS, k=words)) + "."

    with open(path, "w") as file:
        for _ in range(rows):
            messages = []
            for _ in range(3):
                messages.append({"role": "user", "content": text(rng.randint(5, 60))})
                messages.append({"role": "assistant", "content": text(rng.randint(20, 200))})
            file.write(json.dumps({"messages": messages}) + "\n")


def one_process(path: Path) -> dict[str, float]:
    from ray_jobs.prompt_files import files_of, read_lines
    from ray_jobs.prompts import Limits, end_ids, load_tokenizer, prepare_line
    from ray_jobs.recipe import PromptSource
    from ray_jobs.verifier import resolve_verifier

    folder = str(resolve_verifier("bundled:smollm2-135m-instruct"))
    tokenizer = load_tokenizer(folder)
    limits = Limits(49152, 8192, end_ids(folder, tokenizer))
    (file,) = files_of([PromptSource(path=str(path))])
    tokens = 0
    began = time.perf_counter()
    for number, line in read_lines(str(path)):
        made, reject = prepare_line(file, number, line, tokenizer, limits)
        assert reject is None, reject
        tokens += sum(len(one["token_ids"]) for one in made)
    return {"tokens": tokens, "seconds": time.perf_counter() - began}


def on_ray(path: Path, cpus: int) -> dict[str, float]:
    import ray

    from ray_jobs.inputs import open_verifier
    from ray_jobs.prepare import collect
    from ray_jobs.prompt_files import files_of
    from ray_jobs.recipe import Recipe

    recipe = Recipe.model_validate(
        {
            "name": "benchmark",
            "verifier": {"model": "bundled:smollm2-135m-instruct"},
            "prompts": [{"path": str(path)}],
            "dataset": {"uri": str(path.parent / "dataset"), "max_length": 8185},
        }
    )
    verifier = open_verifier(recipe)
    # Two reading tasks of a quarter of a core each may stand beside the tokenising ones.
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="error")
    warm = path.parent / "warm.jsonl"
    with open(path) as whole:
        warm.write_text("".join(next(whole) for _ in range(2000)))
    collect(recipe, verifier, files_of([recipe.prompts[0].model_copy(update={"path": str(warm)})]))
    before = peak()
    began = time.perf_counter()
    collected = collect(recipe, verifier, files_of(recipe.prompts))
    size = len(collected.finish())
    seconds = time.perf_counter() - began
    grown = peak() - before
    ray.shutdown()
    return {
        "tokens": collected.tokens,
        "seconds": seconds,
        "grown": grown,
        "bytes": size,
        "rejects": len(collected.rejects),
    }


def _apart(what: str, path: Path, cpus: int) -> dict[str, Any]:
    """A process of its own, so that neither Ray nor memory is shared between two measurements."""
    environment = {**os.environ, "RAY_ADDRESS": "", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.prepare", "--measure", what, str(path), str(cpus)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{what}: {done.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prepare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8,000 rows once; otherwise 60,000 three times")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        what, path, cpus = args.measure
        print(json.dumps(one_process(Path(path)) if what == "process" else on_ray(Path(path), int(cpus))))
        return
    report = Report("prepare", args.quick)
    cores = len(os.sched_getaffinity(0))
    rows, repeats = (8_000, 1) if args.quick else (60_000, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chats.jsonl"
        write_chats(path, rows)
        found: dict[str, list[dict[str, Any]]] = {
            "one process": [_apart("process", path, 1) for _ in range(repeats)],
            "Ray, 1 CPU": [_apart("ray", path, 1) for _ in range(repeats)],
            f"Ray, {cores} CPUs": [_apart("ray", path, cores) for _ in range(repeats)],
        }
    rates = {
        name: report.row(
            f"{name}: {rows:,} chats", "k tokens/s", [one["tokens"] / one["seconds"] / 1e3 for one in runs]
        )
        for name, runs in found.items()
    }
    alone, one, every = rates.values()
    assert len({run["tokens"] for runs in found.values() for run in runs}) == 1, "not the same tokens"
    last = found[f"Ray, {cores} CPUs"]
    report.row("driver's memory, grown by", "MB", [run["grown"] / 1e6 for run in last])
    report.bar("cores_used", every / one / cores, 0.8, "higher", f"rate on {cores} CPUs / (rate on one x {cores})")
    report.bar("of_one_process", one / alone, 0.8, "higher", "Ray on one CPU against the same code in one process")
    report.bar(
        "driver_bytes_per_token",
        max(run["grown"] / run["tokens"] for run in last), 40, "lower",
        "growth of the driver's memory; rows as Python objects take 100 and more",
    )  # fmt: skip
    report.show(args.json)


if __name__ == "__main__":
    main()
