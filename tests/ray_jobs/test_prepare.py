"""Prepare's own parts without Ray: every row comes back once, in order, and what the documents promise is so."""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import templates
from jobs import ROOT, Finished, finish, start_driver
from templates import END, MARKS, prepared, with_template

from ray_jobs import collecting
from ray_jobs.collecting import Collected
from ray_jobs.prompt_files import PromptFile, files_of
from ray_jobs.prompts import Limits
from ray_jobs.recipe import PromptSource
from ray_jobs.tokenising import read_file, tokenise_block
from storage.errors import RecipeError, StatehouseError


def write(folder: Path, name: str, rows: list[Any]) -> None:
    (folder / name).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


@pytest.fixture
def files(tmp_path: Path) -> list[PromptFile]:
    write(tmp_path, "b.jsonl", [{"prompt": f"Question {n}?"} for n in range(70)])
    mixed = [
        {"prompt": "Question 3?"},
        "broken",
        {"token_ids": list(range(100)), "loss_mask": [1] * 100},
        {"prompt": ""},
    ]
    write(tmp_path, "a.jsonl", mixed)
    write(tmp_path, "empty.jsonl", [])
    sources = [
        PromptSource(path=str(tmp_path / "b.jsonl")),
        PromptSource(path=str(tmp_path / "a.jsonl"), truncation="split", max_length=60),
        PromptSource(path=str(tmp_path / "empty.jsonl")),
    ]
    return files_of(sources)


def blocks(files: list[PromptFile], verifier: Path, rows: int) -> Iterator[pa.Table]:
    """What Ray Data does, with blocks of this many rows."""
    for at in range(len(files)):
        lines = pa.concat_tables(read_file(pa.table({"at": [at]}), files))
        for low in range(0, len(lines), rows):
            yield from tokenise_block(lines.slice(low, rows), files, (str(verifier), None, False), Limits(49152, 200))


def test_the_result_does_not_depend_on_how_the_rows_were_cut(
    files: list[PromptFile], tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "ROW_GROUP_TOKENS", 300)
    made = []
    for rows in (1, 7, 1000):
        collected = Collected(files)
        for block in blocks(files, tiny_verifier, rows):
            collected.add(block)
        made.append((collected.finish(), collected.rejects))
        assert (collected.rows, collected.prompts, collected.duplicates) == (74, 72, 1)
        assert collected.codes == {"not_json": 1, "empty": 1}
        assert collected.kinds == {"generate": 70, "given": 2}
        assert collected.loss_tokens == 100
    assert made[0] == made[1] == made[2]
    prompts, rejects = pq.read_table(io.BytesIO(made[0][0])), made[0][1]
    assert pq.ParquetFile(io.BytesIO(made[0][0])).num_row_groups > 3
    rows_of_b, rows_of_a = (f"{file.path}:" for file in files[:2])
    assert prompts["row"].to_pylist() == [f"{rows_of_b}{n + 1}" for n in range(70)] + [f"{rows_of_a}3"] * 2
    assert prompts["source"].to_pylist() == ["b"] * 70 + ["a"] * 2
    assert rejects.select(["file", "row", "code"]).to_pylist() == [
        {"file": files[1].path, "row": 2, "code": "not_json"},
        {"file": files[1].path, "row": 4, "code": "empty"},
    ]


def test_a_row_that_is_lost_or_out_of_order_and_a_file_that_does_not_end_are_errors(
    files: list[PromptFile], tiny_verifier: Path
) -> None:
    whole = list(blocks(files, tiny_verifier, 10))
    lost = Collected(files)
    with pytest.raises(StatehouseError, match=r"b\.jsonl: 70 rows were read and 60 came back"):
        for block in [*whole[:2], *whole[3:]]:
            lost.add(block)
    swapped = Collected(files)
    with pytest.raises(StatehouseError, match="out of order"):
        for block in [whole[1], whole[0]]:
            swapped.add(block)
    cut = Collected(files)
    for block in whole[:-1]:
        cut.add(block)
    with pytest.raises(StatehouseError, match=r"empty\.jsonl: did not come to its end"):
        cut.finish()


def test_a_file_that_breaks_off_ends_the_job_with_its_name(tmp_path: Path, tiny_verifier: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    broken = files_of([PromptSource(path=str(tmp_path / "a.parquet"))])
    collected = Collected(broken)
    with pytest.raises(RecipeError, match=r"a\.parquet: cannot be read"):
        for block in blocks(broken, tiny_verifier, 10):
            collected.add(block)


def test_a_node_without_the_verifier_is_one_clear_error(files: list[PromptFile], tmp_path: Path) -> None:
    collected = Collected(files)
    with pytest.raises(RecipeError, match="config.json|no verifier"):
        for block in blocks(files, tmp_path / "absent", 10):
            collected.add(block)


# ---- docs/prompts.md ---------------------------------------------------------------------------------------------------


def examples() -> list[dict[str, Any]]:
    text = (ROOT / "docs" / "prompts.md").read_text()
    found = []
    for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL):
        rest = block.strip()
        while rest:
            row, end = json.JSONDecoder().raw_decode(rest)
            found.append(row)
            rest = rest[end:].strip()
    return found


def test_every_example_of_the_document_is_accepted(smollm2: Path) -> None:
    tokenizer = with_template(smollm2, templates.TOOLS, MARKS, END)  # it takes all: reasoning is put back
    rows = examples()
    assert len(rows) >= 12
    assert all(prepared(tokenizer, row) for row in rows)


def test_the_document_names_every_reason_and_no_other() -> None:
    used = set()
    for path in (ROOT / "ray_jobs").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Reject":
                first = node.args[0]
                choices = (first.body, first.orelse) if isinstance(first, ast.IfExp) else (first,)
                used |= {one.value for one in choices if isinstance(one, ast.Constant)}
    table = (ROOT / "docs" / "prompts.md").read_text().split("| code | the row |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == used | {"unexpected"}


@pytest.mark.slow
@pytest.mark.ray
def test_one_core_and_a_cluster_prepare_the_same_bytes(
    recipe: Callable[..., Path], run_job: Callable[..., Finished], tmp_path: Path
) -> None:
    rows: list[Any] = [{"prompt": f"Question {n}? " + "word " * (n % 50)} for n in range(20_000)]
    rows[777] = {"prompt": ""}
    path = recipe(rows, dataset={"max_reject_share": 0.01})
    folder = tmp_path / "dataset-inputs"
    found = []
    for run in (lambda: run_job("prepare", path), lambda: finish(start_driver("prepare", path, RAY_ADDRESS=""))):
        finished = run()
        assert finished.code == 0, finished.err
        found.append([(folder / name).read_bytes() for name in ("prompts.parquet", "rejects.parquet")])
    assert found[0] == found[1]
    assert json.loads((folder / "prepare.json").read_text())["rows"] == 20_000
