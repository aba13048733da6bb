"""What a sealed dataset holds, in numbers: lengths, sources, norms of each layer, channels that stick out.

Counts and layer norms cover the whole dataset (plan and receipts hold them); channels are measured on a sample of
sequences, spread evenly over the ids, which are hashes: so over everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from storage.contract import Contract
from storage.reader import Dataset

# A channel sticks out when its root mean square is this many times the median channel's of its layer. In SmolLM2 a few
# reach 1,000 times; they decide how scales and offsets must be chosen.
OUTLIER_TIMES = 20.0
_QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class Source:
    name: str
    sequences: int
    tokens: int
    loss_tokens: int


@dataclass(frozen=True)
class Layer:
    """rms: root mean square over the whole dataset. The rest over the sample. outliers: (channel, times the median)."""

    name: str
    rms: float
    largest: float
    median_channel_rms: float
    outliers: list[tuple[int, float]]


@dataclass(frozen=True, eq=False)
class Stats:
    """channel_rms: [L, H] float64 over the sample. histogram: (low, high, sequences), low <= length < high."""

    uri: str
    sequences: int
    tokens: int
    loss_tokens: int
    raw_bytes: int
    stored_bytes: int
    non_finite: int
    quarantined: int
    sources: list[Source]
    lengths: dict[str, float]
    histogram: list[tuple[int, int, int]]
    layers: list[Layer]
    sampled_sequences: int
    sampled_tokens: int
    channel_rms: np.ndarray

    def json(self) -> dict[str, Any]:
        """Everything but the channels' norms."""
        document = asdict(self)
        del document["channel_rms"]
        return document


def layer_names(contract: Contract) -> list[str]:
    """A name for each of the L states of a token."""
    names = [f"layer {layer}" for layer in contract.capture_layers]
    return names + (["final"] if contract.final_state != "absent" else [])


def layer_rms(shards: pa.Table) -> np.ndarray:
    """Root mean square of each layer over the dataset, from its receipts: [L] float64. shards: SHARDS_SCHEMA."""
    rows = shards["rows"].to_numpy().astype(np.float64)
    rms = np.array(shards["layer_rms"].to_pylist())
    return np.sqrt((rms**2 * rows[:, None]).sum(0) / rows.sum())


def sources_of(sequences: pa.Table) -> list[Source]:
    """Totals by source, in order of their names. sequences: PLAN_SCHEMA."""
    table = sequences.group_by("source").aggregate([("id", "count"), ("length", "sum"), ("loss_tokens", "sum")])
    rows = sorted(table.to_pylist(), key=lambda row: row["source"])
    return [Source(row["source"], row["id_count"], row["length_sum"], row["loss_tokens_sum"]) for row in rows]


def length_histogram(lengths: np.ndarray, bins: int = 24) -> list[tuple[int, int, int]]:
    """(low, high, sequences) of about `bins` equally wide bins with whole bounds. lengths: [n] int, n > 0."""
    width = max(1, -(-int(lengths.max() + 1) // bins))
    edges = np.arange(0, int(lengths.max()) + width + 1, width)
    counts, _ = np.histogram(lengths, edges)
    return [(int(low), int(low) + width, int(count)) for low, count in zip(edges[:-1], counts, strict=True)]


def dataset_stats(dataset: Dataset, *, sample: int = 64, progress: Callable[[int], None] | None = None) -> Stats:
    """Reads at most `sample` sequences; progress(1) is called after each. Raises DatasetNotSealed, ShardCorrupt."""
    seal, shards = dataset.seal, dataset.shards_table()
    assert seal is not None  # shards_table has refused a dataset without
    lengths = dataset.sequences["length"].to_numpy()
    spread = np.linspace(0, len(dataset) - 1, min(sample, len(dataset)))
    chosen = np.unique(spread.astype(int)).tolist()
    shape = (dataset.contract.layers, dataset.contract.hidden_size)
    squares, largest, counts = np.zeros(shape), np.zeros(shape), np.zeros(shape, np.int64)
    tokens = 0
    for states in dataset.stream(chosen):
        values = states.hidden.astype(np.float32)
        finite = np.isfinite(values)
        values = np.where(finite, values, 0)
        squares += np.einsum("tlh,tlh->lh", values, values, dtype=np.float64)
        largest = np.maximum(largest, np.abs(values).max(0))
        counts += finite.sum(0)
        tokens += len(values)
        if progress is not None:
            progress(1)
    channel = np.sqrt(squares / np.maximum(counts, 1))
    layers = []
    for name, rms, row, top in zip(layer_names(dataset.contract), layer_rms(shards), channel, largest, strict=True):
        median = float(np.median(row))
        times = row / median if median else np.zeros_like(row)
        found = [int(at) for at in np.argsort(-times) if times[at] >= OUTLIER_TIMES]
        layers.append(
            Layer(name, float(rms), float(top.max()), median, [(at, round(float(times[at]), 1)) for at in found])
        )
    return Stats(
        uri=dataset.uri,
        sequences=seal.sequences,
        tokens=seal.tokens,
        loss_tokens=seal.loss_tokens,
        raw_bytes=seal.raw_bytes,
        stored_bytes=seal.stored_bytes,
        non_finite=int(np.sum(shards["non_finite"].to_numpy())),
        quarantined=len(seal.quarantined),
        sources=sources_of(dataset.sequences),
        lengths={
            "shortest": int(lengths.min()),
            "longest": int(lengths.max()),
            "mean": round(float(lengths.mean()), 1),
            **{name: float(np.quantile(lengths, at)) for name, at in _QUANTILES.items()},
        },
        histogram=length_histogram(lengths),
        layers=layers,
        sampled_sequences=len(chosen),
        sampled_tokens=tokens,
        channel_rms=channel,
    )
