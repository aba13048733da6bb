"""A drafter goes from format to format and comes back bit for bit; others' folders are read, or one error says why not."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense import small_batch, small_drafter
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.convert import main
from drafter.errors import DrafterError
from drafter.export import CONFIG, TENSORS, export_sglang, load_sglang
from drafter.model import Drafter
from drafter.speculators import export_speculators, load_any, load_speculators
from drafter.start import load_start, start_from
from drafter.ttt import unroll

PEERS = os.environ.get("STATEHOUSE_PEERS_PYTHON")
VARIANTS: list[dict[str, Any]] = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "draft_vocab_size": 30},
    {"attention_bias": "o_proj"},
    {"target_hidden_size": 12, "rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
]


def assert_same(one: Drafter, other: Drafter) -> None:
    assert one.config == other.config
    ours, theirs = one.state_dict(), other.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("changed", VARIANTS)
def test_both_formats_come_back_as_they_were_and_turn_into_each_other(tmp_path: Path, changed: dict[str, Any]) -> None:
    drafter = small_drafter(**changed)
    export_sglang(drafter, tmp_path / "sglang")
    export_speculators(load_any(tmp_path / "sglang", drafter.embed_tokens.weight), tmp_path / "vllm", verifier="them")
    export_sglang(load_any(tmp_path / "vllm"), tmp_path / "again")
    assert_same(load_speculators(tmp_path / "vllm"), drafter)
    assert_same(load_sglang(tmp_path / "again", drafter.embed_tokens.weight), drafter)
    assert (tmp_path / "again" / CONFIG).read_text() == (tmp_path / "sglang" / CONFIG).read_text()
    config = json.loads((tmp_path / "vllm" / CONFIG).read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["norm_before_residual"] is False


def test_a_plain_checkpoint_of_others_is_read_whatever_its_names_and_files(tmp_path: Path) -> None:
    """Shaped as public EAGLE-3 drafters are: no key of ours, an embedding, `layers.0` or `midlayer`, two files."""
    drafter = small_drafter()
    export_sglang(drafter, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    for name in ("statehouse", "eagle_config", "eagle_aux_hidden_state_layer_ids", "target_hidden_size"):
        del config[name]
    (tmp_path / CONFIG).write_text(json.dumps(config))
    tensors = load_file(tmp_path / TENSORS) | {"embed_tokens.weight": drafter.embed_tokens.weight.detach().clone()}
    renamed = {
        "model." + name.replace("midlayer.", "layers.0.") if "d" not in name[:2] else name: one
        for name, one in tensors.items()
    }
    names = sorted(renamed)
    (tmp_path / TENSORS).unlink()
    for part, some in enumerate((names[::2], names[1::2])):
        save_file({name: renamed[name] for name in some}, tmp_path / f"model-{part + 1:05d}-of-00002.safetensors")
    with pytest.raises(DrafterError, match="name them with capture_layers"):
        load_any(tmp_path)
    assert_same(load_any(tmp_path, capture_layers=(1, 3, 4)), drafter)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"norm_before_residual": None}, "norm_before_residual: expected false, found None"),
        ({"norm_before_residual": True}, "norm_before_residual: expected false, found True"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type: expected eagle3"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "name them with capture_layers"),
    ],
)
def test_speculators_that_are_none_of_ours_are_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    export_speculators(small_drafter(), tmp_path, verifier="them")
    found = json.loads((tmp_path / CONFIG).read_text()) | config
    if config.get("norm_before_residual", 0) is None:
        del found["norm_before_residual"]
        said = r"norm_before_residual: expected false, found nothing \(true\)"
    (tmp_path / CONFIG).write_text(json.dumps(found))
    with pytest.raises(DrafterError, match=said):
        load_speculators(tmp_path)


def test_a_missing_an_extra_and_a_misshapen_tensor_are_one_error_each(tmp_path: Path) -> None:
    export_speculators(small_drafter(), tmp_path, verifier="them")
    whole = load_file(tmp_path / TENSORS)
    changes: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
        (lambda t: t.pop("norm.weight"), r"expected tensors \['norm.weight'\]"),
        (lambda t: t.update({"surplus": torch.ones(1)}), r"found \['surplus'\]"),
        (lambda t: t.update({"fc.weight": torch.ones(2, 2)}), r"fc.weight: expected shape \[16, 48\], found \[2, 2\]"),
        (lambda t: t["norm.weight"].fill_(torch.nan), "norm.weight: expected finite numbers"),
    ]
    for change, said in changes:
        tensors = {name: one.clone() for name, one in whole.items()}
        change(tensors)
        save_file(tensors, tmp_path / TENSORS)
        with pytest.raises(DrafterError, match=said):
            load_speculators(tmp_path)
    (tmp_path / TENSORS).unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(DrafterError, match="pickles are not opened"):
        load_speculators(tmp_path)


def test_starting_from_another_drafter_keeps_rows_of_shared_tokens(tmp_path: Path) -> None:
    other, drafter = small_drafter(1, draft_vocab_size=20), small_drafter(2)
    before = drafter.lm_head.weight.detach().clone()
    export_sglang(other, tmp_path)
    started = start_from(drafter, load_start(str(tmp_path), drafter))
    ours, theirs = drafter.draft_vocab.target_ids.tolist(), other.draft_vocab.target_ids.tolist()
    for row, token in enumerate(ours):
        expected = other.lm_head.weight[theirs.index(token)] if token in theirs else before[row]
        assert torch.equal(drafter.lm_head.weight[row], expected)
    assert torch.equal(drafter.midlayer.mlp.up_proj.weight, other.midlayer.mlp.up_proj.weight)
    assert not torch.equal(drafter.embed_tokens.weight, other.embed_tokens.weight)
    shared = len(set(ours) & set(theirs))
    assert (started.rows_kept + started.rows_mapped, started.rows_new, started.rows_dropped) == (
        shared, 11 - shared, 20 - shared,
    )  # fmt: skip
    same = start_from(small_drafter(1, draft_vocab_size=20), other)
    assert (same.rows_kept, same.rows_mapped, same.rows_new, same.rows_dropped) == (20, 0, 0, 0)
    with pytest.raises(DrafterError, match="intermediate_size: expected 24, found 32"):
        start_from(drafter, small_drafter(intermediate_size=32))
    with pytest.raises(DrafterError, match="expected a drafter's folder"):
        load_start(str(tmp_path / "none"), drafter)


def test_the_command_converts_and_says_in_one_line_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = small_drafter()
    export_speculators(drafter, tmp_path / "vllm", verifier="them")
    assert main([str(tmp_path / "vllm"), str(tmp_path / "sglang")]) == 0
    assert "11 of 30" in (said := capsys.readouterr().out)
    assert "48 bytes of keys and values a token" in said
    assert_same(load_sglang(tmp_path / "sglang", drafter.embed_tokens.weight), drafter)
    assert main([str(tmp_path / "sglang")]) == 1
    assert "give the verifier's embedding" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1
    assert main([str(tmp_path / "vllm"), str(tmp_path / "x"), "--layers", "one"]) == 1
    assert "--layers: expected numbers" in capsys.readouterr().err


def test_for_sglang_layers_are_numbered_as_the_verifiers_family_has_them_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ids() -> list[int]:
        found = json.loads((tmp_path / "out" / CONFIG).read_text())
        return list(found["eagle_config"]["eagle_aux_hidden_state_layer_ids"])

    kimi = tmp_path / "kimi"
    kimi.mkdir()
    (kimi / CONFIG).write_text(json.dumps({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}}))
    drafter = small_drafter(capture_layers=(2, 30, 57))
    export_speculators(drafter, tmp_path / "vllm", verifier="moonshotai/Kimi-K2.5")
    command = [str(tmp_path / "vllm"), str(tmp_path / "out")]
    assert main(command) == 1
    assert "expected --verifier or --layer-ids, found neither" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert main([*command, "--layer-ids", "58,31,3"]) == 0
    assert ids() == [58, 31, 3]
    export_speculators(drafter, tmp_path / "vllm", verifier=str(kimi))  # a folder that is at hand
    assert main(command) == 0
    assert ids() == [58, 31, 3]
    again = [str(tmp_path / "out"), str(tmp_path / "out"), "--layers", "2,30,57"]  # as it was served
    tensors = load_file(tmp_path / "out" / TENSORS) | {"embed_tokens.weight": drafter.embed_tokens.weight.detach()}
    save_file(tensors, tmp_path / "out" / TENSORS)
    assert main(again) == 0, capsys.readouterr().err
    assert ids() == [58, 31, 3]


@pytest.mark.slow
@pytest.mark.skipif(not PEERS, reason="STATEHOUSE_PEERS_PYTHON names no Python with SpecForge and speculators")
@pytest.mark.parametrize(
    ("changed", "peers"),
    [
        ({}, 2),
        ({"num_attention_heads": 2, "num_key_value_heads": 1, "rope_theta": 500000.0}, 2),
        ({"fc_norm": True}, 2),
        ({"norm_before_fc": True, "norm_output": True}, 1),
        ({"draft_vocab_size": 30, "fc_norm": True, "norm_output": True}, 1),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 8}}, 2),
        ({"attention_bias": "o_proj"}, 1),
    ],
)
def test_the_peers_own_classes_give_the_same_logits(tmp_path: Path, changed: dict[str, Any], peers: int) -> None:
    """peers: how many of them compute such a drafter; SpecForge has fc_norm alone of EAGLE-3.1, and no biases."""
    drafter = small_drafter(head_dim=8, **changed)
    batch = small_batch(drafter, [18])
    export_sglang(drafter, tmp_path / "sglang")
    export_speculators(drafter, tmp_path / "vllm", verifier=str(tmp_path / "verifier"))
    save_file(
        {"token_ids": batch.token_ids, "features": batch.features, "embedding": drafter.embed_tokens.weight.detach()},
        tmp_path / "batch.safetensors",
    )
    script = Path(__file__).parent / "peer_logits.py"
    done = subprocess.run([str(PEERS), str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = load_file(tmp_path / "logits.safetensors")
    assert peers == 1 or set(theirs) == {"specforge", "speculators"}
    with torch.no_grad():
        steps = list(unroll(drafter, batch.token_ids, batch.features, [18], 4))
    for k, step in enumerate(steps):
        ours = drafter.logits(step.hidden_ND).detach()
        if peers == 2:
            torch.testing.assert_close(theirs["specforge"][k], ours, atol=1e-4, rtol=0)
        torch.testing.assert_close(theirs["speculators"][k][: 17 - k], ours[: 17 - k], atol=1e-4, rtol=0)
