"""Garbage: keys of a sealed dataset that no plan and no seal names, and temporary files of writers that were killed.

Only sealed datasets have any: before the seal, what looks unplanned may be somebody's work in progress. For the same
reason only what is older than a day counts. Datasets nested under the URI are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from storage import layout
from storage.commit import PlanDocument, load_plan_document, restore_command
from storage.errors import ShardCorrupt, StatehouseError
from storage.objects import ObjectStore
from storage.seal import Seal, load_seals, seal_key
from storage.verify import seals_beyond, unplanned_keys

DAY = timedelta(days=1)


@dataclass(frozen=True)
class Garbage:
    key: str
    bytes: int
    modified: datetime


def find_garbage(store: ObjectStore, *, older_than: timedelta = DAY, now: datetime | None = None) -> list[Garbage]:
    """Unplanned keys that were last written more than `older_than` ago, in order of their keys.

    Raises DatasetMissing, DatasetNotSealed, ShardCorrupt when a seal is missing, and StatehouseError when the newest one is
    younger than that or the dataset was written by a newer Statehouse.
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
    _require_known(store, listed, document, seals)
    unplanned = unplanned_keys(listed, document, len(seals))
    return [Garbage(key, listed[key][0], listed[key][1]) for key in unplanned if now - listed[key][1] >= older_than]


def delete_garbage(
    store: ObjectStore, garbage: Iterable[Garbage], *, progress: Callable[[int], None] | None = None
) -> int:
    """Deletes them, after one more look at the plan and the seals; returns the bytes freed. progress(1) after each."""
    document, seals = load_plan_document(store), load_seals(store)
    garbage = list(garbage)
    _require_known(store, store.sizes(), document, seals)
    still = set(unplanned_keys([*(one.key for one in garbage), *_plans(store)], document, len(seals)))
    freed = 0
    for one in garbage:
        if one.key in still:
            store.delete(one.key)
            freed += one.bytes
        if progress is not None:
            progress(1)
    return freed


def _require_known(store: ObjectStore, keys: Iterable[str], document: PlanDocument, seals: list[Seal]) -> None:
    """Raises when what looks unplanned may be something that cannot be known here."""
    for written in (document.format_version, *(seal.format_version for seal in seals)):
        if _minor(written) > _minor(layout.FORMAT_VERSION):
            raise StatehouseError(
                f"{store.uri}: format version {written}, this Statehouse knows the keys of {layout.FORMAT_VERSION}; "
                "install a newer Statehouse to collect its garbage"
            )
    if beyond := seals_beyond(keys, len(seals)):
        raise ShardCorrupt(
            f"{store.uri}/{seal_key(len(seals) + 1)}: missing, though {beyond[0]} is there; restore it with "
            f"`{restore_command(store.uri)}`"
        )


def _minor(version: str) -> int:
    minor = version.partition(".")[2].partition(".")[0]
    return int(minor) if minor.isdecimal() else 0


def _plans(store: ObjectStore) -> list[str]:
    return [key for key in store.sizes() if key.endswith(f"/{layout.PLAN}")]
