"""The arrows of the house: ray_jobs -> drafter, vocab -> storage, and nothing back."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {
    "storage": set(),
    "vocab": {"storage"},
    "drafter": {"storage", "vocab"},
    "ray_jobs": {"storage", "vocab", "drafter"},
}


def imported(path: Path) -> set[str]:
    """Top-level names of every module that a file imports, at its head or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_along_the_arrows(room: str) -> None:
    files = list((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        names = imported(path)
        assert not (names & set(ROOMS)) - ROOMS[room] - {room}, path
        if room != "ray_jobs":
            assert "ray" not in names, path
        if room in ("storage", "vocab"):
            assert not names & {"sglang", "transformers", "zarr"}, path


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules_imported(path: Path, known: set[str]) -> set[str]:
    """Our modules that a file names at its head or inside functions, for types alone too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return found & known


@pytest.mark.parametrize("room", ROOMS)
def test_modules_import_each_other_in_no_circle(room: str) -> None:
    paths = {module(path): path for path in (ROOT / room).rglob("*.py")}
    # A package's own __init__ gathers its modules' names, and is no arrow back.
    files = {name: path for name, path in paths.items() if path.name != "__init__.py"}
    TopologicalSorter({name: modules_imported(path, set(files)) for name, path in files.items()}).prepare()


def test_there_is_no_pickle_and_no_untrusted_torch_load() -> None:
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            assert not imported(path) & {"pickle", "dill", "cloudpickle", "joblib"}, path
            text = path.read_text()
            assert "torch.load(" not in text or "weights_only=True" in text, path


def test_modules_stay_small() -> None:
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 500, path
