"""The fingerprint of a dataset: equal content has an equal one, wherever it lies and whoever wrote it."""

from __future__ import annotations

from storage.contract import sha256_json


def covered(data: str, index: str, teacher: str | None) -> list[str]:
    """What the fingerprint covers of a shard: sha256 of its data, its index and, where there are any, its teacher objects."""
    return [data, index] if teacher is None else [data, index, teacher]


def content_fingerprint(contract_hash: str, plan_hash: str, offset: str | None, shards: list[list[str]]) -> str:
    """shards: `covered` of each, in their order."""
    return sha256_json({"contract": contract_hash, "offset": offset, "plan": plan_hash, "shards": shards})
