"""One side of the drafter benchmark: builds a model for a line of JSON, takes a training step for any other line.

    python -m benchmarks.drafter_step statehouse

Sides: `statehouse` (the project's Python), `specforge` and `speculators` (the peers', by path: nothing of the project is
imported then). All read one file of tensors and one verifier folder, both made by benchmarks/drafter_sides.py. Prints a
JSON line for each: seconds of CPU, loss and peak memory above the bare process for a step.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # no compiler on the bench machine is part of the comparison
warnings.filterwarnings("ignore")

Step = Callable[[], float]
# What is imported is part of the bare process, over which memory is counted. The peers' modules import torch._dynamo too;
# torch's optimisers do when the first one is made: 145 MB. numba is there in any run, which reads datasets with it: 50 MB.
_IMPORTS = {
    "statehouse": ("drafter.trainer", "torch._dynamo", "numba"),
    "specforge": ("specforge.training.strategies.base", "specforge.algorithms.eagle3.model"),
    "speculators": ("speculators.models.eagle3", "speculators.train.trainer"),
}


def status(field: str) -> float:
    """MB of this process: VmRSS, VmHWM."""
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


def statehouse(spec: SimpleNamespace, tensors: dict[str, Any]) -> Step:
    """The trainer's own update: loss, gradient, clip, AdamW."""
    import torch

    from drafter.config import DrafterConfig
    from drafter.initial import new_drafter
    from drafter.loader import PackedBatch
    from drafter.recipe import DrafterSection, TrainingSection
    from drafter.team import Team
    from drafter.trainer import Trainer
    from drafter.verifier_head import VerifierHead
    from drafter.verifier_weights import read_verifier_weights
    from vocab.mapping import DraftVocab

    weights = read_verifier_weights(spec.verifier)
    vocabulary = DraftVocab.from_ids(tensors["draft_ids"].tolist(), spec.vocab)
    config = DrafterConfig.from_verifier(weights.config, vocabulary.size, spec.layers)
    section = DrafterSection(ttt_steps=spec.steps, lm_head=spec.lm_head)
    settings = TrainingSection(dtype=spec.dtype)
    dtype = getattr(torch, spec.dtype)
    drafter = new_drafter(config, vocabulary, weights, section, 0)
    drafter.embed_tokens.to(dtype)
    head = VerifierHead(weights.lm_head_VD.to(dtype), vocabulary)
    del weights
    trainer = Trainer(drafter, head, section, settings, Team())
    lengths = tuple(spec.lengths)
    batch = PackedBatch(
        token_ids_T=tensors["token_ids"], loss_mask_T=tensors["loss_mask"], features_TF=tensors["features"],
        final_TD=tensors["final"], lengths=lengths, rows=tuple(range(len(lengths))),
    )  # fmt: skip
    return lambda: trainer.update([batch], 1e-4).loss


def specforge(spec: SimpleNamespace, tensors: dict[str, Any]) -> Step:
    """SpecForge's model, strategy, teacher head and optimiser; lm_head trained; its loss's own reference for CPUs."""
    import specforge.algorithms.eagle3.model as eagle3
    import torch
    from specforge.algorithms.eagle3.data import build_offline_collator, build_offline_normalizer
    from specforge.core import loss
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig
    from specforge.modeling.target.target_head import TargetHead
    from specforge.optimizer import BF16Optimizer
    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader
    from specforge.training.strategies.base import Eagle3TrainStrategy

    eagle3.LogSoftmaxLoss = SimpleNamespace(apply=loss._compute_loss)
    dtype = getattr(torch, spec.dtype)
    verifier = json.loads(Path(spec.verifier, "config.json").read_text())
    folder = Path(tempfile.mkdtemp(dir=spec.folder))
    (folder / "data").mkdir()
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
            "max_position_embeddings", "rms_norm_eps")  # fmt: skip
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu",
        "tie_word_embeddings": False, "draft_vocab_size": spec.draft, "rope_theta": 10000.0, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": spec.dtype, **{name: verifier[name] for name in same},
    }  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    draft = AutoDraftModel.from_config(
        AutoDraftModelConfig.from_file(str(path)), attention_backend="sdpa", torch_dtype=dtype
    )
    ids = tensors["draft_ids"]
    t2d = torch.zeros(spec.vocab, dtype=torch.bool).index_fill(0, ids, True)
    torch.save({"d2t": ids - torch.arange(spec.draft), "t2d": t2d}, folder / "map.pt")
    draft.load_vocab_mapping(str(folder / "map.pt"))
    draft.load_embedding(spec.verifier)
    draft.freeze_embedding()
    draft = draft.to(dtype)
    head = TargetHead.from_pretrained(spec.verifier).to(dtype)
    model = eagle3.OnlineEagle3Model(draft, length=spec.steps, attention_backend="sdpa")
    strategy = Eagle3TrainStrategy(model, target_head=head, compact_teacher=False)
    sample = {
        "input_ids": tensors["token_ids"], "loss_mask": tensors["loss_mask"].long(),
        "hidden_state": tensors["final"][None], "aux_hidden_state": tensors["features"][None],
    }  # fmt: skip
    torch.save(sample, folder / "data" / "000000.ckpt")
    length = len(sample["input_ids"])
    refs = OfflineManifestReader(str(folder / "data"), run_id="b", ttt_length=spec.steps, max_len=length).read()
    loader = FeatureDataLoader(
        LocalFeatureStore(), refs=refs, batch_size=1, collate_fn=build_offline_collator(),
        per_sample_transform=build_offline_normalizer(length), num_workers=0,
    )  # fmt: skip
    batch = next(iter(loader))
    if dtype != torch.bfloat16:
        wide = {k: v.to(dtype) for k, v in batch.tensors.items() if torch.is_tensor(v) and v.is_floating_point()}
        batch.tensors.update(wide)
    optimizer = BF16Optimizer(model, lr=1e-4, total_steps=100_000)

    def step() -> float:
        found = strategy.forward_loss(batch)
        found.loss.backward()
        optimizer.step()
        return float(found.loss.detach())

    return step


def speculators(spec: SimpleNamespace, tensors: dict[str, Any]) -> Step:
    """speculators' model, collator and optimiser as its trainer calls them; lm_head frozen to the verifier's rows."""
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.cli import create_transformer_layer_config
    from speculators.train.data import CollateFn
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig

    dtype = getattr(torch, spec.dtype)
    ids = tensors["draft_ids"]
    t2d = torch.zeros(spec.vocab, dtype=torch.bool).index_fill(0, ids, True)
    layer = create_transformer_layer_config(spec.verifier, 1, "llama", "silu", 2048, [0])
    settings = {
        "draft_vocab_size": spec.draft, "norm_before_residual": False, "norm_before_fc": False, "norm_output": False,
        "target_layer_ids": [index + 1 for index in spec.layers], "ttt_steps": spec.steps, "ttt_step_loss_decay": 0.8,
        "verifier_name_or_path": spec.verifier, "draft_attn_impl": "sdpa", "loss_fn": "kl_div",
        "loss_implementation": "eager",
    }  # fmt: skip
    model = Eagle3DraftModel.from_training_args(layer, t2d=t2d, d2t=ids - torch.arange(spec.draft), **settings)
    call, _ = Eagle3DraftModel.get_trainer_kwargs(**settings)
    width, start, items = tensors["final"].shape[1], 0, []
    for length in spec.lengths:
        part = slice(start, start + length)
        start += length
        items.append(
            {
                "input_ids": tensors["token_ids"][part], "hidden_states": tensors["features"][part].to(dtype),
                "verifier_last_hidden_states": tensors["final_before_norm"][part].to(dtype),
                "loss_mask": tensors["loss_mask"][part].long(), "lengths": torch.tensor([length]),
                "position_ids": torch.arange(length),
            }
        )  # fmt: skip
    batch = CollateFn(sum(spec.lengths), width, dtype=dtype, preprocess=shift_batch)(items)
    config = TrainerConfig(
        lr=1e-3, num_epochs=1, save_path=spec.folder, train_call_kwargs=call, hidden_states_dtype=dtype,
        scheduler_type="none",
    )  # fmt: skip
    optimizers = build_optimizers(model, config)
    model.train()

    def step() -> float:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            _, loss, _ = model(**batch, **call)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        return float(loss.detach())

    return step


def main(side: str) -> None:
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    sides = {"statehouse": statehouse, "specforge": specforge, "speculators": speculators}
    for module in _IMPORTS[side]:
        importlib.import_module(module)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; the protocol is ours
    bare, step = status("VmRSS"), None
    for line in sys.stdin:
        if line.startswith("{"):
            step = None
            gc.collect()
            torch.manual_seed(0)
            spec = SimpleNamespace(**json.loads(line))
            step = sides[side](spec, load_file(spec.tensors))
            print(json.dumps({"ready": side}), file=out, flush=True)
            continue
        assert step is not None
        Path("/proc/self/clear_refs").write_text("5")  # the peak from here on, not that of loading
        began = time.process_time()
        loss = step()
        seconds = time.process_time() - began
        peak = status("VmHWM") - bare
        print(json.dumps({"seconds": seconds, "loss": loss, "peak_mb": peak}), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
