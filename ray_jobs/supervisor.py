"""Drives replica actors through the scheduler's state machine: its actions become Ray calls, Ray's answers its events.

A replica lives in a placement group of its own, one bundle with all its CPUs and GPUs on one node. Everything that is
decided, is decided in `scheduling`; here is only what needs a cluster: starting, calling, waiting, killing, health checks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

from ray_jobs import job
from ray_jobs.policies import Call, Done, Kill, Outcome, Policies, Restart, Start, Straggler, first_line
from ray_jobs.recipe import ExtractionConfig
from ray_jobs.scheduling import Scheduler
from storage.errors import ReplicaFailed, StatehouseError

# Engines take minutes to start; say so now and then.
_PATIENCE_S = 15.0
_TICK_S = 1.0
_HEALTH_EVERY_S = 10.0
_PLACES_EVERY_S = 2.0
# Of a start, what comes before and behind the engine's own: the process, its packages, the verifier's folder, the canary.
_AROUND_START_S = 300.0


def require_resources(config: ExtractionConfig) -> None:
    """Raises ReplicaFailed when the cluster can never place the replicas (they would wait for ever)."""
    cpus, gpus = job.cluster_size()
    need_cpus, need_gpus = config.replica.cpus, config.replica.gpus
    fit = job.fitting(need_cpus, need_gpus)
    if fit < config.replicas:
        raise ReplicaFailed(
            f"extraction.replicas is {config.replicas}, each needs {need_cpus} CPUs and {need_gpus} GPUs, but the cluster "
            f"has {cpus:g} CPUs and {gpus:g} GPUs: {fit} fit; add nodes, or set extraction.replicas={max(1, fit)}"
            + ("" if fit else " and lower extraction.replica.gpus or .cpus")
        )


@dataclass
class _Live:
    """A replica that was started. placed: when it was known that a node has room for it. asked: when the open health check was
    sent."""

    generation: int
    actor: Any
    group: Any
    began: float
    placed: float | None = None
    ready: bool = False
    asked: float | None = None
    answered: float = 0.0


@dataclass(frozen=True)
class _Waiting:
    """What a Ray reference stands for. checked: the call was given another replica's states, which may be lost."""

    slot: int
    generation: int
    kind: str
    task: int = 0
    value: Any = None
    checked: bool = False


class Supervisor:
    """Runs a method of replica actors over units. Actors start when they are first needed, and stay until `stop`.

    make_actor(options): starts one actor with Ray's options for its placement (its constructor may take minutes). Errors in
    a unit that are a StatehouseError of the store or the data end the job with that very error; a ReplicaFailed, a dead
    actor or a lost node is the scheduler's to handle. bundle: what one replica needs.
    """

    def __init__(
        self,
        make_actor: Callable[[dict[str, Any]], Any],
        config: ExtractionConfig,
        bundle: dict[str, float] | None = None,
    ) -> None:
        self.make_actor, self.config, self.bundle = make_actor, config, bundle
        self._schedulers: list[Scheduler] = []
        self._live: dict[int, _Live] = {}
        self._waiting: dict[Any, _Waiting] = {}
        # When places were last looked at, when a replica had one, and when it was last said that one has none.
        self._looked = self._placed = self._told = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # ---- what it says of itself ----

    @property
    def actors(self) -> list[Any]:
        return [live.actor for live in self._live.values() if live.ready]

    def counts(self) -> dict[str, int]:
        """Replicas that answer now, and what happened in all runs so far."""
        counts = {"replicas": len(self.actors), **dict.fromkeys(("restarts", "retries", "reissued"), 0)}
        for scheduler in self._schedulers:
            for name in ("restarts", "retries", "reissued"):
                counts[name] += getattr(scheduler, name)
        return counts

    # ---- a run ----

    def run(
        self,
        method: str,
        units: Iterable[Any],
        done: Callable[[Any, Any], None],
        waiting_on: Callable[[int], None],
        quarantine_limit: int | None = None,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Calls done(unit, result) once for each unit, in the order in which they finish. Raises StatehouseError.

        waiting_on(units in flight) is called every few seconds in which none finishes. quarantine_limit: sequences of
        divisible units that may be given up; None for units that cannot be divided. begun() is called once, when the first
        replica is up and gets the first unit: the start of the engines is no throughput. SIGTERM lets units in flight end
        within extraction.drain_s, then raises SystemExit.
        """
        units = list(units)
        if not units:
            return
        scheduler = Scheduler(units, self.config.replicas, self._policies(quarantine_limit))
        self._schedulers.append(scheduler)
        for slot, live in list(self._live.items()):
            if live.ready and slot < self.config.replicas:
                scheduler.adopt(slot, live.generation)
            else:  # started in an earlier run that ended before it was up
                self._kill(slot)
        try:
            self._drive(scheduler, method, done, waiting_on, begun)
        finally:
            # A straggler may still be at a unit of this run: its answer is no answer to the next one.
            self._waiting = {ref: one for ref, one in self._waiting.items() if one.kind in ("start", "health")}

    def _drive(
        self,
        scheduler: Scheduler,
        method: str,
        done: Callable[[Any, Any], None],
        waiting_on: Callable[[int], None],
        begun: Callable[[], None],
    ) -> None:
        called = False
        heard = self._placed = time.monotonic()
        with job.drain_on_sigterm() as stopped:
            stop_at: float | None = None
            while True:
                step = scheduler.step(time.monotonic())
                for action in step.actions:
                    if isinstance(action, Done):
                        done(action.unit, action.value)
                        heard = time.monotonic()
                        continue
                    if isinstance(action, Call) and not called:
                        called = True
                        begun()
                    self._act(action, method)
                if step.failed:
                    raise ReplicaFailed(step.failed)
                if step.over or (stop_at is not None and time.monotonic() > stop_at):
                    break
                if stopped() and stop_at is None:
                    stop_at = time.monotonic() + self.config.drain_s
                    scheduler.drain()
                    job.log.warning("draining in_flight=%d grace_s=%g", scheduler.in_flight, self.config.drain_s)
                self._hear(scheduler, 0.0 if step.actions else _TICK_S)
                self._ask_health(scheduler)
                self._look_for_places()
                if time.monotonic() - heard > _PATIENCE_S:
                    heard = time.monotonic()
                    waiting_on(scheduler.in_flight)
            if stopped():
                raise SystemExit(143)

    def _policies(self, quarantine_limit: int | None) -> Policies:
        config = self.config
        return Policies(
            max_attempts=config.max_attempts,
            unit_timeout_s=config.unit_timeout_s,
            quarantine_limit=quarantine_limit,
            restart=Restart(attempts=config.max_attempts),
            straggler=Straggler(config.straggler_factor),
        )

    def _act(self, action: Start | Kill | Call, method: str) -> None:
        if isinstance(action, Start):
            live = self._live[action.slot] = self._start(action.generation)
            self._waiting[live.actor.describe.remote()] = _Waiting(action.slot, action.generation, "start")
        elif isinstance(action, Kill):
            job.log.warning("replica replaced slot=%d reason=%s", action.slot, first_line(action.reason))
            self._kill(action.slot)
        else:
            self._call(action, method)

    def _start(self, generation: int) -> _Live:
        now = time.monotonic()
        if self.bundle is None:
            return _Live(generation, self.make_actor({}), None, now, placed=now)
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group([self.bundle], strategy="STRICT_PACK")
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        return _Live(generation, self.make_actor({"scheduling_strategy": strategy}), group, now)

    def _call(self, call: Call, method: str) -> None:
        actor = self._live[call.slot].actor
        waiting = _Waiting(call.slot, call.generation, call.kind, call.task)
        if call.kind == "probe":
            reference = actor.probe.remote(call.argument)
        elif call.kind == "reference":
            # The states stay where they are until the worker that needs them fetches them: only the first is read here.
            reference, value = actor.reference.options(num_returns=2).remote(call.argument)
            waiting = _Waiting(call.slot, call.generation, call.kind, call.task, value)
        elif call.reference is not None:
            reference = getattr(actor, method).remote(call.argument, call.reference)
            waiting = replace(waiting, checked=True)
        else:
            reference = getattr(actor, method).remote(call.argument)
        self._waiting[reference] = waiting

    def _hear(self, scheduler: Scheduler, timeout: float) -> None:
        import ray

        if not self._waiting:
            time.sleep(timeout)
            return
        ready, _ = ray.wait(list(self._waiting), num_returns=1, timeout=timeout)
        if ready:  # and whatever else is there by now
            ready, _ = ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=0)
        for reference in ready:
            self._answer(scheduler, reference, self._waiting.pop(reference))

    def _answer(self, scheduler: Scheduler, reference: Any, about: _Waiting) -> None:
        import ray

        live = self._live.get(about.slot)
        current = live is not None and live.generation == about.generation
        try:
            value = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, StatehouseError) and not isinstance(error.cause, ReplicaFailed):
                raise error.cause from None
            reason = reason_of_call(error.cause or error)
            if current and about.checked and isinstance(error.cause, ray.exceptions.ObjectLostError):
                job.log.warning("self-check left out reason=%s", first_line(reason))
                scheduler.lost(about.slot, about.generation, about.task)
            elif current and about.kind not in ("start", "health"):
                scheduler.failure(about.slot, about.generation, about.task, reason)
            elif current:
                scheduler.death(about.slot, about.generation, reason)
            return
        except (ray.exceptions.RayError, TimeoutError) as error:  # the actor or its node is gone
            if current:
                reason = reason_of(error)
                scheduler.death(about.slot, about.generation, reason if about.kind == "start" else f"it died: {reason}")
            return
        if live is None or not current:
            return
        live.answered = time.monotonic()
        if about.kind == "start":
            live.ready = True
            scheduler.ready(about.slot, about.generation)
            told = " ".join(f"{name}={item}" for name, item in value.items())
            job.log.info("replica ready slot=%d %s", about.slot, told)
        elif about.kind == "health":
            live.asked = None
        elif about.kind == "reference":
            if value is not None:
                job.log.warning("self-check left out reason=%s", value)
            outcome = Outcome(about.value if value is None else None)
            scheduler.result(about.slot, about.generation, about.task, outcome)
        else:
            outcome = value if isinstance(value, Outcome) else Outcome(value)
            if outcome.bad:
                row, why = next(iter(outcome.bad.items()))
                job.log.warning(
                    "unit lacks sequences=%d slot=%d first=%d reason=%s", len(outcome.bad), about.slot, row, why
                )
            scheduler.result(about.slot, about.generation, about.task, outcome)

    def _ask_health(self, scheduler: Scheduler) -> None:
        """A process that is there and does nothing (stopped, swapped out) is no engine that computes, or starts, for long."""
        now = time.monotonic()
        replica = self.config.replica
        most = replica.start_timeout_s + replica.request_timeout_s + _AROUND_START_S
        for slot, live in list(self._live.items()):
            if not live.ready:
                if live.placed is not None and now - live.placed > most:
                    scheduler.death(slot, live.generation, f"it did not start within {most:.0f} s")
                continue
            if live.asked is None and now - live.answered > _HEALTH_EVERY_S:
                live.asked = now
                reference = live.actor.alive.options(concurrency_group="health").remote()
                self._waiting[reference] = _Waiting(slot, live.generation, "health")
            elif live.asked is not None and now - live.asked > self.config.health_timeout_s:
                scheduler.death(slot, live.generation, f"no answer to a health check for {now - live.asked:.0f} s")

    def _look_for_places(self) -> None:
        """Says which replicas no node has room for. Raises ReplicaFailed when that holds for all of them for too long: they
        would wait for ever. While others work, a lost node's replica may wait for a new node."""
        now = time.monotonic()
        if now - self._looked < _PLACES_EVERY_S:
            return
        self._looked = now
        unknown = [live for live in self._live.values() if live.placed is None]
        created = _created_groups() if unknown else set()
        for live in unknown:
            if live.ready or live.group.id.hex() in created:
                live.placed = now
        waiting = [slot for slot, live in self._live.items() if live.placed is None]
        if len(waiting) < len(self._live) or not waiting:
            self._placed = now
        longest = max((now - self._live[slot].began for slot in waiting), default=0.0)
        if now - self._placed > self.config.placement_timeout_s:
            raise ReplicaFailed(
                f"no node had room for a replica in {now - self._placed:.0f} s; {self._room()}; add nodes, end the job that "
                "holds them, or raise extraction.placement_timeout_s"
            )
        if longest > _PATIENCE_S and now - self._told > 4 * _PATIENCE_S:
            self._told = now
            job.log.warning("replicas wait for a node slots=%s: %s", ",".join(map(str, waiting)), self._room())

    def _room(self) -> str:
        import ray

        (cpus, gpus), free = job.cluster_size(), ray.available_resources()
        asked = " and ".join(f"{much:g} {name}s" for name, much in (self.bundle or {}).items())
        return (
            f"each needs {asked} on one node, the cluster has {cpus:g} CPUs and {gpus:g} GPUs, of which "
            f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free"
        )

    # ---- ends ----

    def _kill(self, slot: int) -> None:
        import ray

        live = self._live.pop(slot, None)
        if live is None:
            return
        self._waiting = {k: v for k, v in self._waiting.items() if (v.slot, v.generation) != (slot, live.generation)}
        ray.kill(live.actor, no_restart=True)
        _remove_group(live.group)

    def stop(self) -> None:
        """Ends the engines in order; actors that do not answer are killed."""
        import ray

        if ready := self.actors:
            ray.wait([actor.stop.remote() for actor in ready], num_returns=len(ready), timeout=20)
        for slot in list(self._live):
            self._kill(slot)


def _created_groups() -> set[str]:
    """Ids of the cluster's placement groups that have their place: one question for all replicas."""
    from ray.util.placement_group import placement_group_table

    return {key for key, about in placement_group_table().items() if about["state"] == "CREATED"}


def _remove_group(group: Any) -> None:
    if group is not None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)


def reason_of_call(error: BaseException) -> str:
    """What a failed call said, never nothing; its kind, too, unless it is one of ours."""
    text = str(error).strip()
    if isinstance(error, ReplicaFailed) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def reason_of(error: Exception) -> str:
    """The root of an actor's death : a StatehouseError raised by its constructor, or Ray's own words."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("storage.errors.")]
    if ours:
        at = lines.index(ours[-1])
        return "\n".join([ours[-1].split(": ", 1)[-1], *lines[at + 1 :]])  # behind the first: the engine's log
    if not lines:
        return type(error).__name__
    return lines[-1].split(" Some common causes")[0]  # a page of guesses follows
