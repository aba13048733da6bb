"""What `ray job submit --working-dir .` sends to a cluster, by Ray's own packaging, and what a driver hands on."""

from __future__ import annotations

import fnmatch
import json
import logging
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from node_env import ROOT
from ray._private.runtime_env.packaging import create_package
from ray._private.runtime_env.working_dir import upload_working_dir_if_needed
from ray.runtime_env.runtime_env import _merge_runtime_env

from ray_jobs import job


def package(folder: Path, scratch: Path) -> tuple[set[str], int]:
    """Names in, and size of, the zip that would be uploaded."""
    target = scratch / "package.zip"

    def pack(working_dir: str, excludes: list[str], is_file: bool = False) -> None:
        # As ray.dashboard.modules.dashboard_sdk does, except that it then sends the file.
        create_package(working_dir, target, include_gitignore=True, excludes=excludes)

    upload_working_dir_if_needed(
        {"working_dir": str(folder)}, include_gitignore=True, logger=logging.getLogger("test"), upload_fn=pack
    )
    with zipfile.ZipFile(target) as archive:
        return set(archive.namelist()), target.stat().st_size


def test_the_upload_is_small_and_holds_what_the_jobs_need(tmp_path: Path) -> None:
    names, size = package(ROOT, tmp_path)
    assert size < 2_000_000, sorted(names)
    needed = [*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "prompts").glob("*.jsonl")]
    for room in ("storage", "vocab", "drafter", "ray_jobs"):
        needed += (ROOT / room).rglob("*.py")
    # The engine's plugin is found by entry point: without this folder the capture does not load.
    needed += (ROOT / "ray_jobs" / "replicas").rglob("entry_points.txt")
    assert any(path.name == "entry_points.txt" for path in needed)
    assert {str(path.relative_to(ROOT)) for path in needed} <= names
    top = {name.split("/")[0] for name in names}
    assert not top & {".venv", ".git", "out", "tests", "docs", "deploy", ".mypy_cache", ".ruff_cache", ".hypothesis"}


def test_environments_results_caches_weights_and_secrets_stay_at_home(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in (".gitignore", ".rayignore"):
        shutil.copy(ROOT / name, clone)
    home = [
        ".venv/lib/torch.so", ".git/objects/00", "out/smollm2/hidden/c/0", "tests/ray_jobs/data.parquet", "dist/a.whl",
        "statehouse.egg-info/PKG-INFO", "ray_jobs/__pycache__/job.pyc", ".mypy_cache/x", ".hypothesis/x",
        "weights/model-00001.safetensors", "smollm2.gguf", "wandb/run/log", "key.pem", ".env", "auth_token",
    ]  # fmt: skip
    travels = ["ray_jobs/job.py", "recipes/mine.yaml", "prompts/chat.jsonl", "storage/out/module.py", "benchmarks/a.py"]
    for name in home + travels:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(name)
    names, _ = package(clone, tmp_path)
    assert names == {*travels, ".gitignore", ".rayignore"}


def test_the_image_holds_the_code_and_neither_environments_nor_secrets() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]

    def left_out(name: str) -> bool:
        """Docker's rule: a path is out with any of its parents; `**/` is any folder, the root too."""
        parts = name.split("/")
        places = {"/".join(parts[:end]) for end in range(1, len(parts) + 1)}
        return any(
            fnmatch.fnmatchcase(place.rsplit("/", 1)[-1], pattern[3:])
            if pattern.startswith("**/")
            else place == pattern
            for pattern in patterns
            for place in places
        )

    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    rooms = ("storage/", "vocab/", "drafter/", "ray_jobs/", "recipes/", "prompts/", "deploy/", "pyproject.toml")
    needed = [name for name in tracked if name.startswith(rooms)]
    assert len(needed) > 100
    assert not [name for name in needed if left_out(name)]
    home = [
        ".venv/lib/torch.so", ".git/objects/00", "out/smollm2/hidden/c/0", ".env", ".env.prod", "deploy/.env", "a/key.pem",
        "drafter/__pycache__/run.pyc", ".mypy_cache/x", ".ruff_cache/x", ".pytest_cache/x", ".hypothesis/x", "auth_token",
    ]  # fmt: skip
    assert all(map(left_out, home))


def test_workers_get_credentials_endpoints_and_caches_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    given = {"AWS_REGION": "r", "AWS_ENDPOINT_URL": "http://s3", "HF_HOME": "/h", "STATEHOUSE_LOG_DIR": "/l"}
    for name, value in {**given, "NCCL_P2P_DISABLE": "0", "MY_SECRET": "s"}.items():
        monkeypatch.setenv(name, value)
    environment = job._forwarded()
    assert given.items() <= environment.items()
    # Settings of a node are the node's, not the driver's.
    assert not {"NCCL_P2P_DISABLE", "MY_SECRET", "PATH"} & set(environment)


def test_what_a_job_was_submitted_with_is_not_forwarded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray puts env_vars of --runtime-env-json into the driver's environment, and refuses to be told them again."""
    submitted = {"env_vars": {"AWS_ENDPOINT_URL": "http://s3", "OMP_NUM_THREADS": "4"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": submitted, "metadata": {}}))
    monkeypatch.setenv("AWS_REGION", "r")
    for name, value in submitted["env_vars"].items():
        monkeypatch.setenv(name, value)
    merged = _merge_runtime_env(submitted, {"env_vars": job._forwarded()})
    assert merged is not None
    assert merged["env_vars"]["AWS_REGION"] == "r"
    assert submitted["env_vars"].items() <= merged["env_vars"].items()
