"""Is a served response the verifier's own greedy output, and did the server accept what the offline walk says?

One teacher-forced prefill of prompt and response through the verifier alone answers both. Each token must be the
likeliest after those before it: then, by induction, greedy decoding would have written the same. Where another token's
logit is higher by less than `TIE`, two orders of summation may differ, and both outputs are greedy. And the same states
are the features from which the drafter drafts, so the walk over this very sequence must repeat the server's passes.

Shape suffixes: S tokens of prompt and response, R of them behind the prompt's first, L states of a token, D their width,
V the verifier's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter.acceptance import draft_chains, walk
from drafter.model import Drafter

# Logits closer than this count as equal, the verifier's and the drafter's: fp32 sums differ by about 1e-5 here.
TIE = 1e-4
# fp32 logits that exist at one time: 204 rows of Kimi-K2.5.
_LOGITS_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class Mismatch:
    """A served token that the verifier would not have written. position: within the response. gap: in logits."""

    position: int
    token: int
    best: int
    gap: float


@dataclass(frozen=True)
class Verdict:
    """On one response. ties: tokens that are likeliest but for less than TIE. mismatches: those that are not.

    walked: accepted drafts of each pass, offline. cut: the response ends inside the last pass's chain, and the server's
    number for it may be larger. differing: passes before the last block that differ from the server's, each judged at
    the token where the server really drafted. draft_ties: those that do, but where two drafts were closer than TIE.
    """

    ties: int
    mismatches: tuple[Mismatch, ...]
    walked: tuple[int, ...]
    cut: bool
    differing: tuple[int, ...]
    draft_ties: int
    last_agrees: bool


def judge(
    states_SLD: NDArray[np.float32],
    token_ids_S: NDArray[np.int32],
    prompt: int,
    passes: Sequence[int],
    lm_head_VD: Tensor,
    drafter: Drafter | None,
    draft_length: int,
) -> Verdict:
    """states_SLD: the verifier's captured layers and its final state, in fp32. prompt: tokens of the prompt.

    passes: accepted drafts of each verify pass, as served. lm_head_VD: fp32. Without a drafter there are none, and only
    the tokens are judged.
    """
    hidden_SLD = torch.from_numpy(np.array(states_SLD, np.float32))
    ids_S = torch.from_numpy(np.asarray(token_ids_S, np.int64))
    ties, mismatches = _greedy(hidden_SLD[prompt - 1 : -1, -1], ids_S[prompt:], lm_head_VD)
    if drafter is None:
        return Verdict(ties, mismatches, (), False, (), 0, True)
    mask_S = torch.arange(len(ids_S)) >= prompt
    features_SF = hidden_SLD[:, :-1].flatten(1)
    chains = draft_chains(drafter, ids_S, mask_S, features_SF, [len(ids_S)], draft_length)
    accepted, gaps = chains.accepted_T.numpy(), chains.gap_T.numpy()
    found = walk(accepted, prompt, len(ids_S), draft_length)
    differing, draft_ties, last = compare_passes(accepted, gaps, passes, prompt, len(ids_S), draft_length)
    return Verdict(ties, mismatches, found.accepted, found.cut, differing, draft_ties, last)


def _greedy(final_RD: Tensor, ids_R: Tensor, lm_head_VD: Tensor) -> tuple[int, tuple[Mismatch, ...]]:
    """(ties, mismatches) of tokens [R] that were written after these final states."""
    ties, mismatches, rows = 0, [], max(1, _LOGITS_AT_ONCE // len(lm_head_VD))
    for start in range(0, len(ids_R), rows):
        logits_RV = final_RD[start : start + rows].to(lm_head_VD.dtype) @ lm_head_VD.T
        best_R, token_R = logits_RV.argmax(-1), ids_R[start : start + rows]
        gap_R = (logits_RV.gather(1, best_R[:, None]) - logits_RV.gather(1, token_R[:, None])).squeeze(1)
        for at in (best_R != token_R).nonzero().squeeze(1).tolist():
            if float(gap_R[at]) < TIE:
                ties += 1
            else:
                mismatches.append(Mismatch(start + at, int(token_R[at]), int(best_R[at]), float(gap_R[at])))
    return ties, tuple(mismatches)


def compare_passes(
    accepted_S: NDArray[np.int64],
    gap_S: NDArray[np.float32],
    passes: Sequence[int],
    first: int,
    end: int,
    draft_length: int,
) -> tuple[tuple[int, ...], int, bool]:
    """(differing passes, draft ties, whether the last block agrees) between server and drafter, pass by pass.

    accepted_S, gap_S: as in `drafter.acceptance.Chains`. passes: as served. [first, end): the response. The server's
    own count leads to the next pass, so that one difference does not become many. The last block is the pass that
    reaches the response's end: it agrees when the server accepted what is right as far as the response goes, or, where
    the response ends inside the chain, at least that.
    """
    differing: list[int] = []
    ties, at, last_agrees = 0, max(first, 1), True
    for number, served in enumerate(passes):
        if at >= end - 1:  # the response has no room for this pass
            return (*differing, number), ties, False
        right = min(int(accepted_S[at]), draft_length)
        last = at + served + 1 >= end - 1
        cut = right < draft_length and at + right == end - 1
        agrees = right == served or (cut and served >= right)
        if not agrees and gap_S[at] < TIE:
            ties += 1
        elif not agrees and last:
            last_agrees = False
        elif not agrees:
            differing.append(number)
        at += served + 1
    if at < end - 1:  # tokens that no pass wrote
        differing.append(len(passes))
    return tuple(differing), ties, last_agrees
