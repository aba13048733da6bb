"""Answers on their way into the store: what a replica has finished is kept at once, and is not drawn a second time.

responses/<unit>.parquet               the answers of a finished work unit, create-only: the first one to be stored counts
responses/<unit>.quarantined.parquet   prompts of it that no replica could answer, with reasons
parts/<unit>/*.parquet                 answers of a unit that is not finished yet; whoever tries it next takes them from there

Of parts nothing else is known: `extract` never reads them, a damaged one is drawn again, and they go when the unit is stored.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ray_jobs.policies import first_line
from ray_jobs.thinking import Response
from ray_jobs.units import GenerateUnit
from storage.contract import sha256_json
from storage.errors import StatehouseError, StoreError
from storage.objects import ObjectMissing, ObjectStore

RESPONSES, PARTS = "responses", "parts"
QUARANTINED = "quarantined"
# token_ids: exactly what the verifier produced, its end token included. finish_reason: "stop", "length", or "quarantined" where
# there is no answer, and then `reason` says why. forced: index of the token that ended a thinking longer than its budget, null
# where none did.
RESPONSES_SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("sampling_hash", pa.string()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("seed", pa.int64()),
        ("forced", pa.int64()),
        ("reason", pa.string()),
    ]
)
_NEWER = ("forced", "reason")  # files of earlier versions lack them
_AGAIN_S = 1.0


def unit_key(prompt_ids: Sequence[str], sampling_hashes: Sequence[str]) -> str:
    """What the files of a work unit are named after: its prompts and how they are answered."""
    return sha256_json([list(prompt_ids), sorted(set(sampling_hashes))])[:32]


def response_of(row: Mapping[str, Any]) -> Response:
    return Response(row["token_ids"], row["finish_reason"], row.get("forced"))


def read_rows(store: ObjectStore, key: str) -> list[dict[str, Any]]:
    """`RESPONSES_SCHEMA` rows of one file, token ids as [T] int32. Raises ObjectMissing, and StatehouseError when it is damaged."""
    data = store.get(key)
    try:
        table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
        for field in RESPONSES_SCHEMA:
            if field.name not in _NEWER:
                table[field.name].cast(field.type)
        ids = table["token_ids"].combine_chunks().cast(pa.list_(pa.int32()))
        rows = table.drop_columns(["token_ids"]).to_pylist()
        # A list of Python's integers takes nine times the memory.
        return [{**row, "token_ids": np.array(ids[at].values, np.int32)} for at, row in enumerate(rows)]
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError):  # OSError: what was compressed is damaged
        raise StatehouseError(
            f"{store.uri}/{key}: damaged; delete it and run `python -m ray_jobs.generate RECIPE` again"
        ) from None


def find(store: ObjectStore, unit: GenerateUnit) -> dict[int, Response] | None:
    """{index of the prompt: its answer} where another driver has finished the unit; None where none has."""
    try:
        rows = read_rows(store, f"{RESPONSES}/{unit.key}.parquet")
    except ObjectMissing:
        return None
    return _of_unit(unit, rows)


def commit(store: ObjectStore, unit: GenerateUnit, answers: Mapping[int, Response]) -> bool:
    """Stores a finished unit; False when another driver was first. The quarantined last: without them, they are tried again."""
    created = True
    if answers:
        rows = [_row(unit, at, answers[at]) for at in sorted(answers)]
        created = store.create(f"{RESPONSES}/{unit.key}.parquet", _parquet(rows))
    if created and unit.quarantined:
        nothing = Response(np.zeros(0, np.int32), QUARANTINED)
        rows = [
            {**_row(unit, at, nothing), "reason": first_line(unit.quarantined[at])[:300]}
            for at in sorted(unit.quarantined)
        ]
        store.create(f"{RESPONSES}/{unit.key}.{QUARANTINED}.parquet", _parquet(rows))
    return created


def read_parts(store: ObjectStore, unit: GenerateUnit) -> dict[int, Response]:
    """{index of the prompt: its answer} of what earlier tries of the unit have finished."""
    rows: list[dict[str, Any]] = []
    for key in sorted(store.sizes(f"{PARTS}/{unit.key}")):
        with contextlib.suppress(ObjectMissing, StatehouseError):
            rows += read_rows(store, key)
    return _of_unit(unit, rows)


def clear_parts(store: ObjectStore, key: str | None = None) -> None:
    """Of one unit, or all."""
    for part in store.sizes(PARTS if key is None else f"{PARTS}/{key}"):
        store.delete(part)


class Parts:
    """Stores answers of a unit as they come, from a thread of its own: a part holds what came while the one before was written.

    Errors of the store end nothing here: storing the finished unit tells them.
    """

    def __init__(self, store: ObjectStore, unit: GenerateUnit) -> None:
        self._store, self._unit = store, unit
        self._rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._more, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._keep, daemon=True, name="answers")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._more.set()
        self._thread.join()
        with contextlib.suppress(StoreError):
            self._flush()

    def add(self, at: int, response: Response) -> None:
        """at: index of the prompt in the unit."""
        with self._lock:
            self._rows.append(_row(self._unit, at, response))
        self._more.set()

    def _keep(self) -> None:
        while not self._ended:
            self._more.wait()
            self._more.clear()
            try:
                self._flush()
            except StoreError:
                if not self._ended:
                    time.sleep(_AGAIN_S)
                self._more.set()

    def _flush(self) -> None:
        with self._lock:
            rows, self._rows = self._rows, []
        if not rows:
            return
        try:
            self._store.put(f"{PARTS}/{self._unit.key}/{secrets.token_hex(8)}.parquet", _parquet(rows))
        except StoreError:
            with self._lock:
                self._rows = rows + self._rows
            raise


def _row(unit: GenerateUnit, at: int, response: Response) -> dict[str, Any]:
    sampling = unit.samplings[at]
    return {
        "prompt_id": unit.prompt_ids[at],
        "token_ids": response.token_ids,
        "finish_reason": response.finish_reason,
        "sampling_hash": unit.hashes[at],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "forced": response.forced,
    }


def _of_unit(unit: GenerateUnit, rows: Sequence[Mapping[str, Any]]) -> dict[int, Response]:
    asked = {(prompt, how): at for at, (prompt, how) in enumerate(zip(unit.prompt_ids, unit.hashes, strict=True))}
    found: dict[int, Response] = {}
    for row in rows:
        at = asked.get((row["prompt_id"], row["sampling_hash"]))
        if at is not None and row["finish_reason"] != QUARANTINED:
            found.setdefault(at, response_of(row))
    return found


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    table = pa.Table.from_pylist(rows, schema=RESPONSES_SCHEMA)
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)  # a flipped bit would be another token
    return sink.getvalue()
