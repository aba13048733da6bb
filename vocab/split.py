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


def fold_of(groups: Sequence[str] | Sequence[bytes] | np.ndarray, folds: int, seed: int) -> NDArray[np.int64]:
    """The fold, 0 to folds - 1, of each sequence's prompt group: for cross-validation among those not held out.

    groups: [N] as for `held_out_mask`. Returns [N] int64. It is independent of the hold-out of the same seed.
    Raises VocabError for fewer than two folds or a group that is neither str nor bytes.
    """
    if folds < 2:
        raise VocabError(f"folds: expected at least 2, found {folds}")
    return (_hashes(groups, seed, b"statehouse-folds") >> np.uint64(11)).astype(np.int64) % folds


def prefix_groups(token_ids: np.ndarray, loss_mask: np.ndarray, lengths: np.ndarray) -> list[str]:
    """Groups of sequences whose tokens before the first loss-bearing one (the prompt) are the same, by their hash.

    For data that does not name its prompt groups. token_ids: [N] integers. loss_mask: [N] bool. lengths: [S]. A sequence
    without loss tokens counts whole. Returns S names.
    """
    ids, mask = np.asarray(token_ids), np.asarray(loss_mask, np.bool_)
    names, end = [], 0
    for length in np.asarray(lengths).tolist():
        start, end = end, end + length
        first = int(mask[start:end].argmax()) if mask[start:end].any() else length
        names.append(hashlib.blake2b(ids[start : start + first].astype("<i8").tobytes(), digest_size=8).hexdigest())
    return names


def held_out_mask(groups: Sequence[str] | Sequence[bytes] | np.ndarray, share: float, seed: int) -> NDArray[np.bool_]:
    """True where the sequence's prompt group is held out.

    groups: [N] ids of prompt groups, str or bytes (a str counts as its UTF-8 bytes; trailing NUL bytes, which numpy's
    fixed-width strings cannot hold, do not count). share: of the *groups*, in [0, 1], so that the share of sequences
    or of tokens differs a little from it. seed: any integer of up to 16 bytes. Returns [N] bool.
    Raises VocabError for a share outside [0, 1] or a group that is neither str nor bytes.
    """
    if not 0 <= share <= 1:
        raise VocabError(f"share: expected a number from 0 to 1, found {share}")
    below = round(share * 2**64)
    hashes = _hashes(groups, seed, b"statehouse-split")
    return np.ones(len(groups), np.bool_) if below >= 2**64 else hashes < np.uint64(below)


def _hashes(groups: Sequence[str] | Sequence[bytes] | np.ndarray, seed: int, purpose: bytes) -> NDArray[np.uint64]:
    """64 bits of each group, [N] uint64. purpose: 16 bytes, so that two uses of one seed are independent."""
    try:
        salt = int(seed).to_bytes(16, "little", signed=True)
    except OverflowError as error:
        raise VocabError(f"seed: expected an integer of at most 16 bytes, found {seed}") from error
    # About a microsecond a group, so each distinct one is hashed once, and nothing else is done a group in Python.
    distinct = dict.fromkeys(groups.tolist() if isinstance(groups, np.ndarray) else groups)
    digests = []
    for group in distinct:
        if not isinstance(group, str | bytes):
            raise VocabError(
                f"groups: expected str or bytes, found {type(group).__name__} at position {list(groups).index(group)}"
            )
        raw = group.encode("utf-8", "surrogatepass") if isinstance(group, str) else group
        digests.append(hashlib.blake2b(raw.rstrip(b"\0"), digest_size=8, salt=salt, person=purpose).digest())
    values = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
    if len(distinct) == len(groups):
        return values
    place = dict(zip(distinct, range(len(distinct)), strict=True))
    return values[np.fromiter(map(place.__getitem__, groups), np.int64, len(groups))]
