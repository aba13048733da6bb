"""The interface: config, and the checks that stand between a bad input and an engine. No engine here."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from ray_jobs.replicas.replica import (
    CAPTURE_ARGUMENTS,
    ReplicaConfig,
    Sampling,
    parse_ports,
    validate_ids,
    validate_layers,
    validate_prompts,
)
from storage.errors import RecipeError, StatehouseError


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError, match="gpu\n"):
        ReplicaConfig.model_validate({"gpu": 8})


@pytest.mark.parametrize("name", sorted(CAPTURE_ARGUMENTS))
def test_engine_arguments_that_the_capture_needs_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValidationError) as error:
        ReplicaConfig(args={name: 1, "mem_fraction_static": 0.85})
    assert f"may not set {name} ({CAPTURE_ARGUMENTS[name]})" in str(error.value)


def test_ports() -> None:
    assert parse_ports("31000-31002") == range(31000, 31003)
    for wrong in ("31000", "31002-31000", "1-2", "a-b", "60000-70000"):
        with pytest.raises(ValidationError, match="first-last"):
            ReplicaConfig(ports=wrong)


@pytest.mark.parametrize("layers", [[], [3, 1], [1, 1], [-1, 2], [1, 29]])
def test_layers_that_cannot_be_captured(layers: list[int]) -> None:
    with pytest.raises(RecipeError, match=r"outputs of decoder layers 0 to 28.*final state"):
        validate_layers(layers, 30)


def test_layers_up_to_the_last_but_one_can_be_captured() -> None:
    validate_layers([0, 28], 30)
    validate_layers([5], 30)


@pytest.mark.parametrize(("bad", "position"), [(-1, 1), (100, 2)])
def test_a_bad_id_is_named_with_its_position(bad: int, position: int) -> None:
    sequence = ids(5, 6, 7)
    sequence[position] = bad
    with pytest.raises(StatehouseError, match=rf"sequence 1 of 2 .*found {bad} at position {position}"):
        validate_ids([ids(0, 99), sequence], vocab_size=100, max_length=10)


@pytest.mark.parametrize("length", [0, 11])
def test_a_bad_length_is_named(length: int) -> None:
    with pytest.raises(StatehouseError, match=rf"sequence 0 of 1 has {length} tokens; expected 1 to 10"):
        validate_ids([np.zeros(length, dtype=np.int64)], vocab_size=100, max_length=10)


@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros((1, 3), dtype=np.int32)])
def test_what_is_no_list_of_ids_is_refused(wrong: np.ndarray) -> None:
    with pytest.raises(StatehouseError, match="no list of token ids"):
        validate_ids([wrong], vocab_size=100, max_length=10)


def test_a_response_needs_room() -> None:
    validate_prompts([ids(1, 2)], [Sampling(max_new_tokens=8)], 100, 10)
    with pytest.raises(StatehouseError, match=r"found 2 \+ 9"):
        validate_prompts([ids(1, 2)], [Sampling(max_new_tokens=9)], 100, 10)
    with pytest.raises(StatehouseError, match="1 prompts but 2 samplings"):
        validate_prompts([ids(1, 2)], [Sampling()] * 2, 100, 10)


@pytest.mark.parametrize("wrong", [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"max_new_tokens": 0}])
def test_bad_sampling(wrong: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="bad sampling"):
        Sampling(**wrong)
