"""What the first worker writes of a run: metrics.jsonl, and whatever trackers there are."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from drafter.progress import evaluation_scalars, scalars
from drafter.run import Run
from drafter.tracking import Tracker

log = logging.getLogger("statehouse")


class Journal:
    """lines: of metrics.jsonl, as of the checkpoint that the run goes on from. A tracker that fails is left, not the run."""

    def __init__(self, run: Run, lines: list[str], trackers: list[Tracker]) -> None:
        self.run, self.lines, self.trackers = run, lines, trackers

    def update(self, line: Mapping[str, Any]) -> None:
        self.lines.append(json.dumps(line))
        self._each(lambda tracker: tracker.log(line["update"], scalars(dict(line))))

    def evaluation(self, entry: Mapping[str, Any]) -> None:
        self._each(lambda tracker: tracker.log(entry["update"], evaluation_scalars(dict(entry))))

    def resumed(self, update: int, evaluations: Iterable[Mapping[str, Any]]) -> None:
        """The run goes on from this update. evaluations: that were made."""
        for entry in evaluations:
            if entry["update"] == update:
                self._each(lambda tracker, one=entry: tracker.again(update, evaluation_scalars(dict(one))))  # type: ignore[misc]

    def storing(self) -> Callable[[], None]:
        """What stores all that was said until now; may run in another thread, while more is said."""
        lines = list(self.lines)

        def store() -> None:
            self.run.put_metrics(lines)
            self._each(lambda tracker: tracker.store())

        return store

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        self._each(lambda tracker: tracker.close(summary))
        self.trackers = []

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for tracker in list(self.trackers):
            try:
                action(tracker)
            except Exception as error:  # of a library and its server, which no training should end for
                log.warning(
                    "tracker left name=%s: %s", type(tracker).__name__.lower(), " ".join(str(error).split())[:300]
                )
                if tracker in self.trackers:
                    self.trackers.remove(tracker)
