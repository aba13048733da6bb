"""`python -m drafter.train`, as a user runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_training import Tiny, make_dataset, make_verifier, make_vocabulary

from drafter.layer_ids import sglang_ids
from drafter.run import Run
from drafter.train import main, parse_settings

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = ["training.dtype=float32", "training.global_batch_tokens=200", "training.micro_batch_tokens=80",
            "training.lr=3e-3", "drafter.ttt_steps=2", "evaluation.held_out=0.2", "training.checkpoint_every=2"]  # fmt: skip


def arguments(tiny: Tiny, run: str, *more: str) -> list[str]:
    return [
        "--dataset", f"{tiny.root}/dataset", "--draft-vocab", f"{tiny.root}/vocab", "--verifier", str(tiny.verifier),
        "--run", f"{tiny.root}/{run}", *SETTINGS, *more,
    ]  # fmt: skip


def test_stopped_by_sigterm_it_leaves_a_checkpoint_and_carries_on(tiny: Tiny) -> None:
    import os

    command = [sys.executable, "-m", "drafter.train", *arguments(tiny, "stopped", "training.epochs=400")]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    run = Run(f"{tiny.root}/stopped")
    deadline = time.monotonic() + 100
    while not run.checkpoints.updates():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "train stopped update=" in err
    at = run.checkpoints.updates()[-1]
    state = f"checkpoints/{at:08d}/state.json"
    assert run.store.exists(state)
    assert main(arguments(tiny, "stopped", "training.epochs=400", "training.lr=1e-3")) == 1  # another run


def test_finished_runs_are_left_alone_and_fresh_starts_over(tiny: Tiny, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(tiny, "again", "training.epochs=1")) == 0
    before = Run(f"{tiny.root}/again").store.get("summary.json")
    assert main(arguments(tiny, "again", "training.epochs=1")) == 0
    assert Run(f"{tiny.root}/again").store.get("summary.json") == before
    assert main(arguments(tiny, "again", "training.epochs=2")) == 1
    assert main(arguments(tiny, "again", "training.epochs=2", "--fresh")) == 0
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "training.epochs: 1 -> 2" in errors[0]


def test_a_recipe_says_what_flags_would(
    tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        f"name: small\nverifier: {{model: {tiny.verifier}}}\ndataset: {{uri: {tiny.root}/dataset, codec: lossless}}\n"
        f"vocab: {{size: 32}}\ndrafter: {{ttt_steps: 2}}\nevaluation: {{held_out: 0.2, draft_lengths: [1, 2]}}\n"
        f"training: {{dtype: float32, global_batch_tokens: 200, micro_batch_tokens: 80, draft_vocabulary: {tiny.root}/vocab}}\n"
    )
    assert main([str(recipe), "training.epochs=1"]) == 0
    run = Run(f"{tiny.root}/dataset-runs/small")
    assert run.summary() is not None
    identity = run.identity()
    assert (identity["drafter"]["ttt_steps"], identity["training"]["epochs"], identity["evaluation"]["held_out"]) == (
        2,
        1,
        0.2,
    )
    # A setting goes before the recipe, which may say more of workers than one process needs.
    text = recipe.read_text()
    recipe.write_text(text.replace("training: {", "training: {workers: 8, parallel: shard, optimizer: muon, "))
    assert main([str(recipe), "training.epochs=1", "training.run=beside"]) == 0
    beside = Run(f"{tiny.root}/dataset-runs/beside").summary()
    assert beside is not None
    assert beside["workers"] == 1
    assert "without training.workers=8 training.parallel=shard of the recipe" in caplog.text
    recipe.write_text(text)
    # The one beside the dataset counts for the recipe only when it is the recipe's.
    make_vocabulary(f"{tiny.root}/dataset-vocab")
    text = recipe.read_text().replace(f", draft_vocabulary: {tiny.root}/vocab", "").replace("size: 32", "size: 16")
    recipe.write_text(text)
    capfd.readouterr()
    assert main([str(recipe), "training.run=other"]) == 1
    assert "vocab.size: expected 16, found 32; run coverage again" in capfd.readouterr().err
    for text, said in (
        ("name: [", "expected a recipe in YAML"),
        ("drafter: 3", "drafter: expected keys and values, found int"),
        ("[1]", "expected keys and values, found list"),
        ("training: {lrr: 1}", "training.lrr"),
        ("vocab: {size: no}", "vocab.size"),
        (
            f"dataset: {{uri: {tiny.root}/dataset}}\nverifier: {{model: 'bundled:x'}}",
            "verifier.model: expected a folder",
        ),
        ("name: x", "expected a recipe, or --dataset, --draft-vocab, --run, --verifier"),
    ):
        recipe.write_text(text)
        assert main([str(recipe)]) == 1, text
        error = capfd.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert main([str(tmp_path / "none.yaml")]) == 1
    assert "cannot read the recipe" in capfd.readouterr().err


def test_the_drafter_names_its_layers_as_sglang_counts_those_of_the_verifiers_family(tmp_path: Path) -> None:
    verifier = make_verifier(tmp_path / "verifier")
    config = json.loads((verifier / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (verifier / "config.json").write_text(json.dumps(config))
    make_dataset(f"{tmp_path}/dataset", verifier)
    make_vocabulary(f"{tmp_path}/vocab")
    assert main(arguments(Tiny(str(tmp_path), verifier), "run", "training.epochs=1")) == 0
    served = json.loads((tmp_path / "run/drafter/config.json").read_text())
    layers = served["statehouse"]["capture_layers"]
    assert served["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == sglang_ids(layers, "kimi_k2") != layers


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.lrr=1", "expected section.key=value"),
        ("lr", "expected section.key=value"),
        ("training.lr=fast", "training.lr is 'fast'"),
        ("training.lr=-1", "training.lr is -1"),
        ("drafter.lm_head=thawed", "drafter.lm_head is 'thawed'"),
        ("training.draft_vocabulary=s3://x", "not read here; use --draft-vocab instead"),
        ("training.run=other", "not read here; use --run instead"),
        ("training.workers=8", "not read here; use python -m ray_jobs.train"),
        (
            "training.loader=5 training.loader.threads=3",
            "expected training.loader to have keys, found training.loader=5",
        ),
        ("training.loader=5", "training.loader is 5"),
        ("drafter.config=deep drafter.config.head_dim=8", "found drafter.config=deep"),
    ],
)
def test_a_wrong_setting_is_one_line(tiny: Tiny, capfd: pytest.CaptureFixture[str], setting: str, message: str) -> None:
    assert main(arguments(tiny, "wrong", *setting.split())) == 1
    assert message in (error := capfd.readouterr().err)
    assert error.count("\n") == 1
    assert not Path(f"{tiny.root}/wrong").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--device", "gpu"], "--device: expected cpu"),
        (["drafter.config.num_attention_heads=5"], "num_attention_heads: "),
        (
            ["drafter.config.num_attention_heads=0"],
            "drafter.config.num_attention_heads: Input should be greater than 0",
        ),
        (["drafter.start_from=/no/such/drafter"], "start_from: /no/such/drafter: expected a drafter's folder"),
        (["drafter.config.hidden_size=192", "drafter.config.target_hidden_size=64"], "SGLang leaves `fc` out"),
    ],
)
def test_what_can_never_be_trained_claims_no_run(
    tiny: Tiny, capfd: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(arguments(tiny, "never", *more)) == 1
    err = capfd.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not Path(f"{tiny.root}/never/run.json").exists()


def test_settings_are_those_of_a_recipe() -> None:
    parsed = parse_settings(
        ["training.betas=[0.8, 0.9]", "drafter.config.head_dim=128", "training.lr=1e-4", "training.loader.threads=2"]
    )
    assert parsed["training"].loader.threads == 2
    assert parsed["training"].betas == (0.8, 0.9)
    assert parsed["training"].lr == 1e-4
    assert parsed["drafter"].config == {"head_dim": 128}


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for word in (
        "training.lr=",
        "training.loader.cache=None",
        "drafter.ttt_steps=",
        "--fresh",
        "carries on from the newest checkpoint",
        "exit codes",
    ):
        assert word in text
