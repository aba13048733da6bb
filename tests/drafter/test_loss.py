"""The loss is the naive one, in value and gradient; vocabularies of any size are counted alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense import Batch, dense_unroll, small_batch, small_drafter, small_head
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafter.errors import DrafterError
from drafter.loss import loss_rows, ttt_loss
from drafter.metrics import Fair, fair_metrics
from drafter.model import Drafter
from drafter.verifier_head import FinalNorm, VerifierHead
from vocab.mapping import DraftVocab

quick = settings(deadline=None, max_examples=40)


def naive_loss(drafter: Drafter, head: VerifierHead, batch: Batch, steps: int) -> tuple[Tensor, list[list[float]]]:
    """Row by row, whole logits, plain autograd; per step positions, covered, matched, summed cross-entropy."""
    hidden = dense_unroll(drafter, batch.token_ids, batch.features, batch.lengths, steps)
    ids = torch.from_numpy(drafter.draft_vocab.target_ids)
    total, counts, start = torch.zeros(()), [[0.0] * 4 for _ in range(steps)], 0
    for length in batch.lengths:
        for step in range(steps):
            for row in range(length):
                if row + 2 + step >= length or not batch.loss_mask[start + row + 1 : start + row + 3 + step].all():
                    continue
                counts[step][0] += 1
                verifier = head.weight_VD @ batch.final[start + row + 1 + step]
                best = int(verifier.argmax())
                if best not in ids.tolist():
                    continue
                draft = drafter.logits(hidden[step][start + row])
                loss = -(verifier[ids].softmax(-1) * draft.log_softmax(-1)).sum()
                total = total + 0.8**step * loss
                counts[step][1] += 1
                counts[step][2] += int(ids[draft.argmax()]) == best
                counts[step][3] += loss.item()
        start += length
    return total / max(counts[0][0], 1), counts


def gradients(drafter: Drafter) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    return found


@quick
@given(
    st.lists(st.integers(1, 10), min_size=1, max_size=3), st.integers(1, 5), st.sampled_from([1, 11, 30]),
    st.sampled_from([0.0, 0.2, 0.6]), st.sampled_from([7, 40, 1 << 25]), st.integers(0, 99),
)  # fmt: skip
def test_value_gradients_and_counts_are_the_naive_ones(
    lengths: list[int], steps: int, draft: int, masked: float, at_once: int, seed: int
) -> None:
    drafter = small_drafter(seed, draft_vocab_size=draft)
    head, batch = small_head(drafter, seed), small_batch(drafter, lengths, seed, masked)
    with pytest.MonkeyPatch.context() as patch:  # chunks of one row, of a few, of all
        patch.setattr("drafter.head_loss._LOGITS_AT_ONCE", {"cpu": at_once})
        patch.setattr("drafter.head_loss._LEAST_ROWS", 2)
        patch.setattr("drafter.verifier_head._LOGITS_AT_ONCE", at_once)
        found = ttt_loss(drafter, head, *batch.parts(), steps=steps)
    found.loss.backward()
    ours = gradients(drafter)
    loss, counts = naive_loss(drafter, head, batch, steps)
    torch.testing.assert_close(found.loss, loss, atol=1e-5, rtol=1e-5)
    sums = torch.stack([found.positions, found.covered, found.matched, found.cross_entropy], dim=1)
    torch.testing.assert_close(sums, torch.tensor(counts), atol=1e-4, rtol=1e-5)
    if loss.requires_grad:
        loss.backward()
    theirs = gradients(drafter)
    for name, gradient in ours.items():  # a batch without a covered position gives zeros, not nothing
        truth = theirs.get(name, torch.zeros_like(gradient))
        torch.testing.assert_close(gradient, truth, atol=1e-5 * max(1.0, truth.abs().max().item()), rtol=0)
    assert set(theirs) <= set(ours)


def test_a_row_counts_only_while_the_mask_holds_up_to_what_it_predicts() -> None:
    mask = torch.tensor([1, 1, 1, 1, 0, 1, 1, 1, 1, 1], dtype=torch.bool)
    rows = loss_rows(mask, [7, 3], 3)
    assert [row.nonzero().squeeze(1).tolist() for row in rows] == [[0, 1, 4, 7], [0], []]


def test_a_mask_without_any_loss_gives_zero_and_zero_gradients() -> None:
    drafter = small_drafter()
    batch = small_batch(drafter, [6, 4], masked=1.0)
    found = ttt_loss(drafter, small_head(drafter), *batch.parts(), steps=3)
    found.loss.backward()
    assert found.loss == 0
    assert found.positions.tolist() == [0, 0, 0]
    trained = [p for p in drafter.parameters() if p.requires_grad]
    assert all(p.grad is not None and not p.grad.any() for p in trained)


def test_positions_outside_the_vocabulary_stay_in_the_denominator() -> None:
    drafter = small_drafter()
    head, batch = small_head(drafter), small_batch(drafter, [12], masked=0.0)
    outside = int((~head.in_draft_V).nonzero()[0])
    found = ttt_loss(drafter, head, *batch.parts(), steps=1, argmax_T=torch.full((12,), outside))
    assert (found.positions.item(), found.covered.item(), found.matched.item(), found.loss.item()) == (10, 0, 0, 0)
    inside = int(head.in_draft_V.nonzero()[0])
    half = torch.tensor([inside, outside] * 6)
    found = ttt_loss(drafter, head, *batch.parts(), steps=1, argmax_T=half)
    assert (found.positions.item(), found.covered.item()) == (10, 5)
    torch.testing.assert_close(found.loss, found.cross_entropy[0] / 10)


def test_stored_argmax_gives_what_the_head_would() -> None:
    drafter = small_drafter()
    head, batch = small_head(drafter), small_batch(drafter, [9, 8])
    one = ttt_loss(drafter, head, *batch.parts(), steps=3)
    other = ttt_loss(drafter, head, *batch.parts(), steps=3, argmax_T=head.argmax(batch.final))
    assert torch.equal(one.loss, other.loss)
    assert torch.equal(one.matched, other.matched)


def test_losses_of_the_parts_of_a_batch_add_up_to_that_of_the_whole() -> None:
    drafter = small_drafter()
    head, lengths = small_head(drafter), [9, 5, 7]
    batch = small_batch(drafter, lengths)
    whole = ttt_loss(drafter, head, *batch.parts(), steps=3)
    whole.loss.backward()
    once = gradients(drafter)
    every = int(whole.positions[0])
    parts = zip(*(x.split(lengths) for x in batch.parts()[:-1]), lengths, strict=True)
    losses = [
        ttt_loss(drafter, head, *tensors, [length], steps=3, denominator=every).loss for *tensors, length in parts
    ]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(sum(losses), whole.loss, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients(drafter).items():
        torch.testing.assert_close(gradient, once[name], atol=1e-5, rtol=1e-4)


def test_a_frozen_head_gets_no_gradient_and_changes_no_other() -> None:
    drafter = small_drafter()
    head, batch = small_head(drafter), small_batch(drafter, [12])
    ttt_loss(drafter, head, *batch.parts(), steps=3).loss.backward()
    trained = gradients(drafter)
    drafter.lm_head.weight.requires_grad_(False)
    ttt_loss(drafter, head, *batch.parts(), steps=3).loss.backward()
    frozen = gradients(drafter)
    assert set(trained) - set(frozen) == {"lm_head.weight"}
    assert all(torch.equal(frozen[name], trained[name]) for name in frozen)


def test_under_autocast_the_loss_is_near_and_gradients_are_in_the_weights_dtype() -> None:
    drafter = small_drafter()
    head, batch = small_head(drafter), small_batch(drafter, [30], masked=0.0)
    exact = ttt_loss(drafter, head, *batch.parts(), steps=4).loss
    with torch.autocast("cpu", torch.bfloat16):
        near = ttt_loss(drafter, head, *batch.parts(), steps=4).loss
    near.backward()
    torch.testing.assert_close(near, exact, rtol=0.02, atol=0)
    assert all(p.grad.dtype == torch.float32 for p in drafter.parameters() if p.requires_grad)


def test_nobody_learns_faster_than_the_verifier_says() -> None:
    """The least loss is the verifier's own entropy: a drafter that is fed one sequence comes close to it."""
    drafter = small_drafter(capture_layers=(1, 2))
    head, batch = small_head(drafter), small_batch(drafter, [16], masked=0.0)
    optimiser = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-2, weight_decay=0)
    first = None
    for _ in range(150):
        found = ttt_loss(drafter, head, *batch.parts(), steps=3)
        first = first if first is not None else found
        optimiser.zero_grad()
        found.loss.backward()
        optimiser.step()
    shares = head.draft_logits(batch.final).softmax(-1)[1:15]
    covered = head.in_draft_V[head.argmax(batch.final)[1:15]]
    entropy = -(shares * shares.log()).sum(-1)[covered].sum()
    assert first.cross_entropy[0] > 1.5 * entropy
    assert entropy - 1e-3 <= found.cross_entropy[0] < 1.02 * entropy
    assert torch.equal(found.matched, found.covered)


def test_a_head_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(DrafterError, match=r"lm_head: expected \[30, hidden_size\].*found \[29, 16\]"):
        VerifierHead(torch.zeros(29, 16), DraftVocab.from_ids([1, 2], 30))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("loss_mask", "loss mask: expected [9], found [8]"),
        ("final", "final states: expected [9, 16], found [8, 16]"),
        ("features", "features: expected [9, 48]"),
    ],
)
def test_a_batch_whose_parts_differ_in_length_is_refused(part: str, said: str) -> None:
    drafter = small_drafter()
    batch = small_batch(drafter, [9])
    setattr(batch, part, getattr(batch, part)[1:])
    with pytest.raises(DrafterError) as error:
        ttt_loss(drafter, small_head(drafter), *batch.parts(), steps=2)
    assert said in str(error.value)


def test_final_states_from_before_the_norm_teach_what_those_after_it_do() -> None:
    drafter = small_drafter()
    batch, after = small_batch(drafter, [9, 8]), small_head(drafter)
    weight = torch.rand(16) + 0.5
    before = VerifierHead(after.weight_VD, drafter.draft_vocab, FinalNorm(weight, 1e-5))
    given = (batch.token_ids, batch.loss_mask, batch.features)
    normed = batch.final / (batch.final.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    pairs = zip(
        (ttt_loss(drafter, after, *given, normed, batch.lengths, steps=3), fair(drafter, after, *given, normed, batch)),
        (ttt_loss(drafter, before, *batch.parts(), steps=3), fair(drafter, before, *given, batch.final, batch)),
        strict=True,
    )
    for expected, found in pairs:
        for name in vars(expected):
            torch.testing.assert_close(torch.as_tensor(getattr(found, name)), torch.as_tensor(getattr(expected, name)))


def fair(drafter: Drafter, head: VerifierHead, *given: Any) -> Fair:
    *parts, batch = given
    return fair_metrics(drafter, head, *parts, batch.lengths, ["all"] * len(batch.lengths), 3)["all"]
