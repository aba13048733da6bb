"""The receipt: the proof of what a shard holds. It lies inside the shard's own object, so one PUT commits both."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from storage.teacher import TeacherObject, objects_digest

_LATER_KEYS = frozenset({"teacher", "self_check"})


class LossyError(BaseModel):
    """What a lossy codec cost in this shard, per layer: [L] each, over the finite values.

    relative_l2: sqrt(sum of (stored - given)**2 / sum of given**2). cosine: mean over tokens of the cosine between the
    stored and the given state; tokens whose given state is all zero are left out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    relative_l2: list[float]
    cosine: list[float]


class SelfCheck(BaseModel):
    """Sequences of this shard that were forwarded a second time, elsewhere, before it was written; per layer: [L] each.

    relative_l2: as in LossyError, over all their tokens. max_error: largest absolute difference. cosine: the smallest of
    any token. by: what forwarded them again.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    sequences: int = Field(gt=0)
    by: str
    relative_l2: list[float]
    max_error: list[float]
    cosine: list[float]


class Receipt(BaseModel):
    """Keys of a later minor version are ignored. NaN and infinities are refused: JSON has none."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    plan_hash: str
    contract_hash: str
    offset_hash: str | None
    codec: str
    shard: int = Field(ge=0)
    rows: int = Field(gt=0)
    sequences: int = Field(gt=0)
    data_bytes: int = Field(gt=0)
    data_sha256: str
    index_sha256: str
    # Root mean square of each layer's values over the rows, NaN and infinities left out.
    layer_rms: list[float]
    # Values that are NaN or infinite.
    non_finite: int = Field(ge=0)
    lossy_error: LossyError | None = None
    quarantined: dict[str, str] = Field(default_factory=dict)
    written_by: dict[str, str | int | float] = Field(default_factory=dict)
    seconds: dict[str, float] = Field(default_factory=dict)
    # Since format 1.1, left out where empty: {key: size and sha256} of the shard's teacher objects.
    teacher: dict[str, TeacherObject] = Field(default_factory=dict)
    self_check: SelfCheck | None = None

    @model_serializer(mode="wrap")
    def _without_empty_later_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A receipt of format 1.0 is written as it was."""
        document: dict[str, Any] = handler(self)
        return {key: value for key, value in document.items() if key not in _LATER_KEYS or value}

    @property
    def teacher_sha256(self) -> str | None:
        """One digest over all teacher objects; None where there are none."""
        return objects_digest(self.teacher) if self.teacher else None
