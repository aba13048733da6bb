"""Every loss by name is its formula, its gradient that of autograd, whole or in chunks, dense teacher or top-k."""

from __future__ import annotations

import pytest
import torch
from dense import small_batch, small_drafter, small_head, stored_top_k
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafter.divergences import ACCEPTANCE, KINDS
from drafter.errors import DrafterError
from drafter.head_loss import HeadLoss, chunks
from drafter.loss import ttt_loss
from drafter.metrics import TEMPERATURES, fair_metrics
from drafter.recipe import DrafterSection
from drafter.teacher import HeadTeacher, TopKTeacher
from drafter.ttt import unroll
from drafter.verifier_head import VerifierHead
from vocab.mapping import DraftVocab

quick = settings(deadline=None, max_examples=40)


def by_formula(kind: str, logits_NW: Tensor, verifier_NW: Tensor, inside_N: Tensor, mean_N: Tensor | None) -> Tensor:
    """[N], as the module's table has it, for autograd."""
    log_q, q, p = logits_NW.log_softmax(-1), logits_NW.softmax(-1), verifier_NW
    kl = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
    accepted = torch.minimum(inside_N[:, None] * p, q).sum(-1)
    share = torch.exp(-3 * (accepted.detach() if mean_N is None else mean_N))
    return {
        "soft_cross_entropy": -(p * log_q).sum(-1),
        "kl": kl,
        "reverse_kl": (q * (log_q - p.clamp(min=1e-20).log())).sum(-1),
        # Over the whole vocabulary, where q has nothing of what lies outside.
        "tv": 0.5 * ((inside_N[:, None] * p - q).abs().sum(-1) + 1 - inside_N),
        "lk": -accepted.log(),
        "lk_hybrid": share * kl + (1 - share) * (1 - accepted),
    }[kind]


@quick
@given(
    st.sampled_from(KINDS), st.integers(1, 12), st.integers(1, 6), st.sampled_from([1, 5, 64, 130]),
    st.booleans(), st.booleans(), st.booleans(), st.sampled_from([2, 9, 1000]), st.integers(0, 99),
)  # fmt: skip
def test_value_and_gradients_are_those_of_the_formula(
    kind: str, rows: int, positions: int, width: int, stored: bool, weighed: bool, given: bool, at_once: int, seed: int
) -> None:
    """weighed: the draft vocabulary's probability is known. given: a mean acceptance is."""
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
        tail = logits.logsumexp(-1) + torch.rand(positions)
        teacher = TopKTeacher(ids, logits, head, tail if weighed else None)
        shares = torch.zeros(positions, 2 * width).scatter_add_(1, ids, (logits - tail[:, None]).exp())
        shares = shares[:, torch.from_numpy(vocabulary.target_ids)]
        inside = shares.sum(-1)
        shares = shares / shares.sum(-1, keepdim=True)
    else:
        final = torch.randn(positions, 4)
        shares = (final @ head.weight_VD.T).softmax(-1)[:, torch.from_numpy(vocabulary.target_ids)]
        inside = shares.sum(-1)
        best, found = head.argmax_and_inside(final)
        assert torch.equal(best, head.argmax(final))
        torch.testing.assert_close(found, inside)
        teacher, shares = HeadTeacher(final, head, found if weighed else None), shares / inside[:, None]
    hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(width, 4, requires_grad=True)
    slot, share = torch.randint(positions, (rows,)), torch.rand(rows)
    mean = torch.rand(rows) if given else None
    inside = inside if weighed else torch.ones(positions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drafter.head_loss.rows_at_once", lambda *_: at_once)
        loss, each, draft, accepted = HeadLoss.apply(hidden, weight, teacher, slot, share, kind, mean)
    ours = torch.autograd.grad(loss, (hidden, weight))
    logits_NW = hidden @ weight.T
    truth = by_formula(kind, logits_NW, shares[slot], inside[slot], mean)
    if kind in ACCEPTANCE:
        true = torch.minimum(inside[slot, None] * shares[slot], logits_NW.softmax(-1)).sum(-1)
        torch.testing.assert_close(accepted, true, atol=2e-5, rtol=2e-5)
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


@pytest.mark.parametrize("kind", ACCEPTANCE)
@pytest.mark.parametrize("k", [None, 30, 4])
def test_what_is_accepted_is_what_the_fair_numbers_say(kind: str, k: int | None) -> None:
    """Of the verifier's whole softmax: a draft vocabulary that holds little of it can have little accepted."""
    drafter = small_drafter()
    head, batch = small_head(drafter), small_batch(drafter, [16, 9])
    parts, top_k = batch.parts(), None if k is None else stored_top_k(head, batch, k)
    every = {"kind": kind, "out_of_vocabulary": "renormalise", "steps": 3, "top_k": top_k}
    found = ttt_loss(drafter, head, *parts, **every)
    fair = fair_metrics(drafter, head, *parts, ["all"] * 2, 3, top_k)["all"]
    overlap = torch.from_numpy(fair.overlap[TEMPERATURES.index(1.0)]).float()
    torch.testing.assert_close(found.accepted, overlap, atol=1e-5, rtol=1e-5)
    if k != 4:  # where a position's four tokens are all outside it teaches nothing
        assert torch.equal(found.learnt, found.positions)
    if kind == "tv":
        torch.testing.assert_close(found.cross_entropy, found.learnt - found.accepted)
    if k is None:
        best, inside = head.argmax_and_inside(batch.final)
        again = ttt_loss(drafter, head, *parts, argmax_T=best, inside_T=inside, **every)
        torch.testing.assert_close(again.loss, found.loss)


def test_the_hybrid_weighs_its_parts_by_a_mean_of_each_step_where_one_is_given() -> None:
    drafter = small_drafter()
    head, batch = small_head(drafter), small_batch(drafter, [16, 9])

    def sums(kind: str, **given: object) -> Tensor:
        return ttt_loss(drafter, head, *batch.parts(), steps=3, kind=kind, **given).cross_entropy

    accepted = (0.9, 0.3, 0.0)
    share = torch.tensor([-3 * a for a in accepted]).exp()
    found = sums("lk_hybrid", accepted_K=accepted)
    torch.testing.assert_close(found, share * sums("kl") + (1 - share) * sums("tv"))
    assert not torch.allclose(found, sums("lk_hybrid"))
    with pytest.raises(DrafterError, match=r"accepted: expected \[3\], found \[1\]"):
        sums("lk_hybrid", accepted_K=(0.5,))


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
