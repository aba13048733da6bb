"""A simulated clock and replicas for the scheduler: what it asks for happens after some seconds, as a function says."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ray_jobs.policies import Call, Done, Kill, Outcome, Start
from ray_jobs.scheduling import Scheduler


@dataclass(frozen=True)
class Unit:
    name: int
    rows: tuple[int, ...]
    quarantined: Mapping[int, str] = field(default_factory=dict)
    check: tuple[int, ...] = ()
    tokens: int = 10

    def suspects(self) -> list[int]:
        return [row for row in range(len(self.rows)) if row not in self.quarantined]

    def part(self, rows: Sequence[int]) -> list[int]:
        return [self.rows[row] for row in rows]

    def without(self, reasons: Mapping[int, str]) -> Unit:
        return replace(self, quarantined={**self.quarantined, **reasons})

    def to_check(self) -> list[int]:
        return list(self.check)

    @property
    def ids(self) -> list[int]:
        return [self.rows[row] for row in self.suspects()]


Say = Callable[[Call, float], tuple[float, object]]


class World:
    """Drives a scheduler. says(call, now) -> (seconds, Outcome | "crash" | "fail" | "hang")."""

    def __init__(
        self, scheduler: Scheduler, says: Say, start_s: float = 5.0, comes_up: Callable[[], bool] | None = None
    ):
        self.scheduler, self.says, self.start_s = scheduler, says, start_s
        self.comes_up = comes_up or (lambda: True)
        self.start_of: dict[int, float] = {}
        self.now, self.events, self.count = 0.0, [], 0  # type: ignore[var-annotated]
        self.done: Counter[int] = Counter()
        self.units: dict[int, Unit] = {}
        self.kills: list[Kill] = []
        self.calls: list[Call] = []
        self.failed: str | None = None

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + seconds, self.count, event))

    def run(self, most_events: int = 20_000, until: float = float("inf")) -> World:
        for _ in range(most_events):
            step = self.scheduler.step(self.now)
            for action in step.actions:
                self.act(action)
            if step.failed:
                self.failed = step.failed
                return self
            if step.over:
                return self
            if not step.actions and self.events and self.events[0][0] <= min(until, self.now + 4.0):
                self.now, _, event = heapq.heappop(self.events)
                event()
            elif not step.actions:
                self.now += 4.0  # time-outs and back-offs
                if self.now > min(until, 10_000_000):
                    return self
        raise AssertionError("it does not end")

    def act(self, action: object) -> None:
        one = self.scheduler
        if isinstance(action, Start):
            up = self.comes_up()
            event = (lambda: one.ready(action.slot, action.generation)) if up else (
                lambda: one.death(action.slot, action.generation, "it does not start"))  # fmt: skip
            self.later(self.start_of.get(action.slot, self.start_s), event)
        elif isinstance(action, Kill):
            self.kills.append(action)
        elif isinstance(action, Call):
            self.calls.append(action)
            seconds, what = self.says(action, self.now)
            if what == "crash":
                self.later(seconds, lambda: one.death(action.slot, action.generation, "crashed"))
            elif what == "fail":
                self.later(seconds, lambda: one.failure(action.slot, action.generation, action.task, "failed"))
            elif what == "lost":
                self.later(seconds, lambda: one.lost(action.slot, action.generation, action.task))
            elif what != "hang":
                assert isinstance(what, Outcome)
                self.later(seconds, lambda: one.result(action.slot, action.generation, action.task, what))
        elif isinstance(action, Done):
            self.done[action.index] += 1
            self.units[action.index] = action.unit


def units_of(count: int, rows: int) -> list[Unit]:
    return [Unit(n, tuple(range(n * rows, n * rows + rows))) for n in range(count)]


def ids_of(call: Call) -> list[int]:
    return call.argument.ids if isinstance(call.argument, Unit) else list(call.argument)


def good(call: Call, now: float) -> tuple[float, object]:
    return 2.0, Outcome("stored")
