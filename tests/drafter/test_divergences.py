"""Every loss by name is its formula, its gradient that of autograd, whole or in chunks, dense teacher or top-k."""

from __future__ import annotations

import pytest
import torch
from dense import small_batch, small_drafter, small_head, stored_top_k
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafter.divergences import KINDS
from drafter.errors import DrafterError
from drafter.head_loss import HeadLoss, chunks
from drafter.loss import ttt_loss
from drafter.recipe import DrafterSection
from drafter.teacher import HeadTeacher, TopKTeacher
from drafter.ttt import unroll
from drafter.verifier_head import VerifierHead
from vocab.mapping import DraftVocab

quick = settings(deadline=None, max_examples=40)


def by_formula(kind: str, logits_NW: Tensor, verifier_NW: Tensor) -> Tensor:
    """[N], as the module's table has it, for autograd."""
    log_q, q, p = logits_NW.log_softmax(-1), logits_NW.softmax(-1), verifier_NW
    kl = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
    accepted = torch.minimum(p, q).sum(-1)
    share = torch.exp(-3 * accepted).detach()
    return {
        "soft_cross_entropy": -(p * log_q).sum(-1),
        "kl": kl,
        "reverse_kl": (q * (log_q - p.clamp(min=1e-20).log())).sum(-1),
        "tv": 0.5 * (p - q).abs().sum(-1),
        "lk": -accepted.log(),
        "lk_hybrid": share * kl + (1 - share) * (1 - accepted),
    }[kind]


@quick
@given(
    st.sampled_from(KINDS), st.integers(1, 12), st.integers(1, 6), st.sampled_from([1, 5, 64, 130]),
    st.booleans(), st.sampled_from([2, 9, 1000]), st.integers(0, 99),
)  # fmt: skip
def test_value_and_gradients_are_those_of_the_formula(
    kind: str, rows: int, positions: int, width: int, stored: bool, at_once: int, seed: int
) -> None:
    torch.manual_seed(seed)
    vocabulary = DraftVocab.from_ids(torch.randperm(2 * width)[:width].tolist(), 2 * width)
    head = VerifierHead(torch.randn(2 * width, 4), vocabulary)
    if stored:
        ids = torch.stack([torch.randperm(2 * width)[: min(6, 2 * width)] for _ in range(positions)])
        ids[:, 0] = torch.from_numpy(vocabulary.target_ids)[torch.randint(width, (positions,))]
        for row in ids:  # no token twice: what stood first elsewhere makes way
            row[1:][row[1:] == row[0]] = -1
        logits = torch.randn(ids.shape).masked_fill(ids < 0, -torch.inf)
        ids = ids.clamp(min=0)
        teacher = TopKTeacher(ids, logits, head)
        shares = torch.zeros(positions, 2 * width).scatter_add_(1, ids, logits.softmax(-1))
        shares = shares[:, torch.from_numpy(vocabulary.target_ids)]
        shares = shares / shares.sum(-1, keepdim=True)
    else:
        final = torch.randn(positions, 4)
        teacher, shares = HeadTeacher(final, head), head.draft_logits(final).softmax(-1)
    hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(width, 4, requires_grad=True)
    slot, share = torch.randint(positions, (rows,)), torch.rand(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drafter.head_loss.rows_at_once", lambda *_: at_once)
        loss, each, draft = HeadLoss.apply(hidden, weight, teacher, slot, share, kind)
    ours = torch.autograd.grad(loss, (hidden, weight))
    logits_NW = hidden @ weight.T
    truth = by_formula(kind, logits_NW, shares[slot])
    theirs = torch.autograd.grad((truth * share).sum(), (hidden, weight))
    torch.testing.assert_close(each, truth, atol=2e-5, rtol=2e-5)
    assert torch.equal(draft, logits_NW.argmax(-1))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@quick
@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.integers(2, 12))
def test_chunks_hold_whole_positions_and_all_rows_once(counts: list[int], budget: int) -> None:
    slots = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    seen, before = [], 0
    for rows, first, last in chunks(slots, budget):
        assert first == before
        before = last
        assert ((slots[rows] >= first) & (slots[rows] < last)).all()
        assert last - first == 1 or (rows.stop - rows.start) + last - first <= budget
        seen += range(rows.start, rows.stop)
    assert seen == list(range(len(slots)))


def test_renormalise_learns_where_mask_does_not_and_counts_alike() -> None:
    drafter = small_drafter()
    head, batch = small_head(drafter), small_batch(drafter, [14], masked=0.0)
    mask = ttt_loss(drafter, head, *batch.parts(), steps=2)
    every = ttt_loss(drafter, head, *batch.parts(), steps=2, out_of_vocabulary="renormalise")
    assert torch.equal(mask.positions, every.positions)
    assert torch.equal(mask.covered, every.covered)
    assert torch.equal(mask.matched, every.matched)  # outside its vocabulary a drafter is never right
    assert (mask.covered < mask.positions).all()
    assert (every.cross_entropy > mask.cross_entropy).all()


def test_a_top_k_of_everything_is_the_dense_teacher() -> None:
    drafter = small_drafter()
    head, batch = small_head(drafter), small_batch(drafter, [9, 8])
    top_k = stored_top_k(head, batch, 30)
    dense = ttt_loss(drafter, head, *batch.parts(), steps=3)
    without = (batch.token_ids, batch.loss_mask, batch.features, None, batch.lengths)
    stored = ttt_loss(drafter, head, *without, steps=3, top_k=top_k)
    torch.testing.assert_close(stored.loss, dense.loss)
    assert torch.equal(stored.matched, dense.matched)
    with pytest.raises(DrafterError, match="final states: expected them, or a stored top-k, found neither"):
        ttt_loss(drafter, head, *without, steps=3)


def test_what_a_top_k_lacks_is_learnt_as_never() -> None:
    """The rows' loss is against the shares of the stored tokens of the draft vocabulary; positions without one teach nothing."""
    drafter = small_drafter()
    head, batch = small_head(drafter), small_batch(drafter, [14], masked=0.0)
    found = ttt_loss(
        drafter, head, *batch.parts(), steps=1, top_k=stored_top_k(head, batch, 2), out_of_vocabulary="renormalise"
    )
    logits_TV = batch.final @ head.weight_VD.T
    kept_TV = torch.full_like(logits_TV, -torch.inf).scatter(1, logits_TV.topk(2).indices, logits_TV.topk(2).values)
    inside_TW = kept_TV[:, torch.from_numpy(drafter.draft_vocab.target_ids)]
    (step,) = unroll(drafter, batch.token_ids, batch.features, [14], 1)
    log_q = drafter.logits(step.hidden_ND).log_softmax(-1)
    rows = [row for row in range(12) if inside_TW[row + 1].isfinite().any()]
    assert 0 < len(rows) < 12
    each = [-(inside_TW[row + 1].softmax(-1) * log_q[row]).sum() for row in rows]
    torch.testing.assert_close(found.loss, torch.stack(each).sum() / 12)


def test_step_weights_weigh_the_steps() -> None:
    drafter = small_drafter()
    head, batch = small_head(drafter), small_batch(drafter, [12])
    found = ttt_loss(drafter, head, *batch.parts(), steps=3, step_weights=(0.0, 2.0, 0.5))
    expected = (found.cross_entropy * torch.tensor([0.0, 2.0, 0.5])).sum() / found.positions[0]
    torch.testing.assert_close(found.loss, expected)
    with pytest.raises(DrafterError, match=r"step weights: expected \[3\], found \[2\]"):
        ttt_loss(drafter, head, *batch.parts(), steps=3, step_weights=(1.0, 1.0))
    with pytest.raises(ValueError, match=r"step_weights: expected ttt_steps \(7\)"):
        DrafterSection(step_weights=(1.0,))


def test_shapes_of_a_top_k_must_agree() -> None:
    head = small_head(small_drafter())
    with pytest.raises(DrafterError, match="top-k: expected ids and logits of one shape"):
        TopKTeacher(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 4), head)
