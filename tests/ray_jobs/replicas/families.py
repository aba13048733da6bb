"""Tiny random checkpoints of the families that SGLang serves and Statehouse captures from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMMON = {
    "vocab_size": 1024, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 64,
    "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 128,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
# name: (config class, model class, what its config has beside the common part)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "qwen2 tied": ("Qwen2Config", "Qwen2ForCausalLM", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": (
        "Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False},
    ),
    "qwen3 moe": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 16,
         "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False},
    ),
    "mistral": (
        "MistralConfig", "MistralForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": None, "tie_word_embeddings": False},
    ),
    "deepseek v3": (
        "DeepseekV3Config", "DeepseekV3ForCausalLM",
        {"moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
         "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32,
         "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "norm_topk_prob": True, "topk_method": "noaux_tc",
         "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "rope_interleave": True, "moe_layer_freq": 1,
         "rope_parameters": _YARN},
    ),
    "gemma3": (
        "Gemma3TextConfig", "Gemma3ForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 64, "query_pre_attn_scalar": 16},
    ),
}  # fmt: skip


def make_family(folder: Path, name: str) -> Path:
    """A checkpoint whose layers all matter: transformers' own start would make them nearly zero."""
    import torch
    import transformers

    config_class, model_class, more = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**_COMMON, **more})
    model = getattr(transformers, model_class)(config)
    for label, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        elif label.endswith("norm.weight") or "layernorm" in label:
            weight.data.add_(torch.randn_like(weight) * 0.1)
    for label, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "e_score_correction_bias" in label:
            tensor.data.copy_(torch.randn_like(tensor) * 0.02)
    model.save_pretrained(folder)
    return folder


def wrap_as_kimi(folder: Path, deepseek: Path) -> Path:
    """Kimi-K2.5's multi-modal wrapper around a DeepSeek-V3 checkpoint: the config names a vision part, SGLang loads none."""
    from safetensors.torch import load_file, save_file

    text = json.loads((deepseek / "config.json").read_text())
    text |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    vision = {
        "patch_size": 14, "init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed", "vt_num_attention_heads": 4, "vt_num_hidden_layers": 1, "vt_hidden_size": 32,
        "vt_intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "hidden_size": 32,
        "intermediate_size": 64, "merge_kernel_size": [2, 2], "video_attn_type": "spatial_temporal",
        "merge_type": "sd2_tpool", "mm_projector_type": "patchmerger", "mm_hidden_size": 32, "text_hidden_size": 64,
        "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5,
    }  # fmt: skip
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "float32",
        "text_config": text, "vision_config": vision, "media_placeholder_token_id": 1023, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(deepseek / "model.safetensors")
    named = {f"language_model.{name}": tensor.contiguous() for name, tensor in weights.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
