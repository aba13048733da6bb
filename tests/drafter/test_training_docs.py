"""docs/training.md: every fault that it lists has the test that it names, and every key that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

from drafter.recipe import LoaderSection, TrainingSection

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/training.md").read_text()


def test_every_fault_has_its_test() -> None:
    named = re.findall(r"^\| .* \| `(\S+\.py)` `(\w+)` \|$", TEXT, re.MULTILINE)
    assert len(named) > 10
    for path, words in named:
        names = re.findall(r"def (test_\w+)", (ROOT / "tests" / path).read_text())
        assert any(words in name for name in names), f"{path}: no test {words}"


def test_every_key_of_the_training_section_exists() -> None:
    for key in re.findall(r"`training\.(\w+)", TEXT):
        assert key in TrainingSection.model_fields, key
    for key in re.findall(r"loader\.(\w+)", TEXT):
        assert key in {*LoaderSection.model_fields, "py"}, key
