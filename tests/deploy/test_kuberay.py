"""deploy/kuberay-rayjob.yaml against KubeRay's schema (rayjob-schema.json says which version), and against the rest."""

from __future__ import annotations

import copy
import json
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from node_env import ROOT, node_env

from ray_jobs.recipe import load_recipe

SCHEMA = json.loads((Path(__file__).parent / "rayjob-schema.json").read_text())
ACCOUNT, JOB = yaml.safe_load_all((ROOT / "deploy" / "kuberay-rayjob.yaml").read_text())
CLUSTER = JOB["spec"]["rayClusterSpec"]
HEAD = CLUSTER["headGroupSpec"]["template"]["spec"]
(GROUP,) = CLUSTER["workerGroupSpecs"]
WORKER = GROUP["template"]["spec"]


def test_the_rayjob_satisfies_the_schema_of_its_custom_resource() -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(JOB)
    assert (JOB["apiVersion"], JOB["kind"]) == ("ray.io/v1", "RayJob")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda job: job["spec"].update(entrypiont="x"), "entrypiont"),
        (lambda job: job["spec"].update(backoffLimit="3"), "'3' is not of type 'integer'"),
        (lambda job: job["spec"]["rayClusterSpec"].pop("headGroupSpec"), "headGroupSpec"),
        (lambda job: job["spec"]["rayClusterSpec"]["authOptions"].update(mode="tokens"), "tokens"),
        (lambda job: job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].pop("groupName"), "groupName"),
        (
            lambda job: job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["volumes"][1][
                "emptyDir"
            ].update(sizeLimit="64 GB"),
            "64 GB",
        ),
    ],
)
def test_the_schema_finds_what_an_api_server_would_refuse(spoil: Callable[[Any], object], message: str) -> None:
    job = copy.deepcopy(JOB)
    spoil(job)
    with pytest.raises(jsonschema.ValidationError, match=message):
        jsonschema.Draft202012Validator(SCHEMA).validate(job)


def test_the_entrypoint_is_a_job_with_a_recipe_and_overrides_that_load() -> None:
    python, flag, module, recipe, *overrides = shlex.split(JOB["spec"]["entrypoint"])
    assert (python, flag, module) == ("python", "-m", "ray_jobs.extract")
    loaded = load_recipe(ROOT / Path(recipe).relative_to("/statehouse"), overrides)
    gpus = int(WORKER["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert loaded.extraction.replica.gpus == gpus == 8
    assert loaded.extraction.replicas == GROUP["replicas"] == GROUP["minReplicas"]  # all there when the job counts them
    assert loaded.dataset.uri.startswith("s3://")


def test_pods_have_the_settings_of_node_env_but_the_token_which_kuberay_sets() -> None:
    expected = node_env()
    assert expected.pop("RAY_AUTH_MODE") == CLUSTER["authOptions"]["mode"]
    for pod in (HEAD, WORKER):
        found = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
        assert found.pop("AWS_REGION")
        assert found == expected


def test_pods_reach_s3_by_the_service_account() -> None:
    assert ACCOUNT["kind"] == "ServiceAccount"
    assert "eks.amazonaws.com/role-arn" in ACCOUNT["metadata"]["annotations"]
    assert HEAD["serviceAccountName"] == WORKER["serviceAccountName"] == ACCOUNT["metadata"]["name"]


def test_dev_shm_is_memory_and_holds_rays_object_store_with_room_to_spare() -> None:
    (mount,) = [mount for mount in WORKER["containers"][0]["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (volume,) = [volume for volume in WORKER["volumes"] if volume["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    size = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) * 2**30
    assert size >= 2 * int(GROUP["rayStartParams"]["object-store-memory"])


def test_pods_outlive_the_time_that_a_stopped_job_is_given() -> None:
    for pod in (HEAD, WORKER):
        assert pod["terminationGracePeriodSeconds"] > int(node_env()["RAY_JOB_STOP_WAIT_TIME_S"])


def test_ray_has_one_version_in_manifest_image_and_project() -> None:
    jobs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["jobs"]
    (ray,) = [package for package in jobs if package.startswith("ray[")]
    version = ray.split("==")[1]
    assert CLUSTER["rayVersion"] == version
    assert f"FROM rayproject/ray:{version}-py311" in (ROOT / "deploy" / "Dockerfile").read_text()
