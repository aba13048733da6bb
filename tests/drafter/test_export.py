"""What is exported is what the server reads, and comes back bit for bit; a folder that is not whole is never loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense import small_batch, small_drafter
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from drafter.errors import DrafterError
from drafter.export import CONFIG, TENSORS, export_sglang, load_sglang
from drafter.model import Drafter
from drafter.ttt import unroll

# Read off SGLang 0.5.23's llama_eagle3.py and llama.py: H 16, three layers of 16, 4 heads and 2 keys of 6, MLP 24.
SERVER_READS = {
    "fc.weight": (16, 48),
    "midlayer.self_attn.q_proj.weight": (24, 32),
    "midlayer.self_attn.k_proj.weight": (12, 32),
    "midlayer.self_attn.v_proj.weight": (12, 32),
    "midlayer.self_attn.o_proj.weight": (16, 24),
    "midlayer.mlp.gate_proj.weight": (24, 16),
    "midlayer.mlp.up_proj.weight": (24, 16),
    "midlayer.mlp.down_proj.weight": (16, 24),
    "midlayer.input_layernorm.weight": (16,),
    "midlayer.hidden_norm.weight": (16,),
    "midlayer.post_attention_layernorm.weight": (16,),
    "norm.weight": (16,),
    "lm_head.weight": (11, 16),
    "d2t": (11,),
    "t2d": (30,),
}


def embedding(drafter: Drafter) -> Tensor:
    return drafter.embed_tokens.weight


def exported(folder: Path, drafter: Drafter | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    export_sglang(drafter or small_drafter(), folder)
    return json.loads((folder / CONFIG).read_text()), load_file(folder / TENSORS)


def test_the_tensors_are_those_that_the_server_reads(tmp_path: Path) -> None:
    _, tensors = exported(tmp_path)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SERVER_READS
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert torch.equal(tensors["d2t"] + torch.arange(11), tensors["t2d"].nonzero().squeeze(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, TENSORS]


def test_the_config_is_the_servers(tmp_path: Path) -> None:
    config, _ = exported(tmp_path)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["model_type"], config["num_hidden_layers"], config["tie_word_embeddings"]) == ("llama", 1, False)
    assert (config["vocab_size"], config["draft_vocab_size"]) == (30, 11)
    assert config["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    }
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # vLLM's
    assert not {"norm_output", "norm_before_residual", "norm_before_fc"} & set(config)


def test_transformers_reads_the_config_as_the_server_will(tmp_path: Path) -> None:
    export_sglang(small_drafter(rope_theta=500000.0), tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.rope_parameters["rope_type"] == "default"
    assert config.rope_parameters["rope_theta"] == 500000.0
    assert (config.head_dim, config.num_key_value_heads, config.hidden_act) == (6, 2, "silu")
    assert (config.target_hidden_size, config.draft_vocab_size, config.attention_bias) == (16, 11, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"capture_layers": (0, 2, 4, 6, 7)},
        {"draft_vocab_size": 30},
        {"target_hidden_size": 20},
        {"attention_bias": "o_proj"},
    ],
    ids=["usual", "five layers", "whole vocabulary", "wider verifier", "a bias"],
)
def test_a_drafter_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, changed: dict[str, Any]) -> None:
    drafter = small_drafter(dtype=dtype, **changed)
    export_sglang(drafter, tmp_path)
    again = load_sglang(tmp_path, embedding(drafter))
    assert again.config == drafter.config
    assert again.draft_vocab == drafter.draft_vocab
    assert {name: t.dtype for name, t in again.state_dict().items()} == {
        name: t.dtype for name, t in drafter.state_dict().items()
    }
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())
    batch = small_batch(drafter, [9])
    for one, other in zip(*(unroll(d, batch.token_ids, batch.features, [9], 3) for d in (drafter, again)), strict=True):
        assert torch.equal(one.hidden_ND, other.hidden_ND)


def test_a_whole_vocabulary_needs_no_map_and_another_width_an_embedding_of_its_own(tmp_path: Path) -> None:
    _, whole = exported(tmp_path / "whole", small_drafter(draft_vocab_size=30))
    assert set(whole) == set(SERVER_READS) - {"d2t", "t2d"}
    wide = small_drafter(target_hidden_size=20)
    _, tensors = exported(tmp_path / "wide", wide)
    assert set(tensors) == set(SERVER_READS) | {"embed_tokens.weight"}
    assert torch.equal(load_sglang(tmp_path / "wide").embed_tokens.weight, embedding(wide))


def test_a_bias_of_o_proj_comes_with_zeros_that_make_the_other_server_compute_the_same(tmp_path: Path) -> None:
    """vLLM gives q, k and v a bias too wherever `attention_bias` is on; SGLang drops those names."""
    drafter = small_drafter(attention_bias="o_proj")
    config, tensors = exported(tmp_path, drafter)
    assert config["attention_bias"] is True
    zeros = {f"midlayer.self_attn.{name}_proj.bias": width for name, width in {"q": 24, "k": 12, "v": 12}.items()}
    assert set(tensors) == {*SERVER_READS, *zeros, "midlayer.self_attn.o_proj.bias"}
    assert all(torch.equal(tensors[name], torch.zeros(width)) for name, width in zeros.items())
    bias = tensors["midlayer.self_attn.o_proj.bias"]
    assert bias.all()
    assert torch.equal(bias, drafter.midlayer.self_attn.o_proj.bias)
    save_file({name: one for name, one in tensors.items() if name not in zeros}, tmp_path / TENSORS)
    again = load_sglang(tmp_path, embedding(drafter))
    assert (again.config, set(again.state_dict())) == (drafter.config, set(drafter.state_dict()))
    for name, width in zeros.items():
        save_file(tensors | {name: torch.full((width,), 0.5)}, tmp_path / TENSORS)
        with pytest.raises(DrafterError, match=rf"{name}: expected zeros, found other numbers: SGLang"):
            load_sglang(tmp_path, embedding(drafter))
        for odd, said in (
            (torch.zeros(5), "expected shape"),
            (torch.zeros(width, dtype=torch.int64), "expected floating point"),
            (torch.zeros(width).to(torch.float8_e4m3fn), "expected floating point"),
            (torch.full((width,), torch.nan), "expected finite"),
        ):
            save_file(tensors | {name: odd}, tmp_path / TENSORS)
            with pytest.raises(DrafterError, match=f"{name}: {said}"):
                load_sglang(tmp_path, embedding(drafter))


def test_weights_are_cast_when_asked_and_maps_never(tmp_path: Path) -> None:
    export_sglang(small_drafter(), tmp_path, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / TENSORS)
    assert {tensor.dtype for name, tensor in tensors.items() if name.endswith("weight")} == {torch.bfloat16}
    assert tensors["d2t"].dtype == torch.int64
    assert json.loads((tmp_path / CONFIG).read_text())["torch_dtype"] == "bfloat16"


def test_a_server_that_numbers_layers_in_its_own_way_is_told_so_and_we_still_know(tmp_path: Path) -> None:
    drafter = small_drafter()
    export_sglang(drafter, tmp_path, layer_ids=[5, 4, 2])
    assert json.loads((tmp_path / CONFIG).read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [5, 4, 2]
    assert load_sglang(tmp_path, embedding(drafter)).config.capture_layers == (1, 3, 4)
    with pytest.raises(DrafterError, match="layer_ids: expected 3 of them"):
        export_sglang(drafter, tmp_path, layer_ids=[5, 4])


def test_what_the_server_would_serve_wrong_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="SGLang leaves `fc` out"):
        export_sglang(small_drafter(capture_layers=(4,)), tmp_path / "one")
    broken = small_drafter()
    with torch.no_grad():
        broken.norm.weight[3] = torch.nan
    with pytest.raises(DrafterError, match=r"norm\.weight: expected finite numbers"):
        export_sglang(broken, tmp_path / "nan")
    grown = small_drafter()
    grown.register_buffer("extra", torch.zeros(1))
    with pytest.raises(DrafterError, match=r"found \['extra'\]"):
        export_sglang(grown, tmp_path / "grown")
    assert not list(tmp_path.iterdir())


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.pop(name)  # type: ignore[return-value]


def put(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: value(tensors.get(name, torch.zeros(2)))})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop("fc.weight"), "expected tensors \\['fc.weight'\\], found none of that name"),
        (drop("d2t"), "expected tensors \\['d2t'\\]"),
        (put("layers.0.hidden_norm.weight", torch.clone), "hidden_norm.weight: expected one tensor of that meaning"),
        (
            put("midlayer.mlp.up_proj.weight", lambda t: t[:5].clone()),
            "up_proj.weight: .* \\[24, 16\\], found \\[5, 16\\]",
        ),
        (put("fc.weight", lambda t: t[:, :32].clone()), "fc.weight: expected shape \\[16, 48\\], found \\[16, 32\\]"),
        (put("d2t", lambda t: t.int()), "d2t: expected torch.int64, found torch.int32"),
        (put("d2t", lambda t: t + torch.arange(11)), "d2t holds offsets"),
        (put("t2d", lambda t: ~t), "t2d: expected 11 ids"),
        (put("midlayer.self_attn.o_proj.bias", lambda t: t), "found \\['midlayer.self_attn.o_proj.bias'\\]"),
        (put("norm.weight", lambda t: t.long()), "norm.weight: expected floating point, found torch.int64"),
        (put("norm.weight", lambda t: t * torch.inf), "norm.weight: expected finite"),
        (put("embed_tokens.weight", lambda t: t), "embed_tokens.weight: expected shape \\[30, 16\\]"),
    ],
)
def test_tensors_that_are_not_the_drafters_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], said: str
) -> None:
    drafter = small_drafter()
    _, tensors = exported(tmp_path, drafter)
    change(tensors)
    save_file(tensors, tmp_path / TENSORS)
    with pytest.raises(DrafterError, match=said) as error:
        load_sglang(tmp_path, embedding(drafter))
    assert TENSORS in str(error.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures: expected \\['LlamaForCausalLMEagle3'\\]"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: expected 1, found 2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: expected it off"),
        ({"norm_before_residual": True}, "norm_before_residual: expected it off"),
        ({"bias": True}, "bias: expected it off"),
        ({"mlp_bias": True}, "mlp_bias: expected it off"),
        ({"eagle_config": {"use_aux_norm": True}}, "use_aux_norm: expected it off"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: .*factor: expected a number"),
        ({"hidden_size": None}, "hidden_size: Field required"),
        (
            {"statehouse": None, "eagle_config": None, "eagle_aux_hidden_state_layer_ids": None},
            "name them with capture_layers",
        ),
    ],
)
def test_configs_of_other_drafters_are_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    drafter = small_drafter()
    config, _ = exported(tmp_path, drafter)
    (tmp_path / CONFIG).write_text(json.dumps(config | changed))
    with pytest.raises(DrafterError, match=said) as error:
        load_sglang(tmp_path, embedding(drafter))
    assert CONFIG in str(error.value)


def test_a_folder_of_somebody_else_is_read_with_what_it_leaves_out(tmp_path: Path) -> None:
    """SpecForge's: no t2d needed, no widths that follow from others, an embedding of its own perhaps."""
    drafter = small_drafter(head_dim=4)
    config, tensors = exported(tmp_path, drafter)
    for name in ("statehouse", "eagle_config", "head_dim", "target_hidden_size", "attention_bias"):
        config.pop(name)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    tensors.pop("t2d")
    save_file(tensors | {"embed_tokens.weight": embedding(drafter)}, tmp_path / TENSORS)
    again = load_sglang(tmp_path, capture_layers=[1, 3, 4])
    assert again.config == drafter.config
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())


def test_files_that_are_not_there_or_not_whole_are_one_error(tmp_path: Path) -> None:
    drafter = small_drafter()
    with pytest.raises(DrafterError, match=r"config\.json: cannot read it: No such file"):
        load_sglang(tmp_path, embedding(drafter))
    exported(tmp_path, drafter)
    with pytest.raises(DrafterError, match=r"expected embed_tokens\.weight, found none; give the verifier's"):
        load_sglang(tmp_path)
    with pytest.raises(DrafterError, match=r"embedding: expected .* \[30, 16\], found \[29, 16\]"):
        load_sglang(tmp_path, embedding(drafter)[1:])
    whole = (tmp_path / TENSORS).read_bytes()
    (tmp_path / TENSORS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DrafterError, match="expected a safetensors file"):
        load_sglang(tmp_path, embedding(drafter))
    (tmp_path / TENSORS).unlink()
    with pytest.raises(DrafterError, match=r"model\.safetensors: cannot read it"):
        load_sglang(tmp_path, embedding(drafter))
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(DrafterError, match="expected JSON"):
        load_sglang(tmp_path, embedding(drafter))
    (tmp_path / "file").write_text("")
    with pytest.raises(DrafterError, match="cannot write the drafter"):
        export_sglang(drafter, tmp_path / "file")
