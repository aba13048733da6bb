"""A verifier, a sealed dataset and a draft vocabulary that a drafter can really learn from, in a second.

The states of a token depend on the token alone, and what follows a token on the final state: so what a drafter has to
guess is a function of the embedding that it reads.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import HIDDEN, LAYERS, VOCAB, contract

from drafter.claim import claim
from drafter.recipe import DrafterSection, TrainingSection
from drafter.run import Run
from drafter.session import train
from drafter.sources import Request, open_sources
from drafter.weights_hash import weights_hash
from storage.commit import publish_plan
from storage.objects import open_store
from storage.plan import make_plan
from storage.seal import seal_dataset
from storage.sequences import Sequence, sequence_table
from storage.teacher import TeacherSummary
from storage.writer import ShardWriter
from vocab.mapping import DraftVocab

# Tokens that occur; the draft vocabulary holds most of them.
USED, DRAFTED = 40, 32


def make_verifier(folder: Path, seed: int = 0) -> Path:
    """embed_tokens, lm_head and norm of a Llama of the tiny contract's shape; it has no layers."""
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5,
        "model.norm.weight": torch.rand(HIDDEN) + 0.5,
    }
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 8, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 512,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_sequences(count: int = 48, seed: int = 0, loss: bool = True) -> list[Sequence]:
    random = np.random.default_rng(seed)
    made = []
    for number, length in enumerate(random.integers(12, 40, count)):
        token_ids = random.integers(0, USED, length).astype(np.int32)
        mask = (np.arange(length) >= 4) & loss
        made.append(Sequence(("code", "chat")[number % 2], f"group-{number}", token_ids, mask))
    return made


def make_dataset(
    uri: str, verifier: Path, sequences: Rows[Sequence] | None = None, top_k: int = 0, broken: int | None = None,
    **changed: Any,
) -> None:  # fmt: skip
    """A sealed dataset in several shards. changed: fields of the contract. top_k: so many of the verifier's likeliest
    tokens instead of the final state. broken: a token whose states are not finite. With final_state pre_norm the final
    states are the same ones before the verifier's norm, up to a scale of each token's.
    """
    table = sequence_table(make_sequences() if sequences is None else sequences)
    fields = {"weights_hash": weights_hash(verifier), **({"final_state": "absent"} if top_k else {}), **changed}
    teacher = f"topk({top_k})" if top_k else "none"
    plan = make_plan(table, contract(**fields), "lossless", shard_length=256, teacher=teacher)
    store = open_store(uri)
    publish_plan(store, plan, table)
    random = np.random.default_rng(5)
    of_token = random.standard_normal((VOCAB, LAYERS, HIDDEN))
    # The final state of a token asks for its successor among the used ones.
    head = load_file(verifier / "model.safetensors")["lm_head.weight"].numpy()
    of_token[:USED, -1] = 6 * head[random.permutation(USED)]
    if changed.get("final_state") == "pre_norm":
        norm = load_file(verifier / "model.safetensors")["model.norm.weight"].numpy()
        of_token[:, -1] *= random.uniform(0.5, 2, (VOCAB, 1)) / norm
    if broken is not None:
        of_token[broken] = np.nan
    states = of_token.astype(ml_dtypes.bfloat16).view(np.uint16)
    writer = ShardWriter.from_uri(uri)
    token_ids = {row["id"]: np.array(row["token_ids"]) for row in table.select(["id", "token_ids"]).to_pylist()}
    for unit in plan.units():
        ids = [plan.table["id"][int(row)].as_py() for row in unit.rows]
        bits = np.concatenate([states[token_ids[one]] for one in ids])
        summary = summary_of(bits[:, -1], head, top_k) if top_k else None
        bits = bits[:, : plan.contract.layers]
        if not writer.calibrated:
            writer.calibrate(bits)
        writer.write(unit.shard, bits, len(unit.rows), teacher=summary)
    seal_dataset(store, plan)


def summary_of(final_bits: np.ndarray, head: np.ndarray, k: int) -> TeacherSummary:
    """What a verifier says after final states [T, D] (bf16 bits): its k likeliest tokens, by falling logit."""
    logits = torch.from_numpy(final_bits.view(np.int16)).view(torch.bfloat16).float() @ torch.from_numpy(head).T
    best = logits.topk(k, dim=-1)
    ids = best.indices.int().numpy()
    return TeacherSummary(ids[:, 0].copy(), logits.logsumexp(-1).numpy(), ids, best.values.numpy())


def make_vocabulary(uri: str, vocab_size: int = VOCAB, **provenance: Any) -> DraftVocab:
    vocabulary = DraftVocab.from_ids(range(DRAFTED), vocab_size, provenance=provenance)
    for name, data in vocabulary.to_bytes().items():
        open_store(uri).put(name, data)
    return vocabulary


DRAFTER = DrafterSection(ttt_steps=2)
TRAINING = TrainingSection(
    dtype="float32", epochs=3, global_batch_tokens=200, micro_batch_tokens=80, lr=3e-3, checkpoint_every=4
)


@dataclass
class Tiny:
    """Everything a run needs, at `root` (a folder or a prefix on S3)."""

    root: str
    verifier: Path

    def request(self, run: str = "run", drafter: dict[str, Any] | None = None, **training: Any) -> Request:
        return Request(
            dataset=f"{self.root}/dataset",
            vocabulary=f"{self.root}/vocab",
            run=f"{self.root}/{run}",
            verifier=str(self.verifier),
            drafter=DRAFTER.model_copy(update=drafter or {}),
            training=TRAINING.model_copy(update=training),
            held_out=0.2,
        )


def make_tiny(root: str, folder: Path) -> Tiny:
    verifier = make_verifier(folder / "verifier")
    make_dataset(f"{root}/dataset", verifier)
    make_vocabulary(f"{root}/vocab")
    return Tiny(root, verifier)


def changed(request: Request, **fields: Any) -> Request:
    return replace(request, **fields)


def planned_only(uri: str) -> None:
    """A dataset that was planned, and no more."""
    table = sequence_table(make_sequences())
    publish_plan(open_store(uri), make_plan(table, contract(), "lossless", shard_length=256), table)


def whole_run(request: Request, **options: Any) -> dict[str, Any] | None:
    claim(request, open_sources(request))
    return train(request, **options)


def exported(request: Request) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    return load(Run(request.run).store.get("drafter/model.safetensors"))


def after(updates: int) -> Any:
    """Says stop when it is asked for the n-th time."""
    asked = iter([False] * (updates - 1) + [True])
    return lambda: next(asked)


def losses(request: Request) -> np.ndarray:
    lines = Run(request.run).store.get("metrics.jsonl").decode().splitlines()
    return np.array([json.loads(line)["loss"] for line in lines])


@contextlib.contextmanager
def small_disk_at(folder: Path, size: str) -> Iterator[Path]:
    """A real disk of this size, such as 256k, mounted there; the test is skipped where that needs other rights."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("cannot mount a tmpfs: needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
