"""The `drafter` and `training` sections of a recipe. No torch: recipes are read where none is installed."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

# A share that never reaches the whole.
_Share = Annotated[float, Field(ge=0, lt=1)]


class DrafterSection(BaseModel):
    """What is trained. Change any of these and it is another run."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Steps of training-time test: the drafter learns to draft this many tokens on its own outputs.
    ttt_steps: int = Field(default=7, ge=1, le=32)
    # Weight of step k in the loss is step_decay**k.
    step_decay: float = Field(default=0.8, gt=0, le=1)
    # Or a weight for each step, ttt_steps of them, instead.
    step_weights: tuple[float, ...] | None = None
    # soft_cross_entropy (same gradient as kl), reverse_kl, tv, lk, lk_hybrid: docs/drafter.md says what each favours.
    loss: Literal["soft_cross_entropy", "kl", "reverse_kl", "tv", "lk", "lk_hybrid"] = "soft_cross_entropy"
    # Where the verifier's likeliest token is outside the draft vocabulary: learn nothing, or its shares of those inside.
    out_of_vocabulary: Literal["mask", "renormalise"] = "mask"
    # trained: from random. initialised: from the verifier's rows, then trained. frozen: the verifier's rows.
    lm_head: Literal["trained", "initialised", "frozen"] = "trained"
    # Folder or URI of a drafter to start from (SGLang's or speculators' format), of any draft vocabulary; random if none.
    start_from: str | None = None
    # Fields of drafter.config.DrafterConfig that differ from the verifier's, for instance {head_dim: 128}.
    config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _weighed(self) -> Self:
        if self.step_weights is not None:
            if len(self.step_weights) != self.ttt_steps:
                raise ValueError(
                    f"step_weights: expected ttt_steps ({self.ttt_steps}) of them, found {len(self.step_weights)}"
                )
            if min(self.step_weights) < 0 or not any(self.step_weights):
                raise ValueError(f"step_weights: expected none below 0 and one above, found {list(self.step_weights)}")
        return self


class MixedDataset(BaseModel):
    """One more dataset to train on."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    uri: str = Field(min_length=1)
    # How often an epoch passes over it; 0.5 takes a half of it, which moves on with every epoch.
    weight: float = Field(default=1.0, gt=0, le=1000)

    @field_validator("uri")
    @classmethod
    def _as_dataset_uri_is_written(cls, uri: str) -> str:
        return os.path.expanduser(uri.rstrip("/"))


class SequenceFilter(BaseModel):
    """Which sequences are trained on, and held out for the run's own loss; what is left out does not restrict.

    ray_jobs.evaluate measures all held-out sequences of dataset.uri, filtered or not, each source for itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: tuple[str, ...] | None = Field(default=None, min_length=1)
    # In tokens, bounds included.
    min_length: int | None = Field(default=None, gt=0)
    max_length: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _leaves_something(self) -> Self:
        if self.min_length is not None and self.max_length is not None and self.min_length > self.max_length:
            raise ValueError(f"min_length is {self.min_length}, above max_length, {self.max_length}: none is left")
        return self


class LoaderSection(BaseModel):
    """How the states come from the store to the device. None of it changes what is learnt."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Bytes of states that are read ahead in each worker, beside the micro-batch that is trained on.
    ahead_bytes: int = Field(default=2 << 30, gt=0)
    # Sequences that are read at one time in each worker; large ones in parts by 8 threads more. Short ones wait for the
    # store, each on its own: from one 30 ms away, at H = 576, 16 at a time come twice as fast as 4.
    threads: int = Field(default=16, gt=0, le=64)
    # host: the processor joins the byte planes. device: the GPU does.
    decode: Literal["host", "device"] = "host"
    # A folder on a local disk that keeps what was fetched, for later epochs; workers of a node share it.
    cache: str | None = Field(default=None, min_length=1)
    cache_bytes: int = Field(default=100 << 30, gt=0)
    # Seconds that a store which fails is asked again, before the run ends.
    patience_s: float = Field(default=120.0, ge=0)


class TrainingSection(BaseModel):
    """How it is trained."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Name of the run, a folder in `<dataset.uri>-runs`; the recipe's name by default.
    run: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    # Data-parallel workers. Their number changes nothing that is learnt: the same batches, shared out.
    workers: int = Field(default=1, gt=0)
    # With fewer nodes than that, as few workers as this go on, and more join when nodes come back; None: all or none.
    min_workers: int | None = Field(default=None, gt=0)
    gpus_per_worker: int = Field(default=0, ge=0, le=1)
    cpus_per_worker: int = Field(default=1, gt=0, le=1024)
    # Where weights, gradients and optimiser lie: whole on every worker, or a share on each (FSDP2).
    parallel: Literal["replicate", "shard"] = "replicate"
    # Other datasets of the same contract, beside dataset.uri (name it here, too, to give it a weight).
    datasets: tuple[MixedDataset, ...] = ()
    filter: SequenceFilter = SequenceFilter()
    # Tokens of the longest sequence; longer ones are dropped, or split into pieces that do not see each other.
    max_length: int | None = Field(default=None, gt=1)
    long_sequences: Literal["drop", "split"] = "drop"
    # URI of the draft vocabulary; by default the one beside the dataset that ray_jobs.coverage makes.
    draft_vocabulary: str | None = None
    # Of the matrix products; weights and optimiser are fp32.
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    epochs: int = Field(default=10, gt=0)
    # Tokens of one update, over all workers.
    global_batch_tokens: int = Field(default=16384, gt=0)
    # Tokens of one forward and backward pass; the longest sequence must fit.
    micro_batch_tokens: int = Field(default=8192, gt=0)
    # muon: the matrices inside by Muon, embedding-like ones (lm_head) and norms by AdamW.
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(default=1e-4, gt=0)
    # Share of the updates over which the rate rises; then it falls along a cosine to min_lr_share of lr.
    warmup: float = Field(default=0.02, ge=0, lt=1)
    min_lr_share: float = Field(default=0.0, ge=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[_Share, _Share] = (0.9, 0.95)
    # Largest norm of the gradient.
    clip: float = Field(default=0.5, gt=0)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    # Compute the MLP again in the backward pass instead of keeping what it held: less memory, a sixth more time.
    recompute: bool = False
    # torch.compile of the decoder layer: the first updates take a minute longer.
    compile: bool = False
    # Updates in a row without finite loss or gradient (they change nothing) after which the run ends.
    max_skipped: int = Field(default=5, gt=0)
    # stop: a damaged shard ends the run with its name. skip: its sequences teach nothing, and are counted.
    bad_shards: Literal["stop", "skip"] = "stop"
    loader: LoaderSection = LoaderSection()
    # Updates between two evaluations on the held-out sequences; None: one an epoch.
    evaluate_every: int | None = Field(default=None, gt=0)
    # Evaluations in a row without a lower held-out loss after which the run ends early; None: it never does.
    patience: int | None = Field(default=None, gt=0)
    # Updates between two checkpoints, and how many of the newest are kept, beside the best by held-out loss.
    checkpoint_every: int = Field(default=200, gt=0)
    keep_checkpoints: int = Field(default=2, gt=0)
    keep_best: bool = True
    # Which of them becomes the run's drafter: the last, or the best by held-out loss.
    export: Literal["last", "best"] = "last"
    # Where the curves go, beside metrics.jsonl.
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ("tensorboard",)
    # For the hours that --plan prints: tokens that one worker trains on in a second, where that is known.
    tokens_per_second: float | None = Field(default=None, gt=0)
    # Seconds for which workers wait for one another in a sum; at the start, for the one whose node is still fetching the
    # verifier. (A worker that dies is seen at once, whatever this is.)
    collective_timeout_s: int = Field(default=7200, gt=0)
    # Times that lost workers are started again, from the newest checkpoint, before the job fails.
    max_failures: int = Field(default=3, ge=0)

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if self.min_workers is not None and self.min_workers > self.workers:
            raise ValueError(f"min_workers is {self.min_workers}, above workers, {self.workers}: lower it")
        if self.max_length is not None and self.max_length > self.micro_batch_tokens:
            raise ValueError(
                f"max_length is {self.max_length}, above micro_batch_tokens, {self.micro_batch_tokens}: one of its "
                "sequences would fit into none"
            )
        if self.export == "best" and not self.keep_best:
            raise ValueError("export is best, and keep_best is false: the best checkpoint would be gone; keep it")
        if self.optimizer == "muon" and self.parallel == "shard":
            raise ValueError("optimizer muon needs whole matrices: set parallel=replicate, or optimizer=adamw")
        return self

    def learnt(self) -> dict[str, Any]:
        """The fields that change what is learnt: a run is carried on with these as they were, and any others."""
        return self.model_dump(mode="json", exclude=set(_HOW_IT_RUNS))


# Where and in which pieces it runs: the updates are the same, to the rounding of a sum. (Datasets are named by their
# fingerprints, and the draft vocabulary by its hash, elsewhere in a run's identity.)
_HOW_IT_RUNS = (
    "run", "workers", "min_workers", "gpus_per_worker", "cpus_per_worker", "parallel", "datasets", "draft_vocabulary",
    "micro_batch_tokens", "recompute", "compile", "max_skipped", "bad_shards", "loader", "evaluate_every", "patience",
    "checkpoint_every", "keep_checkpoints", "keep_best", "export", "trackers", "max_failures",
    "tokens_per_second", "collective_timeout_s",
)  # fmt: skip
