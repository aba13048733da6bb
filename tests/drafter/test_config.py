"""A drafter's shape follows its verifier's config.json, whichever way that is written, or one error says why not."""

from __future__ import annotations

from typing import Any

import pytest
from dense import small_config
from pydantic import ValidationError

from drafter.config import DrafterConfig
from drafter.errors import DrafterError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "num_hidden_layers": 30, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "rope_scaling": None, "attention_bias": False,
}  # fmt: skip
KIMI: dict[str, Any] = {
    "model_type": "kimi_k25",
    "text_config": {
        "model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 64,
        "num_key_value_heads": 64, "v_head_dim": 128, "kv_lora_rank": 512, "vocab_size": 163840, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "rope_scaling": {"type": "yarn", "factor": 64.0},
    },
}  # fmt: skip


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def test_a_drafter_is_one_layer_like_its_verifiers() -> None:
    config = DrafterConfig.from_verifier(LLAMA, 8192, [1, 14, 26])
    assert (config.hidden_size, config.target_hidden_size, config.head_dim) == (576, 576, 64)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert (config.vocab_size, config.draft_vocab_size, config.rope_theta) == (49152, 8192, 100000.0)
    assert config.feature_size == 3 * 576


@pytest.mark.parametrize("layers", [(5,), (1, 14), (0, 2, 4, 6, 8)])
def test_any_number_of_layers_can_be_captured(layers: tuple[int, ...]) -> None:
    assert DrafterConfig.from_verifier(LLAMA, 8192, layers).feature_size == len(layers) * 576


def test_both_ways_of_writing_rope_are_read() -> None:
    new = without(LLAMA, "rope_theta", "rope_scaling") | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}
    }
    assert DrafterConfig.from_verifier(new, 8192, [1, 14, 26]) == DrafterConfig.from_verifier(LLAMA, 8192, [1, 14, 26])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}},
        {"rope_scaling": {"type": "su", "factor": 4.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
        {"partial_rotary_factor": 0.5},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
        {"rope_scaling": "yarn"},
    ],
)
def test_rope_that_is_not_implemented_is_refused_unless_the_drafter_is_told_to_do_without(rope: dict[str, Any]) -> None:
    with pytest.raises(DrafterError, match="verifier config: rope_scaling: "):
        DrafterConfig.from_verifier(LLAMA | rope, 8192, [1, 14, 26])
    assert DrafterConfig.from_verifier(LLAMA | rope, 8192, [1, 14, 26], rope_scaling=None).rope_scaling is None


def test_a_wrapped_verifier_with_latent_attention_gives_ordinary_heads() -> None:
    config = DrafterConfig.from_verifier(KIMI, 32000, [1, 29, 57])
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (7168, 64, 64)
    assert (config.head_dim, config.intermediate_size, config.feature_size) == (128, 12288, 3 * 7168)
    assert config.rope_scaling is not None
    assert config.kv_bytes_per_token == 2 * 2 * 64 * 128
    other = {"num_key_value_heads": 8, "intermediate_size": 18432, "num_attention_heads": 32, "rope_scaling": None}
    changed = DrafterConfig.from_verifier(KIMI, 32000, [1, 29, 57], **other)
    assert {name: getattr(changed, name) for name in other} == other
    assert changed.kv_bytes_per_token == 2 * 2 * 8 * 128


def test_a_config_without_a_decoder_in_it_is_refused() -> None:
    with pytest.raises(DrafterError, match="found none of intermediate_size, vocab_size in it"):
        DrafterConfig.from_verifier(without(LLAMA, "intermediate_size", "vocab_size"), 8192, [1, 14, 26])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"draft_vocab_size": 31}, "at most vocab_size \\(30\\), found 31"),
        ({"num_key_value_heads": 3}, "a multiple of num_key_value_heads \\(3\\), found 4"),
        ({"capture_layers": (3, 1)}, "ascending, found \\[3, 1\\]"),
        ({"capture_layers": (1, 1)}, "ascending, found \\[1, 1\\]"),
        ({"capture_layers": ()}, "at least 1 item"),
        ({"head_dim": 5}, "multiple of 2"),
        ({"attention_bias": True}, "attention_bias\n.*expected false or o_proj, found True: SGLang and vLLM"),
        ({"num_hidden_layers": 2}, "num_hidden_layers\n.*expected 1, found 2: SGLang and vLLM"),
        ({"norm_before_fc": True, "fc_norm": True}, "at most one of them on"),
        ({"layers": 3}, "Extra inputs are not permitted"),
    ],
)
def test_a_shape_that_no_drafter_has_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        small_config(**changed)
