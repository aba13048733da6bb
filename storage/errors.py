"""The errors of Statehouse. Each message says what, where, expected, found, and the command that fixes it."""

from __future__ import annotations


class StatehouseError(Exception):
    """Base of every error a user can cause or meet. Jobs and commands print it and exit with 1.

    One line says it all; a ReplicaFailed may show the end of the engine's log below.
    """


class ContractMismatch(StatehouseError):
    """Two datasets, or a dataset and a drafter, were made from different verifiers."""


class DatasetMissing(StatehouseError):
    """There is no dataset at this URI."""


class DatasetNotSealed(StatehouseError):
    """The dataset is planned but not sealed, so some of its shards may be missing."""


class ShardCorrupt(StatehouseError):
    """A stored object does not hold what its receipt, index or checksum says."""


class PlanConflict(StatehouseError):
    """The dataset URI already holds another plan."""


class StoreError(StatehouseError):
    """The object store refused: no such bucket, wrong credentials, disk full, no create-only PUT, ..."""


class StoreRefused(StoreError):
    """A StoreError that another try will not mend: no such bucket, wrong or expired credentials."""


class RecipeError(StatehouseError):
    """A recipe, an override or an input file is wrong."""


class ReplicaFailed(StatehouseError):
    """A verifier engine could not start, died, or returned what cannot be right."""
