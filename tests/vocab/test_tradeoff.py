"""Trade-offs: what must hold for any question, and the story's from the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vocab.__main__ import main
from vocab.acceptance_model import Walks, walks_bytes
from vocab.counts import TokenCounts
from vocab.errors import VocabError
from vocab.hardware import gpu
from vocab.roofline import Assumptions, Machine
from vocab.shapes import known_verifier
from vocab.tradeoff import Question, _refitted, answer, parse_pairs

VERIFIER, DRAFTER = known_verifier("kimi-k2.5")
STORY = Question(
    VERIFIER,
    DRAFTER,
    Machine(gpu("rtx-pro-6000"), 8),
    sizes=(16_000, 32_000, 64_000),
    coverage={16_000: 0.96, 32_000: 0.983, 64_000: 0.996},
    batches=(1, 16, 256),
    draft_lengths=(1, 3, 5),
)


@pytest.fixture(scope="module")
def story() -> object:
    return answer(STORY)


def test_every_size_batch_and_length_has_a_row_with_ordered_ends(story) -> None:  # type: ignore[no-untyped-def]
    assert len(story.speeds) == 4 * 3 * 3
    for row in story.speeds:
        assert 0 < row.low <= row.high
        assert row.speedup_low <= row.speedup_high
        whole = row.size == 163_840
        assert (row.vs_full_low, row.vs_full_high) == (1.0, 1.0) if whole else row.vs_full_low <= row.vs_full_high
    assert story.speed(163_840, 1, 3).low == story.speed(163_840, 1, 3).high


def test_at_the_break_even_a_size_is_as_fast_as_the_whole_vocabulary(story) -> None:  # type: ignore[no-untyped-def]
    row = story.speed(32_000, 1, 3)
    assert row.break_even is not None
    at = answer(replace(STORY, coverage={32_000: row.break_even}), sensitivity=False).speed(32_000, 1, 3)
    assert at.vs_full_low == pytest.approx(1, abs=1e-6)
    above = answer(replace(STORY, coverage={32_000: row.break_even + 0.01}), sensitivity=False).speed(32_000, 1, 3)
    assert above.vs_full_low > 1


def test_a_size_without_coverage_has_a_break_even_and_no_speed() -> None:
    found = answer(replace(STORY, coverage={}), sensitivity=False)
    assert all(row.low is None for row in found.speeds if row.size < 163_840)
    assert found.recommendation.size == 163_840
    assert "no coverage is known" in found.recommendation.reason
    assert answer(replace(STORY, coverage={})).speed(32_000, 1, 3).break_even is not None


def test_it_never_says_one_number_for_a_size_whose_acceptance_is_not_known(story) -> None:  # type: ignore[no-untyped-def]
    for row in story.sizes[:-1]:
        assert all(one.average < one.none for one in row.tau.values())


def test_poor_coverage_recommends_the_whole_vocabulary_and_full_coverage_the_smallest() -> None:
    poor = answer(replace(STORY, coverage=dict.fromkeys((16_000, 32_000, 64_000), 0.5)), sensitivity=False)
    assert poor.recommendation.size == 163_840
    assert "no smaller size is surely faster" in poor.recommendation.reason
    slow_head = Machine(gpu("rtx-pro-6000"), 1, Assumptions(draft_overhead_us=0, verify_overhead_us=0))
    rich = replace(STORY, machine=slow_head, coverage={16_000: 1.0}, sizes=(16_000,), batches=(1,), draft_lengths=(5,))
    assert answer(rich, sensitivity=False).recommendation.size == 16_000


def test_a_fit_replaces_the_bracket() -> None:
    found = answer(replace(STORY, fitted={32_000: {1: 1.5, 3: 1.97, 5: 2.1}}), sensitivity=False)
    row = found.speed(32_000, 1, 3)
    assert row.low == row.high
    assert found.sizes[1].tau[3].none == 1.97  # type: ignore[index]


def test_the_recommendation_has_a_reason_what_would_change_it_and_the_warning(story) -> None:  # type: ignore[no-untyped-def]
    chosen = story.recommendation
    assert chosen.size in (32_000, 64_000)
    assert "over the whole vocabulary" in chosen.reason
    assert {"gpu b200", "twice the tokens outside", "tensor parallel 1"} <= set(chosen.sensitivity)
    assert "rejection sampling" in chosen.warning


def test_all_of_it_is_json(story) -> None:  # type: ignore[no-untyped-def]
    content = json.loads(json.dumps(story.to_dict(), allow_nan=False))
    assert content["sizes"][1]["lm_head_parameters"] == 229_376_000
    assert content["taus_assumed"] is True


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"coverage": {32_000: 1.2}}, "coverage of 32,000 ids: expected a share above 0, at most 1, found 1.2"),
        ({"coverage": {32_000: 0.0}}, "expected a share above 0"),
        ({"coverage": {200_000: 0.9}}, "found 200000"),
        ({"sizes": (0,)}, "found 0"),
        ({"batches": ()}, "batches: expected whole numbers"),
        ({"draft_lengths": (0,)}, "draft_lengths: expected whole numbers"),
        ({"taus": {3: 5.0}}, "tau: expected"),
        ({"drafter": known_verifier("qwen3-8b")[1]}, "drafter: expected vocabulary 163,840"),
    ],
)
def test_questions_that_make_no_sense_are_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(VocabError, match=named):
        replace(STORY, **changes)  # type: ignore[arg-type]


def test_coverage_is_typed_as_share_or_percent() -> None:
    assert parse_pairs(["32000=0.983", "16_000=96%, 8000=.9"]) == {32_000: 0.983, 16_000: 0.96, 8_000: 0.9}
    for text in ("32000", "x=0.9", "32000=high"):
        with pytest.raises(VocabError, match="expected NUMBER=VALUE as in 32000=0.983"):
            parse_pairs([text])


def test_the_command_prints_the_storys_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    argv = [
        "tradeoff",
        "--hidden-size",
        "7168",
        "--vocab-size",
        "163840",
        "--sizes",
        "32000",
        "--coverage",
        "32000=0.983",
    ]
    assert main([*argv, "--batches", "1,64", "--draft-lengths", "3", "--json", str(out), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    for part in ("229,376,000", "1,174,405,120", "2.59 B", "3.54 B", "8.8 %", "33.1 %", "16.1 %", "49.6 %", "98.30 %"):
        assert part in text
    assert "0.0%..1.4%" in text
    assert "rejection sampling" in text
    assert json.loads(out.read_text())["recommendation"]["size"] in (32_000, 163_840)
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "give --verifier, --verifier-config, or --vocab-size with --hidden-size"),
        (["--vocab-size", "10", "--hidden-size", "4"], "no known verifier has vocabulary 10"),
        (["--verifier", "other"], "expected one of kimi-k2.5"),
        (["--verifier", "qwen3-8b", "--hidden-size", "7168"], "--hidden-size: expected 4,096, as Qwen3-8B has"),
        (["--verifier", "qwen3-8b", "--gpu", "abacus"], "gpu: expected one of"),
        (["--verifier", "qwen3-8b", "--coverage", "32000"], "coverage: expected NUMBER=VALUE"),
        (["--verifier", "qwen3-8b", "--tau", "3"], "--tau: expected NUMBER=VALUE as in 3=2.4"),
        (["--verifier", "qwen3-8b", "--tau", "3=4.5"], "tau: expected"),
        (["--verifier", "qwen3-8b", "--sizes", "200000"], "found 200000"),
        (["--verifier", "qwen3-8b", "--coverage-json", "none.json"], "none.json"),
        (["--verifier", "qwen3-8b", "--drafter-parameters", "1e6"], "give the total with the full vocabulary"),
    ],
)
def test_a_question_that_cannot_be_answered_is_one_line(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tradeoff", *argv]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert named in err


def test_coverage_comes_from_a_saved_report_and_shapes_from_config_files(tmp_path: Path) -> None:
    config = {
        "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 1000, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = [{"size": 500, "coverage": 0.99, "held_out": 0.97}, {"size": 200, "coverage": 0.9, "held_out": None}]
    (tmp_path / "coverage.json").write_text(json.dumps({"rows": rows}))
    out = tmp_path / "out.json"
    argv = [
        "tradeoff",
        "--verifier-config",
        str(tmp_path / "config.json"),
        "--coverage-json",
        str(tmp_path / "coverage.json"),
    ]
    assert main([*argv, "--batches", "1", "--draft-lengths", "2", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [(row["size"], row["coverage"]) for row in found["sizes"]] == [(200, 0.9), (500, 0.97), (1000, 1.0)]


def test_walks_give_a_fit_and_measured_steps_replace_the_roofline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 1000, "num_attention_heads": 4, "intermediate_size": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    targets = np.minimum(random.zipf(1.3, (2000, 3)) - 1, 999)
    hits = random.random((2000, 3)) < 0.9 * (1 + targets) ** -0.3
    walks = Walks(np.cumprod(hits, axis=1).sum(axis=1), targets)
    (tmp_path / "walks.npz").write_bytes(walks_bytes(walks))
    counts = np.bincount(targets.reshape(-1), minlength=1000)
    TokenCounts(counts[None], ("all",), 1000).to_parquet(tmp_path / "counts.parquet")
    steps = [
        {"size": 100, "batch": 1, "path": path, "seconds": s} for path, s in (("none", 1.0), ("gather", 2.0), ("scatter", 3.0))
    ]  # fmt: skip
    steps.append({"size": 1000, "batch": 1, "path": "none", "seconds": 4.0})
    (tmp_path / "steps.json").write_text(json.dumps({"steps": steps}))
    out = tmp_path / "out.json"
    argv = ["tradeoff", "--verifier-config", str(tmp_path / "config.json"), "--sizes", "100", "--batches", "1"]
    argv += ["--walks", str(tmp_path / "walks.npz"), "--step-times", str(tmp_path / "steps.json"), "--json", str(out)]
    assert main(argv) == 1
    assert "--walks: name the counts" in capsys.readouterr().err
    assert main([*argv, "--counts", str(tmp_path / "counts.parquet"), "--server", "vllm"]) == 0
    found = json.loads(out.read_text())
    assert found["taus_full"] == {str(k): pytest.approx(walks.tau(k)) for k in (1, 2, 3)}
    small = found["sizes"][0]["tau"]["3"]
    assert small["average"] == small["none"] == pytest.approx(walks.restricted(np.arange(1000) < 100).tau(), rel=0.03)
    assert [row["draft_step_s"] for row in found["speeds"]] == [3.0, 3.0, 3.0, 4.0, 4.0, 4.0]
    (tmp_path / "steps.json").write_text("{}")
    assert main([*argv, "--counts", str(tmp_path / "counts.parquet")]) == 1
    assert "steps.json: expected the JSON of `vocab measure`" in capsys.readouterr().err


def test_what_is_varied_keeps_the_fits_share_of_the_gain() -> None:
    question = replace(
        STORY, sizes=(32_000,), taus={1: 1.6, 2: 2.0}, draft_lengths=(1, 2), fitted={32_000: {1: 1.57, 2: 1.95}}
    )
    same = _refitted(question, question.taus, 1.0)
    assert same[32000] == pytest.approx({1: 1.57, 2: 1.95})
    lost = _refitted(question, question.taus, 2.0)
    assert lost[32000] == pytest.approx({1: 1.54, 2: 1.90})
    better = _refitted(question, {2: 2.5}, 1.0)[32000]
    assert (better[2] - 1) / 1.5 == pytest.approx(0.95)
    found = answer(replace(question, batches=(1,)))
    assert found.to_dict()["fitted"] == [32000]
    assert "as fitted" in found.recommendation.reason or found.recommendation.size == DRAFTER.vocab_size
