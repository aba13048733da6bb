"""The command line: what it prints for small files, and one-line errors."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vocab.__main__ import main

ROWS: list[dict[str, Any]] = [
    {"token_ids": [0, 1, 1, 3], "loss_mask": [0, 1, 1, 1], "source": "code", "prompt_group": "a"},
    {"token_ids": [1, 2], "loss_mask": [True, True], "source": "chat", "prompt_group": "b"},
    {"token_ids": [], "loss_mask": [], "source": "chat", "prompt_group": "b"},
]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def json_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def failure(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a failing command writes; its exit code is 1."""
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_table_prints_the_parameters_of_each_head(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "--vocab-size", "163840", "--hidden-size", "7168", "--sizes", "32000"]) == 0
    out = capsys.readouterr().out
    for part in ("32,000", "229,376,000", "163,840", "1,174,405,120", "19.5 %", "2,348,810,240"):
        assert part in out


def test_table_takes_the_usual_sizes_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    assert main(["table", "--vocab-size", "49152", "--hidden-size", "576", "--json", str(out)]) == 0
    content = json.loads(out.read_text())
    assert content["rows"][0] == {"size": 1024, "lm_head_parameters": 589_824, "share_of_full": 1024 / 49152}
    assert content["rows"][-1]["size"] == 49152


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "both"])
def test_coverage_counts_loss_tokens_of_files(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out.json"
    plain = json_lines(tmp_path / "rows.jsonl", ROWS)
    files = [plain]
    if kind == "jsonl.gz":
        files = [plain + ".gz"]
        Path(files[0]).write_bytes(gzip.compress(Path(plain).read_bytes()))
    if kind in ("parquet", "both"):
        table = pa.Table.from_pylist([row | {"loss_mask": [bool(m) for m in row["loss_mask"]]} for row in ROWS])
        pq.write_table(table, tmp_path / "rows.parquet")
        files = [str(tmp_path / "rows.parquet")] + ([plain] if kind == "both" else [])
    options = ["--vocab-size", "5", "--hidden-size", "8", "--sizes", "1,2", "--json", str(out)]
    assert main(["coverage", *files, *options]) == 0
    content = json.loads(out.read_text())
    times = len(files)
    assert (content["vocab_size"], content["tokens"], content["unseen_ids"]) == (5, 5 * times, 2)
    one, two = content["rows"]  # ids by frequency: 1 (3 of 5), then 2 and 3 alike
    assert (one["size"], one["coverage"], one["lm_head_parameters"]) == (1, 0.6, 8)
    assert one["per_source"] == {"chat": 0.5, "code": pytest.approx(2 / 3)}
    assert (two["coverage"], two["per_source"]["chat"]) == (0.8, 1.0)


def test_coverage_takes_the_largest_id_and_one_source_by_default(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    path = json_lines(tmp_path / "ids.jsonl", [{"token_ids": [4, 1]}, {"token_ids": [1]}])
    assert main(["coverage", path, "--json", str(out)]) == 0
    content = json.loads(out.read_text())
    assert content["vocab_size"] == 5
    assert content["rows"][0]["per_source"] == {"all": 1.0}


def test_coverage_holds_out_whole_groups(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    rows = [{"token_ids": [group % 7, 7], "prompt_group": f"g{group}"} for group in range(100) for _ in range(2)]
    path = json_lines(tmp_path / "ids.jsonl", rows)
    assert main(["coverage", path, "--held-out", "0.3", "--sizes", "1,8", "--json", str(out)]) == 0
    content = json.loads(out.read_text())
    assert content["tokens"] + content["held_out_tokens"] == 400
    assert content["held_out_tokens"] % 4 == 0
    assert 60 <= content["held_out_tokens"] <= 180
    assert [row["held_out"] for row in content["rows"]] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"ids": [1]}, "line 2: expected an object with token_ids"),
        ([1], "line 2: expected an object with token_ids"),
        ({"token_ids": "text"}, "row 2: token_ids: expected a list of integers, found text"),
        ({"token_ids": None}, "row 2: token_ids: expected a list of integers, found None"),
        ({"token_ids": [[1], [2, 3]]}, "row 2: token_ids: expected a list of integers, found lists of unequal"),
        ({"token_ids": [1, 2], "loss_mask": [1]}, "row 2: loss_mask: expected 2 values, as token_ids, found 1"),
        ({"token_ids": [1], "loss_mask": ["x"]}, "row 2: loss_mask: expected a list of booleans"),
        ({"token_ids": [1, 9]}, "token id 9 at position 2 is outside the vocabulary of 5 ids"),
        ({"token_ids": [2**70]}, "row 2: token_ids: expected a list of integers"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], row: Any, named: str) -> None:
    path = json_lines(tmp_path / "rows.jsonl", [{"token_ids": [1]}, row])
    err = failure(capsys, "coverage", path, "--vocab-size", "5")
    assert "rows.jsonl" in err
    assert named in err


def test_files_that_cannot_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none.jsonl: cannot read it: No such file" in failure(capsys, "coverage", str(tmp_path / "none.jsonl"))
    assert "none.parquet: cannot read it" in failure(capsys, "coverage", str(tmp_path / "none.parquet"))
    assert "expected a name that ends in" in failure(capsys, "coverage", str(tmp_path / "rows.csv"))
    for name in ("text.parquet", "text.jsonl.gz"):
        (tmp_path / name).write_text("hello\n")
        assert name in failure(capsys, "coverage", str(tmp_path / name))
    (tmp_path / "text.jsonl").write_text("hello\n")
    assert "text.jsonl: line 1: expected JSON" in failure(capsys, "coverage", str(tmp_path / "text.jsonl"))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\n")
    assert "bytes.jsonl" in failure(capsys, "coverage", str(tmp_path / "bytes.jsonl"))
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "other.parquet")
    assert "expected a column token_ids, found ['text']" in failure(capsys, "coverage", str(tmp_path / "other.parquet"))


def test_requests_that_cannot_be_met_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = json_lines(tmp_path / "rows.jsonl", [{"token_ids": [1, 0], "loss_mask": [0, 0]}])
    assert "no loss tokens" in failure(capsys, "coverage", path)
    path = json_lines(tmp_path / "rows.jsonl", [{"token_ids": [1, 0]}])
    assert "expected 1 to 2 (the vocabulary), found 9" in failure(capsys, "coverage", path, "--sizes", "9")
    assert "column 'prompt_group' is missing" in failure(capsys, "coverage", path, "--held-out", "0.1")
    assert "no/out.json" in failure(capsys, "coverage", path, "--json", str(tmp_path / "no" / "out.json"))
    too_large = ("table", "--vocab-size", "10", "--hidden-size", "4", "--sizes", "11")
    assert "expected 1 to 10 (the vocabulary), found 11" in failure(capsys, *too_large)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["other"],
        ["coverage"],
        ["table", "--vocab-size", "10"],
        ["table", "--vocab-size", "ten", "--hidden-size", "4"],
        ["table", "--vocab-size", "10", "--hidden-size", "4", "--sizes", "1,x"],
        ["table", "--vocab-size", "10", "--hidden-size", "4", "--sizes", ""],
        ["coverage", "a.jsonl", "--held-out", "1.5"],
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "error:" in err


def test_it_runs_as_a_module_and_needs_neither_ray_nor_torch() -> None:
    program = (
        "import sys, vocab.__main__, vocab.mapping, vocab.split; "
        "assert not {'ray', 'torch', 'drafter', 'pandas'} & set(sys.modules), sys.modules.keys(); "
        "sys.exit(vocab.__main__.main(sys.argv[1:]))"
    )
    argv = ["table", "--vocab-size", "10", "--hidden-size", "4"]
    for command in ([sys.executable, "-c", program, *argv], [sys.executable, "-m", "vocab", "--help"]):
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout
