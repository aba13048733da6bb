"""RoPE frequencies as SGLang 0.5.23 and vLLM compute them for a Llama drafter, from a config's `rope_scaling`.

Always half-split heads, whole heads. `default`; `linear`: positions divided by the factor; `dynamic`: one longer base,
whatever the length; `llama3`: long waves stretched, short ones kept; `yarn`: the same by a ramp, and cos and sin times
the ratio of mscales (DeepSeek's own layer scales its softmax too; these servers' Llama drafter does not).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafter.errors import DrafterError

# Keys of each type, with their defaults; None: must be given. `original_max_position_embeddings` falls back on the
# config's max_position_embeddings.
_ORIGINAL = "original_max_position_embeddings"
_KEYS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": None},
    "dynamic": {"factor": None},
    "llama3": {"factor": None, "low_freq_factor": 1.0, "high_freq_factor": 4.0, _ORIGINAL: 0},
    "yarn": {
        "factor": None, _ORIGINAL: 0, "beta_fast": 32.0, "beta_slow": 1.0, "attn_factor": 1.0, "mscale": 0.0,
        "mscale_all_dim": 0.0, "truncate": True,
    },
}  # fmt: skip
# What configs hold besides, and what it must be.
_HARMLESS = {
    "rope_theta": None,
    "type": None,
    "rope_type": None,
    "partial_rotary_factor": 1.0,
    "extrapolation_factor": 1.0,
}


def checked_scaling(scaling: Any) -> dict[str, Any] | None:
    """The scaling with its type and every key that matters, defaults filled in; None for plain RoPE.

    Raises DrafterError for a type that is not one of those above, a key that it has not, or a value out of range.
    """
    if scaling is None:
        return None
    given = dict(scaling) if isinstance(scaling, Mapping) else {}
    kind = given.get("rope_type", given.get("type"))
    if kind not in _KEYS:
        raise DrafterError(
            f"expected no RoPE scaling, or a rope_type of {', '.join(_KEYS)}, found {scaling}; give rope_scaling=None to "
            f"train the drafter with plain RoPE, which need not be its verifier's"
        )
    known = _KEYS[kind]
    for name, value in given.items():
        if name in known:
            continue
        if name not in _HARMLESS or (_HARMLESS[name] is not None and value != _HARMLESS[name]):
            raise DrafterError(f"rope_scaling of type {kind}: expected {sorted(known)}, found {name}={value!r}")
    found: dict[str, Any] = {"rope_type": kind}
    for name, default in known.items():
        value = given.get(name, default)
        if value is None or isinstance(value, bool) != isinstance(default, bool):
            raise DrafterError(f"rope_scaling of type {kind}: {name}: expected a number, found {value!r}")
        if not isinstance(value, bool) and (not isinstance(value, int | float) or value < 0):
            raise DrafterError(f"rope_scaling of type {kind}: {name}: expected a positive number, found {value!r}")
        if value or name not in (_ORIGINAL, "mscale", "mscale_all_dim"):
            found[name] = value
    if found.get("factor", 1) < 1:
        raise DrafterError(f"rope_scaling of type {kind}: factor: expected at least 1, found {found['factor']}")
    return None if kind == "default" else found


def frequencies(
    scaling: Mapping[str, Any] | None, theta: float, head_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    """(angle of each pair of columns a position [head_dim / 2] float64, factor of cos and sin).

    scaling: of `checked_scaling`. max_positions: the config's max_position_embeddings.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    plain = theta**-exponent
    kind = scaling["rope_type"] if scaling else "default"
    if scaling is None or kind == "default":
        return plain, 1.0
    factor = float(scaling["factor"])
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "dynamic":
        # The servers' length is factor * max_positions for every sequence.
        longer = theta * (factor * factor - (factor - 1)) ** (head_dim / (head_dim - 2))
        return longer**-exponent, 1.0
    original = float(scaling.get(_ORIGINAL) or max_positions)
    if kind == "llama3":
        turns = original * plain / (2 * math.pi)  # of each pair over the original length
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1) if low != high else (turns >= high).double()
        return (1 - kept) * plain / factor + kept * plain, 1.0
    low, high = (_yarn_dimension(scaling[name], head_dim, theta, original) for name in ("beta_fast", "beta_slow"))
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64) - low) / ((high - low) or 0.001)
    stretched = ramp.clamp(0, 1)
    return stretched * plain / factor + (1 - stretched) * plain, _yarn_factor(scaling, factor)


def _yarn_dimension(turns: float, head_dim: int, theta: float, original: float) -> float:
    """The pair of columns that turns so many times over the original length."""
    return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_factor(scaling: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1

    both = scaling.get("mscale"), scaling.get("mscale_all_dim")
    ratio = mscale(both[0]) / mscale(both[1]) if both[0] and both[1] else mscale(1.0)
    return ratio * float(scaling["attn_factor"])
