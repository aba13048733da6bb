"""The shape of an EAGLE-3 drafter, and how it follows from its verifier's config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from drafter.errors import DrafterError
from drafter.rope import checked_scaling

# Fields of a verifier's config that a drafter copies; without any of them there is nothing to follow.
_COPIED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings")

# Fields that no recipe sets in drafter.config, and where they come from.
_GIVEN = {
    "draft_vocab_size": "the draft vocabulary's own size counts; set vocab.size",
    "capture_layers": "the dataset's count; leave it out",
}


_TWO_WAYS = "SGLang and vLLM compute such a drafter in two ways (docs/drafter.md)"


def _agreed_bias(value: Any) -> Any:
    if value not in (False, "o_proj"):
        raise DrafterError(f"expected false or o_proj, found {value!r}: {_TWO_WAYS}")
    return value


def _agreed_layers(value: Any) -> Any:
    if value != 1:
        raise DrafterError(f"expected 1, found {value!r}: {_TWO_WAYS}")
    return value


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
    # None for plain RoPE; else as drafter.rope.checked_scaling fills it in.
    rope_scaling: dict[str, Any] | None = None
    # The verifier's, and the part of it that the drafter proposes from.
    vocab_size: int = Field(gt=0)
    draft_vocab_size: int = Field(gt=0)
    max_position_embeddings: int = Field(gt=0)
    # The one bias on which the servers agree (docs/drafter.md): the attention's output's. True, in Hugging Face configs,
    # means q, k and v too, which SGLang gives none.
    attention_bias: Annotated[Literal[False, "o_proj"], BeforeValidator(_agreed_bias)] = False
    # The servers agree on one layer only: the name is here to be refused.
    num_hidden_layers: Annotated[Literal[1], BeforeValidator(_agreed_layers)] = 1
    # EAGLE-3.1, with the servers' meaning: one norm over all captured states side by side before `fc` (input_norm), or
    # one for each (fc_norm.0, ...); and whether a step is fed the state after the last norm instead of before it.
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    # 0-based outputs of the verifier's decoder layers, ascending; their number, K, may be any.
    capture_layers: tuple[int, ...] = Field(min_length=1)

    @field_validator("rope_scaling", mode="before")
    @classmethod
    def _known_rope(cls, scaling: Any) -> dict[str, Any] | None:
        if isinstance(scaling, Mapping) and "mrope_section" in scaling:
            raise DrafterError(f"expected RoPE of one axis, found {scaling}; give rope_scaling=None for plain RoPE")
        return checked_scaling(scaling)

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
        if self.norm_before_fc and self.fc_norm:
            raise DrafterError("norm_before_fc, fc_norm: expected at most one of them on, found both")
        layers = list(self.capture_layers)
        if layers != sorted(set(layers)) or layers[0] < 0:
            raise DrafterError(f"capture_layers: expected 0-based decoder outputs, ascending, found {layers}")
        return self

    @property
    def feature_size(self) -> int:
        """K * H_target: the captured states of one token, side by side in the order of `capture_layers`."""
        return len(self.capture_layers) * self.target_hidden_size

    @property
    def own_embedding(self) -> bool:
        """Whether the drafter's width is another than the verifier's, whose embedding it cannot read then."""
        return self.hidden_size != self.target_hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values, in bf16, that a server caches for each token of a request."""
        return 2 * 2 * self.num_key_value_heads * self.head_dim

    @staticmethod
    def from_verifier(
        config: Mapping[str, Any], draft_vocab_size: int, capture_layers: Sequence[int], **changed: Any
    ) -> DrafterConfig:
        """The drafter for the verifier with this config.json (or its `text_config`): one layer of the same widths.

        changed: fields that differ from the verifier's, such as rope_scaling=None, head_dim=128.
        Raises DrafterError for a config without the fields of a decoder, or with values that no drafter can have.
        """
        text = _decoder_of(config)
        if missing := missing_fields(config, changed):
            raise DrafterError(
                f"verifier config: expected a decoder's config.json, found none of {', '.join(missing)} in it; "
                f"name them in the recipe's drafter section"
            )
        fields = {name: text[name] for name in _COPIED if name in text} | rope_fields(text)
        fields |= {"draft_vocab_size": draft_vocab_size, "capture_layers": tuple(capture_layers)}
        if "hidden_size" in text:
            fields["target_hidden_size"] = text["hidden_size"]
        fields["rms_norm_eps"] = text.get("rms_norm_eps", 1e-6)
        fields |= changed
        if text.get("kv_lora_rank"):
            # MLA says nothing of ordinary heads, and a mixture's dense width nothing of one layer's: 64 heads of 128 and
            # 12,288 at a width of 7,168 (Kimi-K2.5), as published drafters have them.
            fields["num_attention_heads"] = changed.get(
                "num_attention_heads", min(64, text.get("num_attention_heads", 64))
            )
            fields.setdefault("head_dim", text.get("v_head_dim") or 128)
            fields["intermediate_size"] = changed.get("intermediate_size", fields["hidden_size"] * 12 // 7)
            fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
        heads = fields["num_attention_heads"]
        fields.setdefault("num_key_value_heads", text.get("num_key_value_heads") or heads)
        fields.setdefault("head_dim", text.get("head_dim") or fields["hidden_size"] // heads)
        return checked_config(fields, "verifier config")


def _decoder_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def missing_fields(config: Mapping[str, Any], changed: Mapping[str, Any]) -> list[str]:
    """Fields without which no drafter follows from this config.json."""
    text = _decoder_of(config)
    return [name for name in _COPIED if name not in text and name not in changed]


def follow(
    config: Mapping[str, Any], draft_vocab_size: int, capture_layers: Sequence[int], changed: Mapping[str, Any]
) -> DrafterConfig:
    """`DrafterConfig.from_verifier` with what a recipe changes in `drafter.config`. Raises DrafterError naming the key."""
    known, checked = DrafterConfig.model_fields, dict[str, Any]()
    for name, value in changed.items():
        where = f"drafter.config.{name}"
        if name in _GIVEN:
            raise DrafterError(f"{where}: expected nothing, found {value}: {_GIVEN[name]}")
        if name not in known:
            raise DrafterError(
                f"{where}: expected one of {', '.join(sorted(set(known) - set(_GIVEN)))}; correct the name"
            )
        try:
            # As this field alone, so that arithmetic with it cannot fail.
            alone: TypeAdapter[Any] = TypeAdapter(Annotated[known[name].annotation, known[name]])  # type: ignore[arg-type]
            checked[name] = alone.validate_python(value)
        except ValidationError as error:
            said = error.errors()[0]
            own = said.get("ctx", {}).get("error")  # which says what was found
            raise DrafterError(f"{where}: {own or said['msg']}{'' if own else f', found {value!r}'}") from None
    try:
        return DrafterConfig.from_verifier(config, draft_vocab_size, capture_layers, **checked)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, DrafterError):
            raise
        raise DrafterError(f"verifier config: expected the numbers of a decoder, found {error}") from None


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
