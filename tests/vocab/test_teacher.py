"""What the verifier would say: its likeliest ids and its probability, counted on the tokens they speak of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import VOCAB, contract, sequences, unit_states

from ray_jobs import counting, teacher_counting
from ray_jobs.counting import dataset_tasks, open_all
from ray_jobs.teacher_counting import count_task, count_teachers
from storage import Dataset, open_dataset
from storage.commit import publish_plan
from storage.objects import open_store
from storage.plan import make_plan
from storage.seal import seal_dataset
from storage.teacher import TeacherSummary
from storage.writer import ShardWriter
from vocab.counting import Split
from vocab.errors import VocabError
from vocab.report import report_html
from vocab.tables import teacher_rows
from vocab.teacher import TeacherCounts, teacher_coverage

SPLIT = Split(folds=2, held_out=0.2)
# Ids 0 and 1 enter at the first of two sizes, id 2 at the second, id 3 at none. One table a side.
TABLES = np.array([[0, 0, 1, 2]] * 3, np.uint8)


def test_rows_count_where_the_token_they_speak_of_bears_loss() -> None:
    counts = TeacherCounts.empty(3, 4)
    probability = np.array([[0.5, 0.25], [0.6, 0.3], [0.5, 0.5], [0.9, 0.1], [1.0, 0.0]])
    ids = np.array([[3, 0], [0, 2], [2, 3], [1, 0], [3, 2]])
    norm = np.array([2.0, 3.0, -1.0, 0.0, 5.0])
    mask = np.array([False, False, True, True, True])  # so rows 1, 2 and 3 speak of loss-bearing tokens
    with np.errstate(divide="ignore"):
        counts.add(0, mask, ids[:, 0], norm, ids, np.log(probability) + norm[:, None])
    found = teacher_coverage(counts, TABLES, 2)
    assert found is not None
    assert found["positions"] == 3
    assert found["argmax"] == [pytest.approx(2 / 3), 1.0]  # 0, 2, 1
    assert found["mass"]["low"] == pytest.approx([(0.6 + 0.0 + 1.0) / 3, (0.9 + 0.5 + 1.0) / 3])
    assert found["mass"]["high"] == pytest.approx([(0.6 + 0.1 + 1.0) / 3, (1.0 + 0.5 + 1.0) / 3])
    assert found["held_out"] is None


def test_each_side_is_judged_by_its_own_table_and_sums_add_up() -> None:
    tables = np.array([[0, 2, 2, 2], [2, 0, 2, 2], [2, 2, 0, 2]], np.uint8)
    norm, mask = np.zeros(3), np.ones(3, bool)
    parts = []
    for side, ids in enumerate(([0, 0, 9], [1, 2, 9], [2, 2, 9])):  # the last row speaks of no token
        parts.append(TeacherCounts.empty(3, 4))
        parts[-1].add(side, mask, np.array(ids), norm)
    total = parts[0] + parts[1] + parts[2]
    found = teacher_coverage(total, tables, 2)
    assert found is not None
    assert found == {
        "positions": 4,
        "argmax": [0.75, 0.75],
        "mass": None,
        "held_out": {"positions": 2, "argmax": [1.0, 1.0], "mass": None},
    }
    assert teacher_coverage(TeacherCounts.empty(3, 4), tables, 2) is None


def test_what_does_not_fit_is_refused_and_what_says_nothing_is_left_out() -> None:
    counts, mask, norm = TeacherCounts.empty(1, 4), np.ones(2, bool), np.full(2, np.nan)
    counts.add(0, mask, np.array([-1, -1]), norm, np.full((2, 1), -1), np.full((2, 1), np.nan))
    assert not counts.argmax.any()
    assert np.isfinite(counts.rest).all()
    with pytest.raises(VocabError, match="likeliest id 4 is outside the vocabulary of 4"):
        counts.add(0, mask, np.array([4, 0]), norm)
    with pytest.raises(VocabError, match="a top-k id is outside"):
        counts.add(0, mask, np.array([0, 0]), norm, np.full((2, 1), 9), np.zeros((2, 1)))
    with pytest.raises(VocabError, match=r"expected three of \[T\]"):
        counts.add(0, mask, np.array([1]), norm)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """A sealed dataset whose verifier is sure of the token that really follows, but for every third."""
    uri, table = str(tmp_path / "a"), sequences(20)
    plan = make_plan(table, contract(), "lossless", teacher="topk(2)")
    publish_plan(open_store(uri), plan, table)
    writer, opened = ShardWriter.from_uri(uri), {row["id"]: row for row in table.to_pylist()}
    for unit in plan.units():
        bits = unit_states(plan, unit)
        if not writer.calibrated:
            writer.calibrate(bits)
        ids = np.concatenate(
            [np.roll(opened[plan.table["id"][int(row)].as_py()]["token_ids"], -1) for row in unit.rows]
        )
        top = np.stack([ids, (ids + 1) % VOCAB], axis=1).astype(np.int32)
        top[::3] = top[::3, ::-1]
        logits = np.log(np.tile([0.75, 0.2], (len(ids), 1))).astype(np.float32)
        summary = TeacherSummary(top[:, 0].copy(), np.zeros(len(ids), np.float32), top, logits)
        writer.write(unit.shard, bits, len(unit.rows), teacher=summary)
    seal_dataset(open_store(uri), plan)
    return open_dataset(uri)


def test_a_dataset_is_counted_sequence_by_sequence(dataset: Dataset) -> None:
    tasks, loss_tokens = dataset_tasks(open_all([dataset.uri]), 1)
    counts = count_task(tasks[0], VOCAB, SPLIT)
    first = sum(int(dataset.tokens(row)[1][0]) for row in range(len(dataset)))  # nothing speaks of a first token
    assert counts.argmax.sum() == counts.masses.sum() == loss_tokens - first
    assert counts.mass.sum() == pytest.approx(0.95 * counts.masses.sum())
    expected = np.zeros((SPLIT.sides, VOCAB), np.int64)
    sides = SPLIT.side_of(dataset.sequences["group"].to_pylist())
    for row, side in enumerate(sides.tolist()):
        summary = dataset.teacher(row)
        assert summary is not None
        np.add.at(expected[side], summary.argmax[:-1][dataset.tokens(row)[1][1:]], 1)
    assert np.array_equal(counts.argmax, expected)


def test_what_tasks_send_adds_up_to_the_same(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "_LEAST_TASK_TOKENS", 400)
    monkeypatch.setattr(teacher_counting, "run_tasks", lambda tasks, function: map(function, tasks))
    datasets = open_all([dataset.uri])
    monkeypatch.setattr(teacher_counting, "_AT_ONCE", 500)
    many, one = dataset_tasks(datasets, 4)[0], {"uri": dataset.uri, "rows": np.arange(len(dataset))}
    assert len(many) > 3
    total, whole = count_teachers(datasets, many, VOCAB, SPLIT), count_task(one, VOCAB, SPLIT)
    for name in ("argmax", "mass", "rest", "masses"):
        assert np.allclose(getattr(total, name), getattr(whole, name)), name


def test_datasets_without_a_summary_need_no_pass(tmp_path: Path) -> None:
    from tiny import sealed

    sealed(str(tmp_path / "b"))
    datasets = open_all([str(tmp_path / "b")])
    counts = count_teachers(datasets, dataset_tasks(datasets, 1)[0], VOCAB, SPLIT)
    assert not counts.argmax.any()


def test_the_page_and_the_table_show_both(dataset: Dataset) -> None:
    tasks, _ = dataset_tasks(open_all([dataset.uri]), 1)
    tables = np.full((SPLIT.sides, VOCAB), 2, np.uint8)
    tables[:, : VOCAB // 2] = 1
    tables[:, :10] = 0
    teacher = teacher_coverage(count_task(tasks[0], VOCAB, SPLIT), tables, 2)
    study = {"sizes": [10, VOCAB // 2], "teacher": teacher, "tokens": 1, "held_out_tokens": 0, "sources": {}, "folds": 2,
             "unseen_ids": 0, "vocab_size": VOCAB, "chosen_on": [0.5, 1.0], "level": 0.95, "forced_ids": 0}  # fmt: skip
    rows = teacher_rows(study)
    assert rows[1][0] == f"{VOCAB // 2:,}"
    assert " to " in rows[1][2]
    page = report_html("x", study, None)
    assert "What the verifier would say" in page
    assert rows[1][2] in page
