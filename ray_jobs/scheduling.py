"""Which work unit runs on which replica, and what follows when something goes wrong: a state machine without a cluster.

Events go in (`ready`, `result`, `failure`, `death`, `drain`), and `step(now)` says what is to be done about them. It owns no
clock, no actor and no thread, so every rule below is tested with a simulated clock and replicas that are lists.

A slot is the place of one replica: STARTING until it answers, then READY; BACKOFF between a death and the next start;
GIVEN_UP when it never came up, or died again and again and did nothing else. A replica that dies is replaced, and what it
was at is handed out again. Which of two units killed it cannot be known, so both then run alone (`exclusive`), where a death
does tell: on another slot, for it may be the slot, and one that is not under suspicion itself. A slot is kept free for them.

A unit that fails `max_attempts` times is bisected: probes prefill halves of its sequences, those that fail are halved
again, and a single sequence that fails twice is poison. The unit then runs without it; it is quarantined with its reason.
Where there is more than one slot, failures count only once there are some of two.
Rows that come back without a finite number need no bisection: they are tried on another replica, and quarantined when they
fail there, too. More quarantined sequences than the limit are an error: then it is the engine, not the prompts.

Units are idempotent (their results are create-only objects), so handing one out twice costs time and nothing else: at the
end, a unit that takes much longer than others is also given to an idle replica. `Done` is said once for each unit.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

from ray_jobs.policies import Action, Call, Divisible, Done, Kill, Outcome, Policies, Start, Step
from ray_jobs.slots import Phase, Root, Slot, Task


class Scheduler:
    """Units over slots. Every method but `step` only notes an event; `step` draws all conclusions."""

    def __init__(self, units: Sequence[Any], slots: int, policies: Policies | None = None) -> None:
        self.policies = policies or Policies()
        self.slots = [Slot(number) for number in range(slots)]
        self.tasks: dict[int, Task] = {}
        self.waiting: OrderedDict[int, None] = OrderedDict()  # task numbers, the most urgent first
        self.quarantined: dict[tuple[int, int], str] = {}  # (unit, sequence) -> why
        self.retries = self.restarts = self.reissued = 0
        self.draining = False
        self._open = len(units)
        self._numbers = 0
        self._failed: str | None = None
        self._fruitless = 0
        self._rates: list[float] = []  # seconds a token of finished units
        self._actions: list[Action] = []
        self._now = 0.0
        for index, unit in enumerate(units):
            root = Root(index, unit)
            check = unit.to_check() if isinstance(unit, Divisible) else []
            self._add(root, "reference" if check else "unit", tuple(check))

    # ---- events ----

    def adopt(self, slot: int, generation: int) -> None:
        """A replica that is running already, from an earlier run."""
        self.slots[slot].phase, self.slots[slot].generation = Phase.READY, generation

    def ready(self, slot: int, generation: int) -> None:
        one = self.slots[slot]
        if one.generation == generation and one.phase is Phase.STARTING:
            one.phase, one.failed_starts = Phase.READY, 0

    def result(self, slot: int, generation: int, task: int, outcome: Outcome) -> None:
        began = self._end(slot, generation, task)
        found = self.tasks.get(task)
        if began is None or found is None:  # of a replica that was given up, or another one was first
            return
        root = found.root
        if outcome.bad and found.kind == "unit":
            self._bad_rows(found, (slot, generation), outcome)
            return
        self._forget(found)
        self._fruitless = 0
        if not outcome.bad:
            self.slots[slot].barren = 0
        if found.kind == "reference":
            root.reference, root.referee = outcome.value, (slot, generation)
            self._add(root, "unit")
            self.waiting.move_to_end(self._numbers, last=False)  # next: until it ran, the states take up memory
        elif found.kind == "probe":
            self._probe_over(root)  # it lives; rows without a finite number show when the unit runs
        else:
            self._rates.append((self._now - began) / max(1, getattr(root.unit, "tokens", 1)))
            root.done = True
            self._open -= 1
            self._actions.append(Done(root.index, root.unit, outcome.value))
            root.bad.pop((slot, generation), None)  # it can, too, the second time
            self._distrust(root, set())

    def failure(self, slot: int, generation: int, task: int, reason: str) -> None:
        """A call failed. Its replica is not trusted any more, either."""
        one = self.slots[slot]
        if one.generation == generation and task in one.running:
            self._replace(one, reason, (task,))

    def lost(self, slot: int, generation: int, task: int) -> None:
        """The reference states that a call was given went with their node: its unit goes on without, no replica is to blame."""
        found = self.tasks.get(task)
        if self._end(slot, generation, task) is not None and found is not None:
            found.root.reference = None
            self.retries += 1
            if not found.running:
                self._urgent(found)

    def death(self, slot: int, generation: int, reason: str) -> None:
        one = self.slots[slot]
        if one.generation == generation and one.phase in (Phase.STARTING, Phase.READY):
            self._replace(one, reason, tuple(one.running))

    def drain(self) -> None:
        """Hand nothing out any more; what is in flight may end."""
        self.draining = True

    # ---- conclusions ----

    def step(self, now: float) -> Step:
        self._now = now
        for slot in self.slots:
            late = [task for task, began in slot.running.items() if now - began > self.policies.unit_timeout_s]
            if late:
                self._replace(slot, f"no answer for {self.policies.unit_timeout_s:.0f} s", tuple(late))
            if slot.phase is Phase.BACKOFF and now >= slot.until:
                slot.phase = Phase.IDLE
        if not self.draining and self._failed is None:
            self._start_replicas()
            self._hand_out()
            self._reissue()
        actions, self._actions = tuple(self._actions), []
        in_flight = any(slot.running for slot in self.slots)
        return Step(actions, self._open == 0 or (self.draining and not in_flight), self._failed)

    @property
    def alive(self) -> int:
        return sum(slot.phase is Phase.READY for slot in self.slots)

    @property
    def in_flight(self) -> int:
        return sum(len(slot.running) for slot in self.slots)

    def _add(self, root: Root, kind: Any, rows: tuple[int, ...] = (), **more: Any) -> None:
        self._numbers += 1
        self.tasks[self._numbers] = Task(self._numbers, root, kind, rows, **more)
        self.waiting[self._numbers] = None

    def _urgent(self, task: Task) -> None:
        self.waiting[task.number] = None
        self.waiting.move_to_end(task.number, last=False)

    def _forget(self, task: Task) -> None:
        del self.tasks[task.number]
        self.waiting.pop(task.number, None)

    def _end(self, slot: int, generation: int, task: int) -> float | None:
        """When the call was handed out; None when its replica is not the slot's any more."""
        one = self.slots[slot]
        if one.generation != generation:
            return None
        if task in self.tasks:
            self.tasks[task].running.discard(slot)
        return one.running.pop(task, None)

    def _start_replicas(self) -> None:
        wanted = min(len(self.slots), len(self.tasks))
        # What failed or is checked needs a second replica, even when it is all that is left.
        second = any(
            task.kind == "reference" or task.failed or task.root.reference is not None for task in self.tasks.values()
        )
        wanted = min(len(self.slots), wanted + second)
        up = sum(map(self._comes, self.slots))
        for slot in self.slots:
            if slot.phase is Phase.IDLE and up < wanted:
                slot.phase, slot.generation, up = Phase.STARTING, slot.generation + 1, up + 1
                slot.began = self._now
                self._actions.append(Start(slot.number, slot.generation))

    def _hand_out(self) -> None:
        free = [slot for slot in self.slots if slot.phase is Phase.READY]
        for number in list(self.waiting):
            if not any(len(slot.running) < self.policies.in_flight for slot in free):
                return
            task = self.tasks[number]
            best = self._best(task, free)
            if room := [slot for slot in best if self._has_room(slot, task)]:
                self._call(task, min(room, key=lambda slot: len(slot.running)))
            elif task.exclusive and best:  # the next one that is empty; until then, it gets nothing else
                free.remove(min(best, key=lambda slot: len(slot.running)))

    def _has_room(self, slot: Slot, task: Task) -> bool:
        if slot.phase is not Phase.READY or slot.number in task.running:
            return False
        if task.exclusive:
            return not slot.running
        alone = any(self.tasks[number].exclusive for number in slot.running if number in self.tasks)
        return len(slot.running) < self.policies.in_flight and not alone

    def _best(self, task: Task, free: list[Slot]) -> list[Slot]:
        """Of `free`, what the task may run on: of all slots that are up or will be, those that it has least against; and, when
        it is suspected, such as are not, for where both are, a death tells nothing."""
        if not task.exclusive and not task.against:
            return free
        able = [slot for slot in self.slots if self._comes(slot)]
        least = min((task.against[slot.number] for slot in able), default=0)
        best = [slot for slot in able if task.against[slot.number] == least]
        best = [slot for slot in best if not (task.exclusive and slot.barren)] or best
        return [slot for slot in best if slot in free and slot.number not in task.running]

    def _comes(self, slot: Slot) -> bool:
        """Whether it is up or will be; it is not waited for for ever, since a lost node's replica may never be placed."""
        late = self._now - slot.began > self.policies.start_patience_s
        return slot.phase in (Phase.READY, Phase.BACKOFF) or (slot.phase is Phase.STARTING and not late)

    def _enough(self, failed: Collection[int]) -> bool:
        """Whether these slots, where something failed, say that it is not the slot: two do, and one where no other comes."""
        return len(failed) > 1 or not any(self._comes(slot) and slot.number not in failed for slot in self.slots)

    def _call(self, task: Task, slot: Slot) -> None:
        self.waiting.pop(task.number, None)
        slot.running[task.number] = self._now
        task.running.add(slot.number)
        unit = task.root.unit
        argument = unit if task.kind == "unit" else unit.part(task.rows)
        own = len(self.slots) > 1 and (slot.number, slot.generation) == task.root.referee  # no check against oneself
        reference = task.root.reference if task.kind == "unit" and not own else None
        self._actions.append(Call(slot.number, slot.generation, task.number, task.kind, argument, reference))

    def _reissue(self) -> None:
        if self.waiting or len(self._rates) < 3:
            return
        rate = statistics.median(self._rates)
        for slot in self.slots:
            for number, began in list(slot.running.items()):
                task = self.tasks.get(number)
                if task is None or len(task.running) != 1:
                    continue
                tokens = getattr(task.root.unit, "tokens", 1)
                idle = [one for one in self.slots if self._has_room(one, task) and not one.running]
                if idle and self.policies.straggler.late(self._now - began, tokens, rate):
                    self.reissued += 1
                    self._call(task, idle[0])

    def _replace(self, slot: Slot, reason: str, blamed: tuple[int, ...]) -> None:
        """Ends a slot's replica; its tasks wait again, alone. blamed: those that may have been the cause."""
        running, slot.running = slot.running, {}
        slot.failed_starts += slot.phase is Phase.STARTING
        slot.barren += 1
        delay = self.policies.restart.delay(slot.failed_starts)
        healthy = any(one.phase is Phase.READY and not one.barren for one in self.slots)
        hopeless = slot.barren >= self.policies.barren and healthy
        if hopeless:
            reason = f"given up, its replica was replaced {slot.barren} times and did nothing else: {reason}"
        self._actions.append(Kill(slot.number, slot.generation, reason))
        slot.generation += 1  # whatever the old one still says is ignored
        if delay is None or hopeless:
            slot.phase = Phase.GIVEN_UP
            if all(one.phase is Phase.GIVEN_UP for one in self.slots):
                self._failed = f"no replica came up in {slot.failed_starts} tries, the last time with: {reason}"
        else:
            slot.phase, slot.until = Phase.BACKOFF, self._now + delay
            self.restarts += 1
        self._fruitless += len(blamed)
        most = self.policies.fruitless + self.policies.fruitless_per_replica * len(self.slots)
        if self._fruitless > most:
            self._failed = self._failed or (
                f"{self._fruitless} calls failed and none succeeded between them, so it is not a prompt; what is stored stays, "
                f"run the same command again once the cause is gone; the last one: {reason}"
            )
        for number in running:
            task = self.tasks.get(number)
            if task is None:
                continue
            task.running.discard(slot.number)
            if number in blamed:
                task.failed[slot.number] += 1
            task.exclusive = True
            if not task.running:  # no second replica is at it
                self.retries += 1
                self._again(task, reason)

    def _again(self, task: Task, reason: str) -> None:
        root, most = task.root, self.policies.max_attempts
        if task.kind == "reference":  # the self-check is not worth a replica: the unit goes on without
            self._forget(task)
            self._add(root, "unit", exclusive=True, failed=task.failed)
        elif task.kind == "probe" and len(task.rows) > 1:
            self._forget(task)
            self._split(root, task.rows)
            self._probe_over(root)
        elif task.kind == "probe" and task.attempts >= 2 and self._enough(task.failed):
            self._forget(task)
            self._poison(root, task.rows[0], reason)
            self._probe_over(root)
        elif task.kind == "unit" and task.attempts >= most and self._enough(task.failed):
            self._isolate(task, reason)
        else:
            root.reference = None  # fetching it may be what failed, and the check is not worth the unit
            self._urgent(task)

    def _isolate(self, task: Task, reason: str) -> None:
        """Looks for the sequences of a unit that make it fail."""
        root = task.root
        rows = tuple(root.unit.suspects()) if isinstance(root.unit, Divisible) else ()
        root.isolations += 1
        if self.policies.quarantine_limit is None or not rows or root.isolations > 2:
            self._failed = (
                f"a work unit failed {task.attempts} times; what is stored stays, run the same command again once the cause "
                f"is gone: {reason}"
            )
            return
        self._forget(task)
        self._split(root, rows)
        self._probe_over(root, opened=True)

    def _split(self, root: Root, rows: tuple[int, ...]) -> None:
        middle = len(rows) // 2
        for half in filter(None, (rows[:middle], rows[middle:])):
            root.probes += 1
            self._add(root, "probe", half, exclusive=True)

    def _probe_over(self, root: Root, opened: bool = False) -> None:
        root.probes -= not opened
        if not root.probes:
            self._requeue(root)

    def _bad_rows(self, task: Task, by: tuple[int, int], outcome: Outcome) -> None:
        """Rows without a finite number: once more elsewhere, at last on a fresh replica. Those are quarantined that no
        replica could give; one that lacked more than those is not trusted any more. Where no row lacks each time, it is the
        engine, and the job ends."""
        root, again = task.root, by in task.root.bad
        task.failed[by[0]] += 1
        root.bad[by] = {**root.bad.get(by, {}), **outcome.bad}
        root.lacking = set(outcome.bad) if root.lacking is None else root.lacking & set(outcome.bad)
        last = task.attempts >= self.policies.max_attempts and self._enough({number for number, _ in root.bad})
        if outcome.certain or (last and root.lacking):
            self._forget(task)
            reasons = dict(outcome.bad) if outcome.certain else {row: outcome.bad[row] for row in sorted(root.lacking)}
            self._distrust(root, set(reasons))
            for row, reason in reasons.items():
                self._poison(root, row, reason)
            self._requeue(root)
            return
        if task.attempts >= 4 * self.policies.max_attempts:
            self._failed = self._failed or (
                f"a work unit came back {task.attempts} times with states that are not finite, each time others, so it is the "
                f"engine and not a prompt; what is stored stays, run the same command again once the cause is gone; the last "
                f"one: {next(iter(outcome.bad.values()))}"
            )
        self.retries += 1
        if not task.running:
            self._urgent(task)
        if again and self.slots[by[0]].generation == by[1]:
            why = next(iter(outcome.bad.values()))
            self._replace(self.slots[by[0]], f"its states are not finite again ({why})", ())

    def _distrust(self, root: Root, real: set[int]) -> None:
        """Replaces the replicas that lacked rows of this unit which others gave. real: rows that none can give."""
        for (number, life), rows in root.bad.items():
            if set(rows) - real and self.slots[number].generation == life:
                self._replace(self.slots[number], "its states were not finite where another replica's were", ())
        root.bad, root.lacking = {}, None

    def _poison(self, root: Root, row: int, reason: str) -> None:
        root.poison[row] = self.quarantined[root.index, row] = reason
        limit = self.policies.quarantine_limit or 0
        if len(self.quarantined) > limit:
            self._failed = (
                f"{len(self.quarantined)} sequences fail wherever they are tried, and extraction.max_quarantined accepts {limit}; "
                f"the last one: {reason}; raise it, or find what is wrong with the engine"
            )

    def _requeue(self, root: Root) -> None:
        """The unit waits again, without the sequences that were found; with all of them, and alone, if none was."""
        poison, root.poison = root.poison, {}
        if poison:
            root.unit = root.unit.without(poison)
        self._add(root, "unit", exclusive=not poison)
