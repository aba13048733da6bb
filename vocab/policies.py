"""Ways to choose a draft vocabulary of any size: each gives an order of all ids, and a size takes the first of them.

- `frequency`: most frequent first. Best coverage of the text it was chosen on, by definition.
- `balanced`: by the mean over the sources of an id's share of that source, so that a small domain weighs as much as a
  large one. Gives up a little of the whole for the worst source.
- `list`: ids of a list first, in its order (an earlier draft vocabulary, say), then by frequency.

Forced ids (special tokens) come before everything in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vocab.counts import TokenCounts
from vocab.coverage import check_counts, check_ids, check_size, frequency_order
from vocab.errors import VocabError
from vocab.mapping import DraftVocab

Policy = Literal["frequency", "balanced", "list"]
POLICIES: tuple[Policy, ...] = ("frequency", "balanced", "list")


def policy_order(
    policy: str,
    counts: TokenCounts,
    *,
    force_ids: Sequence[int] | np.ndarray = (),
    listed: Sequence[int] | np.ndarray = (),
) -> NDArray[np.int64]:
    """All token ids in the order in which they enter a draft vocabulary, [vocab] int64, a permutation.

    listed: the ids of policy `list`, in the order they are wanted. Ties go to the lower id.
    Raises VocabError for an unknown policy, counts without tokens, or ids outside the vocabulary.
    """
    total = check_counts(counts.total())
    forced = check_ids(force_ids, counts.vocab_size, "force_ids")
    if policy == "frequency":
        return frequency_order(total, forced)
    if policy == "balanced":
        sums = counts.counts.sum(axis=1, keepdims=True)
        weights = (counts.counts / np.maximum(sums, 1)).mean(axis=0)
        order = np.argsort(-weights, kind="stable")
        return np.concatenate([forced, order[~np.isin(order, forced)]])
    if policy == "list":
        check_ids(listed, counts.vocab_size, "listed ids")
        given = np.asarray(listed, np.int64)
        if given.size == 0:
            raise VocabError("policy list: expected a list of ids, found none; name it with keep_ids")
        _, first = np.unique(given, return_index=True)
        wanted = given[np.sort(first)]
        head = np.concatenate([forced, wanted[~np.isin(wanted, forced)]])
        rest = frequency_order(total)
        return np.concatenate([head, rest[~np.isin(rest, head)]])
    raise VocabError(f"policy: expected one of {', '.join(POLICIES)}, found {policy!r}")


def choose(
    policy: str,
    counts: TokenCounts,
    size: int,
    *,
    force_ids: Sequence[int] | np.ndarray = (),
    listed: Sequence[int] | np.ndarray = (),
    provenance: dict[str, object] | None = None,
) -> DraftVocab:
    """The draft vocabulary of `size` ids under a policy; what was chosen is added to the provenance.

    Raises VocabError as `policy_order` does, for a size outside [1, vocab], and for more forced ids than places.
    """
    check_size(size, counts.vocab_size)
    forced = check_ids(force_ids, counts.vocab_size, "force_ids")
    if forced.size > size:
        raise VocabError(f"force_ids: {forced.size} ids do not fit into a draft vocabulary of {size}; make it larger")
    chosen = policy_order(policy, counts, force_ids=forced, listed=listed)[:size]
    total = counts.total()
    found = {
        "policy": policy,
        "forced": int(forced.size),
        "coverage": float(total[chosen].sum() / total.sum()),
        "unseen": int((total[chosen] == 0).sum()),
        "counts_hash": counts.hash,
    }
    return DraftVocab.from_ids(chosen, counts.vocab_size, provenance=found | dict(provenance or {}))


@dataclass(frozen=True)
class Overlap:
    """Of two draft vocabularies: how many ids both have, and each alone; jaccard is both / any.

    tokens: share of the counted tokens whose id is in both, in the first only, in the second only; None without counts.
    """

    both: int
    only_first: int
    only_second: int
    jaccard: float
    tokens: tuple[float, float, float] | None


def overlap(first: DraftVocab, second: DraftVocab, counts: np.ndarray | None = None) -> Overlap:
    """Compare two draft vocabularies of one verifier. counts: [vocab] int64.

    Raises VocabError when they are of two verifiers' vocabularies.
    """
    if first.vocab_size != second.vocab_size:
        raise VocabError(
            f"overlap: expected two draft vocabularies of one verifier, found vocabularies of {first.vocab_size:,} and "
            f"{second.vocab_size:,} ids"
        )
    parts = (first.t2d & second.t2d, first.t2d & ~second.t2d, second.t2d & ~first.t2d)
    sizes = [int(part.sum()) for part in parts]
    tokens = None
    if counts is not None:
        checked = check_counts(counts)
        shares = [float(checked[part].sum() / checked.sum()) for part in parts]
        tokens = (shares[0], shares[1], shares[2])
    return Overlap(sizes[0], sizes[1], sizes[2], sizes[0] / max(sum(sizes), 1), tokens)
