"""A tiny random Llama with SmolLM2's own tokeniser and template, and recipes on it: real jobs, seconds each."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml
from jobs import Finished, finish, free_ports, start_driver

if TYPE_CHECKING:
    from tiny_run import TinyRun

MAX_LENGTH = 160


@pytest.fixture(scope="session")
def smollm2() -> Path:
    from ray_jobs.verifier import resolve_verifier

    return resolve_verifier("bundled:smollm2-135m-instruct")


@pytest.fixture(scope="session")
def tiny_verifier(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 layers, hidden size 64, vocabulary 49,152; random weights, so outputs are noise of the right shape."""
    return make_verifier(tmp_path_factory.mktemp("verifier") / "tiny", smollm2, tie_word_embeddings=True)


def make_verifier(folder: Path, smollm2: Path, **changed: Any) -> Path:
    """A random Llama with the files of SmolLM2's tokeniser."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, **changed,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (smollm2 / name).exists():
            shutil.copy(smollm2 / name, folder)
    return folder


@pytest.fixture
def recipe(tiny_verifier: Path, tmp_path: Path) -> Callable[..., Path]:
    """recipe(prompts=[...], **sections) writes a recipe and its prompts and returns its path."""

    def make(rows: list[dict[str, Any]] | None = None, **sections: dict[str, Any]) -> Path:
        prompts = tmp_path / "prompts.jsonl"
        rows = [{"prompt": f"Say the number {n}."} for n in range(24)] if rows is None else rows
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        document: dict[str, Any] = {
            "name": "tiny",
            "verifier": {"model": str(tiny_verifier)},
            "prompts": [{"path": str(prompts), "source": "numbers"}],
            "generation": {"max_new_tokens": 8, "batch_size": 8},
            "dataset": {"uri": str(tmp_path / "dataset"), "max_length": MAX_LENGTH, "shard_tokens": 512},
            "extraction": {"replica": {"engine": "transformers", "dtype": "float32"}, "self_check": 0},
            "vocab": {"size": 512},
            "evaluation": {"held_out": 0.25},
        }
        for name, section in sections.items():
            document[name] = {**document.get(name, {}), **section} if isinstance(section, dict) else section
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return make


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[dict[str, str]]:
    """A Ray of its own, as `ray start --head` makes it: environment for drivers, and for `ray job submit`."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets lie in it, and their paths must be short
    # The agent's too: with its default ports taken by another Ray on the machine, no job can be submitted.
    port, dashboard, client, agent, agent_grpc, metrics = free_ports(6)
    # A submitted job's `python` is the cluster's.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {
        **os.environ,
        **token,
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    with open(Path(folder) / "log", "w") as log:
        process = subprocess.Popen(
            [Path(sys.executable).parent / "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1",
             "--num-cpus=4", "--disable-usage-stats",
             f"--port={port}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}",
             f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}",
             f"--metrics-export-port={metrics}",
             f"--temp-dir={folder}"],
            stdout=log, stderr=log, start_new_session=True, env=environment,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 90
        while "Ray runtime started" not in (Path(folder) / "log").read_text():
            assert process.poll() is None, (Path(folder) / "log").read_text()
            assert time.monotonic() < deadline, (Path(folder) / "log").read_text()
            time.sleep(0.2)
        yield {
            "RAY_ADDRESS": f"127.0.0.1:{port}",
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
            **token,
        }
    finally:
        # SIGTERM would take it half a minute.
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start_job(ray_cluster: dict[str, str]) -> Callable[..., subprocess.Popen[str]]:
    """start_job(job, recipe, *overrides, **environment): a driver on the test's cluster."""

    def start(job: str, recipe: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return start_driver(job, recipe, *arguments, **{**ray_cluster, **environment})

    return start


@pytest.fixture
def run_job(start_job: Callable[..., subprocess.Popen[str]]) -> Callable[..., Finished]:
    def run(job: str, recipe: Path, *arguments: str, **environment: str) -> Finished:
        return finish(start_job(job, recipe, *arguments, **environment))

    return run


@pytest.fixture
def prepared() -> Callable[[Path], Path]:
    """Does what `prepare` does, in this process, where `prepare` is not what is tested."""
    from tiny_run import prepare

    def prepared(path: Path) -> Path:
        prepare(path)
        return path

    return prepared


@pytest.fixture(scope="session")
def tiny_run(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A finished run on a tiny verifier that says something else at every step (the other one repeats itself).

    Tests that damage something copy it before.
    """
    from tiny_run import ROWS, make_run, write_recipe

    lively = {"initializer_range": 0.3, "tie_word_embeddings": False}
    tiny_verifier = make_verifier(tmp_path_factory.mktemp("verifier") / "lively", smollm2, **lively)
    with pytest.MonkeyPatch.context() as patch:
        return make_run(write_recipe(tmp_path_factory.mktemp("run"), tiny_verifier, ROWS), tiny_verifier, patch)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the fault tests tried, and how it ended."""
    if (faulty := sys.modules.get("faulty")) is None or not faulty.TRIED:
        return
    terminalreporter.section("faults of an extraction: what was tried, and how it ended")
    for (fault, end), times in sorted(faulty.TRIED.items()):
        terminalreporter.line(f"{fault:<42} {times:>3} tried: {end}")
