"""The fair numbers are what a row-by-row count over whole softmaxes gives, whatever the draft vocabulary or chunk."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense import Batch, dense_unroll, small_batch, small_drafter, small_head, stored_top_k
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.acceptance import shifted_d2t
from drafter.errors import DrafterError
from drafter.loss import ttt_loss
from drafter.metrics import TEMPERATURES, Fair, fair_metrics
from drafter.model import Drafter
from drafter.verifier_head import VerifierHead


@torch.no_grad()
def counted(drafter: Drafter, head: VerifierHead, batch: Batch, groups: list[str], steps: int) -> dict[str, Fair]:
    hidden = dense_unroll(drafter, batch.token_ids, batch.features, batch.lengths, steps)
    ids = torch.from_numpy(drafter.draft_vocab.target_ids)
    found, start = {group: Fair.zero(steps) for group in groups}, 0
    for group, length in zip(groups, batch.lengths, strict=True):
        fair = found[group]
        for row in range(length):
            right = True
            for k in range(steps):
                if row + 2 + k >= length or not batch.loss_mask[start + row + 1 : start + row + 3 + k].all():
                    break
                verifier = head.weight_VD @ batch.final[start + row + 1 + k]
                draft = torch.full_like(verifier, -torch.inf)
                draft[ids] = drafter.logits(hidden[k][start + row])
                hit = int(draft.argmax()) == int(verifier.argmax())
                fair.positions[k] += 1
                fair.reached[k] += right
                right = right and hit
                fair.matched[k] += hit
                fair.joint[k] += right
                for at, heat in enumerate(TEMPERATURES):
                    p, q = (
                        (one / heat).softmax(-1) if heat else (one == one.max()).float() for one in (verifier, draft)
                    )
                    fair.top1[at, k] += float(p[draft.argmax()])
                    fair.overlap[at, k] += float(torch.minimum(p, q).sum())
        start += length
    return found


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 4), st.sampled_from([1, 11, 30]),
    st.sampled_from([60, 1 << 25]), st.integers(0, 99),
)  # fmt: skip
def test_sums_are_those_of_a_count_row_by_row(
    lengths: list[int], steps: int, draft: int, at_once: int, seed: int
) -> None:
    drafter = small_drafter(seed, draft_vocab_size=draft)
    head, batch = small_head(drafter, seed), small_batch(drafter, lengths, seed, 0.1)
    groups = ["chat", "code", "chat"][: len(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drafter.metrics._LOGITS_AT_ONCE", at_once)
        found = fair_metrics(drafter, head, *batch.parts(), groups, steps)
    truth = counted(drafter, head, batch, groups, steps)
    assert set(found) == set(truth)
    for group, fair in truth.items():
        for name in vars(fair):
            np.testing.assert_allclose(getattr(found[group], name), getattr(fair, name), atol=1e-4, err_msg=name)
        assert found[group].shares() == Fair.of_flat(found[group].flat(), steps).shares()


def test_a_stored_top_k_gives_the_same_numbers_and_lower_bounds_where_its_tail_counts() -> None:
    drafter = small_drafter()
    head, batch = small_head(drafter), small_batch(drafter, [20, 9])
    whole = fair_metrics(drafter, head, *batch.parts(), ["all", "all"], 3)["all"]
    without = (batch.token_ids, batch.loss_mask, batch.features, None, batch.lengths)
    for moved in (drafter, shifted_d2t(drafter)):  # also with a map that is not the vocabulary's
        dense = fair_metrics(moved, head, *batch.parts(), ["all", "all"], 3)["all"]
        every = stored_top_k(head, batch, 30)
        stored = fair_metrics(moved, head, *without, ["all", "all"], 3, every)["all"]
        for name in vars(dense):
            np.testing.assert_allclose(getattr(stored, name), getattr(dense, name), atol=1e-4, err_msg=name)
    few = fair_metrics(drafter, head, *without, ["all", "all"], 3, stored_top_k(head, batch, 5))["all"]
    for name in ("positions", "matched", "joint", "reached"):
        assert getattr(few, name).tolist() == getattr(whole, name).tolist()
    at = TEMPERATURES.index(1.0)
    for name in ("top1", "overlap"):
        assert (getattr(few, name)[at] <= getattr(whole, name)[at] + 1e-6).all()
        assert (getattr(few, name)[at] < getattr(whole, name)[at] - 1e-3).any()
    with pytest.raises(DrafterError, match="expected them, or a stored top-k"):
        fair_metrics(drafter, head, *without, ["all", "all"], 3)


def test_the_denominator_is_the_same_whatever_the_vocabulary_and_that_of_the_loss() -> None:
    batch, found = None, []
    for draft in (1, 11, 30):
        drafter = small_drafter(draft_vocab_size=draft)
        batch = batch or small_batch(drafter, [20, 9])
        head = small_head(drafter)
        fair = fair_metrics(drafter, head, *batch.parts(), ["all", "all"], 3)["all"]
        loss = ttt_loss(drafter, head, *batch.parts(), steps=3)
        assert fair.positions.tolist() == loss.positions.tolist()
        assert fair.matched.tolist() == loss.matched.tolist()
        found.append(fair.positions.tolist())
    assert found[0] == found[1] == found[2]


def test_groups_must_name_every_sequence() -> None:
    drafter = small_drafter()
    batch = small_batch(drafter, [5, 5])
    with pytest.raises(DrafterError, match="one for each of 2 sequences, found 1"):
        fair_metrics(drafter, small_head(drafter), *batch.parts(), ["chat"], 2)
