"""cluster.yaml, checked by Ray's own code and without a network."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from node_env import ROOT, node_env
from ray.autoscaler._private.util import prepare_config, validate_config

SPEC = yaml.safe_load((ROOT / "cluster.yaml").read_text())
START = ("head_start_ray_commands", "worker_start_ray_commands")


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `ray up` makes of the file before it asks AWS for anything. Any connection fails the test."""

    def no_network(*_: object) -> None:
        raise AssertionError("preparing cluster.yaml reached for the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    return prepare_config(yaml.safe_load((ROOT / "cluster.yaml").read_text()))


def test_ray_accepts_the_cluster_offline_and_without_credentials(prepared: dict[str, Any]) -> None:
    validate_config(prepared)


def test_ray_refuses_the_cluster_with_a_misspelt_key(prepared: dict[str, Any]) -> None:
    prepared["available_node_types"]["worker"]["min_worker"] = 0
    with pytest.raises(Exception, match="min_worker"):
        validate_config(prepared)


def test_the_head_has_eight_gpus_and_workers_start_at_none() -> None:
    types = SPEC["available_node_types"]
    head, worker = types[SPEC["head_node_type"]], types["worker"]
    for node in (head, worker):
        assert node["node_config"]["InstanceType"] == "g7e.48xlarge"
        assert node["resources"] == {"CPU": 192, "GPU": 8}
    assert worker["min_workers"] == 0
    assert worker["max_workers"] == SPEC["max_workers"] == 3


def test_s3_is_reached_by_instance_role_and_no_key_is_written_anywhere() -> None:
    for node in SPEC["available_node_types"].values():
        assert node["node_config"]["IamInstanceProfile"]["Name"].startswith("statehouse-")
    for path in [ROOT / "cluster.yaml", *(ROOT / "deploy").iterdir()]:
        text = path.read_text()
        assert not re.search(r"AKIA[0-9A-Z]{16}|AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN)\s*[:=]", text), path


def test_the_token_is_demanded_and_reaches_every_node() -> None:
    assert node_env()["RAY_AUTH_MODE"] == "token"
    assert SPEC["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


def test_every_ray_starts_with_the_node_environment() -> None:
    assert SPEC["file_mounts"]["~/statehouse/node.env"] == "deploy/node.env"
    for name in START:
        (start,) = [command for command in SPEC[name] if "ray start" in command]
        assert start.index("set -a; . ~/statehouse/node.env") < start.index("ray start")
        assert f"AWS_REGION={SPEC['provider']['region']};" in start
        assert "ulimit -n 65536" in start
        # Workers of Ray take ports 10002-19999.
        assert not any(10002 <= int(port) <= 19999 for port in re.findall(r"port=(\d+)", start))


def test_the_dashboard_is_not_open_to_the_network() -> None:
    assert "--dashboard-host=127.0.0.1" in " ".join(SPEC["head_start_ray_commands"])


def test_every_setting_for_nodes_has_its_reason_above_it() -> None:
    lines = (ROOT / "deploy" / "node.env").read_text().splitlines()
    described = {
        re.split("=", line)[0]
        for number, line in enumerate(lines)
        if "=" in line and not line.startswith("#") and lines[number - 1].startswith("#")
    }
    assert set(node_env()) - described == {"STATEHOUSE_CACHE", "STATEHOUSE_LOG_DIR"}  # the reason of HF_HOME
    assert node_env()["NCCL_P2P_DISABLE"] == "1"  # the default that cannot hang
    assert int(node_env()["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60


def test_a_shell_reads_the_node_environment_as_it_is_written() -> None:
    command = "set -a; . deploy/node.env; env -0"
    out = subprocess.run(["bash", "-c", command], cwd=ROOT, env={}, capture_output=True, text=True, check=True).stdout
    seen = dict(entry.split("=", 1) for entry in out.split("\0") if entry)
    assert node_env().items() <= seen.items()


def test_set_up_and_start_commands_are_sound_shell(tmp_path: Path) -> None:
    for name in ("setup_commands", *START):
        for command in SPEC[name]:
            subprocess.run(["bash", "-n", "-c", command], check=True)


def test_what_is_installed_are_extras_of_the_project_and_mounted_files_exist() -> None:
    (install,) = [command for command in SPEC["setup_commands"] if "uv pip install" in command]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = re.findall(r"--extra (\w+)", install)
    assert wanted == ["jobs", "sglang"]
    assert set(wanted) <= set(extras)
    for local in SPEC["file_mounts"].values():
        assert local.startswith("~") or (ROOT / local).is_file(), local
