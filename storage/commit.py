"""The first act: a plan is committed by one create-only PUT of plan.json, and the objects it names follow.

Two planners may race: the loser with an equal plan completes the missing objects, another plan is a PlanConflict.
Nothing is ever changed afterwards, so there is no lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from storage import layout
from storage.codecs import codec_by_name
from storage.contract import Contract, canonical_json, sha256_json
from storage.errors import DatasetMissing, PlanConflict, ShardCorrupt, StatehouseError
from storage.objects import ObjectMissing, ObjectStore
from storage.plan import PLAN_SCHEMA, Geometry, Plan
from storage.teacher import NONE
from storage.windowed import in_order
from storage.zarr_array import decode_chunk, encode_chunk

if TYPE_CHECKING:
    from storage.spool import SpooledSequences

Document = TypeVar("Document", bound=BaseModel)
# The key of a document that holds the sha256 over all the others, as canonical JSON.
SIGNATURE = "document_sha256"
# Objects of a plan that are PUT at once: 1.7 billion tokens are 3,244 of about 2 MB.
_PUTS = 8


class ObjectDigest(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    bytes: int
    sha256: str


class PlanDocument(BaseModel):
    """plan.json. Keys of a later minor version are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: str
    format_version: str
    plan_hash: str
    contract: Contract
    codec: str
    geometry: Geometry
    sequences: int
    tokens: int
    loss_tokens: int
    teacher: str = NONE
    objects: dict[str, ObjectDigest]
    written_by: dict[str, str]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def plan_document(plan: Plan, objects: dict[str, ObjectDigest]) -> PlanDocument:
    """plan.json of a plan. objects: what is written at plan time beside it."""
    return PlanDocument(
        format=layout.FORMAT,
        format_version=layout.FORMAT_VERSION,
        plan_hash=plan.hash,
        contract=plan.contract,
        codec=plan.codec,
        geometry=plan.geometry,
        sequences=len(plan.table),
        tokens=plan.tokens,
        loss_tokens=plan.loss_tokens,
        teacher=plan.teacher,
        objects=objects,
        written_by=package_versions("statehouse", "pyarrow", "numpy"),
    )


def package_versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def check_format(document: Any, where: str) -> None:
    """Raises StatehouseError when a JSON document is not of this format or of a newer major version."""
    if not isinstance(document, dict) or document.get("format") != layout.FORMAT:
        raise ShardCorrupt(f"{where}: not a Statehouse document; restore it from a copy or choose another dataset.uri")
    major = str(document.get("format_version", "")).split(".")[0]
    if major != layout.FORMAT_VERSION.split(".")[0]:
        raise StatehouseError(
            f"{where}: format version {document.get('format_version')!r}, this Statehouse reads "
            f"{layout.FORMAT_VERSION}; install a newer Statehouse"
        )


def signed_json(model: BaseModel) -> bytes:
    """A JSON document of ours whose key `document_sha256` covers all its other keys, later ones included."""
    document = model.model_dump(mode="json")
    return canonical_json({**document, SIGNATURE: sha256_json(document)}) + b"\n"


def load_json(store: ObjectStore, key: str) -> Any:
    """Raises ObjectMissing, or ShardCorrupt when it is no JSON of ours or not as it was written."""
    where = f"{store.uri}/{key}"
    try:
        document = json.loads(store.get(key))
        check_format(document, where)
        signature = document.pop(SIGNATURE, None)
        changed = signature is not None and signature != sha256_json(document)
    except (ValueError, RecursionError):
        raise ShardCorrupt(f"{where}: damaged (not JSON); restore it with `{restore_command(store.uri)}`") from None
    if changed:
        raise ShardCorrupt(
            f"{where}: changed since it was written (its {SIGNATURE} is {str(signature)[:12]}, its keys make "
            f"{sha256_json(document)[:12]}); restore it with `{restore_command(store.uri)}`"
        )
    return document


def restore_command(uri: str) -> str:
    """What brings a damaged object of a sealed dataset back when another copy of the dataset exists."""
    return f"statehouse repair {uri} --from COPY_URI"


def load_document(store: ObjectStore, key: str, model: type[Document]) -> Document:
    """A JSON document of ours as its model. Raises ObjectMissing, or ShardCorrupt naming the field that is wrong."""
    try:
        return model.model_validate(load_json(store, key))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ShardCorrupt(
            f"{store.uri}/{key}: field {field}: {first['msg']}; restore it with `{restore_command(store.uri)}`"
        ) from None


def load_plan_document(store: ObjectStore) -> PlanDocument:
    """Raises DatasetMissing when nothing is planned here, ShardCorrupt when plan.json is damaged."""
    try:
        return load_document(store, layout.PLAN, PlanDocument)
    except ObjectMissing:
        raise DatasetMissing(
            f"{store.uri}: there is no dataset here (no {layout.PLAN}); check the URI or make one with "
            "`python -m ray_jobs.extract RECIPE`"
        ) from None


def load_plan(store: ObjectStore, document: PlanDocument | None = None) -> Plan:
    """The plan as it was committed. Raises ShardCorrupt when sequences.parquet does not match plan.json."""
    document = document or load_plan_document(store)
    data = get_checked(store, layout.SEQUENCES, document)
    table = pq.read_table(pa.BufferReader(data)).cast(PLAN_SCHEMA)
    return Plan(document.contract, document.codec, document.geometry, table, document.teacher)


def get_checked(store: ObjectStore, key: str, document: PlanDocument) -> bytes:
    """An object written at plan time. Raises ShardCorrupt when it is missing or its digest differs."""
    try:
        data = store.get(key)
    except ObjectMissing:
        raise ShardCorrupt(f"{store.uri}/{key}: missing; run the extract job again to complete the plan") from None
    if digest(data) != document.objects[key].sha256:
        raise ShardCorrupt(
            f"{store.uri}/{key}: sha256 {digest(data)[:12]}..., plan.json says {document.objects[key].sha256[:12]}...; "
            f"write it again with `python -m ray_jobs.extract RECIPE --repair`, or `{restore_command(store.uri)}`"
        )
    return data


def publish_plan(store: ObjectStore, plan: Plan, sequences: pa.Table | SpooledSequences) -> bool:
    """Commits the plan, or completes an equal one that is already there. True when this call committed it.

    Objects are made one after the other for their digests, and again for the PUT (or kept on disk meanwhile, where the
    sequences are), so that they never lie in memory together. Raises PlanConflict when another plan holds the URI.
    """
    with _Objects(plan, sequences) as made:
        document = plan_document(plan, made.digests)
        committed = store.create(layout.PLAN, signed_json(document))
        if not committed:
            found = load_plan_document(store)
            if found.plan_hash != plan.hash:
                raise PlanConflict(_conflict(store, found, plan))
            document = found
        present = store.sizes()

        def put(one: tuple[str, bytes]) -> None:
            key, data = one
            expected = document.objects.get(key)
            if expected is None or expected.sha256 != digest(data):
                raise PlanConflict(
                    f"{store.uri}/{key}: the plan was committed with {document.written_by}, which writes this object "
                    "differently; complete it with those versions, or delete the folder if no shard is written yet"
                )
            if not store.create(key, data):
                get_checked(store, key, document)

        def there(key: str) -> bool:
            return key in document.objects and present.get(key) == document.objects[key].bytes

        for _ in in_order(put, made.again({key for key in made.digests if not there(key)}), _PUTS):
            pass
    return committed


class _Objects:
    """The objects of a plan beside plan.json: their digests, and their bytes once more."""

    def __init__(self, plan: Plan, sequences: pa.Table | SpooledSequences) -> None:
        self._plan, self._sequences = plan, sequences
        self._scratch = None if isinstance(sequences, pa.Table) else sequences.spool.scratch()
        self._at: dict[str, int] = {}
        self.digests: dict[str, ObjectDigest] = {}

    def __enter__(self) -> _Objects:
        try:
            for key, data in layout.plan_objects(self._plan, self._sequences):
                self.digests[key] = ObjectDigest(bytes=len(data), sha256=digest(data))
                if self._scratch is not None and not isinstance(self._sequences, pa.Table):
                    self._at[key] = self._scratch.tell()
                    with self._sequences.spool.writing():
                        self._scratch.write(data)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._scratch is not None:
            with contextlib.suppress(OSError):  # it writes what is left, and the disk may be full
                self._scratch.close()

    def again(self, keys: set[str]) -> Iterator[tuple[str, bytes]]:
        """Those of `keys`, one at a time."""
        if self._scratch is None:
            if keys:
                yield from (one for one in layout.plan_objects(self._plan, self._sequences) if one[0] in keys)
            return
        for key in self.digests:
            if key in keys:
                self._scratch.seek(self._at[key])
                yield key, self._scratch.read(self.digests[key].bytes)


def _conflict(store: ObjectStore, found: PlanDocument, plan: Plan) -> str:
    differing = found.contract.differences(plan.contract)
    if found.codec != plan.codec:
        differing.append(f"codec: {found.codec} != {plan.codec}")
    if found.teacher != plan.teacher:
        differing.append(f"extraction.teacher: {found.teacher} != {plan.teacher}")
    if found.geometry != plan.geometry:
        differing.append(f"geometry: {found.geometry} != {plan.geometry}")
    if found.sequences != len(plan.table) or found.tokens != plan.tokens:
        differing.append(
            f"{found.sequences:,} sequences, {found.tokens:,} tokens != {len(plan.table):,}, {plan.tokens:,}"
        )
    return (
        f"{store.uri} already holds another plan ({found.plan_hash[:12]}, this recipe makes {plan.hash[:12]}): "
        f"{'; '.join(differing) or 'other sequences'}; choose another dataset.uri, or delete this one if nobody needs it"
    )


def publish_offset(store: ObjectStore, offset_LH: np.ndarray) -> np.ndarray:
    """Stores the exponent offsets unless another worker was first; returns those that count."""
    store.create(layout.OFFSET, encode_chunk(offset_LH))
    found = load_offset(store, offset_LH.shape)
    assert found is not None
    return found


def load_offset(store: ObjectStore, shape: tuple[int, ...]) -> np.ndarray | None:
    """Exponent offsets uint8 [L, H], or None when they are not calibrated yet. Raises ShardCorrupt."""
    try:
        data = store.get(layout.OFFSET)
    except ObjectMissing:
        return None
    try:
        return decode_chunk(data, "uint8", shape)
    except ValueError as error:
        raise ShardCorrupt(
            f"{store.uri}/{layout.OFFSET}: {error}; restore it with `statehouse repair {store.uri}`"
        ) from None


def offset_hash(codec: str, offset_LH: np.ndarray | None) -> str | None:
    """What receipts say of the offsets their shard was encoded with; None for codecs without."""
    if not codec_by_name(codec).needs_offset or offset_LH is None:
        return None
    return digest(np.ascontiguousarray(offset_LH).tobytes())
