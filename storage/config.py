"""The `dataset` section of a recipe."""

from __future__ import annotations

import os
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from storage.codecs import CODEC_NAMES, codec_by_name
from storage.errors import StatehouseError


class Expected(BaseModel):
    """What `--plan` assumes of input that is not there to be counted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sequences: int = Field(gt=0)
    # Mean tokens of a sequence, prompt and response.
    mean_tokens: int = Field(gt=0)


class DatasetConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    # A folder (`~` is the home folder) or an object-store URI. Prepared prompts go beside it, to `<uri>-inputs`.
    uri: str
    # lossless, raw, or with a loss that every receipt records: bitround(k) with k = 1 to 6 mantissa bits, fp8.
    codec: str = "lossless"
    # Tokens of the longest sequence, prompt and response; longer prompts are rejected, responses are capped.
    max_length: int = Field(default=8192, gt=1)
    # Tokens of a shard; the planner chooses about 512 MiB when it is left out.
    shard_tokens: int | None = Field(default=None, gt=0, le=1 << 22)
    # Share of the prompts that may be rejected before `prepare` fails.
    max_reject_share: float = Field(default=0.0, ge=0, lt=1)
    # Sealed datasets of an equal contract: sequences that lie there are copied, not extracted again.
    reuse: tuple[str, ...] = ()
    expected: Expected | None = None
    # For the cost that --plan prints; S3 standard storage, us-east-1.
    usd_per_gb_month: float = Field(default=0.023, ge=0)

    @field_validator("uri")
    @classmethod
    def _no_trailing_slash(cls, uri: str) -> str:
        if not uri.strip("/ "):
            raise ValueError("must name a folder or an object-store URI such as s3://bucket/datasets/name")
        return os.path.expanduser(uri.rstrip("/"))

    @field_validator("reuse")
    @classmethod
    def _whole_uris(cls, uris: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(cls._no_trailing_slash(uri) for uri in uris)

    @model_validator(mode="after")
    def _reuses_others(self) -> Self:
        if self.uri in self.reuse:
            raise ValueError(
                f"dataset.reuse names dataset.uri itself, {self.uri}; name earlier datasets, or leave it out"
            )
        return self

    @field_validator("codec")
    @classmethod
    def _known_codec(cls, codec: str) -> str:
        try:
            return codec_by_name(codec).name
        except StatehouseError:
            raise ValueError(f"must be one of {CODEC_NAMES}") from None

    @property
    def inputs_uri(self) -> str:
        return f"{self.uri}-inputs"

    @property
    def vocab_uri(self) -> str:
        return f"{self.uri}-vocab"
