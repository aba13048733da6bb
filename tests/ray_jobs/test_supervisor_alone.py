"""What the supervisor concludes by itself, without a Ray: hung starts, and what a failed call said."""

from __future__ import annotations

import time

import pytest

from ray_jobs.policies import first_line
from ray_jobs.recipe import ExtractionConfig
from ray_jobs.replicas.replica import ReplicaConfig
from ray_jobs.scheduling import Scheduler
from ray_jobs.slots import Phase
from ray_jobs.supervisor import Supervisor, _Live, reason_of_call
from storage.errors import ReplicaFailed, StatehouseError


def test_a_replica_that_hangs_while_it_starts_is_replaced_and_one_that_waits_for_a_node_is_not() -> None:
    config = ExtractionConfig(
        replicas=3, replica=ReplicaConfig(engine="transformers", start_timeout_s=100, request_timeout_s=50)
    )
    supervisor, scheduler = Supervisor(lambda _options: None, config), Scheduler([1, 2, 3], 3)
    scheduler.step(0.0)
    now = time.monotonic()
    for slot, placed in enumerate((now - 460, now - 440, None)):  # 100 + 50 s, and 300 s around them
        supervisor._live[slot] = _Live(1, None, None, now - 9999, placed=placed)
    supervisor._ask_health(scheduler)
    assert [slot.phase for slot in scheduler.slots] == [Phase.BACKOFF, Phase.STARTING, Phase.STARTING]
    (kill,) = scheduler.step(1.0).actions
    assert kill.reason == "it did not start within 450 s"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AssertionError(), "AssertionError"),
        (KeyError("x"), "KeyError: 'x'"),
        (MemoryError("\n"), "MemoryError"),
        (ReplicaFailed("the engine died\n  log tail"), "the engine died\n  log tail"),
        (ReplicaFailed(""), "ReplicaFailed"),
        (StatehouseError("odd"), "StatehouseError: odd"),
    ],
)
def test_a_failed_call_always_says_something_and_of_which_kind_it_is(error: Exception, said: str) -> None:
    assert reason_of_call(error) == said
    assert first_line(reason_of_call(error)) == said.splitlines()[0]


def test_the_first_line_of_nothing_is_a_line() -> None:
    assert [first_line(text) for text in ("", "\n \n", "\n  one\ntwo")] == ["no reason given", "no reason given", "one"]
