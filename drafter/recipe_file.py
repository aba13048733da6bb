"""A recipe as `python -m drafter.train` reads it: what one process needs of it. (The jobs read all of it: ray_jobs.recipe.)

`dataset.uri` and `verifier.model`, the sections `drafter`, `training` and `vocab`, and of `evaluation` what is held out. Draft
vocabulary and run lie beside the dataset, where the jobs look for them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from drafter.errors import DrafterError
from vocab.config import VocabConfig

# Of `evaluation`; the rest concerns jobs that come after training.
_HELD_OUT = ("held_out", "seed")


@dataclass(frozen=True)
class RecipeFile:
    """sections: `drafter`, `training` and `evaluation` as they stand in the file. dataset, verifier: None where missing.

    vocab: which draft vocabulary is expected beside the dataset.
    """

    path: str
    name: str
    sections: dict[str, dict[str, Any]]
    dataset: str | None
    verifier: str | None
    vocab: VocabConfig

    def run(self, dataset: str, name: str | None) -> str:
        """Where the run of this name goes, by default of the recipe's."""
        return f"{dataset}-runs/{name or self.name}"


def read_recipe(path: str) -> RecipeFile:
    """Raises DrafterError: no such file, no YAML, or not the sections of a recipe."""
    try:
        import yaml
    except ImportError:
        raise DrafterError(f"{path}: reading recipes needs pyyaml: pip install pyyaml, or give the flags") from None
    try:
        document = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise DrafterError(f"{path}: cannot read the recipe: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise DrafterError(f"{path}: expected a recipe in YAML, found {' '.join(str(error).split())[:200]}") from None
    parts: dict[str, dict[str, Any]] = {}
    for section in ("dataset", "verifier", "vocab", "drafter", "training", "evaluation"):
        found = document.get(section) if isinstance(document, dict) else document
        if not isinstance(found, dict | None) or not isinstance(document, dict):
            raise DrafterError(f"{path}: {section}: expected keys and values, found {type(found).__name__}")
        parts[section] = dict(found or {})
    held_out = {key: value for key, value in parts["evaluation"].items() if key in _HELD_OUT}
    sections = {"drafter": parts["drafter"], "training": parts["training"], "evaluation": held_out}
    try:
        vocab = VocabConfig(**parts["vocab"])
    except (ValidationError, TypeError) as error:
        said = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        raise DrafterError(f"{path}: {'.'.join(map(str, ('vocab', *said['loc'])))}: {said['msg']}") from None
    uri, model = (parts[section].get(key) for section, key in (("dataset", "uri"), ("verifier", "model")))
    dataset = None if uri is None else os.path.expanduser(str(uri)).rstrip("/")
    return RecipeFile(
        path, str(document.get("name") or Path(path).stem), sections, dataset, model and str(model), vocab
    )


def verifier_folder(recipe: RecipeFile) -> str:
    """The recipe's verifier as a folder on this machine. Raises DrafterError when it is none."""
    if recipe.verifier is None or not os.path.isdir(folder := os.path.expanduser(recipe.verifier)):
        raise DrafterError(
            f"{recipe.path}: verifier.model: expected a folder of this machine, found {recipe.verifier!r}, which only the "
            f"jobs fetch; name the folder with --verifier"
        )
    return folder
