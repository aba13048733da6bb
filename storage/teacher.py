"""The teacher summary: what the verifier would have said after each token, in 8 bytes a token.

`argmax` is the likeliest next id and `logsumexp` the norm of the logits over the whole vocabulary, so that a probability
is exp(logit - logsumexp) and a drafter needs the logits of its own rows only. `topk(k)` adds the k likeliest ids and their
logits. Row t belongs to token t: it speaks of token t + 1.

Each is a plain Zarr array over the token axis, one chunk (and so one object) a shard, cut at the shard's length and filled
behind its last row. They are PUT, create-only, before the shard that names them in its receipt, by size and sha256: where
the shard is, they are. What no receipt names yet, a cut-off writer left behind; a later one adopts it, or replaces it if
it is damaged or lacks rows that are known now.

    teacher/argmax       [N] int32      fill -1
    teacher/logsumexp    [N] float32    fill NaN
    teacher/topk_ids     [N, k] int32   fill -1     by falling logit, equal ones by id
    teacher/topk_logits  [N, k] float32 fill NaN
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock

import numpy as np
from pydantic import BaseModel, ConfigDict

from storage.contract import sha256_json
from storage.errors import ShardCorrupt, StatehouseError
from storage.objects import ObjectMissing, ObjectStore
from storage.zarr_array import array_metadata, decode_chunk, encode_chunk, group_metadata

NONE = "none"
FOLDER = "teacher/"
# Above, the logits of a token weigh more than its states.
MOST_TOPK = 1024
# Arrays of shards that are kept: 64 KiB each at S = 8,192 without top-k, 34 MB with 64 of them at S = 65,536.
_KEPT_BYTES = 128 << 20


class TeacherObject(BaseModel):
    """What a receipt says of one teacher object of its shard."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    bytes: int
    sha256: str


@dataclass(frozen=True, eq=False)
class TeacherSummary:
    """Rows of T tokens. argmax: [T] int32. logsumexp: [T] float32. topk_ids: [T, k] int32, topk_logits: [T, k] float32.

    Tokens of a quarantined sequence have id -1 and NaN.
    """

    argmax: np.ndarray
    logsumexp: np.ndarray
    topk_ids: np.ndarray | None = None
    topk_logits: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.argmax)

    def arrays(self) -> dict[str, np.ndarray]:
        named = {name: getattr(self, name) for name in DTYPES}
        return {name: values for name, values in named.items() if values is not None}

    def __getitem__(self, rows: slice) -> TeacherSummary:
        return TeacherSummary(**{name: values[rows] for name, values in self.arrays().items()})


DTYPES: dict[str, tuple[np.dtype, int | str]] = {
    "argmax": (np.dtype("int32"), -1),
    "logsumexp": (np.dtype("float32"), "NaN"),
    "topk_ids": (np.dtype("int32"), -1),
    "topk_logits": (np.dtype("float32"), "NaN"),
}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def parse_teacher(text: str) -> str:
    """`none`, `argmax` or `topk(k)` in its one spelling. Raises StatehouseError."""
    found = re.fullmatch(r"(none|argmax)|topk\(\s*0*([1-9]\d*)\s*\)", text.strip())
    if not found or (found[2] and int(found[2]) > MOST_TOPK):
        raise StatehouseError(f"teacher {text!r}: expected none, argmax or topk(k) with k = 1 to {MOST_TOPK}")
    return found[1] or f"topk({int(found[2])})"


def topk_of(teacher: str) -> int:
    """k of `topk(k)`; 0 for the others."""
    return int(teacher[5:-1]) if teacher.startswith("topk(") else 0


def bytes_per_token(teacher: str) -> int:
    return 0 if teacher == NONE else 8 + 8 * topk_of(teacher)


def names_of(teacher: str) -> list[str]:
    """The arrays of a kind of summary, in the order in which they are written."""
    if teacher == NONE:
        return []
    return ["argmax", "logsumexp"] + (["topk_ids", "topk_logits"] if topk_of(teacher) else [])


def _shape(name: str, teacher: str, tokens: int) -> list[int]:
    return [tokens, topk_of(teacher)] if name.startswith("topk") else [tokens]


def teacher_key(name: str, shard: int) -> str:
    return f"{FOLDER}{name}/c/{shard}" + ("/0" if name.startswith("topk") else "")


def teacher_keys(teacher: str, shard: int) -> list[str]:
    return [teacher_key(name, shard) for name in names_of(teacher)]


def teacher_metadata(teacher: str, tokens: int, shard_tokens: int) -> Iterator[tuple[str, bytes]]:
    """(key, zarr.json) of the group and of each array. tokens: N. shard_tokens: S, the length of a chunk."""
    if teacher != NONE:
        yield f"{FOLDER}zarr.json", group_metadata({})
    for name in names_of(teacher):
        dtype, fill = DTYPES[name]
        dimensions = ["token", "rank"] if name.startswith("topk") else ["token"]
        shapes = _shape(name, teacher, tokens), _shape(name, teacher, shard_tokens)
        yield f"{FOLDER}{name}/zarr.json", array_metadata(*shapes, dtype.name, fill, dimensions)


def blank(teacher: str, tokens: int) -> TeacherSummary | None:
    """Rows that say nothing: what a quarantined sequence has."""
    if teacher == NONE:
        return None
    return TeacherSummary(
        **{
            name: np.full(_shape(name, teacher, tokens), float("nan") if fill == "NaN" else fill, dtype)
            for name, (dtype, fill) in DTYPES.items()
            if name in names_of(teacher)
        }
    )


def join(parts: list[TeacherSummary]) -> TeacherSummary:
    return TeacherSummary(
        **{name: np.concatenate([part.arrays()[name] for part in parts]) for name in parts[0].arrays()}
    )


def check_summary(teacher: str, summary: TeacherSummary | None, rows: int) -> None:
    """Raises ValueError unless a summary is of this kind and has `rows` rows."""
    expected = {name: (_shape(name, teacher, rows), DTYPES[name][0]) for name in names_of(teacher)}
    arrays = {} if summary is None else summary.arrays()
    found = {name: (list(values.shape), values.dtype) for name, values in arrays.items()}
    if found != expected:
        raise ValueError(f"a teacher summary of kind {teacher} for {rows} tokens must be {expected}, found {found}")


def objects_digest(objects: Mapping[str, TeacherObject]) -> str:
    """One sha256 for all teacher objects of a shard: what the fingerprint of the dataset covers."""
    return sha256_json({key: one.sha256 for key, one in objects.items()})


def write_teacher(
    store: ObjectStore,
    teacher: str,
    shard: int,
    summary: TeacherSummary,
    shard_tokens: int,
    shard_is_there: Callable[[], bool],
) -> tuple[dict[str, TeacherObject], dict[str, bytes]]:
    """PUTs the rows of one shard; those that are there already are adopted. Returns what its receipt must say, and bytes.

    What cannot be adopted is replaced, unless the shard is there by now: its receipt names them. Raises StoreError.
    """
    objects, stored = {}, {}
    for name, values in summary.arrays().items():
        key = teacher_key(name, shard)
        whole = blank(teacher, shard_tokens)
        assert whole is not None
        padded = whole.arrays()[name]
        padded[: len(values)] = values
        data = encode_chunk(padded)
        if not store.create(key, data):
            there = store.get(key)
            if _adoptable(there, values, padded.shape) or shard_is_there():
                data = there
            else:
                store.put(key, data)
        objects[key], stored[key] = TeacherObject(bytes=len(data), sha256=digest(data)), data
    return objects, stored


def restore_teacher(store: ObjectStore, objects: Mapping[str, TeacherObject], stored: Mapping[str, bytes]) -> None:
    """Puts back what another writer replaced before the shard that names these objects was there. Raises StoreError."""
    for key, named in objects.items():
        try:
            same = digest(store.get(key)) == named.sha256
        except ObjectMissing:
            same = False
        if not same:
            store.put(key, stored[key])


def _adoptable(data: bytes, values: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether an object holds a number wherever we have one, and much the same ones: another machine's differ in the last
    bits, and now and then in a likeliest id, while another shard's agree nowhere.
    """
    try:
        there = decode_chunk(data, values.dtype, shape)
    except ValueError:
        return False
    known, rows = _known(values), len(values)
    if not (_known(there)[:rows] >= known).all() or _known(there)[rows:].any():
        return False
    ours, theirs, both = (one if one.ndim == 1 else one[:, 0] for one in (values, there[:rows], known))
    ours, theirs = ours[both], theirs[both]
    near = ours == theirs if ours.dtype.kind == "i" else np.abs(ours - theirs) <= 1
    return not len(near) or bool(near.mean() > 0.5)


def _known(values: np.ndarray) -> np.ndarray:
    known: np.ndarray = values >= 0 if values.dtype.kind == "i" else np.isfinite(values)
    return known


def wrong_object(store: ObjectStore, key: str, expected: TeacherObject, size: int | None, full: bool) -> str | None:
    """What is wrong with a stored teacher object; None when it is whole. size: as listed, None if it was not."""
    if size is None and not store.exists(key):
        return "missing"
    if size is not None and size != expected.bytes:
        return f"{size:,} bytes, its shard's receipt says {expected.bytes:,}"
    if not full:
        return None
    try:
        found = digest(store.get(key))
    except ObjectMissing:
        return "missing"
    return None if found == expected.sha256 else f"sha256 {found[:12]}, its shard's receipt says {expected.sha256[:12]}"


class TeacherReader:
    """Reads summaries by token range, whole shards at a time, checked against the receipts. Safe between threads."""

    def __init__(
        self, store: ObjectStore, teacher: str, shard_tokens: int, receipt: Callable[[int], Mapping[str, TeacherObject]]
    ) -> None:
        self.store, self.teacher, self.shard_tokens, self._receipt = store, teacher, shard_tokens, receipt
        self._kept: OrderedDict[int, TeacherSummary] = OrderedDict()
        self._most = max(1, _KEPT_BYTES // max(1, bytes_per_token(teacher) * shard_tokens))
        self._lock = Lock()

    def read(self, start: int, length: int) -> TeacherSummary | None:
        """Rows [start, start + length) of the token axis, or None for `none`. Raises ShardCorrupt, StoreError."""
        if self.teacher == NONE:
            return None
        size, parts = self.shard_tokens, []
        for shard in range(start // size, (start + length - 1) // size + 1):
            low = shard * size
            parts.append(self.shard(shard)[max(0, start - low) : start + length - low])
        return join(parts)  # a copy: a view would keep a whole shard alive

    def shard(self, shard: int) -> TeacherSummary:
        """All S rows of one shard, fill behind its last token."""
        with self._lock:
            if shard in self._kept:
                self._kept.move_to_end(shard)
                return self._kept[shard]
        named = self._receipt(shard)
        arrays = {name: self._array(name, shard, named) for name in names_of(self.teacher)}
        summary = TeacherSummary(**arrays)
        with self._lock:
            self._kept[shard] = summary
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return summary

    def _array(self, name: str, shard: int, named: Mapping[str, TeacherObject]) -> np.ndarray:
        key = teacher_key(name, shard)
        where = f"{self.store.uri}/{key}"
        fix = f"make it again with `python -m ray_jobs.extract RECIPE --repair --shards {shard}`"
        data = b""
        for _ in range(2):  # what arrives damaged is fetched once more
            try:
                data = self.store.get(key)
            except ObjectMissing:
                raise ShardCorrupt(f"{where}: missing; {fix}") from None
            if key in named and digest(data) == named[key].sha256:
                return decode_chunk(data, DTYPES[name][0], _shape(name, self.teacher, self.shard_tokens))
        raise ShardCorrupt(f"{where}: {len(data):,} bytes that are not what the receipt of shard {shard} names; {fix}")
