"""What the coverage job refuses before it starts Ray."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from ray_jobs.coverage import wanted_sizes
from storage.errors import RecipeError
from vocab.config import VocabConfig


def test_sizes_are_the_recipes_or_the_usual_ones_that_hold_the_special_tokens() -> None:
    assert wanted_sizes(VocabConfig(size=None), 5000, 2000) == [2048, 4096, 5000]
    assert wanted_sizes(VocabConfig(size=3000), 5000, 0) == [1024, 2048, 3000, 4096, 5000]
    assert wanted_sizes(VocabConfig(size=3000, sizes=(10, 4000)), 5000, 3) == [10, 3000, 4000]


@pytest.mark.parametrize(("sizes", "forced"), [((5001,), 0), ((10, 5001), 0), ((2,), 3)])
def test_a_size_that_cannot_be_is_named_with_the_ones_that_can(sizes: tuple[int, ...], forced: int) -> None:
    with pytest.raises(RecipeError, match=r"vocab\.sizes: .* ids: expected .* to 5,000"):
        wanted_sizes(VocabConfig(size=None, sizes=sizes), 5000, forced)


@pytest.mark.parametrize("wrong", [{"size": 0}, {"size": -1}, {"sizes": (0, 5)}, {"sizes": (-5,)}])
def test_zero_and_negative_sizes_are_no_config(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        VocabConfig.model_validate(wrong)
