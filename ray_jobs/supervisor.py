"""Work units over replica actors: two in flight each, requeued when an actor dies, dead actors replaced.

Units are idempotent (their results are create-only objects), so handing one out twice costs time and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

from ray_jobs import job
from ray_jobs.recipe import ExtractionConfig
from storage.errors import ReplicaFailed, StatehouseError

# A replica prefills one unit while it encodes and stores the one before.
IN_FLIGHT = 2
# Engines take minutes to start; say so now and then.
_PATIENCE_S = 15.0


@dataclass
class _Task:
    unit: Any
    attempts: int = 0


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


class Supervisor:
    """Runs a method of replica actors over units. Actors start when they are first needed, and stay until `stop`.

    make_actor: starts one actor (its constructor may take minutes). Errors in a unit that are a StatehouseError of the
    store or the data end the job with that very error; a ReplicaFailed or a dead actor costs the unit an attempt.
    """

    def __init__(self, make_actor: Callable[[], Any], config: ExtractionConfig) -> None:
        self.make_actor, self.config = make_actor, config
        self.actors: list[Any] = []
        self.restarts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def run(
        self, method: str, units: Iterable[Any], done: Callable[[Any, Any], None], waiting_on: Callable[[int], None]
    ) -> None:
        """Calls done(unit, result) for each unit, in the order in which they finish. Raises StatehouseError.

        waiting_on(units in flight) is called every few seconds in which none finishes.
        """
        import ray

        waiting = deque(_Task(unit) for unit in units)
        if not waiting:
            return
        while len(self.actors) < min(self.config.replicas, len(waiting)):
            self.actors.append(self.make_actor())
        running: dict[Any, tuple[_Task, Any]] = {}
        load = dict.fromkeys(self.actors, 0)
        while waiting or running:
            while waiting and (actor := min(load, key=lambda one: load[one])) and load[actor] < IN_FLIGHT:
                task = waiting.popleft()
                running[getattr(actor, method).remote(task.unit)] = (task, actor)
                load[actor] += 1
            ready, _ = ray.wait(list(running), num_returns=1, timeout=_PATIENCE_S)
            if not ready:
                waiting_on(len(running))
            for reference in ready:
                task, actor = running.pop(reference)
                if actor in load:  # not replaced already
                    load[actor] -= 1
                try:
                    result = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    if isinstance(error.cause, StatehouseError) and not isinstance(error.cause, ReplicaFailed):
                        raise error.cause from None
                    failure = str(error.cause or error)
                except ray.exceptions.RayActorError as error:
                    failure = f"the replica died: {reason_of(error)}"
                else:
                    done(task.unit, result)
                    continue
                self._failed(task, failure)
                waiting.append(task)
                if actor in self.actors:  # the first of its units to come back
                    self._replace(actor, load)

    def _failed(self, task: _Task, failure: str) -> None:
        task.attempts += 1
        job.log.warning("unit failed attempt=%d/%d reason=%s", task.attempts, self.config.max_attempts, _first(failure))
        if task.attempts >= self.config.max_attempts:
            raise ReplicaFailed(
                f"a work unit failed {task.attempts} times; what is stored stays, run the same command again once the "
                f"cause is gone: {failure}"
            )

    def _replace(self, actor: Any, load: dict[Any, int]) -> None:
        import ray

        self.actors.remove(actor)
        load.pop(actor, None)
        ray.kill(actor, no_restart=True)
        self.restarts += 1
        fresh = self.make_actor()
        self.actors.append(fresh)
        load[fresh] = 0
        job.log.warning("replica replaced restarts=%d", self.restarts)

    def call(self, method: str, *args: Any) -> Any:
        """One call on one replica, started if need be, with the same errors as `run`."""
        import ray

        for attempt in range(1, self.config.max_attempts + 1):
            if not self.actors:
                self.actors.append(self.make_actor())
            actor = self.actors[0]
            try:
                return ray.get(getattr(actor, method).remote(*args))
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, StatehouseError) and not isinstance(error.cause, ReplicaFailed):
                    raise error.cause from None
                failure = str(error.cause or error)
            except ray.exceptions.RayActorError as error:
                failure = reason_of(error)
            ray.kill(actor, no_restart=True)
            self.actors.remove(actor)
            job.log.warning("call failed method=%s attempt=%d reason=%s", method, attempt, _first(failure))
        raise ReplicaFailed(f"the replica failed {self.config.max_attempts} times, the last time with: {failure}")

    def stop(self) -> None:
        """Ends the engines in order; actors that do not answer are killed."""
        import ray

        if self.actors:
            ray.wait([actor.stop.remote() for actor in self.actors], num_returns=len(self.actors), timeout=20)
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        self.actors.clear()


def _first(text: str) -> str:
    return text.splitlines()[0] if text else text


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
