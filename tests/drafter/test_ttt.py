"""The unroll is the dense one, in values and gradients, and a row sees what a server's cache would hold, no more."""

from __future__ import annotations

import pytest
import torch
from dense import dense_unroll, small_batch, small_drafter
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.attention import Later, attend, attend_by_sink
from drafter.errors import DrafterError
from drafter.model import Drafter
from drafter.ttt import unroll

quick = settings(deadline=None, max_examples=40)
heads = st.sampled_from([(1, 1, 8), (4, 4, 2), (4, 2, 6), (6, 2, 4), (3, 1, 10)])


def gradients(drafter: Drafter) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    return found


def assert_close(found: torch.Tensor, truth: torch.Tensor, tolerance: float) -> None:
    """Each element off by at most `tolerance` of the largest one, and never asked to be closer than `tolerance`."""
    torch.testing.assert_close(found, truth, atol=tolerance * max(1.0, truth.abs().max().item()), rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@quick
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(1, 7),
    heads,
    st.integers(1, 4),
    st.sampled_from([False, "o_proj"]),
    st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_one_dense_softmax(
    dtype: torch.dtype,
    tolerance: float,
    lengths: list[int],
    steps: int,
    shape: tuple[int, int, int],
    captured: int,
    bias: bool | str,
    seed: int,
) -> None:
    attention, groups, width = shape
    drafter = small_drafter(
        seed, dtype, num_attention_heads=attention, num_key_value_heads=groups, head_dim=width,
        capture_layers=tuple(range(captured)), attention_bias=bias,
    )  # fmt: skip
    batch = small_batch(drafter, lengths, seed)
    ours_features, theirs_features = batch.features.clone().requires_grad_(), batch.features.clone().requires_grad_()
    ours = [step.hidden_ND for step in unroll(drafter, batch.token_ids, ours_features, lengths, steps)]
    theirs = dense_unroll(drafter, batch.token_ids, theirs_features, lengths, steps)
    weights = [torch.randn_like(hidden) / sum(lengths) for hidden in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, tolerance)
    sum((hidden * weight).sum() for hidden, weight in zip(ours, weights, strict=True)).backward()
    our_gradients = gradients(drafter)
    sum((hidden * weight).sum() for hidden, weight in zip(theirs, weights, strict=True)).backward()
    their_gradients = gradients(drafter)
    assert set(our_gradients) == set(their_gradients)
    assert "embed_tokens.weight" not in our_gradients
    # Of the largest gradient of all: where one cancels to zero (a softmax over one key), rounding of the others is left.
    tolerance *= max(1.0, *(gradient.abs().max().item() for gradient in their_gradients.values()))
    for name, gradient in their_gradients.items():
        assert_close(our_gradients[name], gradient, tolerance)
    assert_close(ours_features.grad, theirs_features.grad, tolerance)


@quick
@given(st.lists(st.integers(1, 10), min_size=1, max_size=3), st.integers(1, 5), st.integers(0, 99))
def test_wanted_rows_are_what_they_are_among_all_rows(lengths: list[int], steps: int, seed: int) -> None:
    drafter = small_drafter(seed, torch.float64)  # fp32 differs by rounding, which says nothing
    batch = small_batch(drafter, lengths, seed)
    wanted = (torch.rand(steps, sum(lengths)) < 0.7).cummin(dim=0).values
    every = list(unroll(drafter, batch.token_ids, batch.features, lengths, steps))
    some = list(unroll(drafter, batch.token_ids, batch.features, lengths, steps, wanted))
    for step in range(steps):
        assert torch.equal(some[step].rows_N, wanted[step].nonzero().squeeze(1))
        torch.testing.assert_close(some[step].hidden_ND, every[step].hidden_ND[wanted[step]], atol=1e-11, rtol=1e-11)


def test_a_row_depends_on_tokens_up_to_the_one_it_is_fed_and_on_features_up_to_its_own() -> None:
    drafter = small_drafter()
    batch = small_batch(drafter, [5, 12])
    steps, row, start = 4, 3, 5
    before = list(unroll(drafter, batch.token_ids, batch.features, batch.lengths, steps))
    for step in range(steps):
        tokens, features = batch.token_ids.clone(), batch.features.clone()
        seen = torch.zeros(17, dtype=torch.bool)
        seen[start + 1 : start + row + 2 + step] = True  # tokens 1 .. t+1+k; token 0 is only ever a feature
        tokens[~seen] = (tokens[~seen] + 1) % drafter.config.vocab_size
        features[:start], features[start + row + 1 :] = 7.0, -7.0
        after = list(unroll(drafter, tokens, features, batch.lengths, steps))
        torch.testing.assert_close(after[step].hidden_ND[start + row], before[step].hidden_ND[start + row])
        tokens[start + row + 1 + step] = (tokens[start + row + 1 + step] + 1) % drafter.config.vocab_size
        fed = list(unroll(drafter, tokens, features, batch.lengths, steps))
        assert not torch.allclose(fed[step].hidden_ND[start + row], before[step].hidden_ND[start + row])


@pytest.mark.parametrize("cut", [(256, 1024, 32), (3, 2, 1), (4, 5, 0)])
def test_blocks_and_tiles_of_any_size_and_the_sink_give_one_dense_softmax(cut: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    lengths, heads, groups, width = [9, 1, 14], 6, 2, 4
    tokens = sum(lengths)
    rows = (torch.rand(tokens) < 0.6).nonzero().squeeze(1)
    shapes = [(len(rows), heads, width)] + [
        (tokens, groups, width)
    ] * 6  # later keys of rows that are no longer at work, too
    parts = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    query, key, value, *own = parts
    starts = torch.tensor([0] * 9 + [9] + [10] * 14)
    at = torch.arange(tokens)
    visible = (at <= rows[:, None]) & (at >= starts[rows][:, None])
    mine = [one[rows] for one in own]
    wide = [one.repeat_interleave(heads // groups, 1) for one in (key, value, *mine)]
    scores = torch.einsum("nac,tac->nat", query, wide[0]).masked_fill(~visible[:, None], -torch.inf)
    own_scores = torch.stack([(query * one).sum(-1) for one in wide[2::2]], -1)
    shares = (torch.cat([scores, own_scores], -1) * width**-0.5).softmax(-1)
    truth = torch.einsum("nat,tac->nac", shares[..., :tokens], wide[1])
    truth = truth + sum(shares[..., tokens + j, None] * one for j, one in enumerate(wide[3::2]))
    weight = torch.randn_like(truth)
    expected = torch.autograd.grad((truth * weight).sum(), parts)
    later = [Later(one, other, at) for one, other in zip(own[::2], own[1::2], strict=True)]
    for method in (attend, attend_by_sink):
        with pytest.MonkeyPatch.context() as patch:
            for name, size in zip(("_BLOCK", "_TILE", "_GAP"), cut, strict=True):
                patch.setattr(f"drafter.attention_cpu.{name}", size)
            found = method(query, key, value, later, rows, lengths)
        torch.testing.assert_close(found, truth, atol=1e-12, rtol=1e-10)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("drafter.attention_cpu._TILE", cut[1])
            gradients = torch.autograd.grad((found * weight).sum(), parts)
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)


def test_bf16_stays_as_close_to_fp32_at_every_step_as_the_dense_softmax_does() -> None:
    errors = torch.zeros(2, 6)
    for seed in range(6):
        drafter = small_drafter(seed, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
        with torch.no_grad():  # sharp scores, as a trained drafter has
            drafter.midlayer.self_attn.q_proj.weight.mul_(4)
        batch = small_batch(drafter, [40], seed)
        truth = dense_unroll(drafter, batch.token_ids, batch.features, [40], 6)
        half = drafter.bfloat16()
        ours = [s.hidden_ND for s in unroll(half, batch.token_ids, batch.features, [40], 6)]
        dense = dense_unroll(half, batch.token_ids, batch.features.bfloat16(), [40], 6)
        for step in range(6):
            for error, found in zip(errors, (ours, dense), strict=True):
                error[step] += (found[step] - truth[step]).norm().item()
    assert (errors[0] < errors[1]).all()


def test_bf16_attention_is_near_the_exact_one_even_where_a_rows_later_keys_compete_with_the_causal_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    rows, heads, groups, width = 64, 4, 2, 64
    query = (8 * torch.randn(rows, heads, width)).bfloat16()  # scores up to 70, as a trained head may have
    key = (0.3 * torch.randn(rows, groups, width) + query[:, ::2].float() / 11).bfloat16()
    value = torch.randn(rows, groups, width).bfloat16()
    at = torch.arange(rows)
    later = [
        Later((key * (1 + 0.02 * torch.randn(rows, groups, 1))).bfloat16(), torch.randn_like(value), at)
        for _ in range(3)
    ]
    parts = [query, key, value, *(part for step in later for part in step[:2])]
    weight = torch.randn_like(query)

    def all_of(dtype: torch.dtype) -> list[torch.Tensor]:
        given = [part.to(dtype).requires_grad_() for part in parts]
        own = [Later(one, other, at) for one, other in zip(given[3::2], given[4::2], strict=True)]
        found = attend(*given[:3], own, at, [rows])
        return [found.detach(), *torch.autograd.grad(found, given, weight.to(dtype))]

    for tile in (1024, 24):
        monkeypatch.setattr("drafter.attention_cpu._TILE", tile)
        found, exact = all_of(torch.bfloat16), all_of(torch.float64)
        assert (found[0] - exact[0]).norm() < 0.009 * exact[0].norm()  # 0.015 when the sink's score is rounded to bf16
        for one, other in zip(found[1:], exact[1:], strict=True):
            assert (one - other).norm() < 0.012 * other.norm()


@pytest.mark.parametrize(
    ("lengths", "features", "steps", "said"),
    [
        ([4, 4], (9, 48), 2, "add up to 9 tokens"),
        ([9, 0], (9, 48), 2, "expected positive ones"),
        ([9], (9, 32), 2, "expected [9, 48] (3 captured layers of 16), found [9, 32]"),
        ([9], (9, 48), 0, "steps: expected at least 1"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    lengths: list[int], features: tuple[int, int], steps: int, said: str
) -> None:
    with pytest.raises(DrafterError) as error:
        list(unroll(small_drafter(), torch.zeros(9, dtype=torch.int64), torch.zeros(features), lengths, steps))
    assert said in str(error.value)
