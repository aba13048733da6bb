"""A draft vocabulary is taken only for the settings that would make it."""

from __future__ import annotations

from typing import Any

import pytest

from vocab.chosen import differences, require_chosen_as
from vocab.config import VocabConfig
from vocab.errors import VocabError
from vocab.mapping import DraftVocab

MADE_WITH = {"vocab": {"size": 4, "policy": "balanced", "folds": 7}, "evaluation": {"held_out": 0.1, "serve_tokens": 3}}


@pytest.mark.parametrize(
    ("config", "judged", "said"),
    [
        ({}, {}, []),
        ({"folds": 3, "sizes": [2, 3]}, {}, []),
        ({"size": 5}, {}, ["vocab.size: expected 5, found 4"]),
        ({"size": None}, {}, []),
        ({"policy": "frequency"}, {}, ["vocab.policy: expected frequency, found balanced"]),
        ({"files": ["a.jsonl"]}, {}, ["vocab.files: expected ('a.jsonl',), found ()"]),
        ({}, {"held_out": 0.2}, ["evaluation.held_out: expected 0.2, found 0.1"]),
        ({}, {"seed": 1}, ["evaluation.seed: expected 1, found 0"]),
    ],
)
def test_each_key_that_chooses_ids_is_compared(config: dict[str, Any], judged: dict[str, Any], said: list[str]) -> None:
    made = DraftVocab.from_ids(range(4), 10, provenance={"recipe": MADE_WITH})
    wanted = VocabConfig(**{"size": 4, "policy": "balanced"} | config)
    assert differences(made, wanted, **{"held_out": 0.1} | judged) == said


def test_one_that_does_not_say_how_it_was_made_can_only_be_of_another_size() -> None:
    for provenance in ({}, {"recipe": {"vocab": {"of another version": 1}}}, {"recipe": "?"}):
        made = DraftVocab.from_ids(range(4), 10, provenance=provenance)
        assert differences(made, VocabConfig(size=4), seed=3) == []
        assert differences(made, VocabConfig(), seed=3) == ["vocab.size: expected 10, found 4"]
    with pytest.raises(VocabError, match=r"a/vocab: .*vocab.size: expected 10, found 4; run coverage again"):
        require_chosen_as(made, VocabConfig(), where="a/vocab")
