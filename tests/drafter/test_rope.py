"""RoPE of every type is SGLang's (golden/rope.py), and a scaling that nobody can serve is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense import small_drafter
from safetensors import safe_open

from drafter.errors import DrafterError
from drafter.rope import checked_scaling, frequencies

PATH = Path(__file__).parent / "golden" / "rope.safetensors"
with safe_open(PATH, "pt") as _file:
    ABOUT = json.loads(_file.metadata()["about"])
    GOLDEN = {name: _file.get_tensor(name) for name in _file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", ABOUT["cases"])
def test_cosines_and_sines_are_those_of_sglangs_rope(name: str) -> None:
    theta, scaling = ABOUT["cases"][name]
    angle, factor = frequencies(checked_scaling(scaling), theta, ABOUT["head_dim"], ABOUT["max_positions"])
    angles = torch.tensor(ABOUT["positions"])[:, None] * angle
    ours = torch.cat([angles.cos(), angles.sin()], dim=-1) * factor
    torch.testing.assert_close(ours.float(), GOLDEN[name], atol=2e-5, rtol=0)


def test_the_layer_turns_queries_by_those_angles() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    drafter = small_drafter(head_dim=8, rope_scaling=scaling)
    layer = drafter.midlayer.self_attn
    at = torch.tensor([0, 1, 7, 40, 63])
    projected = torch.randn(5, 4 * 8)
    plain = projected.unflatten(-1, (-1, 8)).double()
    angle, factor = frequencies(drafter.config.rope_scaling, 10_000.0, 8, 64)
    turned = torch.complex(plain[..., :4], plain[..., 4:]) * torch.polar(
        torch.full((5, 1, 4), factor, dtype=torch.float64), (at[:, None] * angle)[:, None]
    )
    expected = torch.cat([turned.real, turned.imag], dim=-1).float()
    for given in (projected, projected.double()):  # compiled, and torch's
        (found,) = layer.heads(given, layer.turns(64), at, [4], 0)
        torch.testing.assert_close(found.float(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "a rope_type of default, linear, dynamic, llama3, yarn, found"),
        ("yarn", "give rope_scaling=None"),
        ({"rope_type": "yarn"}, "factor: expected a number, found None"),
        ({"rope_type": "linear", "factor": 0.5}, "factor: expected at least 1, found 0.5"),
        ({"rope_type": "linear", "factor": 2.0, "alpha": 3}, "found alpha=3"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}, "beta_fast: expected a positive number, found 'x'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "found partial_rotary_factor=0.5"),
    ],
)
def test_other_scalings_are_refused(scaling: Any, said: str) -> None:
    with pytest.raises(DrafterError, match=said):
        checked_scaling(scaling)
