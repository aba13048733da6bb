"""docs/deploy.md: its figures are computed again, its commands name things that exist."""

from __future__ import annotations

import re

import pytest
from node_env import ROOT, node_env

from ray_jobs.planning import estimate
from ray_jobs.recipe import load_recipe

TEXT = (ROOT / "docs" / "deploy.md").read_text()
RECIPE = "recipes/kimi_k25.yaml"
GIB = 2**30


def kimi_checkpoint() -> tuple[int, float, float]:
    """Parameters, bytes, and bytes on each of 8 tensor-parallel GPUs, from the architecture's published shape."""
    hidden, vocabulary, layers, experts, width = 7168, 163_840, 61, 384, 2048
    heads, q_rank, kv_rank, rope, nope = 64, 1536, 512, 64, 128
    expert = 3 * hidden * width
    down = hidden * q_rank + hidden * (kv_rank + rope)
    up = q_rank * heads * (nope + rope) + kv_rank * heads * (nope + nope)
    attention = layers * (down + up + heads * nope * hidden)
    routed = (layers - 1) * experts * expert
    routers, vision = (layers - 1) * experts * hidden, 400_000_000
    shared, dense = (layers - 1) * expert, 3 * hidden * 18_432
    plain = attention + shared + dense + routers + 2 * vocabulary * hidden + vision
    size = routed * (0.5 + 2 / 32) + plain * 2
    repeated = 2 * (layers * down + routers + vision)
    return routed + plain, size, (size - repeated) / 8 + repeated


def test_the_size_of_the_checkpoint_and_what_fits_on_8_gpus_follow_from_the_architecture() -> None:
    parameters, size, on_each = kimi_checkpoint()
    cache = 0.85 * 95 * GIB - on_each
    a_token = 576 * 2 * 61
    for figure in (
        f"{parameters / 1e9:,.1f} G",
        f"{size / 1e9:.1f} ({size / GIB:.1f} GiB)",
        f"{on_each / 1e9:.1f} GB ({on_each / GIB:.1f} GiB)",
        f"595.0 / 8 = {size / 8e9:.1f} GB",
        f"{cache / GIB:.1f} GiB are left",
        f"{a_token:,} bytes a token: {cache / a_token // 1000:.0f},000 tokens, {cache / a_token // 8192:.0f} sequences",
        f"({size / 4e9:.1f} GB a GPU)",
    ):
        assert figure in TEXT, figure
    assert on_each < 0.85 * 95 * GIB
    assert size / 4 > 96e9


@pytest.mark.parametrize("replicas", [1, 4])
def test_the_sizing_table_repeats_what_plan_prints(replicas: int) -> None:
    plan = estimate(load_recipe(ROOT / RECIPE, [f"extraction.replicas={replicas}"]))
    assert plan["gpus"] == 8 * replicas
    for figure in (
        f"{plan['raw_bytes'] / GIB:,.2f} / {plan['stored_bytes'] / GIB:,.2f} GiB",
        f"{plan['tokens']:,} tokens x {plan['bytes_per_token']:,} bytes",
        f"{-(-plan['shards'] // replicas):,}",
        f"{plan['memory_per_replica_bytes'] / GIB:.2f} shards in flight",
        f"{plan['stored_bytes'] / 1e9:.1f} GB",
        f"{plan['tokens'] / 1000 / replicas / 3600:.1f} |",
        f"{1000 * replicas * plan['bytes_per_token'] / 1.49 * 8 / 1e9:.2f} Gbit/s",
        f"{plan['stored_bytes'] / 1e9 / replicas:.0f} s at 1 GB/s",
    ):
        assert figure in TEXT, figure


def test_every_job_and_recipe_that_is_submitted_exists_and_its_overrides_load() -> None:
    found = re.findall(r"(ray_jobs\.\w+) +(recipes/\S+)((?: \S+=\S+)*)$", TEXT, re.MULTILINE)
    assert len(found) >= 6
    for module, recipe, overrides in found:
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), module
        load_recipe(ROOT / recipe, overrides.split())


def test_the_stop_time_and_the_settings_are_those_of_the_nodes() -> None:
    assert f"`RAY_JOB_STOP_WAIT_TIME_S` ({node_env()['RAY_JOB_STOP_WAIT_TIME_S']} s" in TEXT
    for name in ("NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME", "RAY_AUTH_MODE", "STATEHOUSE_LOG_DIR"):
        assert name in TEXT
        assert name in node_env()
