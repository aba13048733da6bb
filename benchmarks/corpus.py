"""What the storage benchmark reads: states whose shapes and statistics are those of a large model, as four layouts.

The synthetic states have channels of very different scales (log-normal, sigma 2), which is what makes real ones hard to
code; every sequence is another window of one block, since making noise takes longer than encoding it.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pyarrow as pa

from storage.commit import publish_plan
from storage.contract import Contract
from storage.objects import ObjectStore, open_store
from storage.plan import Plan, make_plan
from storage.seal import seal_dataset
from storage.sequences import Sequence, sequence_table
from storage.writer import ShardWriter

LAYERS, HIDDEN, VOCAB = 4, 7168, 1000


def contract(layers: int = LAYERS, hidden_size: int = HIDDEN) -> Contract:
    return Contract(
        verifier="synthetic",
        config_hash="c",
        weights_hash="w",
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        num_layers=4 * layers,
        tokenizer_hash="t",
        capture_layers=tuple(range(1, layers)),
        engine="synthetic",
        engine_version="1",
        engine_dtype="bfloat16",
    )


def synthetic_states(tokens: int, seed: int = 0, layers: int = LAYERS, hidden_size: int = HIDDEN) -> np.ndarray:
    """bf16 bits uint16 [tokens, L, H]."""
    random = np.random.default_rng(seed)
    scale = np.exp(random.normal(0, 2, (1, layers, hidden_size))).astype(np.float32)
    values = random.standard_normal((tokens, layers, hidden_size), dtype=np.float32)
    values *= scale
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def token_table(lengths: np.ndarray) -> pa.Table:
    random = np.random.default_rng(1)
    return sequence_table(
        Sequence("chat", f"g{row}", random.integers(0, VOCAB, length).astype(np.int32), np.ones(length, bool))
        for row, length in enumerate(lengths.tolist())
    )


@dataclass
class Corpus:
    """One content in several layouts under `uri`: dataset/, safetensors/<row>, torch/<row>."""

    uri: str
    plan: Plan
    block: np.ndarray

    @property
    def dataset_uri(self) -> str:
        return f"{self.uri}/dataset"

    @property
    def lengths(self) -> np.ndarray:
        return self.plan.column("length")

    def states(self, row: int) -> np.ndarray:
        """bf16 bits uint16 [T, L, H] of a row of the plan."""
        length = int(self.lengths[row])
        start = row * 37 % (len(self.block) - length + 1)
        return self.block[start : start + length]


def plan_corpus(uri: str, lengths: np.ndarray, block: np.ndarray) -> tuple[Corpus, pa.Table]:
    table = token_table(lengths)
    return Corpus(uri, make_plan(table, contract(block.shape[1], block.shape[2]), "lossless"), block), table


def fill_dataset(corpus: Corpus, table: pa.Table) -> int:
    """Writes and seals the dataset; returns its stored bytes."""
    store = open_store(corpus.dataset_uri)
    publish_plan(store, corpus.plan, table)
    writer = ShardWriter.from_uri(corpus.dataset_uri)
    writer.calibrate(corpus.block[:64])
    for unit in corpus.plan.units():
        writer.write(unit.shard, np.concatenate([corpus.states(int(row)) for row in unit.rows]), len(unit.rows))
    return seal_dataset(store, corpus.plan).stored_bytes


def safetensors_bytes(bits: np.ndarray) -> bytes:
    """A file as speculators writes them: one tensor `hidden_states` [T, L, H] bfloat16."""
    header = json.dumps(
        {"hidden_states": {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [0, bits.nbytes]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + bits.tobytes()


def torch_bytes(bits: np.ndarray) -> bytes:
    """A file as SpecForge writes them: torch.save of a dict with the states of one sequence."""
    import torch

    buffer = io.BytesIO()
    torch.save({"hidden_states": torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)}, buffer)
    return buffer.getvalue()


def fill_files(corpus: Corpus, store: ObjectStore, kind: str) -> None:
    """One object for every sequence: kind `safetensors` or `torch`."""
    encode = safetensors_bytes if kind == "safetensors" else torch_bytes
    for row in range(len(corpus.lengths)):
        store.put(f"{kind}/{row}", encode(corpus.states(row)))
