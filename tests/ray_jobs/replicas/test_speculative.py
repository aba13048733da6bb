"""One real SGLang engine on the CPU with a drafter of the tiny verifier, in fp32. About a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_run import TinyRun

from ray_jobs.oracle import Verdict
from ray_jobs.replicas.replica import ReplicaConfig
from ray_jobs.replicas.speculative import Served, SpeculativeReplica
from ray_jobs.serving import TRAINED, OracleActor
from storage.errors import StatehouseError

pytest.importorskip("sglang")
pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(600)]
LENGTH = 3


@pytest.fixture(scope="module")
def engine(tiny_run: TinyRun) -> Iterator[SpeculativeReplica]:
    config = ReplicaConfig(dtype="float32", start_timeout_s=300, request_timeout_s=120, max_total_tokens=2048)
    drafter = Path(tiny_run.recipe.run_uri) / "drafter"
    with SpeculativeReplica(config, tiny_run.verifier, drafter, LENGTH) as replica:
        yield replica


def prompts(tiny_run: TinyRun) -> list[np.ndarray]:
    from storage import open_dataset

    dataset = open_dataset(tiny_run.recipe.dataset.uri)
    found = []
    for row in range(len(dataset)):
        token_ids, mask = dataset.tokens(row)
        found.append(token_ids[: int(np.flatnonzero(mask)[0])])
    return found


def judged(tiny_run: TinyRun, asked: list[np.ndarray], served: list[Served]) -> list[Verdict]:
    oracle = OracleActor(tiny_run.recipe)
    oracle.start()
    return oracle.judge(TRAINED, asked, served)


@pytest.mark.parametrize("tokens", [1, 2, 5, 24])
def test_output_is_the_verifiers_and_passes_are_the_walks_wherever_the_response_is_cut(
    engine: SpeculativeReplica, tiny_run: TinyRun, tokens: int
) -> None:
    asked = prompts(tiny_run)
    served = engine.generate(asked, tokens)
    for one in served:
        assert 1 <= len(one.token_ids) <= tokens
        assert (one.verifies, one.accepted) == (len(one.passes), sum(one.passes))
        assert one.finish_reason in ("stop", "length")
    if tokens == 1:
        assert not any(one.passes for one in served), "the prefill wrote the only token"
    verdicts = judged(tiny_run, asked, served)
    assert not any(verdict.mismatches or verdict.differing for verdict in verdicts)
    assert all(verdict.last_agrees for verdict in verdicts)
    if tokens == 24:
        assert sum(one.accepted for one in served) > 10


def test_prompts_without_room_for_response_and_drafts_are_refused_and_the_engine_lives(
    engine: SpeculativeReplica, tiny_run: TinyRun
) -> None:
    (prompt, *_) = prompts(tiny_run)
    for bad in ([np.zeros(2040, np.int32)], [np.array([49152])], [np.zeros(0, np.int32)]):
        with pytest.raises(StatehouseError):
            engine.generate(bad, 8)
    assert len(engine.generate([prompt], 4)[0].token_ids) >= 1
