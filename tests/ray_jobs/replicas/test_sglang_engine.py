"""One real SGLang engine on the CPU, in fp32, against the oracle. About a minute.

SmolLM2 with prefill chunks of 64 tokens, so that the longer prompts come back in pieces.
"""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ray_jobs.replicas import open_replica
from ray_jobs.replicas.replica import Forwarded, Generation, Replica, ReplicaConfig, Sampling
from ray_jobs.replicas.sglang import SGLangReplica
from ray_jobs.verifier import default_capture_layers, resolve_verifier
from storage.errors import ReplicaFailed, StatehouseError

pytest.importorskip("sglang")
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(280)]
CHUNK = 64
TEACHER = "topk(4)"


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_verifier("bundled:smollm2-135m-instruct")


@pytest.fixture(scope="module")
def layers() -> list[int]:
    return default_capture_layers(30)


@pytest.fixture(scope="module")
def oracle(folder: Path, layers: list[int]) -> Iterator[Replica]:
    with open_replica(ReplicaConfig(engine="transformers", dtype="float32"), folder, layers, TEACHER) as replica:
        yield replica


@pytest.fixture(scope="module")
def engine(folder: Path, layers: list[int]) -> Iterator[SGLangReplica]:
    config = ReplicaConfig(
        dtype="float32", start_timeout_s=240, request_timeout_s=120, args={"chunked_prefill_size": CHUNK}
    )
    replica = open_replica(config, folder, layers, TEACHER)
    assert isinstance(replica, SGLangReplica)
    with replica:
        yield replica


@pytest.fixture(scope="module")
def prompts() -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    long = random.integers(0, 49152, 3 * CHUNK + 11)
    return {
        "one token": long[:1],
        "short": random.integers(0, 49152, 17),
        "exactly a chunk": random.integers(0, 49152, CHUNK),
        "split into four chunks": long,
        "repeats the prefix of another": np.concatenate([long[: CHUNK + 5], random.integers(0, 49152, 20)]),
        "repeats another": long.copy(),
    }


@pytest.fixture(scope="module")
def forwarded(engine: Replica, prompts: dict[str, np.ndarray]) -> dict[str, Forwarded]:
    return dict(zip(prompts, engine.forward(list(prompts.values())), strict=True))


@pytest.fixture(scope="module")
def states(forwarded: dict[str, Forwarded]) -> dict[str, np.ndarray]:
    return {name: one.states for name, one in forwarded.items()}


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[T, L] of [T, L, H] and [T, L, H]."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


@pytest.mark.parametrize(
    "name",
    [
        "one token",
        "short",
        "exactly a chunk",
        "split into four chunks",
        "repeats the prefix of another",
        "repeats another",
    ],
)
def test_every_state_of_every_token_equals_the_oracles(
    name: str, states: dict[str, np.ndarray], prompts: dict[str, np.ndarray], oracle: Replica
) -> None:
    (expected,) = oracle.prefill([prompts[name]])
    assert states[name].shape == expected.shape == (len(prompts[name]), 4, 576)
    assert states[name].dtype == np.float32
    assert cosine(states[name], expected).min() > 0.999999
    norms = np.linalg.norm(states[name], axis=-1) / np.linalg.norm(expected, axis=-1)
    np.testing.assert_allclose(norms, 1, atol=1e-4)


def test_the_teacher_summary_is_that_of_transformers_logits(
    forwarded: dict[str, Forwarded], prompts: dict[str, np.ndarray], folder: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, ids in prompts.items():
        with torch.inference_mode():
            logits_TV = model(torch.tensor(ids)[None]).logits[0]
        summary = forwarded[name].teacher
        assert summary is not None
        assert summary.topk_ids is not None
        assert summary.topk_logits is not None
        np.testing.assert_allclose(summary.logsumexp, logits_TV.logsumexp(-1).numpy(), atol=2e-3)
        values, _ = logits_TV.topk(4)
        np.testing.assert_allclose(summary.topk_logits, values.numpy(), atol=2e-3)
        chosen = logits_TV.gather(1, torch.tensor(summary.argmax).long()[:, None])[:, 0]
        assert (values[:, 0] - chosen).abs().max() < 2e-3  # the argmax, or as good as it
        assert (summary.argmax == logits_TV.argmax(-1).numpy()).mean() > 0.99
        assert np.array_equal(summary.topk_ids[:, 0], summary.argmax)


def test_greedy_responses_equal_the_oracles(engine: Replica, oracle: Replica, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        np.array(tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
                 ["input_ids"])
        for question in ("What is the capital of France?", "Count to five.", "Say hello in Spanish.")
    ]  # fmt: skip
    samplings = [Sampling(max_new_tokens=24)] * 3
    ours, theirs = engine.generate(prompts, samplings), oracle.generate(prompts, samplings)
    for mine, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine.token_ids, expected.token_ids)
        assert mine.finish_reason == expected.finish_reason
    assert ours[0].finish_reason == "stop"
    assert ours[0].token_ids[-1] == tokenizer.eos_token_id, "the end token belongs to the response"


def test_a_seed_decides_a_response_whoever_shares_the_batch(engine: Replica, prompts: dict[str, np.ndarray]) -> None:
    def draw(seed: int | None, company: int = 0, top_p: float = 0.95) -> list[int]:
        sampling = Sampling(temperature=1.0, top_p=top_p, max_new_tokens=8, seed=seed, ignore_eos=True)
        others = [Sampling(max_new_tokens=4), Sampling(temperature=0.5, max_new_tokens=12)][:company]
        generations = engine.generate([prompts["short"]] * (1 + company), [sampling, *others])
        return generations[0].token_ids.tolist()

    assert draw(1) == draw(1, company=2)
    assert draw(1) != draw(2)
    assert draw(None) != draw(None)
    assert draw(3, top_p=1.0) == draw(3, top_p=1.0)


def test_a_stop_id_ends_a_response_and_is_part_of_it(engine: Replica, prompts: dict[str, np.ndarray]) -> None:
    (free,) = engine.generate([prompts["short"]], [Sampling(max_new_tokens=10, ignore_eos=True)])
    assert (len(free.token_ids), free.finish_reason, free.token_ids.dtype) == (10, "length", np.int32)
    stop = int(free.token_ids[5])
    end = free.token_ids.tolist().index(stop) + 1
    (cut,) = engine.generate([prompts["short"]], [Sampling(max_new_tokens=10, stop_token_ids=(stop,))])
    assert (cut.token_ids.tolist(), cut.finish_reason) == (free.token_ids[:end].tolist(), "stop")


def test_prefill_and_generation_at_the_same_time(
    engine: Replica, prompts: dict[str, np.ndarray], states: dict[str, np.ndarray]
) -> None:
    alone = engine.generate([prompts["short"]], [Sampling(max_new_tokens=16, ignore_eos=True)])
    together: list = []
    thread = threading.Thread(
        target=lambda: together.extend(
            engine.generate([prompts["short"]] * 3, [Sampling(max_new_tokens=16, ignore_eos=True)] * 3)
        )
    )
    thread.start()
    again = engine.prefill(list(prompts.values()))
    thread.join()
    for name, array in zip(prompts, again, strict=True):
        assert cosine(array, states[name]).min() > 0.999999
    assert [g.token_ids.tolist() for g in together] == [alone[0].token_ids.tolist()] * 3


@pytest.mark.parametrize("bad", [-1, 49152])
def test_a_bad_id_never_reaches_the_engine(engine: Replica, prompts: dict[str, np.ndarray], bad: int) -> None:
    with pytest.raises(StatehouseError, match=f"{bad} at position 1"):
        engine.prefill([prompts["short"], np.array([5, bad, 6])])
    with pytest.raises(StatehouseError, match=f"{bad} at position 0"):
        engine.generate([np.array([bad])], [Sampling()])
    engine.prefill([prompts["short"]])


def test_nothing_is_left_in_shared_memory_by_a_request(engine: SGLangReplica, states: dict[str, np.ndarray]) -> None:
    assert engine._engine is not None
    assert not [*engine._engine.private.glob("*.states"), *engine._engine.private.glob("*.part")]


def test_describe(engine: Replica) -> None:
    described = engine.describe()
    assert described.pop("engine_version").startswith("0.5.")
    assert described == {"engine": "sglang", "tp_size": 1, "engine_dtype": "float32"}


def test_zz_the_death_of_the_engine_fails_what_waits_and_loses_no_finished_response(
    engine: SGLangReplica, prompts: dict[str, np.ndarray]
) -> None:
    """Last: it kills the module's engine."""
    process = engine._engine
    assert process is not None
    assert process._process is not None
    private = process.private
    failures: list[BaseException] = []
    finished: dict[int, Generation] = {}
    one_is_done = threading.Event()

    def heard(at: int, generation: Generation) -> None:
        finished[at] = generation
        one_is_done.set()

    def work() -> None:
        samplings = [Sampling(max_new_tokens=4 if at == 2 else 2000, ignore_eos=True) for at in range(4)]
        try:
            engine.generate([prompts["short"]] * 4, samplings, heard)
        except ReplicaFailed as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert one_is_done.wait(120)
    os.kill(process.scheduler_pids()[0], signal.SIGKILL)
    thread.join(timeout=30)
    assert not thread.is_alive(), "a request outlived its engine"
    assert "the SGLang engine died" in str(failures[0])
    assert list(finished) == [2]
    assert len(finished[2].token_ids) == 4
    with pytest.raises(ReplicaFailed, match="died"):
        engine.prefill([prompts["short"]])
    engine.stop()
    with pytest.raises(ReplicaFailed, match="call start"):
        engine.prefill([prompts["short"]])
    assert not private.exists()
