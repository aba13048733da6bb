"""The pictures of a run: one page that loads nothing, one PNG with every curve in it, of unfinished runs too."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from tiny_training import Tiny, make_tiny

from drafter.claim import claim
from drafter.run import Run
from drafter.session import train
from drafter.sources import open_sources
from ray_jobs.training_report import curves_png, main, panels, read_run, report_html


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("report")
    torch.set_num_threads(1)
    return make_tiny(str(folder), folder)


def test_a_run_in_pictures_stopped_and_finished(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    request = tiny.request("drawn", epochs=2, evaluate_every=3)
    claim(request, open_sources(request))
    asked = iter([False] * 3 + [True])
    assert train(request, stop=lambda: next(asked)) is None
    page = tmp_path / "page.html"
    assert main([request.run, "-o", str(page)]) == 0
    assert "at update 4" in page.read_text()
    assert train(request) is not None
    assert main([request.run, "-o", str(page)]) == 0
    text = page.read_text()
    for word in (
        "finished",
        "<svg",
        "held out",
        "step 1",
        "Waiting for data",
        "held-out loss",
        "matches in a row",
        request.dataset,
    ):
        assert word in text
    assert "http" not in text.replace("http://www.w3.org", "")
    image = Image.open(page.with_suffix(".png"))
    metrics, summary = read_run(Run(request.run))
    assert summary is not None
    shown = panels(metrics, summary["evaluations"])
    assert image.size == (1000, 320 * len(shown))
    colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
    for line in shown[0].lines:
        assert tuple(bytes.fromhex(line.colour[1:])) in colours, line.name
    capsys.readouterr()
    taus = {"all": {"drafters": {"drafter": {"tau": {"3": {"tau": 1.5}}}}}}
    Run(request.run).store.put("evaluation.json", json.dumps({"sources": taus}).encode())
    assert main([request.run, "-o", str(page)]) == 0
    assert "τ(3) = 1.500" in page.read_text()
    capsys.readouterr()


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
@pytest.mark.parametrize("rubbish", ['{"update": 0}\n', '{"upd', "[1]"])
def test_a_damaged_run_and_none_are_one_line(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, rubbish: str
) -> None:
    run = Run(str(tmp_path / "run"))
    run.claim({}, {})
    run.store.put(name, rubbish.encode())
    for uri in (run.uri, str(tmp_path / "nothing")):
        assert main([uri, "-o", str(tmp_path / "page.html")]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {uri}")


def test_long_curves_are_thinned_and_gaps_are_left_out() -> None:
    lines = [
        {
            "update": n,
            "loss": None if n == 5 else 1.0,
            "accuracy": [0.5],
            "lr": 1e-3,
            "grad_norm": 1.0,
            "wait_share": 0.0,
        }
        for n in range(1000)
    ]
    loss, *_ = panels(json.loads(json.dumps(lines)), [])
    (curve,) = loss.lines
    assert len(curve.points) <= 120
    assert curve.points[-1][0] == 1000
    assert {y for _, y in curve.points} == {1.0}
    png = curves_png([loss])
    assert png is not None
    assert io.BytesIO(png).read(4) == b"\x89PNG"


def test_a_run_whose_losses_are_not_finite_is_drawn_without_them(tmp_path: Path) -> None:
    line = {"loss": 1.0, "accuracy": [0.5], "lr": 1e-3, "grad_norm": float("inf"), "wait_share": 0.0}
    metrics = [{**line, "update": n, "loss": 1.0 if n < 3 else float("nan")} for n in range(6)]
    held = [{"update": n, "loss": float("nan"), "accuracy": [float("nan") if n else 0.25]} for n in (0, 6)]
    shown = panels(metrics, held)
    assert [panel.title for panel in shown][::2] == ["Loss", "Learning rate"]  # no panel of gradients: none is finite
    assert [len(curve.points) for curve in shown[0].lines] == [3, 0]
    assert shown[1].lines[0].points == [(0.0, 25.0)]
    run = Run(str(tmp_path))
    run.claim({}, {})
    summary = {
        "updates": 6,
        "epochs": 1,
        "tokens": 100,
        "tokens_per_s": 10.0,
        "wait_share": 0.0,
        "evaluations": held,
        "parameters": {"trained": 1, "all": 2},
        "loss_before": 7.0,
        "loss_after": float("nan"),
    }
    page = report_html(run, metrics, summary)
    assert page.count("<svg") == len(shown)
    assert "7.000 before, nan after" in page
    assert curves_png(shown) is not None
