"""Makes rayjob-schema.json, the part of KubeRay's RayJob schema that deploy/kuberay-rayjob.yaml is checked against.

usage: python tests/deploy/trim_crd.py ray.io_rayjobs.yaml VERSION > tests/deploy/rayjob-schema.json

The custom resource definition has 1.4 MB, nearly all of it for fields of pods that we do not use. Kept are: the rules for
every field the manifest uses, and the *names* of its neighbours, so that a misspelt field is still found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

MANIFEST = Path(__file__).resolve().parents[2] / "deploy" / "kuberay-rayjob.yaml"
_RULES = ("type", "enum", "required", "anyOf", "pattern", "minimum", "maximum", "additionalProperties")


def trim(schema: dict[str, Any], used: list[Any]) -> dict[str, Any]:
    """`schema` for the values in `used`; unknown fields are errors, as they are for a strict API server."""
    kept: dict[str, Any] = {name: schema[name] for name in _RULES if name in schema}
    if "properties" in schema:
        kept["properties"] = {}
        kept["additionalProperties"] = False
        for name, rules in schema["properties"].items():
            below = [value[name] for value in used if isinstance(value, dict) and name in value]
            kept["properties"][name] = trim(rules, below) if below else {}
    if "items" in schema:
        kept["items"] = trim(schema["items"], [item for value in used if isinstance(value, list) for item in value])
    return kept


def main(crd: str, version: str) -> None:
    definition = yaml.safe_load(Path(crd).read_text())
    (served,) = [entry for entry in definition["spec"]["versions"] if entry["name"] == "v1"]
    jobs = [one for one in yaml.safe_load_all(MANIFEST.read_text()) if one["kind"] == "RayJob"]
    source = {
        "title": "RayJob (ray.io/v1), trimmed",
        "$comment": f"From KubeRay {version}, ray-operator/config/crd/bases/ray.io_rayjobs.yaml, "
        "https://github.com/ray-project/kuberay, Apache-2.0; trimmed by tests/deploy/trim_crd.py.",
    }
    json.dump(source | trim(served["schema"]["openAPIV3Schema"], jobs), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
