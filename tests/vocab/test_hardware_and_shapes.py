"""Weights, bytes and times against numbers worked out by hand; the story's figures come out of our own arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vocab.errors import VocabError
from vocab.hardware import GPUS, Gpu, gpu
from vocab.roofline import (
    Assumptions,
    Machine,
    draft_step,
    expected_experts,
    fits,
    round_seconds,
    training_cost,
    verifier_step,
)
from vocab.shapes import DRAFTERS, VERIFIERS, Drafter, Verifier, known_verifier, verifier_of

quick = settings(deadline=None, max_examples=60)
# 100 bytes and 1,000 FLOP a second: times that a head can work out.
TOY = Gpu(
    "toy", memory_gb=1, bandwidth_gbs=100e-9, bf16_tflops=1000e-12, link_gbs=10e-9, link_latency_us=1e6, source="-"
)
PERFECT = Assumptions(
    bandwidth_share=1, compute_share=1, draft_overhead_us=0, verify_overhead_us=0, map_overhead_us=0, context=0
)


def test_the_storys_drafter_has_the_storys_shares() -> None:
    drafter = DRAFTERS["kimi-k2.5"]
    assert (drafter.lm_head(32_000), drafter.lm_head(163_840)) == (229_376_000, 1_174_405_120)
    assert round(drafter.total(32_000) / 1e9, 1) == 2.6
    assert drafter.total(163_840) == 3_540_000_000
    assert drafter.lm_head(32_000) / drafter.total(32_000) == pytest.approx(0.09, abs=0.005)
    assert drafter.lm_head(163_840) / drafter.total(163_840) == pytest.approx(0.33, abs=0.005)
    assert drafter.lm_head(32_000) / drafter.step(32_000) == pytest.approx(0.16, abs=0.005)
    assert drafter.lm_head(163_840) / drafter.step(163_840) == pytest.approx(0.50, abs=0.005)


def test_a_llama_layer_is_counted_weight_by_weight() -> None:
    drafter = Drafter.llama_layer(vocab_size=100, hidden_size=8, intermediate_size=16, heads=2, kv_heads=1, head_dim=4)
    fc, q, kv, o, mlp, norms = 24 * 8, 16 * 8, 2 * 16 * 4, 8 * 8, 3 * 8 * 16, 4 * 8
    assert drafter.body == fc + q + kv + o + mlp + norms
    assert drafter.fc == fc
    assert drafter.total(10) == drafter.body + 800 + 80
    assert drafter.step(10) == drafter.body + 80


def test_a_drafter_may_differ_from_its_verifiers_config() -> None:
    config = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 100, "intermediate_size": 16, "v_head_dim": 3}
    plain, changed = Drafter.from_config(config), Drafter.from_config(config, changed={"head_dim": 4}, features=2)
    assert plain == Drafter.llama_layer(
        vocab_size=100, hidden_size=8, intermediate_size=16, heads=2, kv_heads=2, head_dim=3
    )
    assert changed == Drafter.llama_layer(
        vocab_size=100, hidden_size=8, intermediate_size=16, heads=2, kv_heads=2, head_dim=4, features=2
    )


def test_a_tied_full_head_counts_once() -> None:
    drafter = Drafter(vocab_size=100, hidden_size=8, body=1000, fc=192, tied_embeddings=True)
    assert drafter.total(100) == 1800
    assert drafter.total(99) == 1000 + 800 + 792


def test_published_models_have_about_their_published_sizes() -> None:
    kimi, qwen, small = (VERIFIERS[name] for name in ("kimi-k2.5", "qwen3-8b", "smollm2-135m"))
    active = kimi.dense + 8 * kimi.expert_parameters * kimi.moe_layers
    assert active / 1e9 == pytest.approx(32, abs=1)
    total = kimi.dense + 384 * kimi.expert_parameters * kimi.moe_layers + 163_840 * 7168
    assert total / 1e12 == pytest.approx(1.03, abs=0.02)
    assert kimi.weight_bytes / 1e9 == pytest.approx(595, abs=10)  # the checkpoint on disk
    assert (qwen.dense + 151_936 * 4096) / 1e9 == pytest.approx(8.2, abs=0.1)
    assert small.dense / 1e6 == pytest.approx(134.5, abs=0.5)
    assert small.weight_bytes == 2 * small.dense  # tied: the embedding is the lm_head


def test_models_are_found_by_their_shapes() -> None:
    assert verifier_of(163_840, 7168) == "kimi-k2.5"
    assert verifier_of(163_840, 7167) is None
    assert known_verifier("qwen3-8b")[0].layers == 36
    with pytest.raises(VocabError, match="expected one of kimi-k2.5"):
        known_verifier("gpt")
    with pytest.raises(VocabError, match="expected the key 'num_attention_heads'"):
        Verifier.from_config({"hidden_size": 4, "num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 4})


def test_every_gpu_says_where_its_numbers_come_from() -> None:
    for name, one in GPUS.items():
        assert "data sheet" in one.source
        assert gpu(name) is one
        assert 50 < one.bf16_tflops * 1000 / one.bandwidth_gbs < 400  # FLOP a byte: neither is off by a thousand
    with pytest.raises(VocabError, match="expected one of rtx-pro-6000, b200, h200, h100"):
        gpu("a100")


def test_a_matrix_takes_the_longer_of_reading_and_arithmetic() -> None:
    machine = Machine(TOY, assumptions=PERFECT)
    assert machine.matmul(100, rows=1) == 2.0  # 200 bytes at 100 a second; 200 FLOP would be 0.2 s
    assert machine.matmul(100, rows=50) == pytest.approx(10.0)  # 10,000 FLOP at 1,000 a second
    assert Machine(TOY, 4, PERFECT).matmul(100, rows=1) == 0.5


def test_collectives_cost_nothing_alone_and_latency_and_bytes_together() -> None:
    assert Machine(TOY, assumptions=PERFECT).all_reduce(1000) == 0
    assert Machine(TOY, 2, PERFECT).all_gather(20) == pytest.approx(1 + 20 * 0.5 / 10)
    assert Machine(TOY, 2, PERFECT).all_reduce(20) == pytest.approx(1 + 2 * 20 * 0.5 / 10)


def test_a_draft_step_reads_layer_and_head_and_passes_twice_over_the_logits() -> None:
    drafter = Drafter(vocab_size=20, hidden_size=2, body=50, fc=12)
    machine = Machine(TOY, assumptions=PERFECT)
    assert draft_step(machine, drafter, 10, 1) == pytest.approx((2 * (50 - 12) + 2 * 20 + 4 * 10) / 100)
    assert draft_step(machine, drafter, 10, 1, rows=1) == pytest.approx((2 * 50 + 2 * 20 + 4 * 10) / 100)
    scatter = Machine(TOY, assumptions=PERFECT, server="vllm")
    assert draft_step(scatter, drafter, 10, 1) - draft_step(machine, drafter, 10, 1) == pytest.approx(4 * 20 / 100)
    assert draft_step(scatter, drafter, 20, 1) == draft_step(machine, drafter, 20, 1)  # nothing to map


def test_measured_times_replace_the_roofline() -> None:
    drafter = Drafter(vocab_size=20, hidden_size=2, body=50, fc=12)
    verifier = Verifier("v", 20, 2, 1, dense=100, kv_bytes=0)
    machine = Machine(TOY, assumptions=PERFECT, measured_step_s={(10, 1): 7.0}, measured_verify_s={2: 1.0, 4: 2.0})
    assert draft_step(machine, drafter, 10, 1) == 7.0
    assert verifier_step(machine, verifier, 1, 3) == 1.5
    assert verifier_step(machine, verifier, 1, 8) == 4.0
    assert round_seconds(machine, verifier, drafter, 10, 1, 3, 2.0) == 21.0 + 2.0


def test_distinct_experts_by_hand() -> None:
    assert expected_experts(384, 8, 1) == pytest.approx(8)
    assert expected_experts(4, 2, 2) == pytest.approx(3)  # 4 x (1 - 1/4)
    assert expected_experts(0, 0, 5) == 0


@quick
@given(st.integers(1, 400), st.integers(1, 8), st.integers(1, 4096))
def test_more_tokens_read_more_experts_up_to_all(experts: int, each: int, tokens: int) -> None:
    each = min(each, experts)
    some, more = expected_experts(experts, each, tokens), expected_experts(experts, each, tokens + 1)
    assert each - 1e-9 <= some <= more + 1e-9
    assert more <= experts + 1e-9


@quick
@given(st.sampled_from(sorted(GPUS)), st.integers(1, 8), st.integers(1, 256), st.sampled_from(["sglang", "vllm"]))
def test_a_larger_vocabulary_is_never_faster_once_both_are_mapped(
    name: str, parallel: int, batch: int, server: str
) -> None:
    machine = Machine(gpu(name), parallel, server=server)  # type: ignore[arg-type]
    times = [draft_step(machine, DRAFTERS["qwen3-8b"], size, batch) for size in (1000, 8000, 32_000, 100_000)]
    assert times == sorted(times)
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in times)


def test_training_costs_by_hand() -> None:
    drafter = Drafter(vocab_size=20, hidden_size=2, body=50, fc=12)
    cost = training_cost(drafter, 10, ttt_steps=3, workers=2)
    assert cost.trained_parameters == 70
    assert cost.flops_per_token == 6 * 12 + 3 * (6 * 38 + 6 * 20) + 2 * 20
    assert cost.state_bytes == 16 * 70
    assert cost.gradient_bytes == 4 * 70
    assert training_cost(drafter, 10, workers=1).gradient_bytes == 0
    assert training_cost(drafter, 10, frozen_head=True).trained_parameters == 50
    with pytest.raises(VocabError, match="at least one step and worker"):
        training_cost(drafter, 10, ttt_steps=0)


def test_kimi_needs_a_node() -> None:
    verifier, drafter = known_verifier("kimi-k2.5")
    assert not fits(Machine(gpu("b200"), 1), verifier, drafter, 32_000, 1)
    assert fits(Machine(gpu("rtx-pro-6000"), 8), verifier, drafter, 163_840, 64)
    assert not fits(Machine(gpu("h100"), 8), verifier, drafter, 163_840, 1)  # 595 GB leave no tenth of 640 free


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Assumptions(bandwidth_share=0), "bandwidth_share: expected a share above 0"),
        (lambda: Assumptions(compute_share=1.1), "compute_share: expected a share above 0, at most 1, found 1.1"),
        (lambda: Assumptions(draft_overhead_us=-1), "draft_overhead_us: expected at least 0"),
        (lambda: Machine(TOY, 0), "tensor_parallel: expected at least 1"),
        (lambda: Machine(TOY, server="other"), "server: expected sglang or vllm"),
        (lambda: Gpu("x", 1, 0, 1, 1, 1, "-"), "gpu x: bandwidth_gbs: expected a number above zero"),
        (lambda: Drafter(10, 2, 5, 6), "expected a body of at least its fc"),
        (lambda: Drafter.of_total(10, vocab_size=10, hidden_size=2), "alone have 40"),
        (lambda: Verifier("v", 0, 1, 1, 1, 0), "verifier v: vocab_size: expected at least 1"),
        (lambda: Verifier("v", 1, 1, 1, 1, 0, experts=2, experts_per_token=3), "at most 2 experts a token, found 3"),
        (lambda: DRAFTERS["qwen3-8b"].lm_head(0), "expected 1 to 151936"),
    ],
)
def test_values_that_cannot_be_are_refused(make: object, named: str) -> None:
    with pytest.raises(VocabError, match=named):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("changed", [{"hidden_size": "abc"}, {"num_attention_heads": 0}, {"intermediate_size": None}])
def test_numbers_that_are_none_are_one_error(changed: dict[str, Any]) -> None:
    config = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 100, "intermediate_size": 16}
    with pytest.raises(VocabError, match=r"drafter config\.json: expected whole numbers above 0"):
        Drafter.from_config(config, changed=changed)
