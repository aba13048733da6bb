"""A drafter as the folder that speculators writes and vLLM serves, and back.

The tensors are SGLang's but for two things: the layer is called `layers.0`, and the embedding is always there. The
config is of another kind: the layer's own lies inside, layers are counted from 1 (the layer that reads the state), and
it names the verifier. A plain folder of `drafter.export` is served by vLLM too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drafter.config import DrafterConfig, checked_config, rope_fields
from drafter.errors import DrafterError
from drafter.export import (
    bias_fields,
    build,
    by_server_names,
    converted,
    load_sglang,
    read_config,
    read_json,
    read_tensors,
    served_state,
    sglang_tensors,
    write_folder,
)
from drafter.layer_ids import captured_layers
from drafter.model import Drafter

MODEL_TYPE = "eagle3"
_EMBEDDING = "embed_tokens.weight"
_VARIANTS = ("norm_before_fc", "fc_norm", "norm_output")
# Fields of the inner config that a drafter's has under the same name.
_SAME = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip


def speculators_tensors(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the folder, by name."""
    shapes = sglang_tensors(config) | {_EMBEDDING: (config.vocab_size, config.hidden_size)}
    return {_layer_name(name): shape for name, shape in shapes.items()}


def speculators_config(
    config: DrafterConfig, dtype: torch.dtype, verifier: str, architectures: Sequence[str], draft_length: int
) -> dict[str, Any]:
    """config.json of the folder. verifier: name or path, as vLLM is to load it. draft_length: what it proposes."""
    rope = {"rope_type": "default"} | (config.rope_scaling or {}) | {"rope_theta": config.rope_theta}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": MODEL_TYPE,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": MODEL_TYPE,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_length}],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size if config.target_hidden_size != config.hidden_size else None,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.capture_layers],
        # Written out: vLLM takes the first for true where it is absent.
        "norm_before_residual": False,
        **{name: getattr(config, name) for name in _VARIANTS},
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        "transformer_layer_config": {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "mlp_bias": False,
            "attention_bias": bool(config.attention_bias),
            "tie_word_embeddings": False,
            "rope_parameters": rope,
            **{name: getattr(config, name) for name in _SAME},
        },
    }


def export_speculators(
    drafter: Drafter,
    folder: str | os.PathLike[str],
    *,
    verifier: str,
    architectures: Sequence[str] = ("LlamaForCausalLM",),
    draft_length: int = 3,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the folder for speculators and vLLM. Raises DrafterError as `drafter.export.export_sglang` does."""
    dtype, shapes = dtype or drafter.fc.weight.dtype, speculators_tensors(drafter.config)
    state = {_layer_name(name): tensor for name, tensor in served_state(drafter).items()}
    state = {name: tensor for name, tensor in state.items() if name in shapes or name not in ("d2t", "t2d")}
    config = speculators_config(drafter.config, dtype, verifier, architectures, draft_length)
    write_folder(folder, config, converted(state, dtype), shapes)


def load_speculators(
    folder: str | os.PathLike[str],
    embedding_VD: Tensor | None = None,
    *,
    capture_layers: Sequence[int] | None = None,
    verifier: Mapping[str, Any] | None = None,
) -> Drafter:
    """The drafter in a folder that speculators wrote; as `drafter.export.load_sglang`, which says what is raised."""
    path, found = read_json(folder)
    config = _read_config(str(path), found, capture_layers, verifier)
    where, tensors = read_tensors(folder)
    for unread in ("verifier_lm_head.weight", "verifier_norm.weight"):  # training saves the teacher too
        tensors.pop(unread, None)
    return build(where, config, by_server_names(where, tensors), embedding_VD)


def load_any(
    folder: str | os.PathLike[str],
    embedding_VD: Tensor | None = None,
    *,
    capture_layers: Sequence[int] | None = None,
    verifier: Mapping[str, Any] | None = None,
) -> Drafter:
    """The drafter in a folder of either kind."""
    _, found = read_json(folder)
    load = load_speculators if "speculators_model_type" in found else load_sglang
    return load(folder, embedding_VD, capture_layers=capture_layers, verifier=verifier)


def read_any_config(
    folder: str | os.PathLike[str],
    capture_layers: Sequence[int] | None = None,
    verifier: Mapping[str, Any] | None = None,
) -> DrafterConfig:
    """The checked config of the drafter in a folder of either kind; as `drafter.export.read_config`."""
    path, found = read_json(folder)
    if "speculators_model_type" in found:
        return _read_config(str(path), found, capture_layers, verifier)
    return read_config(folder, capture_layers, verifier)


def _read_config(
    path: str, found: dict[str, Any], capture_layers: Sequence[int] | None, verifier: Mapping[str, Any] | None
) -> DrafterConfig:
    inner = found.get("transformer_layer_config")
    if found.get("speculators_model_type") != MODEL_TYPE or not isinstance(inner, dict):
        raise DrafterError(
            f"{path}: speculators_model_type: expected {MODEL_TYPE} with a transformer_layer_config, found "
            f"{found.get('speculators_model_type')}; only EAGLE-3 drafters can be read"
        )
    if found.get("norm_before_residual", True):
        raise DrafterError(
            f"{path}: norm_before_residual: expected false, found {found.get('norm_before_residual', 'nothing (true)')}: "
            f"SGLang cannot serve it, and this package does not train it"
        )
    expected = {"model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1, "mlp_bias": False}
    for name, value in expected.items():
        if inner.get(name, value) != value:
            raise DrafterError(
                f"{path}: transformer_layer_config.{name}: expected {value}, found {inner[name]}: not what this package trains"
            )
    layers = capture_layers or captured_layers(found, verifier)
    if not layers:
        raise DrafterError(
            f"{path}: eagle_aux_hidden_state_layer_ids: expected the captured layers, found none; name them with "
            f"capture_layers (--layers), or the verifier (--verifier) whose default they are"
        )
    fields = {name: inner[name] for name in _SAME if inner.get(name) is not None}
    fields |= bias_fields(inner) | rope_fields(inner)
    fields |= {name: bool(found.get(name)) for name in _VARIANTS}
    fields |= {
        "draft_vocab_size": found.get("draft_vocab_size") or inner.get("vocab_size"),
        "capture_layers": tuple(layers),
    }
    if found.get("target_hidden_size"):
        fields["target_hidden_size"] = found["target_hidden_size"]
    fields.setdefault("num_key_value_heads", inner.get("num_attention_heads"))
    if "head_dim" not in fields and inner.get("hidden_size") and inner.get("num_attention_heads"):
        fields["head_dim"] = inner["hidden_size"] // inner["num_attention_heads"]
    return checked_config(fields, path)


def _layer_name(name: str) -> str:
    return name.replace("midlayer.", "layers.0.", 1)
