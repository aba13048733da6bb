"""How much of the text a draft vocabulary of each size covers, on the tokens it was chosen on and on held-out ones.

The order in which ids enter a draft vocabulary (forced ids, then frequency, ties towards the lower id) is defined here
once, in `frequency_order`; the curves and `vocab.mapping.DraftVocab` both follow it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vocab.counts import TokenCounts
from vocab.errors import VocabError

if TYPE_CHECKING:
    from rich.console import Console

_SIZES = (1024, 2048, 4096, 8192, 16384, 32000, 32768, 49152, 65536, 131072)
_SOURCES_A_TABLE = 5


def default_sizes(vocab_size: int) -> list[int]:
    """The usual draft-vocabulary sizes that are smaller than the vocabulary, and the whole vocabulary, ascending."""
    if vocab_size < 1:
        raise VocabError(f"vocab_size: expected at least 1, found {vocab_size}")
    return [size for size in _SIZES if size < vocab_size] + [vocab_size]


def check_size(size: int, vocab_size: int) -> int:
    """`size` itself when it is a draft-vocabulary size. Raises VocabError when not in [1, vocab_size]."""
    if not 1 <= size <= vocab_size:
        raise VocabError(f"draft vocabulary size: expected 1 to {vocab_size} (the vocabulary), found {size}")
    return int(size)


def check_counts(counts: np.ndarray) -> NDArray[np.int64]:
    """`counts` as [vocab] int64. Raises VocabError when it is not [vocab] integers, negative anywhere or all zero."""
    array = np.asarray(counts)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise VocabError(f"counts: expected [vocab] integers, found {array.dtype} of shape {list(array.shape)}")
    if int(array.min()) < 0:
        token = int(np.flatnonzero(array < 0)[0])
        raise VocabError(f"counts: expected none below zero, found {int(array[token])} for token id {token}")
    if not array.any():
        raise VocabError("counts: no loss tokens were counted; are the loss masks all false?")
    return array.astype(np.int64)


def check_ids(ids: Sequence[int] | np.ndarray, vocab_size: int, what: str) -> NDArray[np.int64]:
    """Distinct `ids`, ascending, [n] int64. Raises VocabError that names the first id outside [0, vocab_size)."""
    array = np.asarray(ids)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise VocabError(f"{what}: expected a list of integers, found {array.dtype} of shape {list(array.shape)}")
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if outside.size:
        raise VocabError(f"{what}: id {int(array[outside[0]])} is outside the vocabulary of {vocab_size} ids")
    return np.unique(array.astype(np.int64))


def frequency_order(counts: np.ndarray, force_ids: Sequence[int] | np.ndarray = ()) -> NDArray[np.int64]:
    """All token ids in the order in which they enter a draft vocabulary.

    counts: [vocab] int64. force_ids come first, ascending; then falling count, ties towards the lower id.
    Returns [vocab] int64, a permutation. Raises VocabError for unusable counts or ids.
    """
    checked = check_counts(counts)
    forced = check_ids(force_ids, checked.size, "force_ids")
    order = np.argsort(-checked, kind="stable")
    return np.concatenate([forced, order[~np.isin(order, forced)]]) if forced.size else order


def coverage_curve(counts: np.ndarray, sizes: Sequence[int]) -> NDArray[np.float64]:
    """Share of tokens that the `k` most frequent ids cover, for each k in `sizes`.

    counts: [vocab] int64, occurrences of each verifier token id.
    Returns [len(sizes)] float64 in [0, 1]. Ties are broken towards the lower id.
    Raises ValueError (VocabError) when counts is empty, negative or all zero, or a size is not in [1, vocab].
    """
    return held_out_coverage(counts, counts, sizes)


def held_out_coverage(
    counts_chosen_on: np.ndarray,
    counts_held_out: np.ndarray,
    sizes: Sequence[int],
    *,
    force_ids: Sequence[int] | np.ndarray = (),
) -> NDArray[np.float64]:
    """Share of held-out tokens covered by the first k ids of `frequency_order(counts_chosen_on, force_ids)`.

    counts_chosen_on: [vocab] int64. counts_held_out: [vocab] int64, or [sources, vocab] for one curve a source.
    Returns [len(sizes)] or [sources, len(sizes)] float64 in [0, 1]; a source without held-out tokens is NaN.
    Raises VocabError for unusable counts (a [vocab] of zeros included), ids or sizes.
    """
    order = frequency_order(counts_chosen_on, force_ids)
    vocab_size = order.size
    last = np.array([check_size(size, vocab_size) for size in sizes], np.int64) - 1
    held_out = np.asarray(counts_held_out)
    if held_out.ndim not in (1, 2) or held_out.shape[-1] != vocab_size:
        raise VocabError(
            f"counts_held_out: expected [{vocab_size}] or [sources, {vocab_size}], as counts_chosen_on, "
            f"found {list(held_out.shape)}"
        )
    rows = (
        [check_counts(held_out)]
        if held_out.ndim == 1
        else [check_counts(row) if row.any() else row for row in held_out]
    )
    curves = np.full((len(rows), last.size), np.nan)
    for curve, row in zip(curves, rows, strict=True):
        covered = np.cumsum(row[order])
        if covered[-1]:
            curve[:] = covered[last] / covered[-1]
    return curves[0] if held_out.ndim == 1 else curves


def unseen(counts: np.ndarray) -> NDArray[np.int64]:
    """Token ids that were never counted, ascending, [n] int64. Raises VocabError for unusable counts."""
    return np.flatnonzero(check_counts(counts) == 0)


@dataclass(frozen=True)
class CoverageRow:
    """One draft-vocabulary size. Shares are in [0, 1]; None where nothing was counted or held out.

    coverage, per_source: on the tokens the ids were chosen on. held_out, held_out_per_source: on the others.
    lm_head_parameters: size x hidden size. share_of_full: of the lm_head over the whole vocabulary.
    """

    size: int
    coverage: float
    held_out: float | None
    per_source: dict[str, float | None]
    held_out_per_source: dict[str, float | None]
    lm_head_parameters: int | None
    share_of_full: float


@dataclass(frozen=True)
class CoverageTable:
    """Coverage and size of the lm_head for several draft-vocabulary sizes, ascending."""

    vocab_size: int
    hidden_size: int | None
    tokens: int
    held_out_tokens: int
    unseen_ids: int
    rows: tuple[CoverageRow, ...]

    @classmethod
    def measure(
        cls,
        chosen_on: TokenCounts,
        held_out: TokenCounts | None = None,
        *,
        sizes: Sequence[int] | None = None,
        hidden_size: int | None = None,
        force_ids: Sequence[int] | np.ndarray = (),
    ) -> CoverageTable:
        """Choose ids on the sum over the sources of `chosen_on`, measure them there and on `held_out`.

        sizes: `default_sizes` when None. hidden_size: of the verifier, for the lm_head's parameters.
        Raises VocabError when the vocabularies differ, nothing was counted, or a size does not fit.
        """
        vocab_size = chosen_on.vocab_size
        if held_out is not None and held_out.vocab_size != vocab_size:
            raise VocabError(f"held_out: expected counts over {vocab_size} ids, found {held_out.vocab_size}")
        if hidden_size is not None and hidden_size < 1:
            raise VocabError(f"hidden_size: expected at least 1, found {hidden_size}")
        wanted = sorted({check_size(k, vocab_size) for k in (default_sizes(vocab_size) if sizes is None else sizes)})
        total = chosen_on.total()
        curves: dict[str, tuple[tuple[str, ...], NDArray[np.float64]]] = {}
        for name, part in (("chosen", chosen_on), ("held out", held_out)):
            if part is None or (part is held_out and part.tokens == 0):
                continue
            stacked = np.vstack([part.total()[None], part.counts])
            curves[name] = (part.sources, held_out_coverage(total, stacked, wanted, force_ids=force_ids))
        rows = []
        for at, size in enumerate(wanted):
            coverage, per_source = _column(curves["chosen"], at)
            held: float | None = None
            held_per_source: dict[str, float | None] = {}
            if "held out" in curves:
                held, held_per_source = _column(curves["held out"], at)
            rows.append(
                CoverageRow(
                    size=size,
                    coverage=coverage,
                    held_out=held,
                    per_source=per_source,
                    held_out_per_source=held_per_source,
                    lm_head_parameters=None if hidden_size is None else lm_head_parameters(size, hidden_size),
                    share_of_full=size / vocab_size,
                )
            )
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            tokens=chosen_on.tokens,
            held_out_tokens=0 if held_out is None else held_out.tokens,
            unseen_ids=int(unseen(total).size),
            rows=tuple(rows),
        )

    def to_dict(self) -> dict[str, Any]:
        """The same numbers as plain dicts and lists, ready for JSON."""
        return asdict(self) | {"rows": [asdict(row) for row in self.rows]}

    def render(self, console: Console) -> None:
        """Print the table, and one table of coverage by source for every five sources."""
        from rich.markup import escape
        from rich.table import Table

        title = f"{self.tokens:,} tokens over {self.vocab_size:,} ids, of which {self.unseen_ids:,} never seen"
        table = Table(title=title)
        for heading in ("size", "coverage", "held out", "lm_head parameters", "of full"):
            table.add_column(heading, justify="right")
        for row in self.rows:
            parameters = "-" if row.lm_head_parameters is None else f"{row.lm_head_parameters:,}"
            shares = (percent(row.coverage), percent(row.held_out))
            table.add_row(f"{row.size:,}", *shares, parameters, percent(row.share_of_full, 1))
        console.print(table)
        held = self.held_out_tokens > 0
        names = list(self.rows[0].held_out_per_source if held else self.rows[0].per_source) if self.rows else []
        for start in range(0, len(names) if len(names) > 1 else 0, _SOURCES_A_TABLE):
            block = names[start : start + _SOURCES_A_TABLE]
            table = Table(title="held-out coverage by source" if held else "coverage by source")
            for heading in ("size", *block):
                table.add_column(escape(heading), justify="right")
            for row in self.rows:
                shares_by_source = row.held_out_per_source if held else row.per_source
                table.add_row(f"{row.size:,}", *(percent(shares_by_source[name]) for name in block))
            console.print(table)


def lm_head_parameters(size: int, hidden_size: int) -> int:
    """Parameters of an lm_head over `size` ids: one row of `hidden_size` weights for each, no bias."""
    return int(size) * int(hidden_size)


def percent(share: float | None, decimals: int = 2) -> str:
    """A share as text, '-' for None. Rounded down, so that 100.00 % means all of it."""
    if share is None:
        return "-"
    scale = 10**decimals
    return f"{math.floor(share * 100 * scale + 1e-9) / scale:.{decimals}f} %"


def _column(curves: tuple[tuple[str, ...], NDArray[np.float64]], at: int) -> tuple[float, dict[str, float | None]]:
    """Column `at` of curves [1 + sources, sizes]: the share over all, and those by source with None for NaN."""
    sources, shares = curves
    by_source = [None if math.isnan(share) else float(share) for share in shares[1:, at]]
    return float(shares[0, at]), dict(zip(sources, by_source, strict=True))
