"""The `vocab` section of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class VocabConfig(BaseModel):
    """Which draft vocabulary is chosen, on what, and for which machine the trade-off is worked out."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Ids of the draft vocabulary; null saves the coverage report only.
    size: int | None = Field(default=32000, gt=0)
    # Sizes of the coverage table; a standard list by default.
    sizes: tuple[PositiveInt, ...] | None = None
    # frequency: most frequent ids. balanced: every source weighs the same. list: ids of keep_ids first.
    policy: Literal["frequency", "balanced", "list"] = "frequency"
    force_special_tokens: bool = True
    # JSON list of token ids, or a saved draft vocabulary, for policy list.
    keep_ids: str | None = None
    # More datasets (of the same tokeniser) whose tokens count too, and plain Parquet or JSONL of ids (globs).
    datasets: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    # Folds of prompt groups for cross-fitting, and resamples of the intervals.
    folds: int = Field(default=5, ge=2, le=50)
    resamples: int = Field(default=1000, gt=0)
    # Where the drafter will be served.
    gpu: str = "rtx-pro-6000"
    tensor_parallel: int | None = Field(default=None, gt=0)
    server: Literal["sglang", "vllm"] = "sglang"
    # {draft length: tau} of a drafter with the whole vocabulary, where measured; assumed otherwise.
    tau: dict[int, float] = Field(default_factory=dict)
    # Its walks (an .npz of vocab.acceptance_model.Walks), for a fit instead of a bracket.
    walks: str | None = None
