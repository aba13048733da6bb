"""The `drafter` and `training` sections of a recipe. No torch: recipes are read where none is installed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class DrafterSection(BaseModel):
    """What is trained. Change any of these and it is another run."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Steps of training-time test: the drafter learns to draft this many tokens on its own outputs.
    ttt_steps: int = Field(default=7, ge=1, le=32)
    # Weight of step k in the loss is step_decay**k.
    step_decay: float = Field(default=0.8, gt=0, le=1)
    # trained: from random. initialised: from the verifier's rows, then trained. frozen: the verifier's rows.
    lm_head: Literal["trained", "initialised", "frozen"] = "trained"
    # Fields of drafter.config.DrafterConfig that differ from the verifier's, for instance {head_dim: 128}.
    config: dict[str, Any] = Field(default_factory=dict)


class TrainingSection(BaseModel):
    """How it is trained."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Name of the run, a folder in `<dataset.uri>-runs`; the recipe's name by default.
    run: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    # Data-parallel workers. Their number changes nothing that is learnt: the same batches, shared out.
    workers: int = Field(default=1, gt=0)
    gpus_per_worker: int = Field(default=0, ge=0, le=1)
    cpus_per_worker: int = Field(default=1, gt=0)
    # Of the matrix products; weights and optimiser are fp32.
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    epochs: int = Field(default=10, gt=0)
    # Tokens of one update, over all workers.
    global_batch_tokens: int = Field(default=16384, gt=0)
    # Tokens of one forward and backward pass; the longest sequence must fit.
    micro_batch_tokens: int = Field(default=8192, gt=0)
    lr: float = Field(default=1e-4, gt=0)
    # Share of the updates over which the rate rises; then it falls along a cosine to min_lr_share of lr.
    warmup: float = Field(default=0.02, ge=0, lt=1)
    min_lr_share: float = Field(default=0.0, ge=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    # Largest norm of the gradient.
    clip: float = Field(default=0.5, gt=0)
    seed: int = Field(default=0, ge=0)
    # Updates between two checkpoints, and how many of the newest are kept.
    checkpoint_every: int = Field(default=200, gt=0)
    keep_checkpoints: int = Field(default=2, gt=0)
    # Times that lost workers are started again, from the newest checkpoint, before the job fails.
    max_failures: int = Field(default=3, ge=0)

    def learnt(self) -> dict[str, Any]:
        """The fields that change what is learnt: a run is carried on with these as they were, and any others."""
        return self.model_dump(mode="json", exclude=set(_HOW_IT_RUNS))


# Where and in which pieces it runs: the updates are the same, to the rounding of a sum.
_HOW_IT_RUNS = (
    "run", "workers", "gpus_per_worker", "cpus_per_worker", "micro_batch_tokens", "checkpoint_every",
    "keep_checkpoints", "max_failures",
)  # fmt: skip
