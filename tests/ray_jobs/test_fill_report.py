"""What is shown of an extraction: every metric has its place in the dashboard, stage shares sum to one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_jobs.fill_report import GAUGES
from ray_jobs.job import Progress
from ray_jobs.policies import Call, Outcome, Start
from ray_jobs.recipe import ExtractionConfig
from ray_jobs.scheduling import Scheduler
from ray_jobs.stages import STAGES, StageClock, shares
from ray_jobs.supervisor import Supervisor

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    shown = set(re.findall(r"ray_statehouse_extract_(\w+)", json.dumps(dashboard["panels"])))
    assert shown == {*GAUGES, "bottleneck"}
    assert all(name == name.lower() for name in GAUGES)  # Ray exports them so, whatever they are called
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_bottleneck_is_the_engine_while_it_computes_and_else_what_holds_it_up() -> None:
    now = 0.0
    clock = StageClock(lambda: now)
    now = 1.0  # waits for work
    prefill = clock.at("prefill")
    with prefill:
        with clock.at("upload"):
            now = 4.0
        now = 5.0
    with clock.at("encode"):
        now = 5.5
        with clock.at("upload"):
            now = 7.5
        now = 8.0
    assert clock.take() == {"prefill": 4.0, "upload": 2.0, "encode": 1.0, "wait": 1.0}
    now = 9.0
    assert clock.take() == {"prefill": 0.0, "upload": 0.0, "encode": 0.0, "wait": 1.0}


@given(st.dictionaries(st.sampled_from(STAGES), st.floats(0, 1e6)))
def test_shares_sum_to_one(seconds: dict[str, float]) -> None:
    found = shares(seconds)
    assert set(found) == set(STAGES)
    assert sum(found.values()) == pytest.approx(1 if sum(seconds.values()) else 0)


def test_a_line_counts_the_unit_that_it_tells_of() -> None:
    progress = Progress("extract", "shards", 2, every_s=0)
    progress.step(512, lambda: {"seen": progress.tokens})
    assert progress.extra == {"seen": 512}


def test_the_clock_starts_with_the_first_unit_and_not_with_the_engine() -> None:
    happened: list[str] = []

    class WithoutRay(Supervisor):
        def _act(self, action: Any, method: str) -> None:
            happened.append(type(action).__name__)
            self.asked = action

        def _hear(self, scheduler: Scheduler, timeout: float) -> None:
            action = self.asked
            if isinstance(action, Start):
                scheduler.ready(action.slot, action.generation)
            elif isinstance(action, Call):
                scheduler.result(action.slot, action.generation, action.task, Outcome("stored"))

    supervisor = WithoutRay(lambda _: None, ExtractionConfig())
    supervisor.run(
        "extract", ["unit"], lambda *_: happened.append("done"), lambda _: None, begun=lambda: happened.append("begun")
    )
    assert happened == ["Start", "begun", "Call", "done"]
