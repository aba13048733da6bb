"""A run from end to end on what is out of the ordinary: a stored top-k, another width, states and settings that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import HIDDEN, VOCAB
from tiny_training import USED, Tiny, changed, exported, make_dataset, make_sequences, whole_run

from drafter.claim import drafter_config
from drafter.errors import DrafterError
from drafter.export import load_sglang
from drafter.run import Run
from drafter.session import Session
from drafter.sources import open_sources
from drafter.team import Team
from drafter.verifier_weights import read_verifier_weights
from storage import open_dataset
from storage.sequences import Sequence


def test_a_run_learns_from_a_stored_top_k_what_it_learns_from_final_states(tiny: Tiny, tmp_path: Path) -> None:
    """With every token stored the loss is the same, but for the rounding of logits; with a few it learns as well.

    (The updates' order is another one: it follows the shards, which hold more tokens without final states.)
    """
    whole = tiny.request("final-states", epochs=1, lr=1e-2)
    expected = whole_run(whole)
    assert expected is not None
    for k in (VOCAB, 8):
        uri = str(tmp_path / f"top-{k}")
        make_dataset(uri, tiny.verifier, top_k=k)
        summary = whole_run(changed(whole, dataset=uri, run=str(tmp_path / f"run-{k}")))
        assert summary is not None
        assert summary["accuracy_before"] == expected["accuracy_before"]
        assert summary["loss_after"] < summary["loss_before"]
        if k == VOCAB:
            assert summary["loss_before"] == pytest.approx(expected["loss_before"], rel=1e-5)
            assert summary["loss_after"] == pytest.approx(expected["loss_after"], rel=0.1)


def test_a_run_norms_final_states_that_were_stored_before_the_norm(tiny: Tiny, tmp_path: Path) -> None:
    make_dataset(str(tmp_path / "before"), tiny.verifier, final_state="pre_norm")
    request = changed(tiny.request(epochs=8, lr=1e-2), dataset=str(tmp_path / "before"), run=str(tmp_path / "run"))
    summary = whole_run(request)
    assert summary is not None
    assert summary["accuracy_after"][0] > 0.3  # a scale of its own for each token does not change the likeliest one
    config = tiny.verifier / "config.json"
    kept = config.read_text()
    try:
        config.write_text(kept.replace('"llama"', '"gemma2"'))
        with pytest.raises(DrafterError, match="type gemma2, which has no plain RMSNorm at its end, found pre_norm"):
            drafter_config(request, open_sources(request), read_verifier_weights(tiny.verifier))  # before a run is made
    finally:
        config.write_text(kept)


def test_a_sequence_whose_states_are_not_finite_is_named_or_skipped(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sequences = make_sequences()
    sequences[5].token_ids[8] = USED + 1
    make_dataset(str(tmp_path / "dataset"), tiny.verifier, sequences, broken=USED + 1)
    request = changed(tiny.request(), dataset=str(tmp_path / "dataset"), run=str(tmp_path / "run"), held_out=0.0)
    with pytest.raises(
        DrafterError, match=r"sequence (\w{12}) of shard (\d+) .*expected finite states, found 256 that"
    ) as said:
        whole_run(request)
    name = str(said.value).split("sequence ")[1][:12]
    ids = open_dataset(request.dataset).sequences
    (row,) = [row for row, one in enumerate(ids["id"].to_pylist()) if one.startswith(name)]
    assert USED + 1 in open_dataset(request.dataset).tokens(row)[0]
    assert f"--repair --shards {ids['shard'][row].as_py()}`" in str(said.value)
    skipping = request.training.model_copy(update={"bad_shards": "skip"})
    summary = whole_run(changed(request, run=str(tmp_path / "skipping"), training=skipping))
    assert summary is not None
    assert summary["skipped_updates"] == 0
    assert f"sequence skipped: {request.dataset}: sequence {name}" in caplog.text
    assert all(one.isfinite().all() for one in exported(changed(request, run=str(tmp_path / "skipping"))).values())


def test_what_teaches_nothing_or_little_is_left_out_or_trained_on_and_counted(tiny: Tiny, tmp_path: Path) -> None:
    """Too short for the last of three steps: trained on as far as they go. Without two loss tokens: left out."""
    short = [Sequence("chat", f"short-{n}", np.array([n, 1, 2, 3], np.int32), np.arange(4) > 0) for n in range(5)]
    blank = [Sequence("chat", f"blank-{n}", np.arange(n, n + 9, dtype=np.int32), np.arange(9) == 4) for n in range(3)]
    make_dataset(str(tmp_path / "dataset"), tiny.verifier, [*make_sequences(20), *short, *blank])
    request = changed(tiny.request(), dataset=str(tmp_path / "dataset"), run=str(tmp_path / "run"), held_out=0.0)
    request = changed(request, drafter=request.drafter.model_copy(update={"ttt_steps": 3}))
    summary = whole_run(request)
    assert summary is not None
    assert (summary["sequences"], summary["short"], summary["untaught"]) == (25, 5, 3)
    assert open_sources(request).said(3) == " untaught=3 short=5"


def test_a_drafter_of_another_width_trains_an_embedding_of_its_own(tiny: Tiny, tmp_path: Path) -> None:
    request = tiny.request("narrow", {"config": {"hidden_size": 48}}, epochs=2, lr=1e-2)
    summary = whole_run(request)
    assert summary is not None
    assert summary["loss_after"] < summary["loss_before"]
    assert summary["parameters"]["trained"] == summary["parameters"]["all"]
    verifier = read_verifier_weights(tiny.verifier)
    drafter = load_sglang(Run(request.run).fetch_drafter(tmp_path / "d"), verifier.embedding_VD)
    assert (drafter.config.hidden_size, drafter.config.target_hidden_size) == (48, HIDDEN)
    assert torch.equal(drafter.embed_tokens.weight, exported(request)["embed_tokens.weight"])
    again = tiny.request("narrow-again", {"config": {"hidden_size": 48}, "start_from": str(tmp_path / "d")}, epochs=1)
    assert torch.equal(Session(again, Team()).trainer.drafter.embed_tokens.weight, drafter.embed_tokens.weight)
    with pytest.raises(DrafterError, match="lm_head: expected trained for a drafter of width 48, found frozen"):
        Session(tiny.request("x", {"config": {"hidden_size": 48}, "lm_head": "frozen"}), Team())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_bias_of_o_proj_begins_at_zero_is_trained_and_comes_with_the_drafter(
    tiny: Tiny, tmp_path: Path, optimizer: str
) -> None:
    biased = {"config": {"attention_bias": "o_proj"}}
    request = tiny.request(f"biased-{optimizer}", biased, epochs=1, lr=1e-2, optimizer=optimizer)
    assert not Session(request, Team()).trainer.drafter.midlayer.self_attn.o_proj.bias.any()
    assert whole_run(request) is not None
    folder = Run(request.run).fetch_drafter(tmp_path / "d")
    drafter = load_sglang(folder, read_verifier_weights(tiny.verifier).embedding_VD)
    bias = drafter.midlayer.self_attn.o_proj.bias
    assert bias.all()
    again = tiny.request(f"again-{optimizer}", biased | {"start_from": str(folder)}, epochs=1)
    assert torch.equal(Session(again, Team()).trainer.drafter.midlayer.self_attn.o_proj.bias, bias.float())
    plain = tiny.request(f"plain-{optimizer}", {"start_from": str(folder)}, epochs=1)
    with pytest.raises(DrafterError, match="attention_bias: expected False, found o_proj; give drafter.config"):
        Session(plain, Team())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"attention_bias": True},
            "drafter.config.attention_bias: expected false or o_proj, found True: SGLang and vLLM",
        ),
        ({"attention_bias": "oproj"}, "drafter.config.attention_bias: expected false or o_proj, found 'oproj': SGLang"),
        ({"target_hidden_size": 32}, "target_hidden_size: expected 64, of the states of the dataset .*found 32"),
        ({"vocab_size": 48}, "vocab_size: expected 1000, of the verifier .*found 48"),
        ({"capture_layers": [1, 2, 3]}, r"drafter.config.*capture_layers"),
    ],
)
def test_a_drafter_that_does_not_fit_the_dataset_is_refused_before_it_starts(
    tiny: Tiny, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(DrafterError, match=said):
        Session(tiny.request("misfit", {"config": config}), Team())
