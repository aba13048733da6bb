"""Held-out sequences: never trained on, and what goes by their loss: the best checkpoint, and when a run ends early."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tiny_training import Tiny, after, changed, exported, whole_run

from drafter.claim import claim, finished
from drafter.errors import DrafterError
from drafter.recipe import TrainingSection
from drafter.run import Run
from drafter.session import Session
from drafter.sources import open_sources
from drafter.team import Team


def test_held_out_sequences_are_never_trained_on(tiny: Tiny) -> None:
    session = Session(tiny.request("held"), Team())
    sources = session.sources
    assert len(sources.held_items) > 3
    trained = {int(item) for update in range(session.total) for part in session._batches(update)[0] for item in part}
    assert trained == set(sources.training_items.tolist())
    assert not trained & set(sources.held_items.tolist())


def test_held_out_loss_every_few_updates_and_the_best_becomes_the_drafter(tiny: Tiny) -> None:
    # So high a rate that the first updates, bad as they are, are the best: 22 nats after two, 50 to 90 after that.
    request = tiny.request(
        "best",
        epochs=6,
        lr=1.0,
        betas=(0.0, 0.5),
        warmup=0.0,
        min_lr_share=1.0,
        evaluate_every=2,
        checkpoint_every=100,
        export="best",
    )
    summary = whole_run(request)
    assert summary is not None
    at = [one["update"] for one in summary["evaluations"]]
    assert at[:4] == [0, 2, 4, 6]
    assert at[-1] == summary["updates"]
    best = min((one for one in summary["evaluations"] if one["update"]), key=lambda one: one["loss"])
    assert summary["best"]["update"] == best["update"] == summary["exported"] < summary["updates"]
    run = Run(request.run)
    assert best["update"] in run.checkpoints.updates()
    session = Session(request, Team())
    kept = run.checkpoints.load(best["update"], session.trainer.shapes())[1].model
    assert torch.equal(exported(request)["fc.weight"], kept["fc.weight"])

    # Finished, it is not taken for one whose drafter was chosen otherwise; summaries of before do not say how it was.
    for known in (summary, {name: one for name, one in summary.items() if name != "chosen_by"}):
        run.put_summary(known)
        assert claim(request, open_sources(request)) == known
        last = changed(request, training=request.training.model_copy(update={"export": "last"}))
        for ask in (claim, finished):
            with pytest.raises(DrafterError, match=r"training.export: best -> last; train beside it"):
                ask(last, open_sources(last))

    # With patience it ends where nothing better came for so long, also when it is stopped right there and carried on.
    early = changed(request, run=f"{tiny.root}/early", training=request.training.model_copy(update={"patience": 2}))
    ends = best["update"] + 4
    assert whole_run(early, stop=after(ends)) is None
    ended = whole_run(early)
    assert ended is not None
    assert (ended["updates"], ended["ended_early"], ended["exported"]) == (ends, True, best["update"])
    assert torch.equal(exported(early)["fc.weight"], kept["fc.weight"])
    assert summary["ended_early"] is False
    with pytest.raises(DrafterError, match=r"training.patience: 2 -> None"):
        claim(patient := changed(early, training=request.training), open_sources(patient))


def test_the_best_cannot_be_exported_where_it_is_not_kept() -> None:
    with pytest.raises(ValidationError, match="export is best, and keep_best is false"):
        TrainingSection(export="best", keep_best=False)


@pytest.mark.parametrize("setting", [{"export": "best"}, {"patience": 3}])
def test_what_goes_by_the_held_out_loss_is_refused_where_nothing_is_held_out(
    tiny: Tiny, setting: dict[str, Any]
) -> None:
    request = changed(tiny.request("judged", **setting), held_out=0.0)
    with pytest.raises(DrafterError, match="raise evaluation.held_out"):
        open_sources(request)


def test_stopped_within_an_evaluation_it_is_made_anew_and_nothing_else_differs(tiny: Tiny) -> None:
    settings: dict[str, Any] = {"epochs": 2, "evaluate_every": 3, "micro_batch_tokens": 60}
    calls = itertools.count()
    summary = whole_run(tiny.request("whole-eval", **settings), leave=lambda: next(calls) < 0)
    assert summary is not None
    made = summary["evaluations"]
    each = next(calls) // len(made)
    assert each >= 2  # so it stops in the middle of one
    request = tiny.request("cut-eval", **settings)
    # In the first one, before any update; in the second, at update 3; and in the last one.
    for number, update in ((1, 0), (2, 3), (len(made) - 1, summary["updates"])):
        asked = iter([False] * ((number - 1) * each + 1) + [True])
        assert whole_run(request, leave=lambda asked=asked: next(asked)) is None
        assert Run(request.run).checkpoints.updates()[-1:] == ([update] if update else [])
    again = whole_run(request)
    assert again is not None
    assert [one["update"] for one in again["evaluations"]] == [one["update"] for one in made]
    assert [one["loss"] for one in again["evaluations"]] == [one["loss"] for one in made]
    for name, tensor in exported(tiny.request("whole-eval")).items():
        assert torch.equal(exported(request)[name], tensor)


def test_what_an_evaluation_fetches_is_in_no_line_of_an_update(tiny: Tiny) -> None:
    # All is read ahead within the first update: what lines after it say would be of the evaluations.
    request = tiny.request("fetched", epochs=1, evaluate_every=1)
    assert whole_run(request) is not None
    often = [json.loads(line)["fetched_bytes"] for line in Run(request.run).metrics()]
    seldom = tiny.request("fetched-once", epochs=1)
    assert whole_run(seldom) is not None
    once = [json.loads(line)["fetched_bytes"] for line in Run(seldom.run).metrics()]
    assert sum(often) <= sum(once)
