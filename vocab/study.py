"""The coverage of a draft vocabulary, from every side, as one JSON-ready answer.

`study` takes counts by fold, the held-out split's counts, and (optionally) tokens by group; it gives curves chosen-on
and held out, intervals, sources, policies, positions, unseen ids and the tokens that are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocab.bootstrap import ratio_interval
from vocab.counts import TokenCounts
from vocab.coverage import coverage_curve, held_out_coverage, unseen
from vocab.errors import VocabError
from vocab.folds import FoldCounts, cross_fit
from vocab.groups import GroupCoverage
from vocab.mapping import DraftVocab
from vocab.policies import choose, overlap

_LOST = 200


def study(
    folds: FoldCounts,
    sizes: Sequence[int],
    *,
    held_out: TokenCounts | None = None,
    groups: GroupCoverage | None = None,
    group_sources: Mapping[str, NDArray[np.int64]] | None = None,
    held_out_groups: GroupCoverage | None = None,
    policy: str = "frequency",
    force_ids: Sequence[int] | np.ndarray = (),
    special_ids: Sequence[int] | np.ndarray = (),
    listed: Sequence[int] | np.ndarray = (),
    size: int | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    text_of: Callable[[int], str] | None = None,
) -> dict[str, Any]:
    """Everything about coverage, as plain dicts and lists. Shares in [0, 1], None where nothing was counted.

    sizes: ascending. held_out_groups: of the held-out side, under the whole choice. groups: tokens by unit and band under each fold's own vocabulary, for the same sizes and policy.
    group_sources: {source: rows of `groups`}. size: the draft vocabulary that is asked for; the tokens it loses, held-out
    ones included, are listed.
    text_of: the string of a token id. Where all tokens are in one fold nothing is cross-fitted, and those keys are missing.
    Raises VocabError when nothing was counted.
    """
    total = folds.total()
    if not total.tokens:
        raise VocabError("no loss tokens were counted; are the loss masks all false?")
    wanted = [int(k) for k in sizes]
    curves = cross_fit(folds, wanted, policy, force_ids=force_ids, listed=listed) if folds.usable() else None
    found: dict[str, Any] = {
        "vocab_size": total.vocab_size,
        "tokens": total.tokens,
        "held_out_tokens": 0 if held_out is None else held_out.tokens,
        "sources": {name: int(total.of(name).sum()) for name in total.sources},
        "unseen_ids": int(unseen(total.total()).size),
        "folds": len(folds.folds),
        "folds_seed": folds.seed,
        "policy": policy,
        "forced_ids": len(np.unique(np.asarray(force_ids, np.int64))),
        "level": level,
        "sizes": wanted,
        "best_possible": coverage_curve(total.total(), wanted).tolist(),
        "chosen_on": _plain(
            np.cumsum(total.total()[_order(total, policy, force_ids, listed)])[np.array(wanted) - 1] / total.tokens
        ),
    }
    if curves is not None:
        worst = curves.worst_source()
        found |= {
            "cross_fitted": _plain(curves.pooled),
            "by_fold": [_plain(row) for row in curves.by_fold],
            "by_source": {name: _plain(row) for name, row in curves.by_source.items()},
            "worst_source": [None if one is None else {"source": one[0], "coverage": one[1]} for one in worst],
            "stability": _plain(curves.stability),
            "policies": _policies(folds, wanted, special_ids, listed, size),
        }
    if held_out is not None and held_out.tokens:
        judged = held_out_coverage(
            total.total(), np.vstack([held_out.total()[None], held_out.counts]), wanted, force_ids=force_ids
        )
        found["held_out"] = _plain(judged[0])
        found["held_out_by_source"] = {
            name: _plain(row) for name, row in zip(held_out.sources, judged[1:], strict=True)
        }
        if held_out_groups is not None:
            low, high = ratio_interval(*held_out_groups.covered(), level=level, resamples=resamples, seed=seed)
            found["held_out_interval"] = {"low": _plain(low), "high": _plain(high)}
    if groups is not None:
        found |= _intervals(groups, group_sources or {}, level, resamples, seed)
    if size is not None:
        vocabulary = choose(policy, total, size, force_ids=force_ids, listed=listed)
        found["size"] = size
        everything = total if held_out is None else total + held_out
        found["lost"] = lost_tokens(vocabulary, everything, text_of)
    return found


def _order(counts: TokenCounts, policy: str, force_ids: Any, listed: Any) -> NDArray[np.int64]:
    from vocab.policies import policy_order

    return policy_order(policy, counts, force_ids=force_ids, listed=listed)


def _intervals(
    groups: GroupCoverage, sources: Mapping[str, NDArray[np.int64]], level: float, resamples: int, seed: int
) -> dict[str, Any]:
    """Bootstrap intervals over units, of all and of each source, and coverage by position."""
    covered, tokens = groups.covered()

    def interval(rows: NDArray[np.int64] | slice) -> dict[str, Any]:
        low, high = ratio_interval(covered[rows], tokens[rows], level=level, resamples=resamples, seed=seed)
        return {"low": _plain(low), "high": _plain(high), "groups": int((tokens[rows] > 0).sum())}

    return {
        "interval": interval(slice(None)),
        "interval_by_source": {name: interval(rows) for name, rows in sources.items()},
        "by_position": groups.by_position(),
    }


def _policies(folds: FoldCounts, sizes: list[int], special: Any, listed: Any, size: int | None) -> dict[str, Any]:
    """Held-out coverage of every policy at every size, and what it shares with plain frequency at `size`."""
    total = folds.total()
    asked: dict[str, tuple[str, Any]] = {"frequency": ("frequency", ()), "balanced": ("balanced", ())}
    if len(special):
        asked["frequency + special tokens"] = ("frequency", special)
    if len(listed):
        asked["list"] = ("list", ())
    at = size or sizes[0]
    plain = choose("frequency", total, at)
    found = {}
    for name, (policy, force) in asked.items():
        usable = [k for k in sizes if k >= len(force)]
        curves = cross_fit(folds, usable, policy, force_ids=force, listed=listed)
        other = choose(policy, total, at, force_ids=force, listed=listed) if at >= len(force) else plain
        worst = curves.worst_source()
        found[name] = {
            "sizes": usable,
            "held_out": _plain(curves.pooled),
            "worst_source": [None if one is None else one[1] for one in worst],
            "stability": _plain(curves.stability),
            "overlap_with_frequency": asdict(overlap(other, plain, total.total())) | {"size": at},
        }
    return found


def lost_tokens(
    vocabulary: DraftVocab, counts: TokenCounts, text_of: Callable[[int], str] | None = None, limit: int = _LOST
) -> dict[str, Any]:
    """The ids that were counted but are outside, most frequent first: {ids, tokens, share, top: [{id, count, ...}]}.

    top names at most `limit` of them with count, source that has most of it, and the string where `text_of` is given.
    Raises VocabError when the two are over different vocabularies.
    """
    total = counts.total()
    vocabulary.coverage(total)  # checks that they fit
    outside = np.flatnonzero(~vocabulary.t2d & (total > 0))
    outside = outside[np.argsort(-total[outside], kind="stable")]
    top = []
    for token in outside[:limit].tolist():
        row: dict[str, Any] = {"id": token, "count": int(total[token])}
        if counts.sources:
            row["source"] = counts.sources[int(counts.counts[:, token].argmax())]
        if text_of is not None:
            row["text"] = text_of(token)
        top.append(row)
    lost = int(total[outside].sum())
    return {"ids": int(outside.size), "tokens": lost, "share": lost / int(total.sum()), "top": top}


def _plain(values: NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
