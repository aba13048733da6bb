"""How sure a coverage is: bootstrap over prompt groups.

Tokens of one prompt are alike, so tokens are not the unit that is drawn: groups are. Coverage is a ratio of sums over
groups (covered tokens / tokens), and it is the ratio that is drawn again, with both sums of the same groups.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vocab.errors import VocabError

# Draws of a block of resamples: 64 x groups doubles; at 100,000 groups 51 MB.
_BLOCK = 64


def ratio_interval(
    numerators: np.ndarray, denominators: np.ndarray, *, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Percentile bootstrap interval of sum(numerators) / sum(denominators), groups drawn with replacement.

    numerators: [groups] or [groups, S]; denominators: [groups], not negative. Returns (low, high), each [S] (or [1]).
    Groups with nothing in them carry no weight and are left out. With fewer than two groups there is nothing to draw
    from: both ends are NaN. Raises VocabError for shapes that do not fit or a level outside (0, 1).
    """
    if not 0 < level < 1 or resamples < 1:
        raise VocabError(f"bootstrap: expected a level in (0, 1) and resamples, found {level} and {resamples}")
    below = np.asarray(denominators, float)
    above = np.asarray(numerators, float)
    above = above[:, None] if above.ndim == 1 else above
    if below.ndim != 1 or above.ndim != 2 or above.shape[0] != below.size:
        raise VocabError(
            f"bootstrap: expected [groups, S] and [groups], found {list(above.shape)} and {list(below.shape)}"
        )
    kept = below > 0
    above, below = above[kept], below[kept]
    if below.size < 2:
        return np.full(above.shape[1], np.nan), np.full(above.shape[1], np.nan)
    random = np.random.default_rng(seed)
    drawn = []
    for start in range(0, resamples, _BLOCK):
        rows = min(_BLOCK, resamples - start)
        picks = random.integers(0, below.size, (rows, below.size))
        offsets = np.arange(rows)[:, None] * below.size
        weights = np.bincount((picks + offsets).reshape(-1), minlength=rows * below.size).reshape(rows, below.size)
        total = weights @ below
        drawn.append((weights @ above) / np.where(total > 0, total, np.nan)[:, None])
    tail = (1 - level) / 2
    low, high = np.nanquantile(np.concatenate(drawn), [tail, 1 - tail], axis=0)
    return low, high
