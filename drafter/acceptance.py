"""Acceptance length tau(k), offline: how many drafts of a chain of k the verifier would have accepted, by walking.

tau(k) = 1 + accepted drafts / verify passes, a ratio of sums. A server's first pass follows the token that the prefill
sampled; a pass that accepts `a` drafts commits them and one token more, the verifier's own, and the next pass follows
that one. As long as a chain is right its drafts *are* the tokens of the sequence. So one teacher-forced unroll tells
for every token at once how many drafts after it would be right, and the walk only picks the tokens after which a server
really drafts. Exact on the verifier's own greedy output; unbiased for greedy drafts on its sampled output; meaningless
on text that the verifier did not write.

The last block: where a response ends inside a chain that was right so far, nobody can tell offline whether the drafts
behind the end would have been accepted, and a server, which sees the end only after the pass, counts those that were.
Such a pass is `cut`: it counts with the drafts that are visible.

Shape suffixes as in drafter/model.py, and: S tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter.errors import DrafterError
from drafter.loss import loss_rows
from drafter.model import Drafter
from drafter.ttt import check_batch, unroll
from vocab.mapping import DraftVocab

# fp32 logits that exist at one time: 1,048 rows of 32,000.
_LOGITS_AT_ONCE = 1 << 25
# Numbers drawn at one time by the bootstrap.
_DRAWS_AT_ONCE = 1 << 23


# ---- what would be accepted after each token -----------------------------------------------------------------------


@dataclass(frozen=True)
class Chains:
    """accepted_T: [T] int64, of a chain that starts after token t: its leading right drafts, -1 where none can start.

    A chain can start after each token of a response, but for one that is the first token of its whole sequence; it is
    judged up to the response's end. first_T: [T] int64, the chain's first draft as an id of the verifier, -1 where the
    response has no token behind t. gap_T: [T], how much better than the second best the least certain draft was, of
    those that decide the chain (the right ones and the first wrong one): below the rounding of a server it may draft
    another token. Infinite where nothing was drafted.
    """

    accepted_T: Tensor
    first_T: Tensor
    gap_T: Tensor


@torch.no_grad()
def draft_chains(
    drafter: Drafter,
    token_ids_T: Tensor,
    loss_mask_T: Tensor,
    features_TF: Tensor,
    lengths: Sequence[int],
    steps: int,
) -> Chains:
    """The greedy chains of `steps` drafts after every token of a packed batch's responses.

    token_ids_T, features_TF, lengths: as for `drafter.ttt.unroll`. loss_mask_T: [T] bool, true on responses.
    A chain of fewer drafts is the beginning of a longer one: clip `accepted_T` to its length.
    Raises DrafterError for shapes that do not agree.
    """
    check_batch(drafter, token_ids_T, features_TF, lengths, steps)
    right_T = _starts(token_ids_T, loss_mask_T, lengths)
    accepted_T = torch.where(right_T, 0, -1)
    first_T = torch.full_like(token_ids_T, -1)
    gap_T = torch.full(token_ids_T.shape, torch.inf, device=token_ids_T.device)
    # Row t of the drafter has read token t+1: it drafts after that.
    wanted_KT = loss_rows(loss_mask_T, lengths, steps)
    for k, step in enumerate(unroll(drafter, token_ids_T, features_TF, lengths, steps, wanted_KT)):
        start_N = step.rows_N + 1
        draft_N, gap_N = _greedy(drafter, step.hidden_ND)
        if k == 0:
            first_T[start_N] = draft_N
        decides_N = right_T[start_N]
        gap_T[start_N] = torch.where(decides_N, gap_T[start_N].minimum(gap_N), gap_T[start_N])
        right_N = decides_N & (draft_N == token_ids_T[start_N + 1 + k])
        right_T[start_N] = right_N
        accepted_T[start_N] += right_N
    return Chains(accepted_T, first_T, gap_T)


def greedy_ceiling(
    best_T: Tensor, drafted_T: Tensor, token_ids_T: Tensor, loss_mask_T: Tensor, lengths: Sequence[int], steps: int
) -> Tensor:
    """`Chains.accepted_T` of a drafter that always drafts the verifier's likeliest token: the best there is.

    best_T: [T] int64, the verifier's likeliest token after token t. drafted_T: [T] bool, whether it is in the draft
    vocabulary; where it is not, such a drafter is wrong. Sampled output holds other tokens than the likeliest: a draft of
    one of those is right by luck, less often than the likeliest would have been.
    """
    accepted_T = torch.where(_starts(token_ids_T, loss_mask_T, lengths), 0, -1)
    wanted_KT = loss_rows(loss_mask_T, lengths, steps)
    hit_T = (best_T[:-1] == token_ids_T[1:]) & drafted_T[:-1]
    right_T = accepted_T >= 0
    for k in range(steps):
        start_N = wanted_KT[k].nonzero().squeeze(1) + 1
        right_N = right_T[start_N] & hit_T[start_N + k]
        right_T[start_N] = right_N
        accepted_T[start_N] += right_N
    return accepted_T


def _starts(token_ids_T: Tensor, loss_mask_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T] bool: tokens of responses, without the first of each sequence."""
    if loss_mask_T.shape != token_ids_T.shape:
        raise DrafterError(f"loss mask: expected {list(token_ids_T.shape)}, found {list(loss_mask_T.shape)}")
    starts_T = loss_mask_T.bool().clone()
    starts_T[np.cumsum([0, *lengths[:-1]])] = False
    return starts_T


def _greedy(drafter: Drafter, hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
    """The drafter's likeliest token as the verifier's id, and how far its logit is above the next, both [N]."""
    rows = max(1, _LOGITS_AT_ONCE // drafter.config.draft_vocab_size)
    best, gaps = [], []
    for chunk in hidden_ND.split(rows):
        values, ids = drafter.logits(chunk).float().topk(min(2, drafter.config.draft_vocab_size), dim=-1)
        best.append(ids[:, 0])
        gaps.append(values[:, 0] - values[:, 1] if values.shape[1] == 2 else torch.full_like(values[:, 0], torch.inf))
    if not best:
        return hidden_ND.new_zeros(0, dtype=torch.int64), hidden_ND.new_zeros(0)
    return drafter.target_ids(torch.cat(best)), torch.cat(gaps)


# ---- walking -------------------------------------------------------------------------------------------------------


def responses(loss_mask_S: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[first, end) of each response of a sequence: the contiguous runs of its loss mask ([S] bool)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(loss_mask_S, np.int8), [0]])))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]


@dataclass(frozen=True)
class Walk:
    """The verify passes of one response. starts: index of the token after which each drafts. accepted: by each.

    cut: the response ends inside the last pass's chain, so that more of its drafts may be right than `accepted` says.
    """

    starts: tuple[int, ...]
    accepted: tuple[int, ...]
    cut: bool = False


def walk(accepted_S: NDArray[np.int64], first: int, end: int, draft_length: int) -> Walk:
    """The passes over the response [first, end). accepted_S: `Chains.accepted_T` of its sequence.

    A response of one token has none: the prefill wrote it. One that begins its sequence starts a token later.
    """
    starts, accepted, cut = [], [], False
    at = max(first, 1)
    while at < end - 1:
        right = min(int(accepted_S[at]), draft_length)
        starts.append(at)
        accepted.append(right)
        cut = right < draft_length and at + right == end - 1
        at += right + 1
    return Walk(tuple(starts), tuple(accepted), cut)


@dataclass(frozen=True)
class Tally:
    """Sums over verify passes at one draft length k; add them up with `+`.

    reached: [k], passes in which draft j was judged: all before it were right and the response went on. right: [k],
    those in which it was right too. cut_verifies, cut_accepted: the part of the sums that comes from cut last passes.
    """

    verifies: int
    accepted: int
    cut_verifies: int
    cut_accepted: int
    reached: NDArray[np.int64]
    right: NDArray[np.int64]

    @classmethod
    def zero(cls, draft_length: int) -> Tally:
        return cls(0, 0, 0, 0, np.zeros(draft_length, np.int64), np.zeros(draft_length, np.int64))

    @classmethod
    def of(cls, walks: Sequence[Walk], draft_length: int) -> Tally:
        accepted = np.array([count for one in walks for count in one.accepted], np.int64)
        cut = [one.accepted[-1] for one in walks if one.cut]
        step = np.arange(draft_length)
        right = (accepted[:, None] > step).sum(0)
        reached = (accepted[:, None] >= step).sum(0)
        for count in cut:
            reached[count] -= 1  # nothing stood there to judge it by
        return cls(len(accepted), int(accepted.sum()), len(cut), sum(cut), reached, right)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.verifies + other.verifies,
            self.accepted + other.accepted,
            self.cut_verifies + other.cut_verifies,
            self.cut_accepted + other.cut_accepted,
            self.reached + other.reached,
            self.right + other.right,
        )

    @property
    def tau(self) -> float:
        """1 + accepted / verifies; NaN without a pass."""
        return 1 + self.accepted / self.verifies if self.verifies else float("nan")

    @property
    def conditional(self) -> NDArray[np.float64]:
        """[k] share of right drafts at each place of the chain, among the judged ones; NaN where none was."""
        with np.errstate(invalid="ignore"):
            return self.right / np.where(self.reached, self.reached, np.nan)


def tally_sequence(
    accepted_S: NDArray[np.int64], loss_mask_S: NDArray[np.bool_], draft_lengths: Sequence[int]
) -> dict[int, Tally]:
    """{draft length: Tally} over all responses of one sequence. accepted_S: `Chains.accepted_T` of it."""
    spans = responses(loss_mask_S)
    return {k: Tally.of([walk(accepted_S, first, end, k) for first, end in spans], k) for k in draft_lengths}


def tau_interval(
    verifies_N: NDArray[np.int64],
    accepted_N: NDArray[np.int64],
    *,
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Bootstrap interval of tau: sequences are drawn with replacement, tau is the ratio of the drawn sums.

    verifies_N, accepted_N: [N] passes and accepted drafts of each sequence. Returns (low, high); NaN without a pass.
    """
    verifies, accepted = np.asarray(verifies_N, np.int64), np.asarray(accepted_N, np.int64)
    if not verifies.sum():
        return float("nan"), float("nan")
    random = np.random.default_rng(seed)
    count = len(verifies)
    taus: list[NDArray[np.float64]] = []
    for begin in range(0, draws, rows := max(1, _DRAWS_AT_ONCE // count)):
        drawn = random.integers(0, count, (min(rows, draws - begin), count))
        passes = verifies[drawn].sum(1)
        taus.append(1 + accepted[drawn].sum(1)[passes > 0] / passes[passes > 0])
    low, high = np.quantile(np.concatenate(taus), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


# ---- a control -----------------------------------------------------------------------------------------------------


def shifted_d2t(drafter: Drafter) -> Drafter:
    """The same drafter with every draft id mapped to the token after its own (the last one to token 0).

    What a map of another vocabulary, or one that is off by one, does to a good drafter: each draft id still has a token
    of its own, and it is always the wrong one. Rows of the lm_head are put in the order of those tokens, so that the
    control is a drafter like any other, which can be exported and served.
    """
    moved_W = (drafter.draft_vocab.target_ids + 1) % drafter.config.vocab_size
    vocabulary = DraftVocab.from_ids(moved_W, drafter.config.vocab_size)
    shifted = Drafter(drafter.config, vocabulary, drafter.embed_tokens.weight).to(drafter.fc.weight)
    state = dict(drafter.state_dict())
    state["lm_head.weight"] = state["lm_head.weight"][torch.from_numpy(np.argsort(moved_W))]
    shifted.load_state_dict(state | {name: shifted.state_dict()[name] for name in ("d2t", "t2d")})
    return shifted
