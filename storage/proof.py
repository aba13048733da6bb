"""Whether bytes are those of an object of a dataset: asked before anything is copied or restored from another place."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from storage import layout
from storage.commit import SIGNATURE, PlanDocument, digest
from storage.contract import canonical_json, sha256_json
from storage.receipt import Receipt
from storage.seal import Seal, receipt_copy, seal_key, shards_table_key
from storage.shard import RECEIPT_TRAILER, pack_trailer
from storage.teacher import teacher_keys
from storage.writer import document_identity
from storage.zarr_array import decode_chunk


class Proof:
    """What plan.json, the seals and the newest table of receipts say of every object's bytes.

    table: None where it is lost; then a shard is judged by its own receipt.
    """

    def __init__(self, document: PlanDocument, seals: list[Seal], table: pa.Table | None) -> None:
        self._document, self._seals = document, seals
        geometry = document.geometry
        self.identity = document_identity(document)
        self._seal_of = {seal_key(seal.number): seal for seal in seals}
        self._tables = {shards_table_key(seal.number): seal.shards_sha256 for seal in seals}
        texts = (
            {} if table is None else dict(zip(table["shard"].to_pylist(), table["receipt"].to_pylist(), strict=True))
        )
        self._texts: dict[int, str] = texts
        self._shards = {layout.shard_key(shard): shard for shard in range(geometry.shards)}
        self._teacher = {
            key: shard for shard in range(geometry.shards) for key in teacher_keys(document.teacher, shard)
        }
        self._copies = {layout.receipt_key(shard): shard for shard in range(geometry.shards)}

    def wrong(self, key: str, data: bytes) -> str | None:
        """What is wrong with the bytes of an object; None when they are right, or when nothing names them."""
        if key in self._document.objects:
            return _differs(digest(data), self._document.objects[key].sha256, layout.PLAN)
        if key in self._tables:
            return _differs(digest(data), self._tables[key], "the seal")
        if key == layout.PLAN:
            return _document(data, {"plan_hash": self._document.plan_hash})
        if key in self._seal_of:
            return _document(data, {"fingerprint": self._seal_of[key].fingerprint, "number": self._seal_of[key].number})
        if key == layout.OFFSET:
            return self._offset(data)
        if key in self._copies:
            return self._copy(self._copies[key], data)
        if key in self._teacher:
            return self._teacher_object(key, data)
        return self._shard(self._shards[key], data) if key in self._shards else None

    def _offset(self, data: bytes) -> str | None:
        newest, geometry = self._seals[-1], self._document.geometry
        if newest.offset_object is not None:
            return None if data == base64.b64decode(newest.offset_object) else "not the bytes that the seal holds"
        try:
            offset = decode_chunk(data, "uint8", (geometry.layers, geometry.hidden_size))
        except ValueError as error:
            return str(error)
        return (
            None if newest.offset_hash is None else _differs(digest(offset.tobytes()), newest.offset_hash, "the seal")
        )

    def _teacher_object(self, key: str, data: bytes) -> str | None:
        text = self._texts.get(self._teacher[key])
        if text is None:
            return None
        named = Receipt.model_validate_json(text).teacher.get(key)
        return (
            "not named by its shard" if named is None else _differs(digest(data), named.sha256, "its shard's receipt")
        )

    def _copy(self, shard: int, data: bytes) -> str | None:
        try:
            receipt = Receipt.model_validate_json(data)
        except ValidationError as error:
            return f"no receipt ({error.errors()[0]['msg']})"
        if shard in self._texts and receipt != Receipt.model_validate_json(self._texts[shard]):
            return "no copy of the sealed receipt"
        # With the keys of a later minor version these are other bytes than ours, and as right.
        known = json.loads(receipt_copy(receipt)).keys() == json.loads(data).keys()
        return "not written as a receipt is" if known and data != receipt_copy(receipt) else None

    def _shard(self, shard: int, data: bytes) -> str | None:
        identity, end = self.identity, len(data) - self.identity.index_bytes
        length = int.from_bytes(data[end - 8 : end - 4], "little") if end >= RECEIPT_TRAILER else -1
        text = data[max(0, end - RECEIPT_TRAILER - length) : end - RECEIPT_TRAILER] if length >= 0 else b""
        if not text or pack_trailer(text) != data[end - RECEIPT_TRAILER : end]:
            return f"{len(data):,} bytes that do not end as a shard does"
        if shard in self._texts and text != self._texts[shard].encode():
            return "its receipt is not the sealed one"
        try:
            receipt = Receipt.model_validate_json(text)
        except ValidationError as error:
            return f"its receipt is not readable ({error.errors()[0]['msg']})"
        said = (receipt.plan_hash, receipt.shard, receipt.data_bytes)
        if said != (identity.plan_hash, shard, end - RECEIPT_TRAILER - len(text)):
            return "its receipt is that of another object"
        whole = (
            hashlib.sha256(memoryview(data)[: receipt.data_bytes]).hexdigest() == receipt.data_sha256
            and digest(data[end:]) == receipt.index_sha256
        )
        return None if whole else "its bytes are not those that its receipt was written for"


def _differs(found: str, expected: str, where: str) -> str | None:
    return None if found == expected else f"sha256 {found[:12]}, {where} says {expected[:12]}"


def _document(data: bytes, expected: dict[str, Any]) -> str | None:
    """A signed document is one byte string."""
    try:
        document = json.loads(data)
        if not isinstance(document, dict) or canonical_json(document) + b"\n" != data:
            return "not as such a document is written"
        signature = document.pop(SIGNATURE, None)
    except (ValueError, RecursionError):
        return "not JSON"
    if signature != sha256_json(document):
        return f"its {SIGNATURE} is not that of its keys"
    for name, value in expected.items():
        if document.get(name) != value:
            return f"{name} {str(document.get(name))[:12]}, expected {str(value)[:12]}"
    return None
