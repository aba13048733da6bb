"""A verifier, a dataset and a draft vocabulary for short real trainings on a CPU: random states, the shapes of a small model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.corpus import VOCAB, Corpus, contract, fill_dataset, synthetic_states, token_table
from drafter.weights_hash import weights_hash
from storage.objects import open_store
from storage.plan import make_plan
from vocab.mapping import DraftVocab

LAYERS = 4


def make_verifier(folder: Path, hidden: int) -> Path:
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    save_file(
        {
            "model.embed_tokens.weight": torch.randn(VOCAB, hidden),
            "lm_head.weight": torch.randn(VOCAB, hidden) / hidden**0.5,
            "model.norm.weight": torch.ones(hidden),
        },
        folder / "model.safetensors",
    )
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 4 * hidden,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4 * LAYERS, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 8192,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_small(root: str, folder: Path, *, sequences: int, hidden: int) -> Path:
    """`<root>/dataset` and `<root>/vocab` for the verifier in the folder that is returned; lengths 64 to 512."""
    verifier = make_verifier(folder / "verifier", hidden)
    lengths = np.random.default_rng(2).integers(64, 512, sequences)
    table = token_table(lengths)
    made_by = contract(LAYERS, hidden).model_copy(update={"weights_hash": weights_hash(verifier)})
    block = synthetic_states(600, layers=LAYERS, hidden_size=hidden)
    fill_dataset(Corpus(root, make_plan(table, made_by, "lossless"), block), table)
    store = open_store(f"{root}/vocab")
    for name, data in DraftVocab.from_ids(range(VOCAB // 2), VOCAB).to_bytes().items():
        store.put(name, data)
    return verifier
