"""The tasks that Ray Data runs, without Ray: every sequence once, whatever the tasks, and one error for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import VOCAB, planned, sealed, sequences

from ray_jobs import counting
from ray_jobs.counting import Sums, _packed, dataset_tasks, file_tasks, open_all, task_batches
from storage import open_dataset
from storage.errors import ContractMismatch, DatasetNotSealed
from vocab.counting import SideCounts, Split, count_sides
from vocab.counts import TokenCounts
from vocab.errors import VocabError

SPLIT = Split(folds=3, held_out=0.2, seed=0)


def counted(tasks: list[dict[str, object]]) -> tuple[list[list[int]], list[int]]:
    counts = count_sides((batch for task in tasks for batch in task_batches(task, SPLIT)), VOCAB, SPLIT)
    sums = Sums(VOCAB, SPLIT)
    sums.add(_packed(counts))
    assert (sums.total().folds.total(), sums.total().held_out) == (counts.folds.total(), counts.held_out)
    sums.add(_packed(counts))
    assert sums.total().folds.total() == counts.folds.total() + counts.folds.total()
    return [fold.total().tolist() for fold in counts.folds.folds], counts.held_out.total().tolist()


def test_tasks_of_any_size_count_every_loss_token_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed(str(tmp_path / "a"))
    datasets = open_all([str(tmp_path / "a"), str(tmp_path / "a")])  # named twice, counted once
    tasks, planned_tokens = dataset_tasks(datasets, cores=2)
    whole = counted(tasks)
    assert (
        sum(map(sum, whole[0])) + sum(whole[1]) == planned_tokens == sequences()["loss_mask"].to_pandas().map(sum).sum()
    )
    monkeypatch.setattr(counting, "_LEAST_TASK_TOKENS", 500)
    monkeypatch.setattr(counting, "_BATCH_TOKENS", 300)
    small, again = dataset_tasks(datasets, cores=2)
    assert len(small) > len(tasks)
    assert again == planned_tokens
    assert counted(small) == whole


def test_a_sequence_in_two_datasets_counts_once(tmp_path: Path) -> None:
    table = sequences(40)
    sealed(str(tmp_path / "a"), table.slice(0, 30))
    sealed(str(tmp_path / "b"), table.slice(20, 20))
    sealed(str(tmp_path / "all"), table)
    both, tokens = dataset_tasks(open_all([str(tmp_path / "a"), str(tmp_path / "b")]), 2)
    whole, expected = dataset_tasks(open_all([str(tmp_path / "all")]), 2)
    assert tokens == expected
    assert counted(both) == counted(whole)


def test_plain_files_count_like_the_dataset_they_came_from(tmp_path: Path) -> None:
    sealed(str(tmp_path / "a"))
    dataset = open_dataset(str(tmp_path / "a"))
    rows = dataset.sequences.select(["source", "group"]).to_pylist()
    with (tmp_path / "ids.jsonl").open("w") as file:
        for at, row in enumerate(rows):
            ids, mask = dataset.tokens(at)
            line = {
                "token_ids": ids.tolist(),
                "loss_mask": mask.tolist(),
                "source": row["source"],
                "prompt_group": row["group"],
            }
            file.write(json.dumps(line) + "\n")
    tasks = file_tasks([str(tmp_path / "*.jsonl"), str(tmp_path / "ids.jsonl")])
    assert len(tasks) == 1  # two globs, one file
    assert counted(tasks) == counted(dataset_tasks([dataset], 2)[0])
    with pytest.raises(VocabError, match=r"vocab.files: .*\.parquet: no such file"):
        file_tasks([str(tmp_path / "*.parquet")])


def test_two_tokenisers_and_unsealed_datasets_are_refused(tmp_path: Path) -> None:
    sealed(str(tmp_path / "a"))
    plan = planned(str(tmp_path / "b"), tokenizer_hash="other")
    assert plan.contract.tokenizer_hash == "other"
    with pytest.raises(DatasetNotSealed):
        open_all([str(tmp_path / "a"), str(tmp_path / "b")])
    from tiny import fill

    from storage.objects import open_store
    from storage.seal import seal_dataset

    fill(str(tmp_path / "b"), plan)
    seal_dataset(open_store(str(tmp_path / "b")), plan)
    with pytest.raises(ContractMismatch, match="tokenizer_hash is other, .* token ids of two tokenisers"):
        open_all([str(tmp_path / "a"), str(tmp_path / "b")])


def test_counts_too_large_for_four_bytes_are_carried_whole() -> None:
    large = count_sides([], 3, SPLIT)
    held = TokenCounts(np.array([[2**40, 0, 1]]), ("a",), 3)
    sums = Sums(3, SPLIT)
    sums.add(_packed(SideCounts(large.folds, held)))
    assert sums.total().held_out == held
    assert sums.total().folds.total().tokens == 0


def test_batches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed(str(tmp_path / "a"))
    monkeypatch.setattr(counting, "_BATCH_TOKENS", 1000)
    counting.opened.cache_clear()
    tasks, _ = dataset_tasks(open_all([str(tmp_path / "a")]), 2)
    sizes = [batch.token_ids.size for task in tasks for batch in task_batches(task, SPLIT)]
    assert len(sizes) > 3
    assert max(sizes) < 1000 + 300
    assert np.all(np.array(sizes) > 0)
