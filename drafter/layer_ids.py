"""Which decoder outputs a drafter reads, from what its config.json calls them: the servers count in three ways.

vLLM's top-level `eagle_aux_hidden_state_layer_ids` name the layer that *reads* a state, from 0: output k - 1. SGLang's
`eagle_config.eagle_aux_hidden_state_layer_ids` name the layer that writes it, but for verifiers of the DeepSeek family,
where they name the reader too, unless the first of them is 1 (SGLang 0.5.23, `set_eagle3_layers_to_capture`). Where a
config names none, both servers take the readers 2, n // 2 and n - 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drafter.errors import DrafterError

# Classes of SGLang whose ids name the layer that reads a state, and the model_types of their config.json files.
INPUT_ID_CLASSES = {
    "DeepseekV2ForCausalLM": ("deepseek_v2",),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "kimi_k2"),
    "DeepseekV32ForCausalLM": ("deepseek_v32",),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite",),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa",),
    "MistralLarge3ForCausalLM": ("deepseek_v3",),  # SGLang makes it one, of Mistral's own params.json
}
INPUT_ID_FAMILIES = tuple(sorted({family for families in INPUT_ID_CLASSES.values() for family in families}))
_NAME = "eagle_aux_hidden_state_layer_ids"


def captured_layers(config: Mapping[str, Any], verifier: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """0-based decoder outputs that the drafter of this config.json reads; empty where nothing tells.

    verifier: the verifier's config.json; without it the family is the drafter's own `model_type`, which those who copy a
    verifier's config leave in, and there is no number of layers to take a default from.
    """
    own = (config.get("statehouse") or {}).get("capture_layers")
    if own:
        return tuple(own)
    if ids := config.get(_NAME):
        return tuple(number - 1 for number in ids)
    if ids := (config.get("eagle_config") or {}).get(_NAME):
        return of_sglang(ids, family(verifier or config))
    layers = (verifier.get("text_config") or verifier).get("num_hidden_layers") if verifier else None
    return (1, layers // 2 - 1, layers - 4) if layers else ()


def sglang_ids(layers: Sequence[int], model_type: str) -> list[int]:
    """SGLang's ids (EAGLE3 convention) for the *outputs* of 0-based decoder layers; the order has no other meaning.

    Raises DrafterError for layer 0 alone of a DeepSeek-family verifier, which has no id.
    """
    if model_type not in INPUT_ID_FAMILIES:
        return list(layers)
    ids = sorted((layer + 1 for layer in layers), reverse=True)  # descending: 1 can only be last
    if ids == [1]:
        raise DrafterError(
            "SGLang cannot capture layer 0 alone of a DeepSeek-family verifier: it reads the id 1 as 2; "
            "capture another layer beside it: extraction.capture_layers=[0, 1]"
        )
    return ids


def family(verifier: Mapping[str, Any]) -> str:
    """model_type of a verifier's language model. verifier: its config.json."""
    return str((verifier.get("text_config") or verifier).get("model_type"))


def alike(layers: Sequence[int]) -> bool:
    """Whether SGLang's ids of these layers are the layers themselves, whatever the verifier's family."""
    return list(layers)[:1] == [1]


def of_sglang(ids: Sequence[int], model_type: str) -> tuple[int, ...]:
    """SGLang's ids as 0-based decoder outputs, ascending. model_type: of the verifier's language model."""
    readers = model_type in INPUT_ID_FAMILIES and ids[0] != 1
    return tuple(sorted(number - 1 if readers else number for number in ids))
