"""How two datasets differ: contract, layout, sequences, and the states of the sequences they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from storage.reader import Dataset
from storage.stats import layer_names, sources_of


@dataclass
class Comparison:
    """States of the compared sequences. relative_l2, cosine: [L], a against b; None when the shapes differ."""

    compared: int = 0
    equal: int = 0
    relative_l2: dict[str, float] | None = None
    cosine: dict[str, float] | None = None


@dataclass
class Difference:
    """contract: fields that must match and do not. recorded: other fields of the contract. Both as `field: a != b`."""

    a: str
    b: str
    same: bool
    contract: list[str] = field(default_factory=list)
    recorded: list[str] = field(default_factory=list)
    layout: list[str] = field(default_factory=list)
    shared: int = 0
    only_a: int = 0
    only_b: int = 0
    only_a_tokens: int = 0
    only_b_tokens: int = 0
    sources: dict[str, tuple[int, int]] = field(default_factory=dict)
    # Shards with other bytes or other exponent offsets; only where both have the same plan.
    shards: list[int] | None = None
    states: Comparison = field(default_factory=Comparison)

    def json(self) -> dict[str, Any]:
        return asdict(self)


def diff_datasets(
    a: Dataset, b: Dataset, *, sample: int = 32, progress: Callable[[int], None] | None = None
) -> Difference:
    """Compares two datasets; states on at most `sample` of the sequences that both hold; progress(1) after each.

    `same` says that fingerprints are equal: same contract, same sequences in the same places, same bytes and exponent offsets.
    """
    mine, theirs = a.contract.model_dump(mode="json"), b.contract.model_dump(mode="json")
    recorded = [f"{k}: {mine[k]!r} != {theirs[k]!r}" for k in sorted(a.contract.RECORDED) if mine[k] != theirs[k]]
    found = Difference(
        a.uri,
        b.uri,
        same=a.seal is not None and b.seal is not None and a.fingerprint == b.fingerprint,
        contract=a.contract.differences(b.contract),
        recorded=recorded,
        layout=_layout(a, b),
    )
    rows_a = {key: row for row, key in enumerate(a.sequences["id"].to_pylist())}
    rows_b = {key: row for row, key in enumerate(b.sequences["id"].to_pylist())}
    shared = sorted(rows_a.keys() & rows_b.keys())
    found.shared, found.only_a, found.only_b = len(shared), len(rows_a) - len(shared), len(rows_b) - len(shared)
    for dataset, other, name in ((a, rows_b, "only_a_tokens"), (b, rows_a, "only_b_tokens")):
        alone = np.array([key not in other for key in dataset.sequences["id"].to_pylist()], bool)
        setattr(found, name, int(dataset.sequences["length"].to_numpy()[alone].sum()))
    counts = [{source.name: source.sequences for source in sources_of(one.sequences)} for one in (a, b)]
    found.sources = {
        name: (counts[0].get(name, 0), counts[1].get(name, 0)) for name in sorted({*counts[0], *counts[1]})
    }
    if a.plan.hash == b.plan.hash and a.seal is not None and b.seal is not None:
        tables = [one.shards_table().select(["data_sha256", "index_sha256"]).to_pylist() for one in (a, b)]
        offsets = a.seal.offset_hash != b.seal.offset_hash  # equal bytes are other values then
        found.shards = [at for at, (one, two) in enumerate(zip(*tables, strict=True)) if offsets or one != two]
    if shared and (a.contract.layers, a.contract.hidden_size) == (b.contract.layers, b.contract.hidden_size):
        step = np.unique(np.linspace(0, len(shared) - 1, min(sample, len(shared))).astype(int))
        found.states = _states(a, b, [(rows_a[shared[at]], rows_b[shared[at]]) for at in step], progress)
    return found


def _layout(a: Dataset, b: Dataset) -> list[str]:
    differing = [] if a.plan.codec == b.plan.codec else [f"codec: {a.plan.codec} != {b.plan.codec}"]
    mine, theirs = a.plan.geometry.model_dump(), b.plan.geometry.model_dump()
    return differing + [f"{name}: {mine[name]:,} != {theirs[name]:,}" for name in mine if mine[name] != theirs[name]]


def _states(a: Dataset, b: Dataset, rows: list[tuple[int, int]], progress: Callable[[int], None] | None) -> Comparison:
    layers = a.contract.layers
    error, norm, cosine, tokens = np.zeros(layers), np.zeros(layers), np.zeros(layers), 0
    result = Comparison(compared=len(rows))
    pairs = zip(a.stream([row for row, _ in rows]), b.stream([row for _, row in rows]), strict=True)
    for one, two in pairs:
        result.equal += bool((one.hidden.view(np.uint16) == two.hidden.view(np.uint16)).all())
        x, y = (np.nan_to_num(s.hidden.astype(np.float32), posinf=0, neginf=0) for s in (one, two))
        error += np.einsum("tlh,tlh->l", x - y, x - y, dtype=np.float64)
        norm += np.einsum("tlh,tlh->l", y, y, dtype=np.float64)
        lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
        cosine += (np.einsum("tlh,tlh->tl", x, y) / np.maximum(lengths, 1e-30)).sum(0)
        tokens += len(x)
        if progress is not None:
            progress(1)
    names = layer_names(a.contract)
    relative = np.sqrt(error / np.maximum(norm, 1e-300))
    result.relative_l2 = dict(zip(names, relative.tolist(), strict=True))
    result.cosine = dict(zip(names, (cosine / max(1, tokens)).tolist(), strict=True))
    return result
