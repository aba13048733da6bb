"""The draft vocabulary: which token ids of the verifier a drafter can propose, and how its own ids map to them.

The convention is that of SGLang's loaders: `d2t[draft id]` is an *offset*, target id = draft id + d2t[draft id], and
`t2d` is a mask over the verifier's ids. A folder holds it as two files:

    draft_vocab.safetensors   d2t [draft_vocab] int64, t2d [vocab] bool
    draft_vocab.json          format, sizes, hash, provenance
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocab.coverage import check_counts, check_ids, check_size, frequency_order
from vocab.errors import VocabError

TENSORS = "draft_vocab.safetensors"
HEADER = "draft_vocab.json"
_FORMAT = "statehouse-draft-vocab-1"
_FIX = "make the draft vocabulary again from the token counts, or restore both files from where they came"


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """A draft vocabulary. Draft ids are in the order of the target ids they stand for.

    d2t: [draft_vocab] int64 offsets. t2d: [vocab] bool, true for the ids in it. Both are copied and made read-only.
    provenance: anything JSON can hold (counts' hash, policy, ...); it is kept, but no part of the identity.
    Raises VocabError when d2t and t2d do not say the same.
    """

    d2t: NDArray[np.int64]
    t2d: NDArray[np.bool_]
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        d2t, t2d = np.array(self.d2t), np.array(self.t2d)
        if d2t.ndim != 1 or d2t.dtype != np.int64 or d2t.size == 0:
            raise VocabError(f"d2t: expected [draft_vocab] int64, found {d2t.dtype} of shape {list(d2t.shape)}")
        if t2d.ndim != 1 or t2d.dtype != np.bool_ or t2d.size == 0:
            raise VocabError(f"t2d: expected [vocab] bool, found {t2d.dtype} of shape {list(t2d.shape)}")
        if t2d.view(np.uint8).max() > 1:
            raise VocabError("t2d: expected bytes 0 and 1, found others")
        from_mask = np.flatnonzero(t2d)
        if from_mask.size != d2t.size:
            raise VocabError(f"t2d: expected {d2t.size} ids, as d2t has, found {from_mask.size}")
        from_offsets = np.arange(d2t.size) + d2t
        if not np.array_equal(from_offsets, from_mask):
            at = int(np.flatnonzero(from_offsets != from_mask)[0])
            raise VocabError(
                f"d2t: expected draft id {at} to be target id {int(from_mask[at])}, as t2d has it, "
                f"found {int(from_offsets[at])}: d2t holds offsets (target id minus draft id), ascending by target id"
            )
        try:
            provenance = json.loads(json.dumps(dict(self.provenance), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise VocabError(f"provenance: expected what JSON can hold, found {error}") from error
        for array in (d2t, t2d):
            array.flags.writeable = False
        object.__setattr__(self, "d2t", d2t)
        object.__setattr__(self, "t2d", t2d)
        object.__setattr__(self, "provenance", provenance)

    @classmethod
    def from_ids(
        cls, target_ids: Sequence[int] | np.ndarray, vocab_size: int, *, provenance: Mapping[str, Any] | None = None
    ) -> DraftVocab:
        """The draft vocabulary of these target ids, in any order; repeated ones count once.

        Raises VocabError when there are none, or one is outside [0, vocab_size).
        """
        ids = check_ids(target_ids, vocab_size, "target_ids")
        check_size(ids.size, vocab_size)
        t2d = np.zeros(vocab_size, np.bool_)
        t2d[ids] = True
        return cls(ids - np.arange(ids.size), t2d, dict(provenance or {}))

    @classmethod
    def full(cls, vocab_size: int, *, provenance: Mapping[str, Any] | None = None) -> DraftVocab:
        """The verifier's whole vocabulary: all offsets are zero."""
        check_size(vocab_size, vocab_size)
        given = {"policy": "full"} | dict(provenance or {})
        return cls(np.zeros(vocab_size, np.int64), np.ones(vocab_size, np.bool_), given)

    @classmethod
    def from_counts(
        cls,
        counts: np.ndarray,
        size: int,
        *,
        force_ids: Sequence[int] | np.ndarray = (),
        provenance: Mapping[str, Any] | None = None,
    ) -> DraftVocab:
        """The `size` most frequent ids, ties towards the lower id, with `force_ids` in whatever their frequency.

        counts: [vocab] int64. force_ids: such as the special tokens; they take the places of the least frequent.
        What was chosen is added to the provenance: policy, forced, coverage, unseen (ids taken without any count).
        Raises VocabError for counts without loss tokens, a size outside [1, vocab], or more forced ids than places.
        """
        checked = check_counts(counts)
        check_size(size, checked.size)
        forced = check_ids(force_ids, checked.size, "force_ids")
        if forced.size > size:
            raise VocabError(
                f"force_ids: {forced.size} ids do not fit into a draft vocabulary of {size}; make it larger"
            )
        chosen = frequency_order(checked, forced)[:size]
        found = {
            "policy": "frequency",
            "forced": int(forced.size),
            "coverage": float(checked[chosen].sum() / checked.sum()),
            "unseen": int((checked[chosen] == 0).sum()),
        }
        return cls.from_ids(chosen, checked.size, provenance=found | dict(provenance or {}))

    @property
    def size(self) -> int:
        """How many ids the drafter can propose."""
        return int(self.d2t.size)

    @property
    def vocab_size(self) -> int:
        """How many ids the verifier has."""
        return int(self.t2d.size)

    @property
    def target_ids(self) -> NDArray[np.int64]:
        """The verifier's id of each draft id, ascending, [draft_vocab] int64."""
        return np.arange(self.size) + self.d2t

    def draft_ids(self) -> NDArray[np.int64]:
        """The draft id of each of the verifier's ids, -1 for those outside, [vocab] int64."""
        return np.where(self.t2d, np.cumsum(self.t2d) - 1, -1)

    def coverage(self, counts: np.ndarray) -> float:
        """Share of the counted tokens whose id is in the draft vocabulary. counts: [vocab] int64.

        Raises VocabError for counts over another vocabulary, negative or all zero.
        """
        checked = check_counts(counts)
        if checked.size != self.vocab_size:
            raise VocabError(f"counts: expected {self.vocab_size} ids, as the draft vocabulary, found {checked.size}")
        return float(checked[self.t2d].sum() / checked.sum())

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of the mapping alone: size of the verifier's vocabulary and target ids, not the provenance."""
        head = json.dumps([_FORMAT, self.vocab_size, self.size]).encode()
        return hashlib.sha256(head + self.target_ids.astype("<i8").tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        """Equal when they map the same ids of equally large vocabularies; the provenance may differ."""
        return self.hash == other.hash if isinstance(other, DraftVocab) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.hash)

    def to_bytes(self) -> dict[str, bytes]:
        """The content of both files, by file name, for a caller that puts them somewhere itself."""
        header = {
            "format": _FORMAT,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.size,
            "hash": self.hash,
            "provenance": self.provenance,
        }
        tensors = _safetensors().save({"d2t": self.d2t, "t2d": self.t2d})
        return {TENSORS: tensors, HEADER: json.dumps(header, indent=2).encode() + b"\n"}

    @classmethod
    def from_bytes(cls, parts: Mapping[str, bytes], where: str = "") -> DraftVocab:
        """Read what `to_bytes` gave. where: the folder or URI they came from, for messages.

        Raises VocabError that names file, field, what was expected and found: a part is missing, is not what its name
        says, or the two do not belong together.
        """
        prefix = f"{where.rstrip('/')}/" if where else ""
        for name in (TENSORS, HEADER):
            if name not in parts:
                raise VocabError(f"{prefix}{name}: expected this file, found none; {_FIX}")
        header = _header(prefix + HEADER, parts[HEADER])
        tensors = _tensors(prefix + TENSORS, parts[TENSORS])
        for tensor, key in (("d2t", "draft_vocab_size"), ("t2d", "vocab_size")):
            if tensors[tensor].shape != (header[key],):
                raise VocabError(
                    f"{prefix}{TENSORS}: {tensor}: expected shape [{header[key]}] ({key} in {HEADER}), "
                    f"found {list(tensors[tensor].shape)}; {_FIX}"
                )
        try:
            result = cls(tensors["d2t"], tensors["t2d"], header["provenance"])
        except VocabError as error:
            raise VocabError(f"{prefix}{TENSORS}: {error}; {_FIX}") from error
        if result.hash != header["hash"]:
            raise VocabError(
                f"{prefix}{HEADER}: hash: expected {result.hash} (of the ids in {TENSORS}), found {header['hash']}: "
                f"the two files are not of one draft vocabulary; {_FIX}"
            )
        return result

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write both files into `folder`, which is made if need be. Raises VocabError when that is not possible."""
        parts = self.to_bytes()
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for name, data in parts.items():
                part = Path(folder, name + ".part")
                part.write_bytes(data)
                part.replace(Path(folder, name))
        except OSError as error:
            raise VocabError(f"cannot write the draft vocabulary to {folder}: {error.strerror or error}") from error

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> DraftVocab:
        """Read and check what `save` wrote. Raises VocabError as `from_bytes` does, or when it cannot be read."""
        parts = {}
        for name in (TENSORS, HEADER):
            try:
                parts[name] = Path(folder, name).read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise VocabError(f"{Path(folder, name)}: cannot read it: {error.strerror or error}") from error
        return cls.from_bytes(parts, os.fspath(folder))


def _header(name: str, data: bytes) -> dict[str, Any]:
    """The checked fields of draft_vocab.json."""
    try:
        header = json.loads(data)
    except ValueError as error:
        raise VocabError(f"{name}: expected JSON, found {error}; {_FIX}") from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        found = header.get("format") if isinstance(header, dict) else type(header).__name__
        raise VocabError(f"{name}: format: expected {_FORMAT}, found {found}; {_FIX}")
    for key, kind in (("vocab_size", int), ("draft_vocab_size", int), ("hash", str), ("provenance", dict)):
        value = header.get(key)
        if type(value) is not kind:
            raise VocabError(f"{name}: {key}: expected {kind.__name__}, found {value!r}; {_FIX}")
    return header


def _tensors(name: str, data: bytes) -> dict[str, NDArray[Any]]:
    """The tensors of draft_vocab.safetensors, of the right types, and no others."""
    try:
        tensors = _safetensors().load(data)
    except VocabError:
        raise
    except Exception as error:  # the library raises its own error, KeyError, ValueError, ... by what is damaged
        raise VocabError(f"{name}: expected a safetensors file, found {error!r}; {_FIX}") from error
    if sorted(tensors) != ["d2t", "t2d"]:
        raise VocabError(f"{name}: expected tensors ['d2t', 't2d'], found {sorted(tensors)}; {_FIX}")
    for tensor, dtype in (("d2t", np.int64), ("t2d", np.bool_)):
        if tensors[tensor].dtype != dtype:
            raise VocabError(f"{name}: {tensor}: expected {np.dtype(dtype)}, found {tensors[tensor].dtype}; {_FIX}")
    return tensors


def _safetensors() -> Any:
    """The library, imported only where a draft vocabulary is saved or loaded."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise VocabError("safetensors is not installed; pip install 'statehouse[vocab]'") from error
    return safetensors.numpy
