"""sweep: many trainings over one sealed dataset, one after another or some at a time, and a table that compares them.

    python -m ray_jobs.sweep recipes/smollm2.yaml "vocab.size=[4096,8192]" "training.lr=[1e-3,2e-3]" --evaluate
    python -m ray_jobs.sweep recipes/smollm2.yaml "vocab.size=[4096,8192]" --table        # what is there so far

A key with a list is an axis (one that takes a list anyway, with a list of lists: "evaluation.draft_lengths=[[1,2],[1,3]]"),
and every combination is an arm: a run of its own, with plain jobs (coverage where a
vocabulary key changes, train, evaluate). Run it again after any interruption: what is finished is left as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FrameType
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from drafter.claim import finished
from drafter.run import EVALUATION, RUN, SUMMARY
from drafter.sources import Request, open_sources
from ray_jobs import job
from ray_jobs.measuring import measured_as
from ray_jobs.recipe import Recipe, load_recipe, takes_list
from ray_jobs.train import request_of, require_vocabulary
from storage.errors import RecipeError, StatehouseError
from storage.objects import ObjectMissing, open_store
from storage.runs import FoundRun, read_run
from vocab.chosen import differences
from vocab.mapping import HEADER, TENSORS, DraftVocab

log = logging.getLogger("statehouse")

# What an arm may change: anything else would be another dataset.
_SECTIONS = ("vocab", "drafter", "training", "evaluation")


@dataclass(frozen=True)
class Arm:
    """One combination. settings: {key: value} of the axes. overrides: of the recipe. own_vocabulary: made for the sweep."""

    name: str
    settings: dict[str, Any]
    overrides: list[str]
    recipe: Recipe
    own_vocabulary: bool = False


def plan_arms(path: str, overrides: Sequence[str]) -> list[Arm]:
    """All combinations, checked as recipes. Raises RecipeError."""
    axes: dict[str, list[Any]] = {}
    fixed: list[str] = []
    given: set[str] = set()
    same: dict[str, Any] = {}  # of all arms, and of their vocabularies
    for override in overrides:
        key, found, text = override.partition("=")
        try:
            value = yaml.safe_load(text) if found else None
        except (yaml.YAMLError, ValueError, RecursionError):
            raise RecipeError(f"override {override!r}: the value is not YAML; quote it") from None
        if key in given:
            raise RecipeError(f"sweep: {key} is given twice; give it once, with all its values in one list")
        given.add(key)
        if not isinstance(value, list) or (
            takes_list(key) and not (value and all(isinstance(one, list) for one in value))
        ):
            fixed.append(override)
            if _makes_vocabulary(key):
                same[key] = value
            continue
        if key.split(".")[0] not in _SECTIONS or "." not in key:
            raise RecipeError(
                f"sweep over {key or override}: expected a key inside {', '.join(_SECTIONS)}, since all arms read one dataset; "
                f"for another dataset start another sweep"
            )
        if len({str(one) for one in value}) != len(value) or not value:
            raise RecipeError(f"sweep over {key}: expected different values, found {value}")
        axes[key] = value
    if not axes:
        raise RecipeError('sweep: expected at least one key with a list, for instance "vocab.size=[4096,8192]"')
    base = load_recipe(path, fixed)
    arms = []
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        label = "-".join(f"{key.rsplit('.', 1)[-1]}-{_plain(value)}" for key, value in settings.items())
        name = f"{base.training.run or base.name}-{label}"
        changed = [*fixed, *(f"{key}={json.dumps(value)}" for key, value in settings.items()), f"training.run={name}"]
        if made_of := {key: value for key, value in settings.items() if _makes_vocabulary(key)} | same:
            # A vocabulary of its own, one for all that agree on it; the recipe's is of the recipe's own settings.
            if "training.draft_vocabulary" in settings or base.training.draft_vocabulary is not None:
                raise RecipeError(
                    f"sweep: {', '.join(made_of)} makes another draft vocabulary, and training.draft_vocabulary names "
                    f"one: leave one of them out"
                )
            own = "-".join(f"{key.removeprefix('vocab.')}-{_plain(value)}" for key, value in made_of.items())
            changed.append(f"training.draft_vocabulary={base.dataset.vocab_uri}/{own}")
        arms.append(Arm(name, settings, changed, load_recipe(path, changed), bool(made_of)))
    if len({arm.name for arm in arms}) != len(arms):
        raise RecipeError("sweep: two arms would have one name; give values that differ in letters or digits")
    return arms


def _makes_vocabulary(key: str) -> bool:
    """Whether a draft vocabulary is another one with another value of this key: it is chosen on what is not held out."""
    section = key.split(".")[0]
    return section == "vocab" or key in ("evaluation", "evaluation.held_out", "evaluation.seed")


def _plain(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", str(value)).strip("_")


def steps_left(arm: Arm, evaluate: bool) -> list[str]:
    """Jobs that the arm still needs, in order. Raises StatehouseError when its run is finished, but of something else."""
    run = open_store(arm.recipe.run_uri)
    left = []
    if run.exists(SUMMARY):
        require_own(arm)
    else:
        if not has_vocabulary(arm):
            left.append("coverage")
        left.append("train")
    if evaluate and (left or not is_evaluated(arm)):
        left.append("evaluate")
    return left


def has_vocabulary(arm: Arm) -> bool:
    """Whether the arm's draft vocabulary is there as its recipe makes it. Raises StatehouseError for a recipe's own that
    is another one: other runs may be of it, so it is not made again unasked.
    """
    store = open_store(arm.recipe.vocab_uri)
    if not store.exists(HEADER):
        return False
    vocabulary = DraftVocab.from_bytes({name: store.get(name) for name in (TENSORS, HEADER)}, store.uri)
    if arm.own_vocabulary:
        judged = arm.recipe.evaluation
        return not differences(vocabulary, arm.recipe.vocab, held_out=judged.held_out, seed=judged.seed)
    require_vocabulary(arm.recipe, vocabulary)
    return True


def is_evaluated(arm: Arm) -> bool:
    """Whether the run was measured as the arm asks for it: an evaluation of other draft lengths is none."""
    try:
        found = json.loads(open_store(arm.recipe.run_uri).get(EVALUATION))
    except ObjectMissing:
        return False
    except ValueError:  # torn: measured again
        return False
    return isinstance(found, dict) and found.get("evaluation") == measured_as(arm.recipe)


def require_own(arm: Arm) -> None:
    """A finished run of this name must be what the arm asks for, keys that are no axis included. Raises StatehouseError."""
    fields = request_of(arm.recipe)
    del fields["model_type"]
    request = Request(**fields)
    finished(request, open_sources(request))
    if not has_vocabulary(arm):
        raise StatehouseError(
            f"{request.vocabulary}: a draft vocabulary that was made with other settings, and {request.run} was trained "
            f"with it; give the sweep another training.run"
        )


def of_others(arms: Sequence[Arm]) -> dict[str, str]:
    """{arm: why its finished run is not its own}."""
    found = {}
    for arm in arms:
        if open_store(arm.recipe.run_uri).exists(SUMMARY):
            try:
                require_own(arm)
            except StatehouseError as error:
                found[arm.name] = str(error)
    return found


class Jobs:
    """Runs jobs as processes of their own, and ends them when it is ended."""

    def __init__(self, recipe: str) -> None:
        self.recipe, self._lock = recipe, threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._of: dict[str, threading.Lock] = {}
        self.stopping = False

    def do(self, arm: Arm, evaluate: bool) -> str | None:
        """All that the arm still needs; returns the line of the error that ended it."""
        try:
            with self._alone(arm.recipe.vocab_uri):  # two arms of one vocabulary make it once
                if "coverage" in steps_left(arm, evaluate) and (error := self._job("coverage", arm)):
                    return error
            for step in steps_left(arm, evaluate):
                if error := self._job(step, arm):
                    return error
        except StatehouseError as error:
            return str(error)
        except Exception as error:  # of one arm: the others go on
            return job.unexpected(error)
        return None

    def _alone(self, uri: str) -> threading.Lock:
        with self._lock:
            return self._of.setdefault(uri, threading.Lock())

    def _job(self, name: str, arm: Arm) -> str | None:
        with self._lock:
            if self.stopping:
                return "stopped"
            process = subprocess.Popen(
                [sys.executable, "-m", f"ray_jobs.{name}", self.recipe, *arm.overrides],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._running.add(process)
        log.info("sweep %s start arm=%s", name, arm.name)
        last = ""
        assert process.stderr is not None
        for line in process.stderr:
            line = line.rstrip()
            last = line if line.startswith("error:") or not last.startswith("error:") else last
            log.info("[%s] %s", arm.name, line)
        code = process.wait()
        with self._lock:
            self._running.discard(process)
        return None if code == 0 else f"{name} ended with {code}: {last.removeprefix('error: ')}"

    def stop(self) -> None:
        with self._lock:
            self.stopping = True
            for process in self._running:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)


def compare(arms: Sequence[Arm], others: Container[str] = ()) -> list[dict[str, Any]]:
    """Of each arm: settings, and what is known of its run. others: arms whose runs are not theirs; nothing is said of them."""
    rows = []
    for arm in arms:
        store = open_store(arm.recipe.run_uri)
        run = read_run(store) if arm.name not in others and store.exists(RUN) else FoundRun(store.uri)
        summary = run.summary or {}
        of_drafter = {"loss": summary.get("loss_after"), "accuracy": summary.get("accuracy_after")}
        if (best := summary.get("best")) and best["update"] == summary.get("exported"):
            of_drafter = best
        rows.append(
            {
                "arm": arm.name,
                "settings": arm.settings,
                "run": run.uri,
                "finished": run.summary is not None,
                "datasets": run.datasets,
                "tau": run.tau if run.tau and is_evaluated(arm) else None,
                "held_out_loss": of_drafter.get("loss"),
                "accuracy": of_drafter.get("accuracy"),
                "updates": summary.get("updates"),
                "tokens": summary.get("tokens"),
                "seconds": summary.get("seconds"),
                "parameters": summary.get("parameters"),
                "draft_vocab_size": summary.get("draft_vocab_size"),
            }
        )
    return rows


def render(rows: Sequence[dict[str, Any]]) -> Table:
    lengths = sorted({k for row in rows for k in (row["tau"] or {})}, key=int)
    axes = list(rows[0]["settings"])
    table = Table(
        *axes,
        *(f"τ({k})" for k in lengths),
        "held-out loss",
        "matches",
        "tokens",
        "wall s",
        "M trained",
        "M in all",
        "state",
    )

    def shown(value: Any, form: str = "{:,}") -> str:
        return "" if value is None else form.format(value)

    for row in rows:
        parameters = row["parameters"] or {}
        table.add_row(
            *(str(row["settings"][key]) for key in axes),
            *(shown((row["tau"] or {}).get(k), "{:.3f}") for k in lengths),
            shown(row["held_out_loss"], "{:.3f}"),
            shown((row["accuracy"] or [None])[0], "{:.1%}"),
            shown(row["tokens"]),
            shown(row["seconds"], "{:,.0f}"),
            shown(parameters.get("trained") and parameters["trained"] / 1e6, "{:,.2f}"),
            shown(parameters.get("all") and parameters["all"] / 1e6, "{:,.2f}"),
            "finished" if row["finished"] else "unfinished",
        )
    return table


def sweep(
    path: str, overrides: Sequence[str], *, parallel: int, evaluate: bool, only_table: bool, to: str | None
) -> int:
    """Runs the arms and prints the comparison; the exit code. Raises StatehouseError."""
    arms = plan_arms(path, overrides)
    if to is not None:
        _write(to, "", "a")  # before hours of work, not behind them
    failures: dict[str, str] = {}
    if not only_table:
        jobs = Jobs(path)

        def stopped(_number: int, _frame: FrameType | None) -> None:
            jobs.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stopped)
        with ThreadPoolExecutor(parallel) as pool:
            for arm, error in zip(arms, pool.map(lambda arm: jobs.do(arm, evaluate), arms), strict=True):
                if error is not None:
                    failures[arm.name] = error
        if jobs.stopping:
            print("stopped; run the same command again to carry on where it stood", file=sys.stderr)
            return 143
    others = of_others(arms)
    failures |= others
    rows = compare(arms, others)
    document = {"recipe": path, "overrides": list(overrides), "arms": rows, "failures": failures}
    text = json.dumps(document, indent=1) + "\n"
    base = arms[0].recipe
    open_store(f"{base.dataset.uri}-runs").put(f"{base.name}.sweep.json", text.encode())
    if to is not None:
        _write(to, text, "w")
    Console(width=None if Console().is_terminal else 170).print(render(rows))
    for name, error in failures.items():
        print(f"error: {name}: {error}", file=sys.stderr)
    return 1 if failures else 0


def _write(path: str, text: str, mode: str) -> None:
    try:
        with open(path, mode) as file:
            file.write(text)
    except OSError as error:
        raise StatehouseError(
            f"--json {path}: {error.strerror or error}; name a file in a folder that is there and can be written"
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    parsed = argparse.ArgumentParser(
        prog="python -m ray_jobs.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parsed.add_argument("recipe", help="YAML recipe whose dataset is sealed")
    parsed.add_argument("settings", nargs="+", metavar="section.key=[a,b]", help="axes, and keys for all arms")
    parsed.add_argument("--parallel", type=int, default=1, metavar="N", help="arms at one time (%(default)s)")
    parsed.add_argument("--evaluate", action="store_true", help="measure the acceptance length of each arm, too")
    parsed.add_argument("--table", action="store_true", help="compare what is there, run nothing")
    parsed.add_argument("--json", metavar="FILE", help="the comparison as JSON (it is stored beside the runs anyway)")
    args = parsed.parse_intermixed_args(argv)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING, stream=sys.stderr)
    log.setLevel(logging.INFO)
    try:
        return sweep(
            args.recipe, args.settings, parallel=max(1, args.parallel), evaluate=args.evaluate,
            only_table=args.table, to=args.json,
        )  # fmt: skip
    except StatehouseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        print(f"error: {job.unexpected(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
