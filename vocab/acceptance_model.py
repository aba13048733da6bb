"""What a draft vocabulary costs in acceptance length: a bracket without a trained drafter, a fit with one.

tau(k) = 1 + sum over j of S_j: S_j is the share of rounds that keep at least j drafts. A token outside the draft
vocabulary can never be kept. How much that costs depends on how often a drafter with the whole vocabulary would have
kept it, and those are the rare tokens that drafters seldom hit:

- `bracket`: knows the coverage only. At best such tokens were never kept anyway (no loss); at worst they were kept as
  often as any other (`average`). `hardest` assumes that every one of them was kept, which no drafter does.
- `AcceptanceModel.fit`: measures it, by bin of token frequency and step of the chain, on walks of a full-vocabulary
  drafter. Ranks of the bins come from counts, so the fit carries over to any vocabulary and to other text.

A restricted drafter also gains a little: where its first choice was outside the vocabulary and wrong, the next one may
be right. `rescued` says how often that can be at all; bracket and fit leave it out, so the truth may lie a little above
the bracket (an EAGLE-3 drafter of SmolLM2 with tau 1.16 reached 1.17 when cut to 256 ids that cover 60 %).
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocab.coverage import check_counts, frequency_order
from vocab.errors import VocabError
from vocab.files import read_file
from vocab.roofline import chain_length


@dataclass(frozen=True, eq=False)
class Walks:
    """Rounds of a drafter over held-out responses, one row a round (start position of a walk).

    matched: [R] integers, leading drafts that the verifier kept, 0 to k.
    targets: [R, k] integers, the verifier's own tokens after the start: what draft j had to be; -1 past the end.
    proposals: [R] integers, what the drafter proposed where it first missed, -1 when it missed nowhere. Optional: it
    tells how often a miss was a proposal outside a smaller vocabulary.
    Raises VocabError for shapes and values that do not fit.
    """

    matched: NDArray[np.int64]
    targets: NDArray[np.int64]
    proposals: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        matched, targets = np.asarray(self.matched), np.asarray(self.targets)
        if matched.ndim != 1 or targets.ndim != 2 or targets.shape[0] != matched.size or targets.shape[1] < 1:
            raise VocabError(
                f"walks: expected matched [rounds] and targets [rounds, k], found {list(matched.shape)} and "
                f"{list(targets.shape)}"
            )
        if matched.size == 0:
            raise VocabError("walks: expected at least one round, found none")
        limit = (np.cumprod(targets >= 0, axis=1)).sum(axis=1)
        if bool((matched < 0).any()) or bool((matched > limit).any()):
            at = int(np.flatnonzero((matched < 0) | (matched > limit))[0])
            raise VocabError(f"walks: round {at}: expected 0 to {int(limit[at])} kept drafts, found {int(matched[at])}")
        if self.proposals is not None and np.asarray(self.proposals).shape != matched.shape:
            raise VocabError(f"walks: expected proposals [{matched.size}], found {list(np.shape(self.proposals))}")

    @property
    def k(self) -> int:
        return int(self.targets.shape[1])

    def tau(self, k: int | None = None) -> float:
        """1 + kept drafts / rounds at draft length `k` (all steps when None). Rounds count as they were walked."""
        return 1.0 + float(np.minimum(self.matched, self.k if k is None else k).mean())

    def survival(self) -> NDArray[np.float64]:
        """[k]: share of rounds that keep at least j = 1..k drafts."""
        return np.array([(self.matched >= j).mean() for j in range(1, self.k + 1)])

    def restricted(self, t2d: np.ndarray) -> Walks:
        """The same rounds when ids outside the mask [vocab] bool cannot be proposed, and nothing is rescued."""
        inside = np.where(self.targets >= 0, t2d[np.maximum(self.targets, 0)], False)
        return Walks(np.minimum(self.matched, np.cumprod(inside, axis=1).sum(axis=1)), self.targets)


def chain_from_tau(taus: Mapping[int, float], k: int) -> NDArray[np.float64]:
    """Conditional acceptance of steps 1..k, [k] float64, that gives the measured tau at each draft length in `taus`.

    Between and beyond measured lengths the acceptance is constant: of {3: 2.0} one rate for all steps (0.543...).
    Raises VocabError for a tau outside [1, draft length + 1], or one that falls with the draft length.
    """
    chain_length(taus)
    rates = np.zeros(max(k, max(taus)))
    done, survival, total = 0, 1.0, 1.0
    for length in sorted(taus):
        steps, gain = length - done, taus[length] - total
        if gain < 0:
            raise VocabError(f"tau: expected tau to rise with the draft length, found {dict(taus)}")
        rate = _constant_rate(gain / survival if survival > 0 else 0.0, steps)
        rates[done:length] = rate
        total, survival, done = taus[length], survival * rate**steps, length
    rates[done:] = rates[done - 1]
    return rates[:k]


def _constant_rate(gain: float, steps: int) -> float:
    """The r in [0, 1] with r + r^2 + ... + r^steps = gain, by bisection."""
    if gain > steps * (1 + 1e-9):
        raise VocabError(
            f"tau: {steps} more drafts cannot add {gain:.3f} tokens a round; check the taus that were given"
        )
    low, high = 0.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**j for j in range(1, steps + 1)) < gain else (low, middle)
    return (low + high) / 2


def tau_of(chain: np.ndarray, k: int) -> float:
    """1 + S_1 + ... + S_k for conditional acceptances `chain` [>= k]."""
    return 1.0 + float(np.cumprod(np.asarray(chain, float)[:k]).sum())


@dataclass(frozen=True)
class Bracket:
    """tau of a restricted drafter: between `average` and `none`; `hardest` needs no assumption at all."""

    none: float
    average: float
    hardest: float


def bracket(chain: np.ndarray, coverage: float, k: int) -> Bracket:
    """tau(k) when the vocabulary covers `coverage` of the verifier's tokens and `chain` [>= k] is the full drafter's.

    Raises VocabError for a coverage outside [0, 1].
    """
    if not 0 <= coverage <= 1:
        raise VocabError(f"coverage: expected a share from 0 to 1, found {coverage}")
    rates = np.asarray(chain, float)
    return Bracket(
        none=tau_of(rates, k),
        average=tau_of(rates * coverage, k),
        hardest=tau_of(np.maximum(0.0, rates - (1 - coverage)), k),
    )


@dataclass(frozen=True, eq=False)
class AcceptanceModel:
    """Acceptance by bin of token frequency and chain step, of a full-vocabulary drafter.

    edges: [bins + 1] int64, ranks by frequency at which bins begin; bin b holds ranks edges[b] to edges[b+1] - 1.
    hit: [bins, k] share kept of the targets of bin b that step j met. share: [bins, k] of the targets that step j met.
    rank: [vocab] int64, each id's rank. rounds: how many it was fitted on.
    """

    edges: NDArray[np.int64]
    hit: NDArray[np.float64]
    share: NDArray[np.float64]
    rank: NDArray[np.int64]
    rounds: int

    @classmethod
    def fit(cls, walks: Walks, counts: np.ndarray, *, bins: int = 16) -> AcceptanceModel:
        """Fit on `walks`; bins are of equal ratio in rank. counts: [vocab] int64 of the text ids are chosen on.

        A cell that no round met takes the mean of its step; each is drawn towards it with the weight of two rounds, so
        that cells with few rounds do not say 0 or 1. Raises VocabError when a target is outside the counts.
        """
        checked = check_counts(counts)
        rank = np.empty(checked.size, np.int64)
        rank[frequency_order(checked)] = np.arange(checked.size)
        if int(walks.targets.max()) >= checked.size:
            raise VocabError(f"walks: token id {int(walks.targets.max())} is outside the {checked.size} counted ids")
        steps = np.geomspace(8, checked.size, bins) if checked.size > 8 else np.array([checked.size])
        edges = np.unique(np.concatenate([[0], np.minimum(steps.astype(np.int64), checked.size)]))
        edges[-1] = checked.size
        count = edges.size - 1
        hit, share = np.zeros((count, walks.k)), np.zeros((count, walks.k))
        for step in range(walks.k):
            target = walks.targets[:, step]
            alive = (walks.matched >= step) & (target >= 0)
            cell = np.searchsorted(edges, rank[target[alive]], side="right") - 1
            met = np.bincount(cell, minlength=count).astype(float)
            kept = np.bincount(cell, weights=(walks.matched[alive] > step).astype(float), minlength=count)
            mean = kept.sum() / met.sum() if met.sum() else (hit[:, step - 1].mean() if step else 0.0)
            hit[:, step] = (kept + 2 * mean) / (met + 2)
            share[:, step] = met / met.sum() if met.sum() else share[:, step - 1]
        return cls(edges, hit, share, rank, walks.matched.size)

    def tau(self, t2d: np.ndarray, k: int, *, counts: np.ndarray | None = None) -> float:
        """tau(k) with the vocabulary of the mask `t2d` [vocab] bool.

        counts: [vocab] int64 of the text it will be used on, to weigh the ids inside a bin (alike when None).
        Raises VocabError for more steps than were fitted.
        """
        if not 1 <= k <= self.hit.shape[1]:
            raise VocabError(f"draft length: expected 1 to {self.hit.shape[1]} (the fit's), found {k}")
        inside = self._inside(np.asarray(t2d, bool), counts)
        chain = (self.share[:, :k] * self.hit[:, :k] * inside[:, None]).sum(axis=0)
        return tau_of(chain, k)

    def _inside(self, t2d: NDArray[np.bool_], counts: np.ndarray | None) -> NDArray[np.float64]:
        """Share of each bin's tokens that the mask holds, [bins]."""
        cell = np.searchsorted(self.edges, self.rank, side="right") - 1
        bins = self.edges.size - 1
        weight = np.ones(self.rank.size) if counts is None else np.asarray(counts, float)
        of_all = np.bincount(cell, weights=weight, minlength=bins)
        held = np.bincount(cell, weights=weight * t2d, minlength=bins)
        plain = np.bincount(cell, weights=t2d.astype(float), minlength=bins) / np.maximum(
            np.bincount(cell, minlength=bins), 1
        )
        return np.where(of_all > 0, held / np.maximum(of_all, 1e-300), plain)

    def chain(self, k: int) -> NDArray[np.float64]:
        """Conditional acceptance of the full vocabulary's steps, [k]."""
        return (self.share * self.hit).sum(axis=0)[:k]

    def tau_full(self, k: int) -> float:
        """tau(k) of the whole vocabulary as the fit has it."""
        return tau_of(self.chain(k), k)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists for JSON, without the ranks."""
        return {
            "rounds": self.rounds,
            "rank_edges": self.edges.tolist(),
            "hit": self.hit.round(6).tolist(),
            "share": self.share.round(6).tolist(),
        }


def rescued(walks: Walks, t2d: np.ndarray) -> float:
    """Share of rounds whose first miss was a proposal outside the mask while the target is inside: what a restricted
    drafter may gain at most. Raises VocabError when the walks hold no proposals."""
    if walks.proposals is None:
        raise VocabError("walks: expected the ids proposed at the first miss, found none; give `proposals`")
    missed = walks.matched < walks.k
    target = walks.targets[np.arange(walks.matched.size), np.minimum(walks.matched, walks.k - 1)]
    proposal = np.asarray(walks.proposals)
    outside = (proposal >= 0) & ~np.asarray(t2d, bool)[np.maximum(proposal, 0)]
    inside = (target >= 0) & np.asarray(t2d, bool)[np.maximum(target, 0)]
    return float((missed & outside & inside).mean())


def leading_matches(proposed: Sequence[int] | np.ndarray, targets: Sequence[int] | np.ndarray) -> int:
    """How many leading drafts equal the verifier's tokens."""
    same = np.asarray(proposed) == np.asarray(targets)[: len(proposed)]
    return int(np.cumprod(same).sum())


def walks_of(accepted: np.ndarray, token_ids: np.ndarray, loss_mask: np.ndarray, k: int) -> Walks | None:
    """The rounds that a server walks over one sequence, as Walks; None when it has none.

    accepted: [T] integers, for a chain that starts after token t its leading right drafts (`drafter.acceptance.Chains`),
    -1 where none can start. token_ids: [T]. loss_mask: [T] bool, true on responses. Each round follows the last one's
    kept drafts and the verifier's own token; drafts are not judged beyond the response.
    """
    ids, mask = np.asarray(token_ids, np.int64), np.asarray(loss_mask, np.bool_)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))).reshape(-1, 2)
    matched, targets = [], []
    for first, end in edges.tolist():
        at = max(first, 1)
        while at < end - 1:
            kept = min(int(accepted[at]), k)
            behind = ids[at + 1 : min(at + 1 + k, end)]
            targets.append(np.pad(behind, (0, k - behind.size), constant_values=-1))
            matched.append(kept)
            at += kept + 1
    return Walks(np.array(matched, np.int64), np.array(targets, np.int64)) if matched else None


def join_walks(parts: Sequence[Walks]) -> Walks:
    """The rounds of all parts. Raises VocabError for none, or parts of different draft lengths."""
    if not parts or len({part.k for part in parts}) != 1:
        raise VocabError(f"walks: expected parts of one draft length, found {sorted({part.k for part in parts})}")
    return Walks(np.concatenate([part.matched for part in parts]), np.concatenate([part.targets for part in parts]))


def walks_bytes(walks: Walks) -> bytes:
    """Walks as an .npz file: matched, targets, and proposals when there are some."""
    matched, targets = walks.matched.astype(np.int32), walks.targets.astype(np.int32)
    sink = io.BytesIO()
    if walks.proposals is None:
        np.savez_compressed(sink, matched=matched, targets=targets)
    else:
        np.savez_compressed(sink, matched=matched, targets=targets, proposals=walks.proposals.astype(np.int32))
    return sink.getvalue()


def load_walks(uri: str) -> Walks:
    """Read a file of `walks_bytes`, local or on object storage. Raises VocabError when it is no such file."""
    try:
        with np.load(io.BytesIO(read_file(uri)), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        for name, array in arrays.items():
            if array.dtype.kind not in "iu":
                raise ValueError(f"{name} of type {array.dtype}")
        proposals = arrays["proposals"].astype(np.int64) if "proposals" in arrays else None
        return Walks(arrays["matched"].astype(np.int64), arrays["targets"].astype(np.int64), proposals)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, VocabError):
            raise
        raise VocabError(
            f"{uri}: expected walks (.npz with matched and targets, which ray_jobs.evaluate writes of a drafter with the "
            f"whole vocabulary), found {error}"
        ) from error
