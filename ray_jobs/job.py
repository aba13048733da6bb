"""What all jobs share: the command line, Ray, one-line errors, exit codes, log lines.

A job runs the same way by `ray job submit --working-dir . -- python -m ray_jobs.<job> RECIPE` on a cluster and by
`python -m ray_jobs.<job> RECIPE` alone, which starts a Ray of its own for as long as it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as ProgressBar

from ray_jobs.recipe import Recipe, load_recipe
from storage.errors import RecipeError, StatehouseError

log = logging.getLogger("statehouse")
_bars: list[ProgressBar] = []

# What the workers need of the driver's environment: Ray's workers inherit the raylet's, not ours.
_FORWARDED = ("AWS_", "GOOGLE_", "AZURE_", "HF_", "STATEHOUSE_")


def parser(job: str, description: str) -> argparse.ArgumentParser:
    parsed = argparse.ArgumentParser(
        prog=f"python -m ray_jobs.{job}",
        description=description,
        epilog="On a cluster: ray job submit --working-dir . -- "
        f"python -m ray_jobs.{job} recipes/smollm2.yaml [section.key=value ...]",
    )
    parsed.add_argument("recipe", help="YAML recipe, for instance recipes/smollm2.yaml")
    parsed.add_argument("overrides", nargs="*", metavar="section.key=value", help="override keys of the recipe")
    parsed.add_argument("--plan", action="store_true", help="print what would be done and what it costs, do nothing")
    return parsed


def main(arguments: argparse.ArgumentParser, run: Callable[[Recipe, argparse.Namespace], None]) -> None:
    """Parses sys.argv, runs, and exits: 0 when what was promised is on storage, 1 on a user's error, 143 on SIGTERM."""
    args = arguments.parse_intermixed_args()
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING, stream=sys.stderr)
    log.setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, _stopped)
    try:
        recipe = load_recipe(args.recipe, args.overrides)
        if args.plan:
            from ray_jobs.planning import print_plan  # it needs torch, which takes a worker a second and 200 MB

            print_plan(recipe)
        else:
            _require_lasting(recipe)
            run(recipe, args)
    except StatehouseError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 1
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except (KeyboardInterrupt, SystemExit) as stop:
        print("stopped; run the same command again to carry on where it stood", file=sys.stderr, flush=True)
        code = 143 if isinstance(stop, SystemExit) else 130
    except Exception as error:  # none should come here; nobody should have to read a traceback when one does
        print(f"error: {unexpected(error)}", file=sys.stderr, flush=True)
        code = 1
    else:
        code = 0
    shutdown_ray()
    _leave(code)


def unexpected(error: Exception) -> str:
    """One line for an error that none should see; its traceback goes into a file that the line names."""
    with tempfile.NamedTemporaryFile("w", prefix="statehouse-", suffix=".traceback", delete=False) as file:
        file.write("".join(traceback.format_exception(error)))
    what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return f"unexpected {what}; please report it with {file.name}"


def _leave(code: int) -> NoReturn:
    """Ends the process without tearing the interpreter down; a terminal gets its cursor back.

    Native threads of a dozen libraries (Arrow, gRPC, torch, tokenizers) are still there; one in some thousand exits, one
    of them aborted the process then, and a job that had said what it had to say ended with -6 instead of its exit code.
    """
    for bar in _bars:
        bar.stop()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe
            stream.flush()
    os._exit(code)


def _require_lasting(recipe: Recipe) -> None:
    """A submitted job runs in a copy of the working directory that Ray deletes: a relative folder would be lost there,
    or not found by the next job. (Prompts and lists of ids travel with it.) Runs lie beside dataset.uri.
    """
    if not _submitted():
        return
    named: list[tuple[str, str | None]] = [
        ("dataset.uri", recipe.dataset.uri),
        ("training.draft_vocabulary", recipe.training.draft_vocabulary),
        ("drafter.start_from", recipe.drafter.start_from),
        *(("dataset.reuse", uri) for uri in recipe.dataset.reuse),
        *(("vocab.datasets", uri) for uri in recipe.vocab.datasets),
        *(("training.datasets", one.uri) for one in recipe.training.datasets),
    ]
    for key, uri in named:
        if uri is not None and "://" not in uri and not os.path.isabs(os.path.expanduser(uri)):
            raise RecipeError(
                f"{key} {uri!r} is relative to a folder that Ray deletes after the job; "
                "give an object-store URI, or an absolute folder that all nodes share"
            )


def _submitted() -> bool:
    """Whether this process is the driver of a `ray job submit`."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def _stopped(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)  # unwinds, so that replicas are ended in order


@contextlib.contextmanager
def drain_on_sigterm() -> Iterator[Callable[[], bool]]:
    """SIGTERM inside the block is noted (what is given says so); a second one stops the process as it does elsewhere."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    noted: list[bool] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            _stopped(number, frame)
        noted.append(True)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGTERM, before)


def _forwarded() -> dict[str, str]:
    """Variables for the workers, less those that came with `ray job submit --runtime-env-json`.

    Ray hands the latter on itself, and refuses a driver that names one of them again, be it with the same value.
    """
    environment = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    of_the_job = (config.get("runtime_env") or {}).get("env_vars") or {}
    return {name: value for name, value in environment.items() if name not in of_the_job}


def start_ray() -> None:
    """Connects to the cluster this process belongs to, or starts a local Ray. Does nothing when already connected."""
    cluster = os.environ.get("RAY_ADDRESS")
    if not cluster or os.environ.get("RAY_AUTH_TOKEN") or (Path.home() / ".ray" / "auth_token").exists():
        # A Ray that finds a token asks for it, but a driver sends it in this mode only, read when ray is imported.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    if ray.is_initialized():
        return
    environment = _forwarded()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    runtime_env: dict[str, object] = {"env_vars": environment}
    root = str(Path(__file__).resolve().parent.parent)
    if cluster and not _submitted():
        runtime_env["working_dir"] = root  # as `ray job submit --working-dir .` does
    if not cluster:
        # The project need not be installed: local workers find it where this file lies.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    try:
        ray.init(
            address=cluster or "local",
            runtime_env=runtime_env,
            log_to_driver=False,
            logging_level="error",
            include_dashboard=False if not cluster else None,
            configure_logging=True,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise StatehouseError(
            f"no Ray: {error}; unset RAY_ADDRESS to start a local one, or start the cluster with `ray start --head`"
        ) from None
    signal.signal(signal.SIGTERM, _stopped)  # ray.init put its own in its place
    log.info("ray %s nodes=%d cpus=%g gpus=%g", "cluster" if cluster else "local", len(ray.nodes()), *cluster_size())


def quiet_ray_data() -> None:
    """Ray Data's progress bars and plans are noise in a job's log; ours says what happens."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def shutdown_ray() -> None:
    if "ray" in sys.modules:
        import ray

        ray.shutdown()


def cluster_size() -> tuple[float, float]:
    """CPUs and GPUs of the cluster."""
    import ray

    resources = ray.cluster_resources()
    return resources.get("CPU", 0.0), resources.get("GPU", 0.0)


def fitting(cpus: float, gpus: float) -> int:
    """How many processes that each need so much fit on the cluster's nodes; one never spans two of them."""
    import ray

    need = {"CPU": cpus, "GPU": gpus}
    fit = 0
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            fit += min((int(has.get(name, 0.0) // much) for name, much in need.items() if much), default=1 << 30)
    return fit


class Progress:
    """One log line every few seconds: `extract shards=3/16 tokens=9,120 tokens_per_s=812 eta=41s`. A bar on a terminal."""

    def __init__(self, job: str, unit: str, total: int, done: int = 0, every_s: float = 5.0) -> None:
        self.job, self.unit, self.total, self.done, self.every_s = job, unit, total, done, every_s
        self.began = self.last = time.monotonic()
        self.at_start = done
        self.tokens = 0
        self.extra: dict[str, object] = {}
        self.bar: ProgressBar | None = None

    def _tell(self, text: str) -> None:
        if not sys.stderr.isatty():
            log.info("%s", text)
            return
        if self.bar is None:
            columns = (TextColumn(self.job), BarColumn(), TextColumn("{task.fields[text]}"))
            self.bar = ProgressBar(*columns, console=Console(stderr=True), transient=True)
            self.bar.add_task(self.job, total=self.total, text="")
            self.bar.start()
            _bars.append(self.bar)
        self.bar.update(self.bar.task_ids[0], completed=self.done, text=text)
        if self.done == self.total:
            self.bar.stop()

    def step(self, tokens: int, extra: Callable[[], dict[str, object]] = dict) -> None:
        """A unit is done. extra: more fields of the line, asked for when this unit counts."""
        self.done += 1
        self.tokens += tokens
        self.extra.update(extra())
        now = time.monotonic()
        if now - self.last >= self.every_s or self.done == self.total:
            self.last = now
            self._tell(self.line(now))

    def wait(self, in_flight: int) -> None:
        """A line for a while in which nothing finished."""
        self._tell(f"{self.line(time.monotonic())} in_flight={in_flight} seconds={self.seconds:.0f}")

    def restart(self) -> None:
        """What came before was no work."""
        self.began = self.last = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def line(self, now: float) -> str:
        seconds = max(now - self.began, 1e-9)
        finished = self.done - self.at_start
        eta = f"{(self.total - self.done) * seconds / finished:.0f}s" if finished else "unknown"
        extra = "".join(f" {key}={value}" for key, value in self.extra.items())
        return (
            f"{self.job} {self.unit}={self.done}/{self.total} tokens={self.tokens:,} "
            f"tokens_per_s={self.tokens / seconds:,.0f} eta={eta}{extra}"
        )


def require(condition: bool, message: str) -> None:
    """Raises RecipeError with `message` unless `condition`."""
    if not condition:
        raise RecipeError(message)
