from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import fails, fill, planned, sealed, sequences, states_of

from storage.cli import main, size
from storage.cli.console import Lines


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(list(arguments))
    return capsys.readouterr().out


def test_ls_finds_datasets_under_a_prefix(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, seal = sealed(f"{uri}/a")
    planned(f"{uri}/deep/b")
    rows = json.loads(run(capsys, "ls", uri, "--json"))
    assert [(row["uri"], row["sealed"]) for row in rows] == [(f"{uri}/a", True), (f"{uri}/deep/b", False)]
    assert rows[0]["fingerprint"] == seal.fingerprint
    table = run(capsys, "ls", uri)
    assert "not sealed" in table
    assert seal.fingerprint[:12] in table


def test_one_unreadable_dataset_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sealed(str(tmp_path / "a"))
    sealed(str(tmp_path / "b"))
    (tmp_path / "a" / "plan.json").write_text("{")
    rows = json.loads(run(capsys, "ls", str(tmp_path), "--json"))
    assert ["error" in row for row in rows] == [True, False]
    assert "unreadable" in run(capsys, "ls", str(tmp_path))


@pytest.mark.usefixtures("s3_server")
def test_ls_of_a_whole_bucket_and_names_that_look_like_markup(capsys: pytest.CaptureFixture[str]) -> None:
    sealed("s3://statehouse/markup/x[/y]z")
    rows = json.loads(run(capsys, "ls", "s3://statehouse", "--json"))
    assert "s3://statehouse/markup/x[/y]z" in {row["uri"] for row in rows}
    assert "x[/y]z" in run(capsys, "ls", "s3://statehouse/markup")
    assert "x[/y]z" in run(capsys, "info", "s3://statehouse/markup/x[/y]z")


def test_info_tells_what_the_dataset_holds(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, seal = sealed(uri)
    text = run(capsys, "info", uri)
    for part in (
        "[1, 3, 4]",
        "lossless",
        f"{seal.tokens:,} tokens",
        "chat 20, code 20, maths 20",
        seal.fingerprint[:16],
    ):
        assert part in text
    document = json.loads(run(capsys, "info", uri, "--json"))
    assert document["plan"]["contract"]["hidden_size"] == 64
    assert document["seal"]["fingerprint"] == seal.fingerprint
    assert len(document["layer_rms"]) == 4


def test_info_of_an_unsealed_dataset_says_how_to_finish_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(str(tmp_path))
    assert "python -m ray_jobs.extract RECIPE" in run(capsys, "info", str(tmp_path))


def test_head_shows_tokens_beside_the_norms_of_their_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, _ = sealed(str(tmp_path))
    rows = json.loads(run(capsys, "head", str(tmp_path), "-n", "2", "--tokens", "3", "--json"))
    assert len(rows) == 2
    assert rows[0]["id"] == plan.table["id"][0].as_py()
    bits = states_of(rows[0]["id"], rows[0]["length"])[0]
    states = (bits.astype(np.uint32) << 16).view(np.float32)
    assert rows[0]["tokens"][0]["rms"] == pytest.approx(np.sqrt((states**2).mean(-1)).tolist())
    assert "layer 3" in run(capsys, "head", str(tmp_path), "-n", "1")


def test_head_refuses_an_unsealed_dataset_unless_partial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(str(tmp_path), sequences(120))
    fill(str(tmp_path), plan, {0})
    assert "--partial" in fails(capsys, "head", str(tmp_path))
    assert run(capsys, "head", str(tmp_path), "--partial", "-n", "1")


def test_errors_are_one_line_and_exit_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no dataset here" in fails(capsys, "info", str(tmp_path))
    assert "no datasets here" in fails(capsys, "ls", str(tmp_path))
    sealed(str(tmp_path))
    assert "tokenizer.json" in fails(capsys, "head", str(tmp_path), "--tokenizer", str(tmp_path))
    (tmp_path / "plan.json").write_text("{")
    assert "plan.json" in fails(capsys, "info", str(tmp_path))


def test_the_command_is_installed_and_teaches() -> None:
    command = [str(Path(sys.executable).parent / "statehouse"), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in ("ls", "info", "head", "s3://"):
        assert name in text


def test_sizes_are_for_people() -> None:
    assert [size(0), size(1023), size(1536), size(5 * 2**40)] == ["0 B", "1,023 B", "1.5 KiB", "5.0 TiB"]


def test_without_a_terminal_progress_is_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines("copy", 4 << 30, "bytes", every_s=0.0)
    lines(1 << 30)
    lines(1 << 30)
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"copy 1\.0 GiB of 4\.0 GiB, .*iB/s, [\d,]+ s left", first)
    assert second.startswith("copy 2.0 GiB of 4.0 GiB")
    Lines("seal", None, "shards", every_s=0.0)(3)
    assert re.fullmatch(r"seal 3 shards, [\d,]+/s\n", capsys.readouterr().err)
    Lines("seal", 9, "shards")(3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["stats", "seal", "card", "diff"])
def test_long_commands_say_how_far_they_are(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = str(tmp_path / "dataset")
    sealed(uri, sequences(12, 100))
    monkeypatch.setattr(Lines.__init__, "__defaults__", (0.0,))
    more = {"card": ["-o", str(tmp_path / "card.html")], "diff": [uri]}.get(command, [])
    main([command, uri, *more])
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert re.match(rf"{command} \d+ of \d+ (sequences|shards), ", lines[-1])
