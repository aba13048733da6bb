"""What no job can do is one line that names it, and an exit code: on a real Ray, through the real command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from jobs import GIVEN, Finished, ok

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]
Recipe = Callable[..., Path]
Run = Callable[..., Finished]
Prepared = Callable[[Path], Path]


def test_refused_prompts_fail_the_job_name_the_first_and_leave_nothing_that_counts(
    recipe: Recipe, prepared: Prepared, run_job: Run, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "fine"},
        {"prompt": ""},
        {"prompt": "long " * 500},
        {"token_ids": [1, 99999]},
    ]
    path = prepared(recipe([{"prompt": "what was prepared before"}]))
    recipe(rows)
    failed = run_job("prepare", path)
    assert failed.code == 1, failed.err
    assert "3 of 4 prompts were refused" in failed.errors[0]
    assert "prompts.jsonl:2" in failed.errors[0]
    rejects = pq.read_table(tmp_path / "dataset-inputs" / "rejects.parquet").to_pylist()
    assert ["empty" in rejects[0]["reason"], "no room" in rejects[1]["reason"], "99999" in rejects[2]["reason"]] == [
        True
    ] * 3
    for job in ("generate", "extract"):
        assert run_job(job, path).code == 1
    assert not (tmp_path / "dataset").exists()
    assert "rejects=3" in ok(run_job("prepare", path, "dataset.max_reject_share=0.8")).err


def test_an_empty_file_of_prompts_is_named(recipe: Recipe, run_job: Run) -> None:
    failed = run_job("prepare", recipe([]))
    assert failed.code == 1, failed.err
    assert "no rows" in failed.errors[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset.ur=x"], "unknown key 'dataset.ur'; did you mean 'uri'?"),
        # The same way through the same code: one of them is enough where time counts.
        *(
            pytest.param([override], message, marks=pytest.mark.slow)
            for override, message in (
                ("prompts.0.path=absent.jsonl", "absent.jsonl: no such file"),
                ("verifier.model=EMPTY", "config.json"),
                ("verifier.model=WEIGHTLESS", "safetensors"),
                ("verifier.model=no-such-folder", "no-such-folder"),
            )
        ),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(
    recipe: Recipe, run_job: Run, tiny_verifier: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_bytes((tiny_verifier / "config.json").read_bytes())
    folders = {"EMPTY": str(tmp_path / "empty"), "WEIGHTLESS": str(tmp_path / "weightless")}
    overrides = [
        override.replace(name, folders[name]) for override in overrides for name in folders if name in override
    ] or overrides
    failed = run_job("prepare", recipe(), *overrides)
    assert failed.code == 1, failed.err
    assert len(failed.errors) == 1
    assert message in failed.errors[0]
    assert "Traceback" not in failed.err
    assert not (tmp_path / "dataset-inputs").exists()


@pytest.mark.usefixtures("s3_server")
@pytest.mark.parametrize(
    ("uri", "environment", "message"),
    [
        pytest.param("s3://absent-bucket/x", {}, "no bucket 'absent-bucket'", marks=pytest.mark.slow),
        ("s3://statehouse/x", {"AWS_SECRET_ACCESS_KEY": "wrong-secret"}, "refused these credentials"),
    ],
)
def test_a_bucket_that_is_not_there_and_wrong_credentials_are_named(
    recipe: Recipe, run_job: Run, uri: str, environment: dict[str, str], message: str
) -> None:
    failed = run_job("prepare", recipe(dataset={"uri": uri}), **environment)
    assert failed.code == 1, failed.err
    assert message in failed.errors[0]
    assert "wrong-secret" not in failed.err


def test_more_replicas_than_the_cluster_can_hold_is_an_error_not_a_wait(
    recipe: Recipe, prepared: Prepared, run_job: Run
) -> None:
    path = prepared(recipe(GIVEN[:5]))
    failed = run_job("extract", path, "extraction.replica.gpus=8")
    assert failed.code == 1, failed.err
    assert "8 GPUs, but the cluster has" in failed.errors[0]
