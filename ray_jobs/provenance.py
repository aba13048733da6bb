"""What every run writes beside its results: the recipe as resolved, versions, what code."""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from ray_jobs.recipe import Recipe
from storage.commit import package_versions

_PACKAGES = ("storage", "vocab", "drafter", "ray_jobs")
_SECRET = re.compile(r"(api|access|secret)_?key|token$|secret|password|credential", re.IGNORECASE)


def provenance(recipe: Recipe) -> dict[str, Any]:
    return {
        "recipe": redact(recipe.model_dump(mode="json", exclude_defaults=True)),
        "git_commit": git_commit(),
        "source": source_hash(),
        "python": platform.python_version(),
        "packages": package_versions("statehouse", "ray", "torch", "transformers", "sglang", "zstandard", "pyarrow"),
    }


def redact(value: Any) -> Any:
    """Hides what sits under a key that names a secret (an API key among the engine's arguments, say)."""
    if isinstance(value, dict):
        return {key: "***" if _SECRET.search(key) and item else redact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [redact(item) for item in value]
    return value


@functools.cache
def source_hash() -> str:
    """SHA-256 of the project's own Python files: it names the code where there is no checkout, as in a submitted job."""
    root, digest = Path(__file__).resolve().parent.parent, hashlib.sha256()
    for path in sorted(path for part in _PACKAGES for path in (root / part).rglob("*.py")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def git_commit() -> str | None:
    """The commit the code ran from, `+changes` when files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        commit, changes = (
            subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, timeout=10, check=True)
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
