"""The shape of an EAGLE-3 drafter, and how it follows from its verifier's config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from drafter.errors import DrafterError

# Fields of a verifier's config that a drafter copies; without any of them there is nothing to follow.
_COPIED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings")


class DrafterConfig(BaseModel):
    """One decoder layer in the verifier's style. Names are those of Hugging Face configs where they have one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: int = Field(gt=0)
    # Width of the verifier's states; the drafter's own where it is left out.
    target_hidden_size: int = Field(default=0, ge=0)
    intermediate_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0, multiple_of=2)
    rms_norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)
    # Only plain RoPE so far: {"rope_type": "default"} is stored as None, all else is refused.
    rope_scaling: None = None
    # The verifier's, and the part of it that the drafter proposes from.
    vocab_size: int = Field(gt=0)
    draft_vocab_size: int = Field(gt=0)
    max_position_embeddings: int = Field(gt=0)
    # SGLang's drafter has no biases.
    attention_bias: Literal[False] = False
    # 0-based outputs of the verifier's decoder layers, ascending; their number, K, may be any.
    capture_layers: tuple[int, ...] = Field(min_length=1)

    @field_validator("rope_scaling", mode="before")
    @classmethod
    def _only_plain_rope(cls, scaling: Any) -> None:
        if scaling is None:
            return
        given = scaling if isinstance(scaling, Mapping) else {}
        plain = given.get("rope_type", given.get("type")) == "default"
        if not plain or given.get("partial_rotary_factor", 1.0) != 1.0 or "mrope_section" in given:
            raise DrafterError(
                f"expected no RoPE scaling, or rope_type 'default' over whole heads, found {scaling}; "
                f"other kinds are not implemented: give rope_scaling=None to train the drafter with plain RoPE, "
                f"which need not be its verifier's"
            )

    @model_validator(mode="before")
    @classmethod
    def _own_width(cls, given: Any) -> Any:
        if isinstance(given, dict) and not given.get("target_hidden_size"):
            return given | {"target_hidden_size": given.get("hidden_size")}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise DrafterError(
                f"num_attention_heads: expected a multiple of num_key_value_heads ({self.num_key_value_heads}), "
                f"found {self.num_attention_heads}"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise DrafterError(
                f"draft_vocab_size: expected at most vocab_size ({self.vocab_size}), found {self.draft_vocab_size}"
            )
        layers = list(self.capture_layers)
        if layers != sorted(set(layers)) or layers[0] < 0:
            raise DrafterError(f"capture_layers: expected 0-based decoder outputs, ascending, found {layers}")
        return self

    @property
    def feature_size(self) -> int:
        """K * H_target: the captured states of one token, side by side in the order of `capture_layers`."""
        return len(self.capture_layers) * self.target_hidden_size

    @staticmethod
    def from_verifier(
        config: Mapping[str, Any], draft_vocab_size: int, capture_layers: Sequence[int], **changed: Any
    ) -> DrafterConfig:
        """The drafter for the verifier with this config.json (or its `text_config`): one layer of the same widths.

        changed: fields that differ from the verifier's, such as rope_scaling=None, head_dim=128.
        Raises DrafterError for a config without the fields of a decoder, or with values that no drafter can have.
        """
        inner = config.get("text_config")
        text = inner if isinstance(inner, Mapping) else config
        if missing := [name for name in _COPIED if name not in text and name not in changed]:
            raise DrafterError(
                f"verifier config: expected a decoder's config.json, found none of {', '.join(missing)} in it; "
                f"name them in the recipe's drafter section"
            )
        fields = {name: text[name] for name in _COPIED if name in text} | rope_fields(text)
        fields |= {"draft_vocab_size": draft_vocab_size, "capture_layers": tuple(capture_layers)}
        fields["rms_norm_eps"] = text.get("rms_norm_eps", 1e-6)
        fields |= changed
        heads = fields["num_attention_heads"]
        fields.setdefault("num_key_value_heads", text.get("num_key_value_heads") or heads)
        # With MLA (`v_head_dim`) the drafter gets ordinary heads as wide as the values.
        head_dim = text.get("v_head_dim") or text.get("head_dim") or fields["hidden_size"] // heads
        fields.setdefault("head_dim", head_dim)
        return checked_config(fields, "verifier config")


def rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a config.json, written either way: transformers 4, or 5's rope_parameters."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    nested = scaling if isinstance(scaling, Mapping) else {}
    theta = nested.get("rope_theta") or config.get("rope_theta") or 10000.0
    if nested and set(nested) <= {"rope_theta"}:
        scaling = None
    partial = config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        scaling = {**nested, "rope_type": nested.get("rope_type", "default"), "partial_rotary_factor": partial}
    return {"rope_theta": theta, "rope_scaling": scaling}


def checked_config(fields: Mapping[str, Any], where: str) -> DrafterConfig:
    """`DrafterConfig(**fields)`, with pydantic's report as one DrafterError that starts with `where`."""
    try:
        return DrafterConfig(**fields)
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'fields'}: {e['msg']}" for e in error.errors())
        raise DrafterError(f"{where}: {said}") from error
