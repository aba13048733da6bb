"""The command line: what it prints for small files, and one-line errors."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vocab.__main__ import main
from vocab.counts import TokenCounts, count_by_source
from vocab.errors import VocabError
from vocab.inputs import read_batches
from vocab.mapping import DraftVocab

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
        ({"token_ids": [1, 9]}, "row 2: token id 9 at position 1 is outside the vocabulary of 5 ids"),
        ({"token_ids": [2**70]}, "row 2: token_ids: expected a list of integers"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], row: Any, named: str) -> None:
    path = json_lines(tmp_path / "rows.jsonl", [{"token_ids": [1]}, row])
    err = failure(capsys, "coverage", path, "--vocab-size", "5")
    assert "rows.jsonl" in err
    assert named in err


def test_files_that_cannot_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none.jsonl: no such file" in failure(capsys, "coverage", str(tmp_path / "none.jsonl"))
    assert "none.parquet: no such file" in failure(capsys, "coverage", str(tmp_path / "none.parquet"))
    (tmp_path / "rows.csv").write_text("1,2\n")
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


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("wrong", [9, -2])
def test_an_id_outside_the_vocabulary_is_named_with_its_row_and_position(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, wrong: int
) -> None:
    rows = [{"token_ids": [1, 2], "prompt_group": "a"}, {"token_ids": [3, 4, wrong], "prompt_group": "b"}]
    path = tmp_path / f"rows.{form}"
    if form == "jsonl":
        json_lines(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    for options in ([], ["--folds", "2"]):
        err = failure(capsys, "coverage", str(path), "--vocab-size", "5", *options)
        assert f"rows.{form}: row 2: token id {wrong} at position 2 is outside the vocabulary of 5 ids" in err


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


def corpus(path: Path, rows: int = 300) -> str:
    """Rows of 40 tokens in groups of two, a prompt of ten shared by each group."""
    random = np.random.default_rng(0)
    made = []
    for row in range(rows):
        ids = np.minimum(random.zipf(1.4, 30) - 1, 199).tolist()
        prompt = [row // 2 % 200, 3, row // 2 // 200] * 3 + [1]
        made.append(
            {
                "token_ids": prompt + ids,
                "loss_mask": [0] * 10 + [1] * 30,
                "source": "ab"[row % 2],
                "prompt_group": f"g{row // 2}",
            }
        )
    return json_lines(path, made)


def test_folds_give_a_study_a_page_counts_and_a_draft_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out, page = corpus(tmp_path / "ids.jsonl"), tmp_path / "out.json", tmp_path / "out.html"
    options = ["--vocab-size", "200", "--folds", "4", "--held-out", "0.1", "--sizes", "10,50", "--size", "50"]
    files = [
        "--json",
        str(out),
        "--html",
        str(page),
        "--save",
        str(tmp_path / "map"),
        "--counts",
        str(tmp_path / "c.parquet"),
    ]
    assert main(["coverage", path, *options, *files]) == 0
    assert "4 folds of prompt groups" in capsys.readouterr().out
    content = json.loads(out.read_text())
    study = content["study"]
    assert content["tokens"] + content["held_out_tokens"] == 9000
    assert study["interval"]["low"][0] < study["cross_fitted"][0] < study["interval"]["high"][0]
    assert study["lost"]["tokens"] > 0
    assert "<svg" in page.read_text()
    assert DraftVocab.load(tmp_path / "map").size == 50
    counts = TokenCounts.from_parquet(tmp_path / "c.parquet")
    assert counts.tokens == content["tokens"]
    assert (
        main(
            ["merge", str(tmp_path / "c.parquet"), str(tmp_path / "c.parquet"), "--out", str(tmp_path / "sum.parquet")]
        )
        == 0
    )
    assert TokenCounts.from_parquet(tmp_path / "sum.parquet") == counts + counts
    assert main(["report", str(out), str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text() == page.read_text()


def test_groups_come_from_equal_prompts_where_none_are_named(tmp_path: Path) -> None:
    named, out = corpus(tmp_path / "ids.jsonl"), tmp_path / "out.json"
    rows = [json.loads(line) for line in Path(named).read_text().splitlines()]
    bare = json_lines(tmp_path / "bare.jsonl", [{k: v for k, v in row.items() if k != "prompt_group"} for row in rows])
    options = ["--vocab-size", "200", "--folds", "2", "--sizes", "10", "--json", str(out)]
    assert main(["coverage", bare, *options]) == 1
    assert main(["coverage", bare, *options, "--group-by-prefix"]) == 0
    assert json.loads(out.read_text())["study"]["interval"]["groups"] == 300  # 150 prompts, two sources each


def test_columns_of_other_tools_and_odd_parquet_types_count_alike(tmp_path: Path) -> None:
    ids, mask = [[1, 2, 3], [], [3]], [[True, False, True], [], [True]]
    tables = {
        "plain": pa.table({"token_ids": ids, "loss_mask": mask}),
        "theirs": pa.table({"input_ids": ids, "loss_mask": [[int(m) for m in row] for row in mask]}),
        "large": pa.table({"token_ids": pa.array(ids, pa.large_list(pa.int32())), "loss_mask": mask}),
        "fixed": pa.table({"token_ids": pa.array([[1, 3, 3]], pa.list_(pa.int64(), 3))}),
    }
    found = []
    for name, table in tables.items():
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=2)
        batches = list(read_batches([str(tmp_path / f"{name}.parquet")], "prompt_group"))
        counts = sum(
            (count_by_source(b.token_ids, b.loss_mask, b.lengths, b.sources, 5) for b in batches), TokenCounts.empty(5)
        )
        found.append(counts.total().tolist())
    assert found == [[0, 1, 0, 2, 0]] * 4


@pytest.mark.parametrize("stream", [False, True])
def test_arrow_files_and_streams_are_counted_where_they_lie(tmp_path: Path, stream: bool) -> None:
    table = pa.table({"input_ids": [[1, 2, 3], [], [3], [4, 4]], "loss_mask": [[1, 0, 1], [], [1], [0, 1]]})
    with pa.OSFile(str(tmp_path / "data.arrow"), "wb") as sink:
        make = pa.ipc.new_stream if stream else pa.ipc.new_file
        with make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    total = TokenCounts.empty(5)
    for batch in read_batches([str(tmp_path / "data.arrow")], ""):
        total += count_by_source(batch.token_ids, batch.loss_mask, batch.lengths, batch.sources, 5)
    assert total.total().tolist() == [0, 1, 0, 2, 1]
    (tmp_path / "bad.arrow").write_text("hello")
    with pytest.raises(VocabError, match=r"bad\.arrow: not an Arrow file"):
        list(read_batches([str(tmp_path / "bad.arrow")], ""))


def test_parquet_rows_with_nulls_or_masks_of_another_length_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"token_ids": [[1], None]}), tmp_path / "a.parquet")
    with pytest.raises(VocabError, match=r"a\.parquet: row 2: token_ids: expected a list of integers, found None"):
        list(read_batches([str(tmp_path / "a.parquet")], ""))
    pq.write_table(pa.table({"token_ids": [[1], [2, 3]], "loss_mask": [[True], [True]]}), tmp_path / "b.parquet")
    with pytest.raises(VocabError, match=r"b\.parquet: row 2: loss_mask: expected 2 values, as token_ids, found 1"):
        list(read_batches([str(tmp_path / "b.parquet")], ""))
    pq.write_table(pa.table({"token_ids": [["x"]]}), tmp_path / "c.parquet")
    with pytest.raises(VocabError, match=r"c\.parquet: row 1: token_ids: expected a list of integers"):
        list(read_batches([str(tmp_path / "c.parquet")], ""))
    pq.write_table(pa.table({"token_ids": [[1, None]]}), tmp_path / "d.parquet")
    with pytest.raises(VocabError, match=r"d\.parquet: row 1: token_ids: expected a list of integers"):
        list(read_batches([str(tmp_path / "d.parquet")], ""))


def test_options_that_need_each_other_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = corpus(tmp_path / "ids.jsonl", 20)
    assert "say how many ids with --size" in failure(capsys, "coverage", path, "--save", str(tmp_path / "x"))
    assert "--folds 5" in failure(capsys, "coverage", path, "--html", str(tmp_path / "x.html"))
    assert "folds: expected at least 2" in failure(capsys, "coverage", path, "--folds", "1")
    assert "policy list: expected a list of ids" in failure(
        capsys, "coverage", path, "--policy", "list", "--size", "5", "--save", str(tmp_path / "x")
    )


def test_draft_steps_are_measured_on_this_device(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "steps.json"
    shape = ["--hidden-size", "32", "--intermediate-size", "64", "--heads", "4", "--kv-heads", "2", "--context", "8"]
    argv = ["measure", *shape, "--vocab-size", "100", "--sizes", "20,100", "--batches", "1,2", "--repeats", "2"]
    assert main([*argv, "--json", str(out)]) == 0
    steps = json.loads(out.read_text())["steps"]
    assert [(row["size"], row["path"]) for row in steps if row["batch"] == 2] == [
        (20, "none"), (20, "gather"), (20, "scatter"), (100, "none"), (100, "identity"),
    ]  # fmt: skip
    assert all(0 < row["fastest"] <= row["seconds"] for row in steps)
