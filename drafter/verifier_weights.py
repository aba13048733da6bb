"""The few tensors of a verifier that a drafter needs: embedding, lm_head and last norm, read without the other 99 %.

Shape suffixes as in drafter/model.py: V the verifier's vocabulary, D its hidden size.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafter.errors import DrafterError
from drafter.verifier_head import FinalNorm
from storage.contract import Contract

# A wrapper of a language model (Kimi-K2.5) puts its own name before, or inside, those of the model it wraps.
_PREFIXES = ("", "language_model.", "model.language_model.")
_FIX = "point verifier.model at a complete checkpoint in safetensors"


@dataclass(frozen=True)
class VerifierWeights:
    """embedding_VD: input embedding. lm_head_VD: output rows (the embedding where they are tied). norm_D: last norm.

    All in the checkpoint's dtype, on the CPU.
    """

    embedding_VD: Tensor
    lm_head_VD: Tensor
    norm_D: Tensor
    # config.json as it is (with its text_config, if it has one).
    config: dict[str, Any]

    def final_norm(self, contract: Contract, where: str) -> FinalNorm | None:
        """The norm that final states of this contract lack; None where they have it, or there are none.

        Raises DrafterError for a verifier whose last norm is no plain RMSNorm.
        """
        if contract.final_state != "pre_norm":
            return None
        text = self.config.get("text_config") or self.config
        kind = str(text.get("model_type"))
        if "rms_norm_eps" not in text or kind.startswith("gemma"):
            raise DrafterError(
                f"{where}: final_state: expected post_norm for a verifier of type {kind}, which has no plain RMSNorm at its "
                f"end, found pre_norm; extract the dataset again"
            )
        return FinalNorm(self.norm_D, float(text["rms_norm_eps"]))


def read_verifier_weights(folder: str | os.PathLike[str]) -> VerifierWeights:
    """Raises DrafterError that names the tensor or file when one is missing or unreadable."""
    root = Path(folder)
    try:
        config = json.loads((root / "config.json").read_bytes())
        index = root / "model.safetensors.index.json"
        files = json.loads(index.read_bytes())["weight_map"] if index.exists() else _names(root)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DrafterError(f"{root}: cannot read the verifier: {error}; {_FIX}") from error
    embedding = _read(root, files, ("model.embed_tokens.weight", "embed_tokens.weight"))
    head = _read(root, files, ("lm_head.weight", "model.lm_head.weight"))
    norm = _read(root, files, ("model.norm.weight", "norm.weight"))
    if embedding is None or norm is None:
        missing = "model.embed_tokens.weight" if embedding is None else "model.norm.weight"
        raise DrafterError(f"{root}: expected a tensor {missing}, found none of that name; {_FIX}")
    if head is None:
        inner = config.get("text_config")
        tied = config.get("tie_word_embeddings") or (inner or {}).get("tie_word_embeddings")
        if not tied:
            raise DrafterError(
                f"{root}: expected a tensor lm_head.weight, or tie_word_embeddings, found neither; {_FIX}"
            )
        head = embedding
    if head.shape != embedding.shape or norm.shape != embedding.shape[1:]:
        shapes = [list(tensor.shape) for tensor in (embedding, head, norm)]
        raise DrafterError(
            f"{root}: embedding, lm_head and norm: expected [V, D], [V, D] and [D], found {shapes}; {_FIX}"
        )
    return VerifierWeights(embedding, head, norm, config)


def _names(root: Path) -> dict[str, str]:
    """{tensor: file} of a checkpoint without an index."""
    found: dict[str, str] = {}
    for path in sorted(root.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path.name)
    return found


def _read(root: Path, files: dict[str, str], names: tuple[str, ...]) -> Tensor | None:
    for name in (prefix + name for prefix in _PREFIXES for name in names):
        if name in files:
            try:
                with safe_open(root / files[name], "pt") as file:
                    tensor: Tensor = file.get_tensor(name)
                    return tensor
            except (OSError, SafetensorError) as error:
                raise DrafterError(f"{root / files[name]}: cannot read {name}: {error}; {_FIX}") from error
    return None
