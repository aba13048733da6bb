"""Train a drafter in this process, without Ray: the same engine as `ray_jobs.train`, with one worker.

    python -m drafter.train recipes/qwen3_8b.yaml training.lr=1e-4
    python -m drafter.train --dataset s3://states/qwen3 --draft-vocab s3://states/qwen3-vocab \\
        --verifier /models/Qwen3-8B --run s3://states/qwen3-runs/first training.lr=1e-4 drafter.ttt_steps=5
"""

from __future__ import annotations

import argparse
import logging
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drafter.claim import claim, drafter_config, require_start
from drafter.errors import DrafterError
from drafter.progress import describe
from drafter.recipe import DrafterSection, TrainingSection
from drafter.recipe_file import RecipeFile, read_recipe, verifier_folder
from drafter.session import train
from drafter.sources import Request, open_sources, open_verifier_weights
from drafter.team import Team
from storage.errors import StatehouseError
from vocab.chosen import require_chosen_as

log = logging.getLogger("statehouse")

_HELP = """\
what it does:
  A recipe names dataset, verifier, draft vocabulary and run as it does for the jobs; a flag goes before it. What it says
  of workers (training.workers and its like) is left out: this is one process.
  Reads the dataset straight from the store, trains on all sequences but the held-out ones, and puts into --run:
  checkpoints/, metrics.jsonl, drafter/ (config.json and model.safetensors as SGLang serves them) and, last, summary.json.
  Run it again after any interruption: it carries on from the newest checkpoint. A finished run is left as it is.

settings (section.key=value, the sections of a recipe):
{settings}

exit codes: 0 the drafter is in --run; 1 an error, said in one line; 130 or 143 stopped, with a checkpoint.
"""


class _Evaluation(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    # Share of prompt groups that are never trained on, as in a recipe.
    held_out: float = Field(default=0.02, ge=0, lt=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)


_SECTIONS: dict[str, type[BaseModel]] = {
    "drafter": DrafterSection, "training": TrainingSection, "evaluation": _Evaluation,
}  # fmt: skip
# Keys of `training` that only a job of several workers reads.
_OF_JOBS = (
    "workers", "min_workers", "gpus_per_worker", "max_failures", "parallel", "tokens_per_second",
    "collective_timeout_s",
)  # fmt: skip
# What is no setting here, and what takes its place: of the first two only where there is no recipe.
_UNUSED = {
    "training.run": "--run", "training.draft_vocabulary": "--draft-vocab",
    **{f"training.{key}": "python -m ray_jobs.train, since this command is one process," for key in _OF_JOBS},
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    settings = "\n".join(line for section, model in _SECTIONS.items() for line in _listed(section, model))
    parsed = argparse.ArgumentParser(
        prog="python -m drafter.train",
        description=__doc__,
        epilog=_HELP.format(settings=settings),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parsed.add_argument("--dataset", metavar="URI", help="a sealed dataset (ray_jobs.extract)")
    parsed.add_argument("--draft-vocab", metavar="URI", help="a draft vocabulary (ray_jobs.coverage)")
    parsed.add_argument("--verifier", metavar="FOLDER", help="the verifier that made the dataset")
    parsed.add_argument("--run", metavar="URI", help="where the run goes: a folder or s3://...")
    parsed.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parsed.add_argument("--fresh", action="store_true", help="delete what is in --run and start over")
    parsed.add_argument("settings", nargs="*", metavar="[RECIPE.yaml] section.key=value", help="see below")
    return parsed


def _listed(prefix: str, model: type[BaseModel]) -> list[str]:
    """`  prefix.key=default` of every key, those of sections inside included."""
    lines: list[str] = []
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            lines += _listed(f"{prefix}.{name}", type(default))
        elif f"{prefix}.{name}" not in _UNUSED:
            lines.append(f"  {prefix}.{name}={default}")
    return lines


def parse_settings(settings: Sequence[str], recipe: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """{section: its checked model} from `section.key=value`, over what a recipe has in the section.

    What a recipe says of a job's workers is left out. Raises DrafterError naming the one that is wrong.
    """
    given: dict[str, dict[str, Any]] = {section: dict((recipe or {}).get(section, {})) for section in _SECTIONS}
    if left_out := [f"training.{key}={given['training'].pop(key)}" for key in _OF_JOBS if key in given["training"]]:
        log.info("train in one process, without %s of the recipe", " ".join(left_out))
    for setting in settings:
        match = re.fullmatch(r"(\w+)\.(\w+)((?:\.\w+)?)=(.*)", setting, re.DOTALL)
        if match is None or match[1] not in _SECTIONS or match[2] not in _SECTIONS[match[1]].model_fields:
            raise DrafterError(
                f"setting {setting!r}: expected section.key=value, for instance training.lr=1e-4; see --help for all"
            )
        section, key, inner, text = match.groups()
        instead = _UNUSED.get(f"{section}.{key}")
        if instead and (recipe is None or not instead.startswith("--")):
            raise DrafterError(f"setting {setting!r}: not read here; use {instead} instead")
        if inner:  # drafter.config.head_dim=128
            outer = given[section].get(key)
            if not isinstance(outer, dict | None):
                raise DrafterError(
                    f"setting {setting!r}: expected {section}.{key} to have keys, found {section}.{key}={outer}; leave that out"
                )
            given[section][key] = (outer or {}) | {inner[1:]: _value(text)}
        else:
            given[section][key] = _value(text)
    try:
        return {section: model(**given[section]) for section, model in _SECTIONS.items()}
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([error.title.removesuffix("Section").strip("_").lower(), *map(str, first["loc"])])
        raise DrafterError(f"{where} is {first['input']!r}: {first['msg']}") from None


def _value(text: str) -> Any:
    """JSON where it is JSON (numbers, true, [1, 2]), else the text itself."""
    import json

    try:
        return json.loads(text)
    except ValueError:
        return text


def _places(args: argparse.Namespace, recipe: RecipeFile | None, training: TrainingSection) -> dict[str, str]:
    """Dataset, vocabulary, run and verifier of a Request: those of the flags, else the recipe's."""
    dataset = args.dataset or (recipe and recipe.dataset)
    found = {"dataset": dataset, "vocabulary": args.draft_vocab, "run": args.run, "verifier": args.verifier}
    if recipe is not None and dataset:
        found["vocabulary"] = args.draft_vocab or training.draft_vocabulary or f"{dataset}-vocab"
        found["run"] = args.run or recipe.run(dataset, training.run)
        found["verifier"] = args.verifier or verifier_folder(recipe)
    flags = {"vocabulary": "draft-vocab"}
    if missing := [f"--{flags.get(name, name)}" for name, one in found.items() if not one]:
        raise DrafterError(f"expected a recipe, or {', '.join(missing)}; see --help")
    return {name: str(one) for name, one in found.items()}


def _device(name: str) -> torch.device:
    """The device of this name. Raises DrafterError when this machine has none."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = str(error).split("\n")[0][:200]
        raise DrafterError(f"--device: expected cpu, or a GPU of this machine, found {name!r}: {said}") from None


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_intermixed_args(argv)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING, stream=sys.stderr)
    log.setLevel(logging.INFO)
    asked: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt  # asked twice: without a checkpoint
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        path = next((one for one in args.settings if one.endswith((".yaml", ".yml")) and "=" not in one), None)
        recipe = None if path is None else read_recipe(path)
        settings = [one for one in args.settings if one != path]
        sections = parse_settings(settings, None if recipe is None else recipe.sections)
        places = _places(args, recipe, sections["training"])
        request = Request(
            dataset=places["dataset"],
            vocabulary=places["vocabulary"],
            run=places["run"],
            verifier=places["verifier"],
            drafter=sections["drafter"],
            training=sections["training"],
            held_out=sections["evaluation"].held_out,
            split_seed=sections["evaluation"].seed,
            provenance={"command": " ".join(sys.argv[1:] if argv is None else argv), "torch": torch.__version__},
        )
        if args.device == "cpu":
            torch.set_num_threads(request.training.cpus_per_worker)
        device, sources = _device(args.device), open_sources(request)
        if recipe is not None and not args.draft_vocab and request.training.draft_vocabulary is None:
            require_chosen_as(
                sources.vocabulary, recipe.vocab,
                held_out=request.held_out, seed=request.split_seed, where=request.vocabulary,
            )  # fmt: skip
        weights = open_verifier_weights(request.verifier, sources.dataset)
        require_start(request, drafter_config(request, sources, weights), weights.config, fresh=args.fresh)
        finished = claim(request, sources, fresh=args.fresh)
        if finished is not None:
            log.info("train finished already %s", describe(finished, request.run))
            return 0
        summary = train(request, Team(device=device), lambda: bool(asked), lambda: bool(asked))
    except StatehouseError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # none should come here; nobody should have to read a traceback when one does
        with tempfile.NamedTemporaryFile("w", prefix="statehouse-", suffix=".traceback", delete=False) as file:
            file.write(traceback.format_exc())
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"error: unexpected {what}; please report it with {file.name}", file=sys.stderr, flush=True)
        return 1
    if summary is None:
        return 143 if asked[0] == signal.SIGTERM else 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
