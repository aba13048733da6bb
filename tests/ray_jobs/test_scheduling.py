"""The supervisor's state machine under a simulated clock, with replicas that die, hang, lie and choke on single prompts."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Say, Unit, World, good, ids_of, units_of

from ray_jobs.policies import Call, Outcome, Policies, Restart, Straggler
from ray_jobs.scheduling import Scheduler
from ray_jobs.slots import Phase


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_every_unit_is_done_once_and_exactly_the_poison_is_quarantined(data: st.DataObject) -> None:
    count, rows, slots = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    everything = range(count * rows)
    poison = data.draw(st.sets(st.sampled_from(everything), max_size=3))
    nan = data.draw(st.sets(st.sampled_from(everything), max_size=3)) - poison
    rng = random.Random(data.draw(st.integers(0, 9999)))
    broken = (
        data.draw(st.sampled_from([None, 0])) if slots > 1 else None
    )  # a replica whose numbers are all NaN, at first

    def says(call: Call, now: float) -> tuple[float, object]:
        ids, seconds = ids_of(call), rng.uniform(0.1, 9)
        if poison & set(ids):
            return seconds, rng.choice(["crash", "fail", "hang"])
        names = call.argument.rows if isinstance(call.argument, Unit) else call.argument
        lost = set(ids) if (call.slot, call.generation) == (broken, 1) else nan & set(ids)
        bad = {at: "NaN" for at, name in enumerate(names) if name in lost}
        return seconds, Outcome("stored", bad)

    policies = Policies(unit_timeout_s=30, quarantine_limit=6)
    world = World(Scheduler(units_of(count, rows), slots, policies), says).run()
    assert world.failed is None
    assert world.done == Counter(range(count))
    found = {unit.rows[row] for unit in world.units.values() for row in unit.quarantined}
    assert found == poison | nan
    assert found == {count_row(world, key) for key in world.scheduler.quarantined}
    assert all(reason for unit in world.units.values() for reason in unit.quarantined.values())


def count_row(world: World, key: tuple[int, int]) -> int:
    return world.units[key[0]].rows[key[1]]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_deaths_at_any_moment_lose_and_double_nothing(data: st.DataObject) -> None:
    count, slots = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 6))
    rng = random.Random(data.draw(st.integers(0, 9999)))
    deaths = data.draw(st.integers(0, 2))

    def says(call: Call, now: float) -> tuple[float, object]:
        nonlocal deaths
        if deaths and rng.random() < 0.2:
            deaths -= 1
            return rng.uniform(0.1, 4), "crash"
        return rng.uniform(0.1, 4), Outcome("stored")

    world = World(Scheduler(units_of(count, 3), slots, Policies(quarantine_limit=0)), says).run()
    assert world.failed is None
    assert world.done == Counter(range(count))
    assert not world.scheduler.quarantined


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_replica_that_starts_and_then_fails_at_everything_costs_no_sequence_and_is_given_up(
    data: st.DataObject,
) -> None:
    """Whatever it does instead of work, however long it takes to start again, and with prompts that are poison beside."""
    slots, rows = data.draw(st.integers(2, 8)), data.draw(st.sampled_from([1, 2, 16]))
    what = data.draw(st.sampled_from(["fail", "crash", "hang", "nan"]))
    start, seconds = data.draw(st.sampled_from([5.0, 60.0, 300.0])), data.draw(st.sampled_from([3.0, 30.0]))
    poison = data.draw(st.sets(st.integers(0, 60 * rows - 1), max_size=2))
    rng = random.Random(data.draw(st.integers(0, 9999)))

    def says(call: Call, now: float) -> tuple[float, object]:
        crashes = bool(poison & set(ids_of(call)))
        if call.slot == 0 and not (what == "nan" and crashes):
            lacks = Outcome("stored", dict.fromkeys(range(len(ids_of(call))), "NaN"))
            return rng.uniform(1, 3), lacks if what == "nan" else what
        return rng.uniform(0.7, 1.3) * seconds, "crash" if crashes else Outcome("stored")

    policies = Policies(quarantine_limit=3, unit_timeout_s=100)
    world = World(Scheduler(units_of(60, rows), slots, policies), says, start_s=start).run()
    assert world.failed is None
    assert world.done == Counter(range(60))
    assert {count_row(world, key) for key in world.scheduler.quarantined} == poison
    mine = [kill for kill in world.kills if kill.slot == 0]
    assert len(mine) <= policies.barren + 5 * len(poison)  # while the others are under suspicion, none is given up
    if not poison and len(mine) == policies.barren:
        assert "given up, its replica was replaced 5 times" in mine[-1].reason


def test_what_failed_on_the_only_replica_that_is_up_is_tried_on_a_second_one() -> None:
    """The last unit needs one replica, and that one is broken."""
    world = World(
        Scheduler(units_of(1, 4), 2, Policies(quarantine_limit=4)),
        lambda call, now: (1.0, "fail" if call.slot == 0 else Outcome("stored")),
    ).run()
    assert world.failed is None
    assert world.done == Counter([0])
    assert not world.scheduler.quarantined
    assert len(world.kills) == 1


def test_where_no_second_replica_comes_up_the_one_that_is_there_tells_what_is_poison() -> None:
    world = World(
        Scheduler(units_of(6, 4), 2, Policies(quarantine_limit=1)),
        lambda call, now: (1.0, "crash" if 9 in ids_of(call) else Outcome("stored")),
    )
    world.start_of = {1: float("inf")}
    world.run()
    assert world.failed is None
    assert world.done == Counter(range(6))
    assert set(world.scheduler.quarantined) == {(2, 1)}


def test_two_are_in_flight_on_each_replica_and_never_more() -> None:
    scheduler, most = Scheduler(units_of(20, 1), 3), 0

    def says(call: Call, now: float) -> tuple[float, object]:
        nonlocal most
        most = max(most, *(len(slot.running) for slot in scheduler.slots))
        return 1.0, Outcome()

    world = World(scheduler, says).run()
    assert most == 2
    assert {call.slot for call in world.calls} == {0, 1, 2}


def test_bisection_costs_about_two_probes_a_level() -> None:
    def says(call: Call, now: float) -> tuple[float, object]:
        return 1.0, "crash" if 37 in ids_of(call) else Outcome()

    world = World(Scheduler(units_of(1, 64), 1, Policies(quarantine_limit=1)), says).run()
    assert world.scheduler.quarantined == {(0, 37): "crashed"}
    probes = [call for call in world.calls if call.kind == "probe"]
    assert len(probes) <= 2 * 6 + 1
    assert len(world.kills) == 3 + 6 + 1  # the unit three times, once a level, the single one twice


def test_an_innocent_unit_beside_a_poisonous_one_is_not_blamed() -> None:
    def says(call: Call, now: float) -> tuple[float, object]:
        return (1.0, "crash") if 0 in ids_of(call) else (30.0, Outcome())

    world = World(Scheduler(units_of(2, 2), 1, Policies(quarantine_limit=1)), says).run()
    assert world.done == Counter([0, 1])
    assert set(world.scheduler.quarantined) == {(0, 0)}


def test_more_poison_than_the_limit_accepts_ends_the_job() -> None:
    def says(call: Call, now: float) -> tuple[float, object]:
        return 1.0, "crash" if any(name in (0, 8, 16, 24) for name in ids_of(call)) else Outcome()

    world = World(Scheduler(units_of(50, 8), 2, Policies(quarantine_limit=2)), says).run()
    assert world.failed is not None
    assert "extraction.max_quarantined accepts 2" in world.failed
    assert len(world.scheduler.quarantined) == 3


def test_an_engine_that_fails_everything_is_blamed_before_all_prompts_are_tried() -> None:
    world = World(
        Scheduler(units_of(500, 8), 2, Policies(quarantine_limit=100)), lambda call, now: (1.0, "crash")
    ).run()
    assert world.failed is not None
    assert "none succeeded between them, so it is not a prompt" in world.failed
    assert len(world.kills) < 40
    assert len(world.scheduler.quarantined) < 10


def test_units_that_cannot_be_divided_end_the_job_after_their_attempts() -> None:
    world = World(Scheduler(list(range(3)), 1), lambda call, now: (1.0, "fail")).run()
    assert world.failed is not None
    assert "a work unit failed 3 times" in world.failed


def test_a_replica_that_never_comes_up_ends_the_job_and_one_of_two_does_not() -> None:
    world = World(Scheduler(units_of(3, 1), 1), good, comes_up=lambda: False).run()
    assert world.failed == "no replica came up in 3 tries, the last time with: it does not start"
    ups = iter([True, False, False, False, False])
    world = World(Scheduler(units_of(60, 1), 2), good, comes_up=lambda: next(ups)).run()
    assert world.failed is None
    assert world.done == Counter(range(60))
    assert [slot.phase for slot in world.scheduler.slots] == [Phase.READY, Phase.GIVEN_UP]


def test_restarts_back_off() -> None:
    restart = Restart(first_s=1, most_s=10, attempts=6)
    assert [restart.delay(n) for n in range(7)] == [1, 2, 4, 8, 10, 10, None]


def test_a_hanging_call_costs_its_replica() -> None:
    hung = iter(["hang"])
    world = World(
        Scheduler(units_of(4, 1), 2, Policies(unit_timeout_s=50, straggler=Straggler(least_s=999))),
        lambda call, now: (1.0, next(hung, Outcome())),
    ).run()
    assert world.done == Counter(range(4))
    assert [kill.reason for kill in world.kills] == ["no answer for 50 s"]


def test_a_straggler_is_given_to_an_idle_replica_and_the_first_answer_counts() -> None:
    slow = iter([0])

    def says(call: Call, now: float) -> tuple[float, object]:
        return (5000.0 if call.argument.name == 7 and next(slow, None) == 0 else 1.0), Outcome()

    policies = Policies(straggler=Straggler(factor=4, least_s=10), unit_timeout_s=9999)
    world = World(Scheduler(units_of(8, 1), 2, policies), says).run()
    assert world.done == Counter(range(8))
    assert world.scheduler.reissued == 1
    assert world.now < 100


def test_rows_that_are_nan_on_one_replica_only_cost_that_replica() -> None:
    def says(call: Call, now: float) -> tuple[float, object]:
        bad = {0: "NaN"} if (call.slot, call.generation) == (0, 1) else {}
        return 1.0, Outcome("stored", bad)

    world = World(Scheduler(units_of(6, 2), 2, Policies(quarantine_limit=1)), says).run()
    assert world.done == Counter(range(6))
    assert not world.scheduler.quarantined
    assert {(kill.slot, kill.generation) for kill in world.kills} == {(0, 1)}


def test_an_engine_whose_rows_are_nan_at_random_ends_the_job() -> None:
    rows = itertools.cycle([3, 0, 2, 1])
    world = World(
        Scheduler(units_of(2, 4), 2, Policies(quarantine_limit=8)),
        lambda call, now: (1.0, Outcome("stored", {next(rows): "row with NaN"})),
    ).run()
    assert world.failed is not None
    assert "so it is the engine and not a prompt" in world.failed
    assert "row with NaN" in world.failed
    assert len(world.calls) <= 24
    assert not world.scheduler.quarantined


def test_a_row_that_came_back_finite_the_last_time_is_not_quarantined() -> None:
    lacks = iter([{1: "NaN"}, {1: "NaN"}, {0: "NaN"}])  # on two replicas in turn: no row is bad everywhere and last
    says: Say = lambda call, now: (1.0, Outcome("stored", next(lacks, {})))  # noqa: E731
    world = World(Scheduler(units_of(1, 2), 2, Policies(quarantine_limit=2)), says)
    world.scheduler.adopt(0, 1)
    world.scheduler.adopt(1, 1)
    world.run()
    assert world.failed is None
    assert world.done == Counter([0])
    assert not world.scheduler.quarantined


def test_what_is_certain_is_quarantined_at_once() -> None:
    def says(call: Call, now: float) -> tuple[float, object]:
        bad = {1: "too long"} if isinstance(call.argument, Unit) and 1 in call.argument.suspects() else {}
        return 1.0, Outcome(None, bad, certain=True)

    world = World(Scheduler(units_of(1, 3), 2, Policies(quarantine_limit=1)), says).run()
    assert world.scheduler.quarantined == {(0, 1): "too long"}
    assert len(world.calls) == 2
    assert not world.kills


def test_a_checked_unit_runs_on_another_replica_than_its_reference_and_gets_it() -> None:
    units = [replace(unit, check=(1,)) for unit in units_of(6, 3)]
    world = World(Scheduler(units, 2), lambda call, now: (1.0, Outcome(("reference", call.slot)))).run()
    assert world.done == Counter(range(6))
    references = [call for call in world.calls if call.kind == "reference"]
    assert sorted(call.argument for call in references) == [[unit.rows[1]] for unit in units]
    for call in world.calls:
        if call.kind == "unit":
            assert call.reference[0] == "reference"
            assert call.reference[1] != call.slot
    late = World(Scheduler(units, 2), lambda call, now: (1.0, Outcome(("reference", call.slot))))
    late.start_of = {1: 40.0}  # the second replica takes its time
    late.run()
    assert all(call.reference[1] != call.slot for call in late.calls if call.kind == "unit")
    alone = World(Scheduler(units, 1), lambda call, now: (1.0, Outcome("states"))).run()
    assert alone.done == Counter(range(6))


def test_the_last_missing_unit_is_checked_by_a_second_replica() -> None:
    units = [replace(unit, check=(1,)) for unit in units_of(1, 2)]
    world = World(Scheduler(units, 2), lambda call, now: (1.0, Outcome(("reference", call.slot)))).run()
    (call,) = [call for call in world.calls if call.kind == "unit"]
    assert call.reference == ("reference", 1 - call.slot)


def test_a_replica_is_never_checked_against_itself() -> None:
    units = [replace(unit, check=(1,)) for unit in units_of(4, 2)]
    world = World(
        Scheduler(units, 2),
        lambda call, now: (1.0, Outcome(("reference", call.slot))),
        comes_up=itertools.chain([True], itertools.repeat(False)).__next__,
    ).run()
    assert world.done == Counter(range(4))
    assert all(call.reference is None for call in world.calls)
    alone = World(Scheduler(units, 1), lambda call, now: (1.0, Outcome("by transformers"))).run()
    assert all(call.reference == "by transformers" for call in alone.calls if call.kind == "unit")


def test_reference_states_are_used_soon_after_they_are_made() -> None:
    units = [replace(unit, check=(1,)) for unit in units_of(100, 2)]
    held = most = 0

    def says(call: Call, now: float) -> tuple[float, object]:
        nonlocal held, most
        held += 1 if call.kind == "reference" else -1
        most = max(most, held)
        return 1.0, Outcome("states")

    world = World(Scheduler(units, 2), says).run()
    assert world.done == Counter(range(100))
    assert most <= 8  # two in flight on each of two replicas, and those that wait for the other replica


def test_checked_units_do_not_wait_for_ever_for_a_replica_that_is_never_placed() -> None:
    units = [replace(unit, check=(1,)) for unit in units_of(4, 2)]
    world = World(Scheduler(units, 2), lambda call, now: (1.0, Outcome(("reference", call.slot))))
    world.start_of = {1: float("inf")}
    world.run(until=3000)
    assert world.done == Counter(range(4))
    assert 900 < world.now < 1000


@pytest.mark.parametrize("said", ["lost", "fail"])
def test_a_unit_whose_reference_states_are_lost_goes_on_without_them(said: str) -> None:
    """Each call that is given them fails: as that very loss, or as something that looks like a failure of the replica."""

    def says(call: Call, now: float) -> tuple[float, object]:
        return 1.0, said if call.reference is not None else Outcome(("reference", call.slot))

    units = [replace(unit, check=(1,)) for unit in units_of(4, 2)]
    world = World(Scheduler(units, 2, Policies(quarantine_limit=0)), says).run()
    assert world.failed is None
    assert world.done == Counter(range(4))
    assert sum(call.reference is not None for call in world.calls) <= 4
    assert bool(world.kills) == (said == "fail")


def test_a_reference_that_fails_does_not_hold_up_its_unit() -> None:
    def says(call: Call, now: float) -> tuple[float, object]:
        return 1.0, "crash" if call.kind == "reference" else Outcome("stored")

    world = World(Scheduler([replace(unit, check=(0,)) for unit in units_of(3, 2)], 2), says).run()
    assert world.done == Counter(range(3))


def test_draining_hands_nothing_out_and_ends_with_what_is_in_flight() -> None:
    scheduler = Scheduler(units_of(40, 1), 2)
    world = World(scheduler, lambda call, now: (10.0, Outcome()))
    world.run(until=27)
    before = len(world.calls)
    assert 0 < len(world.done) < 40
    scheduler.drain()
    world.run()
    assert len(world.calls) == before
    assert sum(world.done.values()) == before


def test_replicas_of_an_earlier_run_are_used_again() -> None:
    scheduler = Scheduler(units_of(3, 1), 2)
    scheduler.adopt(0, 5)
    world = World(scheduler, good).run()
    assert world.done == Counter(range(3))
    assert {(call.slot, call.generation) for call in world.calls} >= {(0, 5)}


@pytest.mark.parametrize("waiting", [2000])
def test_two_thousand_units_over_64_slots_take_little_time_to_schedule(waiting: int) -> None:
    import time

    began = time.process_time()
    world = World(Scheduler(units_of(waiting, 1), 64), lambda call, now: (random.uniform(50, 70), Outcome())).run()
    assert sum(world.done.values()) == waiting
    assert time.process_time() - began < 5
