"""The optimiser of a drafter's fp32 weights: AdamW, or Muon for the matrices inside and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from drafter.recipe import TrainingSection

# What each keeps of a parameter between two steps.
_ADAMW, _MUON = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)


class Optimizer:
    """trained: parameters by name, whose `.grad` is set before each `step`."""

    def __init__(self, trained: Mapping[str, Tensor], settings: TrainingSection) -> None:
        self.trained = dict(trained)
        matrices = {
            name: one
            for name, one in self.trained.items()
            if settings.optimizer == "muon" and one.ndim == 2 and not name.startswith("lm_head")
        }
        others = {name: one for name, one in self.trained.items() if name not in matrices}
        groups = [
            {"params": [one for one in others.values() if one.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [one for one in others.values() if one.ndim == 1], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)
        self.parts: list[torch.optim.Optimizer] = [adamw]
        self._of: dict[str, tuple[torch.optim.Optimizer, tuple[str, ...]]] = dict.fromkeys(others, (adamw, _ADAMW))
        if matrices:
            # Updates as large as AdamW's, so that one rate serves both (Moonlight, arXiv 2502.16982).
            muon = torch.optim.Muon(
                matrices.values(), lr=settings.lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            self.parts.append(muon)
            self._of |= dict.fromkeys(matrices, (muon, _MUON))

    def step(self, lr: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    @property
    def steps(self) -> int:
        """Updates applied so far: the same for all parameters."""
        found = (self._of[name][0].state.get(one, {}).get("step", 0) for name, one in self.trained.items())
        return max((int(step) for step in found), default=0)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all moments: `<parameter>.<kind>`."""
        return {f"{name}.{kind}": tuple(one.shape) for name, one in self.trained.items() for kind in self._of[name][1]}

    def moments(self) -> dict[str, Tensor]:
        """`<parameter>.<kind>`, the very tensors; zeros before the first step, when there are none."""
        return {
            f"{name}.{kind}": optimizer.state.get(self.trained[name], {}).get(
                kind, torch.zeros_like(self.trained[name])
            )
            for name, (optimizer, kinds) in self._of.items()
            for kind in kinds
        }

    def restore(self, moments: Mapping[str, Tensor], steps: int) -> None:
        """moments: as `moments` gave them, of the parameters' own kind and device."""
        for name, (optimizer, kinds) in self._of.items():
            one = self.trained[name]
            state: dict[str, Tensor] = {kind: moments[f"{name}.{kind}"] for kind in kinds}
            if kinds == _ADAMW:
                state["step"] = torch.tensor(float(steps), device=one.device)
            optimizer.state[one] = state
