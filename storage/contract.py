"""The contract: everything that must agree for hidden states of two origins to be used together.

It travels with a dataset (in `plan.json` and in the attributes of the Zarr root group) and is hashed into every
receipt. Layers are 0-based *outputs of decoder layers*: transformers' `hidden_states` index minus one.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from storage.errors import ContractMismatch


def canonical_json(value: Any) -> bytes:
    """Sorted keys, no spaces, UTF-8: one byte string per value, so that it can be hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256_json(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


class Contract(BaseModel):
    """What the states are states of. Fields in `RECORDED` may differ between datasets that are used together."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    verifier: str
    revision: str | None = None
    config_hash: str
    # Of samples of the weights: a finetuned verifier shares everything else with its base.
    weights_hash: str
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    tokenizer_hash: str
    chat_template_hash: str | None = None
    # 0-based outputs of decoder layers, ascending; the final state follows them as the last of the L layers.
    capture_layers: tuple[int, ...]
    final_state: Literal["post_norm", "pre_norm", "absent"] = "post_norm"
    dtype: Literal["bfloat16"] = "bfloat16"
    # Arguments of the engine that may change the states (quantization, ...); those known not to are left out.
    engine_args: dict[str, Any] = Field(default_factory=dict)
    engine: str
    engine_version: str
    engine_dtype: str
    tp_size: int = 1

    RECORDED: ClassVar[frozenset[str]] = frozenset({"verifier", "engine", "engine_version", "engine_dtype", "tp_size"})

    @model_validator(mode="after")
    def _layers_ascend(self) -> Contract:
        layers = list(self.capture_layers)
        if layers != sorted(set(layers)) or any(not 0 <= layer < self.num_layers for layer in layers):
            raise ValueError(
                f"capture_layers must ascend within 0..{self.num_layers - 1} (0-based decoder outputs), found {layers}"
            )
        return self

    @property
    def layers(self) -> int:
        """L, the number of states stored for each token: the captured layers and, unless absent, the final one."""
        return len(self.capture_layers) + (self.final_state != "absent")

    def must_match(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude=set(self.RECORDED))

    @property
    def hash(self) -> str:
        """sha256 over the fields that must match."""
        return sha256_json(self.must_match())

    def differences(self, other: Contract) -> list[str]:
        """`field: mine != theirs` for each field that must match and does not."""
        mine, theirs = self.must_match(), other.must_match()
        return [f"{k}: {mine[k]!r} != {theirs[k]!r}" for k in mine if mine[k] != theirs[k]]

    def require_match(self, other: Contract, what: str) -> None:
        """Raises ContractMismatch naming every differing field."""
        if differing := self.differences(other):
            raise ContractMismatch(f"{what}: the contracts differ in {'; '.join(differing)}")
