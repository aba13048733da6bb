"""Drafters that others published for Kimi, as their config.json and tensor names have them: read, turned, trained on.

Nothing of theirs is here. The configs hold the keys and numbers that are public: lightseekorg/kimi-k2.5-eagle3 (the whole
vocabulary, fp16 with the verifier's embedding in bf16, two files, no layer named), AQ-MedAI/Kimi-K2-Instruct-eagle3 and
Kimi-K25-eagle3 (SpecForge's kimi-k2-eagle3.json and export: 32,000 tokens, no embedding, DeepSeek's layer ids). Weights are
made here, at a 256th of the width.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drafter.config import DrafterConfig
from drafter.convert import main
from drafter.export import CONFIG, load_sglang, read_config, sglang_tensors
from drafter.layer_ids import captured_layers
from drafter.model import Drafter
from drafter.speculators import load_any, load_speculators
from drafter.start import load_start, start_from
from vocab.mapping import DraftVocab

LIGHTSEEK: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 163584, "draft_vocab_size": 163840, "dtype": "bfloat16", "eos_token_id": 163585, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 12288,
    "max_position_embeddings": 262144, "max_window_layers": 36, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 64, "num_hidden_layers": 1, "num_key_value_heads": 64, "pretraining_tp": 1,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False, "vocab_size": 163840,
}  # fmt: skip
AQ_MEDAI: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 163584, "eos_token_id": 163585, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
    "max_position_embeddings": 131072, "max_window_layers": 48, "model_type": "kimi_k2", "num_attention_heads": 64,
    "num_hidden_layers": 1, "num_key_value_heads": 64, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.53.2", "use_cache": True, "use_sliding_window": False, "vocab_size": 163840,
    "draft_vocab_size": 32000,
}  # fmt: skip
# A Kimi wrapper's config, as far as it concerns a drafter.
VERIFIER = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
    "text_config": {"model_type": "kimi_k2", "num_hidden_layers": 61, "hidden_size": 28, "vocab_size": 40},
}  # fmt: skip
TINY = {"hidden_size": 28, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
LAYER = [
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "hidden_norm", "input_layernorm", "post_attention_layernorm",
]  # fmt: skip
NAMES = {"fc.weight", "norm.weight", "lm_head.weight", *(f"midlayer.{name}.weight" for name in LAYER)}


def folder_of(path: Path, config: dict[str, Any], draft: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A folder as published, tiny; its tensors. With the whole vocabulary it has an embedding and comes in two files."""
    path.mkdir()
    config = config | TINY | {"vocab_size": 40, "draft_vocab_size": draft}
    (path / CONFIG).write_text(json.dumps(config))
    torch.manual_seed(draft)
    width, inner, heads = 28, 48, 32
    shapes = {
        "fc": (width, 3 * width), "q_proj": (heads, 2 * width), "k_proj": (heads, 2 * width), "v_proj": (heads, 2 * width),
        "o_proj": (width, heads), "gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner),
        "lm_head": (draft, width),
    }  # fmt: skip
    tensors = {name: torch.randn(shapes.get(name.split(".")[-2], (width,))).to(dtype) for name in sorted(NAMES)}
    if draft == 40:
        tensors["embed_tokens.weight"] = torch.randn(40, width).bfloat16()
        first = {name: one for name, one in tensors.items() if name != "lm_head.weight"}
        save_file(first, path / "model-00001-of-00002.safetensors")
        save_file({"lm_head.weight": tensors["lm_head.weight"]}, path / "model-00002-of-00002.safetensors")
        parts = {name: f"model-0000{1 + (name not in first)}-of-00002.safetensors" for name in tensors}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    else:
        vocabulary = DraftVocab.from_ids(range(3, 3 + draft), 40)
        tensors["d2t"], tensors["t2d"] = (torch.from_numpy(one.copy()) for one in (vocabulary.d2t, vocabulary.t2d))
        save_file(tensors, path / "model.safetensors")
    return tensors


def test_lightseekorgs_is_read_with_the_layers_that_servers_take_by_default(tmp_path: Path) -> None:
    tensors = folder_of(tmp_path / "kimi", LIGHTSEEK, 40, torch.float16)
    drafter = load_any(tmp_path / "kimi", verifier=VERIFIER)
    assert drafter.config.capture_layers == (1, 29, 57)
    assert drafter.draft_vocab.size == 40
    state = drafter.state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor.to(torch.float16)), name


def test_aq_medais_is_read_with_deepseeks_layer_ids_and_turned_for_both_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = folder_of(tmp_path / "kimi", AQ_MEDAI, 12, torch.bfloat16)
    verifier = tmp_path / "verifier"
    verifier.mkdir()
    (verifier / CONFIG).write_text(json.dumps(VERIFIER))
    save_file(
        {
            "language_model.model.embed_tokens.weight": torch.randn(40, 28),
            "language_model.lm_head.weight": torch.randn(40, 28),
            "language_model.model.norm.weight": torch.ones(28),
        },
        verifier / "model.safetensors",
    )
    for to in ("sglang", "speculators"):
        command = [str(tmp_path / "kimi"), str(tmp_path / to), "--to", to, "--verifier", str(verifier)]
        assert main(command) == 0, capsys.readouterr().err
        assert "[1, 29, 57] (0-based outputs)" in capsys.readouterr().out
    served = json.loads((tmp_path / "sglang" / CONFIG).read_text())
    assert sorted(served["eagle_config"]["eagle_aux_hidden_state_layer_ids"]) == [2, 30, 58]
    assert served["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    read = [load_sglang(tmp_path / "sglang", torch.zeros(40, 28)), load_speculators(tmp_path / "speculators")]
    for drafter in read:
        assert drafter.config.capture_layers == (1, 29, 57)
        state = drafter.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def test_both_are_trained_on_with_another_draft_vocabulary(tmp_path: Path) -> None:
    for config, draft, dtype, kept in ((LIGHTSEEK, 40, torch.float16, 20), (AQ_MEDAI, 12, torch.bfloat16, 5)):
        folder = tmp_path / str(draft)
        tensors = folder_of(folder, config, draft, dtype)
        own = read_config(folder, (1, 29, 57)).model_dump() | {"draft_vocab_size": 20}
        drafter = Drafter(DrafterConfig(**own), DraftVocab.from_ids(range(10, 30), 40), torch.randn(40, 28))
        started = start_from(drafter, load_start(str(folder), drafter))
        assert (started.rows_kept + started.rows_mapped, started.rows_new) == (kept, 20 - kept)
        assert (len(started.kept), started.rows_dropped) == (12, draft - kept)
        row = tensors["lm_head.weight"][10 if draft == 40 else 7]  # of token 10
        assert torch.equal(drafter.lm_head.weight[0], row.float())


@pytest.mark.parametrize(
    ("config", "draft", "parameters"), [(LIGHTSEEK, 163840, 2_003_857_408), (AQ_MEDAI, 32000, 1_190_948_864)]
)
def test_tensors_have_the_published_sizes(tmp_path: Path, config: dict[str, Any], draft: int, parameters: int) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(config))
    found = read_config(tmp_path, verifier=VERIFIER)
    shapes = sglang_tensors(found)
    assert set(shapes) == NAMES | ({"d2t", "t2d"} if draft < 163840 else set())
    assert shapes["fc.weight"] == (7168, 21504)
    assert shapes["midlayer.self_attn.q_proj.weight"] == (8192, 14336)
    assert shapes["midlayer.self_attn.o_proj.weight"] == (7168, 8192)
    assert shapes["midlayer.mlp.down_proj.weight"] == (7168, config["intermediate_size"])
    assert shapes["lm_head.weight"] == (draft, 7168)
    assert sum(torch.Size(shapes[name]).numel() for name in NAMES) == parameters
    assert found.kv_bytes_per_token == 32768


def test_layers_are_told_by_whichever_servers_ids_a_config_has() -> None:
    assert captured_layers({"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}) == (1, 29, 57)  # vLLM's
    assert captured_layers({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}}) == (1, 29, 57)
    assert captured_layers({}) == ()
