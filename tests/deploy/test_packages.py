"""The extras that a GPU node installs can be installed together. (Here SGLang is installed without its requirements.)"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires

from node_env import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def wanted(*extras: str) -> list[Requirement]:
    """Requirements of the project with these extras; extras that name others are followed."""
    found = [Requirement(line) for line in PROJECT["dependencies"]]
    for extra in extras:
        for line in PROJECT["optional-dependencies"][extra]:
            one = Requirement(line)
            found += wanted(*sorted(one.extras)) if one.name == PROJECT["name"] else [one]
    return found


def test_no_package_of_a_gpu_node_contradicts_a_pin_of_sglang() -> None:
    pins = {}
    for line in requires("sglang") or []:
        one = Requirement(line)
        exact = re.fullmatch(r"==([^*]+)", str(one.specifier))
        if exact and (one.marker is None or one.marker.evaluate({"extra": ""})):
            pins[canonicalize_name(one.name)] = exact[1]
    assert "torch" in pins
    for one in wanted("jobs", "sglang"):
        pin = pins.get(canonicalize_name(one.name))
        assert pin is None or one.specifier.contains(pin), f"sglang wants {one.name}=={pin}, pyproject.toml {one}"
