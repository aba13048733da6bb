"""Which numbers mean which layers is what the installed SGLang says, not what it said once."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from drafter.layer_ids import INPUT_ID_CLASSES, INPUT_ID_FAMILIES, alike, of_sglang, sglang_ids

_CLASS = re.compile(r"^class (\w+)\(([^)]*)\):", re.MULTILINE)


def sglang_models() -> Path | None:
    found = importlib.util.find_spec("sglang")  # not imported: that takes seconds
    folders = found.submodule_search_locations if found else None
    return Path(folders[0], "srt", "models") if folders else None


@pytest.mark.skipif(sglang_models() is None, reason="SGLang is not installed")
def test_the_families_whose_ids_name_readers_are_those_of_the_installed_sglang() -> None:
    rules: dict[str, bool] = {}  # of classes that set the layers themselves
    parents: dict[str, list[str]] = {}
    entries: set[str] = set()
    for path in sglang_models().rglob("*.py"):  # type: ignore[union-attr]
        text = path.read_text()
        listed = re.findall(r"^EntryClass = (\[[^]]*\]|\w+)", text, re.MULTILINE)
        entries |= set(re.findall(r"\w+", " ".join(listed)))
        _, *parts = _CLASS.split(text)
        for name, inherited, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            parents[name] = re.findall(r"\w+", inherited)
            if "def set_eagle3_layers_to_capture" in body:
                rules[name] = "layer_ids[0] == 1" in body

    def names_readers(name: str) -> bool:
        return rules[name] if name in rules else any(names_readers(one) for one in parents.get(name, []) if one != name)

    found = {name for name in entries if names_readers(name) and not re.search("NextN$|Eagle$", name)}
    assert found == set(INPUT_ID_CLASSES)  # those left out are drafters themselves


def test_ids_of_every_such_family_come_back_as_the_layers_they_were_made_of() -> None:
    assert {"deepseek_v3", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa"} <= set(INPUT_ID_FAMILIES)
    for family in ("llama", *INPUT_ID_FAMILIES):
        for layers in ((1, 29, 57), (0, 29, 57), (2, 30, 58), (0, 1), (3,)):
            ids = sglang_ids(layers, family)
            assert of_sglang(ids, family) == layers
            assert not alike(layers) or of_sglang(layers, family) == layers
