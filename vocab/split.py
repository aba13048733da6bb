"""Which sequences are held out: decided by a hash of the prompt group alone.

Whatever the order of the sequences, whichever others are there and on whichever machine it is asked, the same group
with the same seed falls on the same side, and all sequences of a group fall on it together. A larger share holds out
what a smaller one does, and more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vocab.errors import VocabError


def held_out_mask(groups: Sequence[str] | Sequence[bytes] | np.ndarray, share: float, seed: int) -> NDArray[np.bool_]:
    """True where the sequence's prompt group is held out.

    groups: [N] ids of prompt groups, str or bytes (a str counts as its UTF-8 bytes; trailing NUL bytes, which numpy's
    fixed-width strings cannot hold, do not count). share: of the *groups*, in [0, 1], so that the share of sequences
    or of tokens differs a little from it. seed: any integer of up to 16 bytes. Returns [N] bool.
    Raises VocabError for a share outside [0, 1] or a group that is neither str nor bytes.
    """
    if not 0 <= share <= 1:
        raise VocabError(f"share: expected a number from 0 to 1, found {share}")
    try:
        salt = int(seed).to_bytes(16, "little", signed=True)
    except OverflowError as error:
        raise VocabError(f"seed: expected an integer of at most 16 bytes, found {seed}") from error
    below = round(share * 2**64)
    side_of: dict[bytes, bool] = {}
    mask = np.zeros(len(groups), np.bool_)
    for position, group in enumerate(groups):
        if not isinstance(group, str | bytes):
            raise VocabError(f"groups: expected str or bytes, found {type(group).__name__} at position {position}")
        raw = group.encode("utf-8", "surrogatepass") if isinstance(group, str) else bytes(group)
        raw = raw.rstrip(b"\0")
        side = side_of.get(raw)
        if side is None:
            digest = hashlib.blake2b(raw, digest_size=8, salt=salt, person=b"statehouse-split").digest()
            side = side_of[raw] = int.from_bytes(digest, "little") < below
        mask[position] = side
    return mask
