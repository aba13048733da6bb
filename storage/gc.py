"""Garbage: keys of a sealed dataset that no plan and no seal names, and temporary files of writers that were killed.

Only sealed datasets have any: before the seal, what looks unplanned may be somebody's work in progress. For the same
reason only what is older than a day counts. Datasets nested under the URI are never touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from storage import layout
from storage.commit import load_plan_document
from storage.errors import StatehouseError
from storage.objects import ObjectStore
from storage.seal import load_seals
from storage.verify import unplanned_keys

DAY = timedelta(days=1)


@dataclass(frozen=True)
class Garbage:
    key: str
    bytes: int
    modified: datetime


def find_garbage(store: ObjectStore, *, older_than: timedelta = DAY, now: datetime | None = None) -> list[Garbage]:
    """Unplanned keys that were last written more than `older_than` ago, in order of their keys.

    Raises DatasetMissing, DatasetNotSealed, and StatehouseError when the seal itself is younger than that.
    """
    document, seals = load_plan_document(store), load_seals(store)
    now = now or datetime.now(UTC)
    sealed = datetime.fromisoformat(seals[-1].sealed_at)
    if now - sealed < older_than:
        raise StatehouseError(
            f"{store.uri}: sealed {(now - sealed).total_seconds() / 3600:.1f} hours ago, and only what is older than "
            f"{older_than.total_seconds() / 3600:g} hours is collected: a writer may still be at work; try again later, "
            "or lower --older-than if nothing runs"
        )
    listed = store.written()
    unplanned = unplanned_keys(listed, document, len(seals))
    return [Garbage(key, listed[key][0], listed[key][1]) for key in unplanned if now - listed[key][1] >= older_than]


def delete_garbage(store: ObjectStore, garbage: Iterable[Garbage]) -> int:
    """Deletes them, after one more look at the plan and the seals; returns the bytes freed."""
    document, seals = load_plan_document(store), load_seals(store)
    garbage = list(garbage)
    still = set(unplanned_keys([*(one.key for one in garbage), *_plans(store)], document, len(seals)))
    freed = 0
    for one in garbage:
        if one.key in still:
            store.delete(one.key)
            freed += one.bytes
    return freed


def _plans(store: ObjectStore) -> list[str]:
    return [key for key in store.sizes() if key.endswith(f"/{layout.PLAN}")]
