"""Logits and losses of every step are those of SpecForge's and speculators' own code, on the same weights and inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from drafter.config import DrafterConfig
from drafter.divergences import divergence
from drafter.loss import Loss, ttt_loss
from drafter.model import Drafter
from drafter.ttt import unroll
from drafter.verifier_head import VerifierHead
from vocab.mapping import DraftVocab

GOLDEN = Path(__file__).parent / "golden"
CLOSE = {"atol": 1e-4, "rtol": 0}
SPECFORGE = ["plain", "grouped", "wide_heads", "long", "fc_norm_alone", "acceptance"]
SPECULATORS = [*SPECFORGE, "packed", "fc_norm", "norm_before_fc", "biased"]
PACKED = ["packed", "norm_before_fc", "biased"]
# Speculators' names of losses that we have.
LOSSES = {"kl_div": "kl", "rkl": "reverse_kl", "tv": "tv", "nla": "lk", "lk_hybrid": "lk_hybrid"}


class Golden:
    def __init__(self, name: str) -> None:
        with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
            self.tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        self.config = json.loads(metadata["config"])
        self.lengths: list[int] = json.loads(metadata["lengths"])
        self.weights = {
            key.removeprefix("drafter."): value for key, value in self.tensors.items() if key.startswith("drafter.")
        }
        layers = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        variants = {name: self.config.get(name, False) for name in ("norm_before_fc", "fc_norm", "norm_output")}
        if self.config.get("attention_bias"):
            variants["attention_bias"] = "o_proj"
            for part in "qkv":
                assert not self.weights.pop(f"midlayer.self_attn.{part}_proj.bias").any()
        config = DrafterConfig.from_verifier(self.config, self.config["draft_vocab_size"], layers, **variants)
        self.vocab = DraftVocab(self.weights["d2t"].numpy(), self.weights["t2d"].numpy())
        self.drafter = Drafter(config, self.vocab, self.weights["embed_tokens.weight"])
        self.drafter.load_state_dict(self.weights)

    @torch.no_grad()
    def logits(self, steps: int) -> list[Tensor]:
        tensors = self.tensors
        found = unroll(self.drafter, tensors["token_ids"], tensors["features"], self.lengths, steps)
        return [self.drafter.logits(step.hidden_ND) for step in found]

    @torch.no_grad()
    def loss(self, steps: int, **convention: Any) -> Loss:
        head = VerifierHead(self.tensors["lm_head"], self.vocab)
        parts = (self.tensors[name] for name in ("token_ids", "loss_mask", "features", "final"))
        return ttt_loss(self.drafter, head, *parts, self.lengths, steps=steps, **convention)


@pytest.mark.parametrize("name", SPECFORGE)
def test_logits_of_every_step_are_specforges(name: str) -> None:
    golden = Golden(name)
    theirs = golden.tensors["specforge.logits"]
    assert theirs.abs().mean() > 1
    for step, ours in enumerate(golden.logits(len(theirs))):
        torch.testing.assert_close(ours, theirs[step], **CLOSE)


@pytest.mark.parametrize("name", SPECULATORS)
def test_logits_of_every_step_are_speculators(name: str) -> None:
    golden = Golden(name)
    theirs = golden.tensors["speculators.logits"]
    for step, ours in enumerate(golden.logits(len(theirs))):
        their_start, our_start = 0, 0
        for length in golden.lengths:
            rows = max(0, length - 1 - step)  # later ones have no token to be fed
            torch.testing.assert_close(
                ours[our_start : our_start + rows], theirs[step, their_start : their_start + rows], **CLOSE
            )
            their_start, our_start = their_start + length - 1, our_start + length


@pytest.mark.parametrize("name", SPECFORGE)
def test_the_teacher_is_specforges(name: str) -> None:
    golden = Golden(name)
    ours = VerifierHead(golden.tensors["lm_head"], golden.vocab).draft_logits(golden.tensors["final"]).softmax(-1)
    torch.testing.assert_close(ours[1:], golden.tensors["specforge.teacher"][:-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SPECFORGE)
def test_the_loss_of_every_step_is_specforges_by_its_convention(name: str) -> None:
    golden = Golden(name)
    theirs = golden.tensors["specforge.losses"]
    ours = golden.loss(len(theirs), rows="specforge", kind="soft_cross_entropy", out_of_vocabulary="mask")
    torch.testing.assert_close(ours.cross_entropy / golden.lengths[0], theirs, **CLOSE)


def test_acceptance_and_the_losses_that_look_at_it_are_specforges() -> None:
    """Its mean of kl is over all S positions, that of acceptance over those that are learnt from."""
    golden = Golden("acceptance")
    theirs = {name: golden.tensors[f"specforge.lk_{name}"] for name in ("alpha.losses", "lambda.losses")}
    accepted = golden.tensors["specforge.lk_lambda.acceptance"]
    steps, convention = len(accepted), {"rows": "specforge", "out_of_vocabulary": "mask"}
    tv, lk, kl = (golden.loss(steps, kind=kind, **convention) for kind in ("tv", "lk", "soft_cross_entropy"))
    assert (tv.learnt < tv.positions).any()
    torch.testing.assert_close(tv.accepted / tv.learnt, accepted, **CLOSE)
    torch.testing.assert_close(1 - tv.cross_entropy / tv.learnt, accepted, **CLOSE)
    torch.testing.assert_close(lk.cross_entropy / lk.learnt, theirs["alpha.losses"], **CLOSE)
    share = torch.exp(-3 * accepted)
    expected = share * kl.cross_entropy / golden.lengths[0] + (1 - share) * tv.cross_entropy / tv.learnt
    torch.testing.assert_close(expected, theirs["lambda.losses"], **CLOSE)
    # Ours, whose parts have one denominator: so that the shares are what their names say.
    hybrid = golden.loss(steps, kind="lk_hybrid", accepted_K=accepted.tolist(), **convention)
    kl_alone = golden.loss(steps, kind="kl", **convention)
    torch.testing.assert_close(
        hybrid.cross_entropy, share * kl_alone.cross_entropy + (1 - share) * tv.cross_entropy, **CLOSE
    )


@pytest.mark.parametrize("name", [*SPECFORGE, "fc_norm"])
def test_the_loss_of_every_step_is_speculators_by_its_convention(name: str) -> None:
    golden = Golden(name)
    theirs = golden.tensors["speculators.losses"]
    ours = golden.loss(len(theirs), rows="speculators", kind="kl", out_of_vocabulary="renormalise")
    torch.testing.assert_close(ours.cross_entropy / (ours.positions + 1e-5), theirs, **CLOSE)


@pytest.mark.parametrize("name", PACKED)
def test_the_loss_of_packed_sequences_is_speculators_but_for_rows_that_learn_from_the_next_sequence(name: str) -> None:
    """At step k speculators moves teacher and mask by k over the whole batch: the last k rows of a sequence, which have
    been fed the next one's tokens, learn from its states. With those rows their losses are theirs, without them ours.
    """
    golden = Golden(name)
    teacher_TW = VerifierHead(golden.tensors["lm_head"], golden.vocab).draft_logits(golden.tensors["final"]).softmax(-1)
    mask_T = golden.tensors["loss_mask"].bool()
    theirs = golden.tensors["speculators.losses"]
    ours = golden.loss(len(theirs), rows="speculators", kind="kl", out_of_vocabulary="renormalise")
    # A sequence of S tokens has S - 1 rows there; row t learns from what the verifier says after token t + 1.
    token_N = torch.cat([torch.arange(S - 1) + 1 for S in golden.lengths])
    start_N = torch.cat([torch.full((S - 1,), sum(golden.lengths[:at])) for at, S in enumerate(golden.lengths)])
    row_N, crossing = torch.arange(len(token_N)), 0
    for step, their_loss in enumerate(theirs):
        log_q = golden.tensors["speculators.logits"][step, : len(row_N)].log_softmax(-1)
        from_N = row_N[step:]  # of the row that stands at the teacher's place
        p = teacher_TW[(start_N + token_N)[from_N]]
        kl_N = (torch.special.xlogy(p, p) - p * log_q[: len(from_N)]).sum(-1)
        counted_N = mask_T[(start_N + token_N)[from_N]]
        own_N = counted_N & (start_N[from_N] == start_N[: len(from_N)])
        torch.testing.assert_close(kl_N[counted_N].sum() / (counted_N.sum() + 1e-5), their_loss, **CLOSE)
        torch.testing.assert_close(
            kl_N[own_N].sum() / own_N.sum(), ours.cross_entropy[step] / ours.positions[step], **CLOSE
        )
        assert int(own_N.sum()) == int(ours.positions[step])
        crossing += int((counted_N & ~own_N).sum())
    assert crossing


@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_and_gradients_by_name_are_speculators(name: str) -> None:
    tensors = load_file(GOLDEN / "losses.safetensors")
    loss_N, grad_NW, _ = divergence(LOSSES[name], tensors["logits"].softmax(-1), tensors["teacher"].softmax(-1))
    torch.testing.assert_close(loss_N, tensors[f"speculators.{name}"], **CLOSE)
    torch.testing.assert_close(grad_NW, tensors[f"speculators.{name}.grad"], **CLOSE)


def test_the_acceptance_loss_is_specforges() -> None:
    """SpecForge's LK^alpha: the mean over positions of - log sum min(p, q)."""
    tensors = load_file(GOLDEN / "losses.safetensors")
    found = divergence("lk", tensors["logits"].softmax(-1), tensors["teacher"].softmax(-1))
    torch.testing.assert_close(found.loss_N.mean(), tensors["specforge.alpha"], **CLOSE)
