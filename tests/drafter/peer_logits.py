"""Loads exported folders into SpecForge's and speculators' own classes and writes the logits of four steps.

    PEERS_PYTHON tests/drafter/peer_logits.py FOLDER

FOLDER holds sglang/, vllm/ and batch.safetensors. Every tensor of a folder must be one that the class has, and but for
the verifier's own every one of the class must be there. Never imported by the project.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from safetensors.torch import load_file, save_file

STEPS = 4
SPECFORGE_LACKS = ("norm_before_fc", "norm_output", "attention_bias")  # or takes for something else


def specforge(folder: Path, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    import specforge.algorithms.eagle3.model as eagle3
    from specforge.core import loss
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig
    from specforge.utils import padding

    eagle3.LogSoftmaxLoss = SimpleNamespace(apply=loss._compute_loss)
    draft = AutoDraftModel.from_config(
        AutoDraftModelConfig.from_file(str(folder / "config.json")), attention_backend="sdpa", torch_dtype=torch.float32
    )
    state = load_file(folder / "model.safetensors") | {"embed_tokens.weight": batch["embedding"]}
    missing, unexpected = draft.load_state_dict(state, strict=False)
    assert not missing, missing
    assert not unexpected, unexpected
    found: list[torch.Tensor] = []
    original = draft.compute_logits

    def recording(hidden: torch.Tensor) -> torch.Tensor:
        found.append(original(hidden))
        return found[-1]

    draft.compute_logits = recording
    model = eagle3.OnlineEagle3Model(draft, length=STEPS, attention_backend="sdpa").eval()
    ids = padding(batch["token_ids"][None], left=False)
    vocabulary = len(batch["embedding"])
    with torch.no_grad():
        model(
            input_ids=ids, attention_mask=torch.ones_like(ids), target=torch.zeros(*ids.shape, vocabulary),
            loss_mask=torch.ones(*ids.shape, 1, dtype=torch.int64), hidden_states=batch["features"][None],
        )  # fmt: skip
    return torch.cat(found)


def speculators(folder: Path, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    config = Eagle3SpeculatorConfig.from_dict(json.loads((folder / "config.json").read_text()))
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = Eagle3DraftModel(config)
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"verifier_lm_head.weight", "verifier_norm.weight"}, missing
    model = model.float().eval()
    torch.nn.init.zeros_(model.verifier_lm_head.weight)
    torch.nn.init.ones_(model.verifier_norm.weight)
    rows, width = len(batch["token_ids"]), batch["embedding"].shape[1]
    item = {
        "input_ids": batch["token_ids"], "hidden_states": batch["features"],
        "verifier_last_hidden_states": torch.ones(rows, width), "loss_mask": torch.ones(rows, dtype=torch.int64),
        "lengths": torch.tensor([rows]), "position_ids": torch.arange(rows),
    }  # fmt: skip
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, out: found.append(out.detach().clone()))
    call, _ = Eagle3DraftModel.get_trainer_kwargs(
        ttt_steps=STEPS, ttt_step_loss_decay=1.0, loss_fn="kl_div", loss_implementation="eager"
    )
    collated = CollateFn(rows - 1, width, dtype=torch.float32, preprocess=shift_batch)([item])
    with torch.no_grad():
        model(**collated, **call)
    return torch.cat(found)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    tensors = load_file(root / "batch.safetensors")
    logits = {"speculators": speculators(root / "vllm", tensors)}
    config = json.loads((root / "sglang" / "config.json").read_text())
    if not any(config.get(name) for name in SPECFORGE_LACKS):
        logits["specforge"] = specforge(root / "sglang", tensors)
    save_file({name: value.contiguous() for name, value in logits.items()}, root / "logits.safetensors")
