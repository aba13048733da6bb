"""Golden values: logits of every step from SpecForge's and speculators' own model code, on tiny random drafters.

    python tests/drafter/golden/generate.py tests/drafter/golden [CASE ...]

Run it with a Python that has the peers (see README.md here), never with the project's. It writes one safetensors file
a case, all of them when none is named, with everything a test needs: config and sequence lengths in its metadata, weights,
inputs, outputs. `losses` is a case of its own: values and gradients of the losses by name, without a model.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the peers compile parts of themselves; eager is enough here

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, DRAFT, LAYERS = 96, 40, (1, 3, 4)
# hidden size, heads, key/value heads, head_dim, RoPE base, sequence lengths, steps, norms other than one
CASES = {
    "plain": (32, 4, 4, 8, 10_000.0, [24], 4, False),
    "grouped": (48, 6, 2, 8, 10_000.0, [21], 7, True),
    "wide_heads": (32, 4, 2, 16, 500_000.0, [30], 3, True),
    "packed": (32, 4, 1, 16, 10_000.0, [9, 3, 14], 5, True),
    "long": (64, 8, 2, 16, 10_000.0, [48], 8, True),
    "fc_norm": (32, 4, 2, 8, 10_000.0, [20], 4, True),
    "norm_before_fc": (32, 4, 2, 8, 10_000.0, [8, 13], 4, True),
    "fc_norm_alone": (48, 6, 2, 8, 10_000.0, [22], 5, True),
    "biased": (32, 4, 2, 8, 10_000.0, [12, 9], 4, True),
    "acceptance": (48, 6, 2, 8, 10_000.0, [26], 5, True),
}
# Keys of the config that are on. Of EAGLE-3.1 SpecForge has only fc_norm, and means another thing by norm_output.
VARIANTS = {
    "fc_norm": ("fc_norm", "norm_output"), "norm_before_fc": ("norm_before_fc",), "fc_norm_alone": ("fc_norm",),
    "biased": ("attention_bias",),
}  # fmt: skip
SPECFORGE_LACKS = {"norm_output", "norm_before_fc", "attention_bias"}


def weights(config: dict, norms: bool) -> dict[str, torch.Tensor]:
    """A drafter's tensors by SGLang's names. Scaled so that attention is far from uniform and logits differ."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def linear(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns) * gain / columns**0.5

    found = {
        "embed_tokens.weight": torch.randn(VOCAB, width),
        "fc.weight": linear(width, len(LAYERS) * width),
        "lm_head.weight": linear(DRAFT, width, 3.0),
        "midlayer.self_attn.q_proj.weight": linear(queries, 2 * width, 2.0),
        "midlayer.self_attn.k_proj.weight": linear(keys, 2 * width, 2.0),
        "midlayer.self_attn.v_proj.weight": linear(keys, 2 * width, 2.0),
        "midlayer.self_attn.o_proj.weight": linear(width, queries),
        "midlayer.mlp.gate_proj.weight": linear(inner, width),
        "midlayer.mlp.up_proj.weight": linear(inner, width),
        "midlayer.mlp.down_proj.weight": linear(width, inner),
    }
    for name in ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm"):
        found[f"{name}.weight"] = 0.5 + torch.rand(width) if norms else torch.ones(width)
    if config.get("attention_bias"):  # of q, k and v zero: SGLang has none there
        sizes = {"q": queries, "k": keys, "v": keys}
        found |= {f"midlayer.self_attn.{name}_proj.bias": torch.zeros(size) for name, size in sizes.items()}
        found["midlayer.self_attn.o_proj.bias"] = torch.randn(width)
    if config.get("norm_before_fc"):
        found["input_norm.weight"] = 0.5 + torch.rand(len(LAYERS) * width)
    if config.get("fc_norm"):
        found |= {f"fc_norm.{at}.weight": 0.5 + torch.rand(width) for at in range(len(LAYERS))}
    ids = torch.randperm(VOCAB)[:DRAFT].sort().values
    found["d2t"] = ids - torch.arange(DRAFT)
    found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return found


def specforge(config: dict, state: dict, case: SimpleNamespace, folder: Path) -> dict[str, torch.Tensor]:
    """Logits [steps, S, DRAFT] of one sequence, and its teacher: softmax over the draft vocabulary."""
    import specforge.algorithms.eagle3.model as eagle3
    from specforge.core import loss
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig
    from specforge.utils import padding

    # The package's loss is a GPU kernel; its own reference for it runs anywhere. No logit depends on it.
    eagle3.LogSoftmaxLoss = SimpleNamespace(apply=loss._compute_loss)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    draft = AutoDraftModel.from_config(
        AutoDraftModelConfig.from_file(str(path)), attention_backend="sdpa", torch_dtype=torch.float32
    )
    missing, unexpected = draft.load_state_dict(state, strict=False)
    assert not missing, missing
    assert not unexpected, unexpected
    logits = record(draft, "compute_logits")
    # The case `acceptance` is of its acceptance-aware losses, too.
    kinds = {"": None, "lk_alpha.": "alpha", "lk_lambda.": "lambda"} if case.name == "acceptance" else {"": None}
    # Its data pipeline shifts ids and teacher by one and leaves the mask.
    ids, final = padding(case.token_ids[None], left=False), padding(case.final[None], left=False)
    mask = case.loss_mask.long()[None, :, None].clone()
    mask[:, -1] = 0
    teacher = final @ case.lm_head.T
    results = {}
    for name, kind in kinds.items():
        model = eagle3.OnlineEagle3Model(
            draft, length=case.steps, attention_backend="sdpa", lk_loss_type=kind, kl_decay=3.0
        ).eval()
        with torch.no_grad():
            found = model(
                input_ids=ids, attention_mask=torch.ones_like(ids), target=teacher, loss_mask=mask,
                hidden_states=case.features[None],
            )  # fmt: skip
        results[f"specforge.{name}losses"] = torch.stack([each.float() for each in found[0]])
        if kind is not None:
            results[f"specforge.{name}acceptance"] = torch.stack([each.float() for each in found[1]])
    shares = eagle3._compute_target_p(teacher, draft.t2d, mask)[0]
    return {"specforge.logits": torch.cat(logits[: case.steps]), "specforge.teacher": shares[0], **results}


def speculators(config: dict, state: dict, case: SimpleNamespace, folder: Path) -> dict[str, torch.Tensor]:
    """Logits [steps, T - 1, DRAFT] of the packed sequences: one row fewer for each, zeros behind them."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.eagle3.data import shift_batch
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from speculators.train.data import CollateFn

    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act",
    )  # fmt: skip
    layer = LlamaConfig(
        **{name: config[name] for name in names},
        tie_word_embeddings=False,
        attention_bias=config.get("attention_bias", False),
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
    )
    layer._attn_implementation = "sdpa"
    speculator = SpeculatorsConfig(
        algorithm="eagle3",
        default_proposal_method="greedy",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=case.steps)],
        verifier=VerifierConfig.from_pretrained(str(folder / "verifier")),
    )
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=DRAFT, norm_before_residual=False,
            **{name: config.get(name, False) for name in ("norm_before_fc", "fc_norm", "norm_output")}, eagle_aux_hidden_state_layer_ids=[layer + 1 for layer in LAYERS],
            speculators_config=speculator,
        )
    )  # fmt: skip
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()}
    missing, unexpected = model.load_state_dict(renamed, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"verifier_lm_head.weight", "verifier_norm.weight"}, missing
    model.load_verifier_weights()
    model = model.float().eval()
    items, start = [], 0
    for length in case.lengths:
        part = slice(start, start + length)
        start += length
        items.append(
            {
                "input_ids": case.token_ids[part], "hidden_states": case.features[part],
                "verifier_last_hidden_states": case.final_before_norm[part], "loss_mask": case.loss_mask[part].long(),
                "lengths": torch.tensor([length]), "position_ids": torch.arange(length),
            }
        )  # fmt: skip
    collate = CollateFn(sum(case.lengths) - 1, config["hidden_size"], dtype=torch.float32, preprocess=shift_batch)
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, found: logits.append(found.detach().clone()))
    call, _ = Eagle3DraftModel.get_trainer_kwargs(
        ttt_steps=case.steps, ttt_step_loss_decay=1.0, loss_fn="kl_div", loss_implementation="eager"
    )
    with torch.no_grad():
        _, _, metrics = model(**collate(items), **call)
    losses = torch.stack([metrics[f"loss_{step}_sum"].float() for step in range(case.steps)])
    return {"speculators.logits": torch.cat(logits), "speculators.losses": losses}


def record(owner: object, method: str) -> list[torch.Tensor]:
    """A list that fills with what `owner.method` returns."""
    found: list[torch.Tensor] = []
    original = getattr(owner, method)

    def recording(*args, **kwargs):
        found.append(original(*args, **kwargs))
        return found[-1].detach().clone()

    setattr(owner, method, recording)
    return found


def generate(name: str, folder: Path) -> None:
    width, heads, groups, head_dim, theta, lengths, steps, norms = CASES[name]
    torch.manual_seed(list(CASES).index(name))
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_act": "silu", "tie_word_embeddings": False, "hidden_size": width, "intermediate_size": 2 * width + 8,
        "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head_dim, "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": theta,
        "rope_scaling": None, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(LAYERS)},
    }  # fmt: skip
    config |= dict.fromkeys(VARIANTS.get(name, ()), True)
    state = weights(config, norms)
    tokens = sum(lengths)
    verifier = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=1,
            num_attention_heads=heads, num_key_value_heads=groups, head_dim=head_dim, tie_word_embeddings=False,
        )
    )  # fmt: skip
    verifier.model.embed_tokens.weight.data = state["embed_tokens.weight"].clone()
    verifier.lm_head.weight.data = torch.randn(VOCAB, width) / width**0.5
    verifier.model.norm.weight.data = 0.5 + torch.rand(width)
    before = torch.randn(tokens, width)
    case = SimpleNamespace(
        name=name, lengths=lengths, steps=steps, token_ids=torch.randint(1, VOCAB, (tokens,)),
        loss_mask=torch.rand(tokens) < 0.8, features=torch.randn(tokens, len(LAYERS) * width),
        final_before_norm=before, final=verifier.model.norm(before).detach(), lm_head=verifier.lm_head.weight.detach(),
    )  # fmt: skip
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        verifier.save_pretrained(Path(temporary, "verifier"))
        if len(lengths) == 1 and not SPECFORGE_LACKS & set(VARIANTS.get(name, ())):  # nor does SpecForge pack
            found |= specforge(config, state, case, Path(temporary))
        found |= speculators(config, state, case, Path(temporary))
    inputs = {key: getattr(case, key) for key in ("token_ids", "loss_mask", "features", "final", "lm_head")}
    metadata = {"config": json.dumps(config), "lengths": json.dumps(lengths), "peers": json.dumps(versions())}
    tensors = {f"drafter.{key}": value for key, value in state.items()} | inputs | found
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{name}.safetensors", metadata)
    print(name, {key: list(value.shape) for key, value in found.items()})


def versions() -> dict[str, str]:
    return {peer: version(peer) for peer in ("specforge", "speculators", "torch", "transformers")}


def generate_losses(folder: Path) -> None:
    """[N] losses and [N, DRAFT] gradients for the drafter's logits, by speculators' names; SpecForge's mean of one."""
    from specforge.core.lk_loss import compute_acceptance_rate, compute_lk_loss
    from speculators.losses import eager

    torch.manual_seed(0)
    rows = 16
    # From rows that agree to rows that have nothing in common.
    teacher = 4 * torch.randn(rows, DRAFT)
    share = torch.linspace(0, 1, rows)[:, None]
    logits = ((1 - share) * teacher + share * 4 * torch.randn(rows, DRAFT)).requires_grad_()
    found = {"logits": logits.detach(), "teacher": teacher}
    for name, loss in {
        "kl_div": eager.kl_div_loss, "rkl": eager.reverse_kl_div_loss, "tv": eager.tv_loss,
        "nla": eager.neg_log_acceptance_loss, "lk_hybrid": eager.lk_hybrid_loss,
    }.items():  # fmt: skip
        each = loss(logits[None], teacher[None])[0]
        found |= {
            f"speculators.{name}": each.detach(),
            f"speculators.{name}.grad": torch.autograd.grad(each.sum(), logits)[0],
        }
    mask = torch.ones(rows, 1)
    rate, log_rate = compute_acceptance_rate(
        logits=logits.detach(), target_probs=teacher.softmax(-1), position_mask=mask
    )
    found["specforge.alpha"] = compute_lk_loss(
        kl_loss=torch.zeros(()), acceptance_rate=rate, log_acceptance_rate=log_rate, lk_loss_type="alpha",
        kl_scale=1.0, kl_decay=3.0,
    )  # fmt: skip
    metadata = {"peers": json.dumps(versions())}
    save_file({key: value.contiguous() for key, value in found.items()}, folder / "losses.safetensors", metadata)
    print("losses", {key: list(value.shape) for key, value in found.items()})


if __name__ == "__main__":
    for each in sys.argv[2:] or [*CASES, "losses"]:
        if each == "losses":
            generate_losses(Path(sys.argv[1]))
        else:
            generate(each, Path(sys.argv[1]))
