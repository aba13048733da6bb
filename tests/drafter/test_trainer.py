"""The trainer: it learns, workers add nothing of their own, a run cut anywhere ends where the undisturbed one does."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense import small_batch, small_drafter, small_head
from tiny_training import (
    TRAINING,
    Tiny,
    after,
    changed,
    exported,
    losses,
    make_dataset,
    make_sequences,
    make_tiny,
    make_vocabulary,
    whole_run,
)

from drafter.batch import PackedBatch
from drafter.checkpoint import Checkpoints
from drafter.claim import claim
from drafter.divergences import ACCEPTANCE
from drafter.errors import DrafterError
from drafter.export import load_sglang
from drafter.loss import Loss, ttt_loss
from drafter.recipe import DrafterSection, TrainingSection
from drafter.run import Run
from drafter.session import Session, train
from drafter.sources import open_sources
from drafter.team import Team
from drafter.trainer import Trainer, learning_rate
from drafter.verifier_weights import read_verifier_weights
from storage.errors import ContractMismatch, DatasetMissing, StatehouseError


def test_the_loss_falls_and_the_drafter_is_there_for_the_server(tiny: Tiny, tmp_path: Path) -> None:
    request = tiny.request("learns", epochs=8, lr=1e-2, checkpoint_every=100)
    summary = whole_run(request)
    assert summary is not None
    assert summary["loss_after"] < 0.5 * summary["loss_before"]
    assert summary["accuracy_after"][0] > 5 * max(0.02, summary["accuracy_before"][0])
    assert summary == Run(request.run).summary()
    drafter = load_sglang(
        Run(request.run).fetch_drafter(tmp_path / "d"), read_verifier_weights(tiny.verifier).embedding_VD
    )
    assert drafter.config.capture_layers == (1, 3, 4)
    lines = [json.loads(line) for line in Run(request.run).store.get("metrics.jsonl").decode().splitlines()]
    assert [line["update"] for line in lines] == list(range(summary["updates"]))
    assert summary["tokens"] == sum(line["tokens"] for line in lines)


@pytest.mark.parametrize("mode", ["initialised", "frozen"])
def test_a_head_of_the_verifiers_rows(tiny: Tiny, mode: str) -> None:
    request = tiny.request(mode, {"lm_head": mode}, epochs=1)
    verifier = read_verifier_weights(tiny.verifier)
    drafter = Session(request, Team()).trainer.drafter
    rows = verifier.lm_head_VD[torch.from_numpy(drafter.draft_vocab.target_ids)]
    assert torch.equal(drafter.lm_head.weight, rows)
    assert whole_run(request) is not None
    assert torch.equal(exported(request)["lm_head.weight"], rows) == (mode == "frozen")


def test_a_run_stopped_and_resumed_ends_in_the_same_bits(tiny: Tiny) -> None:
    undisturbed, cut = tiny.request("whole"), tiny.request("cut", checkpoint_every=3)
    whole_run(undisturbed)
    for updates in (2, 5):
        assert whole_run(cut, stop=after(updates)) is None
    assert Run(cut.run).summary() is None
    summary = whole_run(cut)
    assert summary is not None
    assert summary["resumed"] == 2
    ours, theirs = exported(cut), exported(undisturbed)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    same = ("update", "epoch", "loss", "accuracy", "positions", "lr", "grad_norm", "tokens", "padding")
    first, second = (
        [
            {key: json.loads(line)[key] for key in same}
            for line in Run(one.run).store.get("metrics.jsonl").decode().splitlines()
        ]
        for one in (undisturbed, cut)
    )
    assert first == second


def test_a_run_that_falls_back_behind_a_damaged_checkpoint_ends_in_the_same_bits(tiny: Tiny) -> None:
    undisturbed, cut = tiny.request("whole2"), tiny.request("damaged", checkpoint_every=3)
    whole_run(undisturbed)
    whole_run(cut, stop=after(7))
    (Path(cut.run) / "checkpoints/00000007/optimizer.safetensors").write_bytes(b"rubbish")
    summary = whole_run(cut)
    assert summary is not None
    ours, theirs = exported(cut), exported(undisturbed)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_updates_that_are_not_finite_change_nothing_and_several_in_a_row_end_the_run(tiny: Tiny) -> None:
    session = Session(tiny.request("nan"), Team())
    trainer = session.trainer
    from drafter.batch import pack

    parts, _ = session._batches(0)
    batches = [pack(part, [session.sources.dataset.read(int(row)) for row in part]) for part in parts]
    weight = trainer.trained["fc.weight"]
    before = {name: one.detach().clone() for name, one in trainer.trained.items()}

    def diverged() -> Any:
        kept = weight.detach()[0, 0].clone()
        weight.detach()[0, 0] = math.inf
        try:
            return trainer.update(batches, 1e-3)
        finally:
            weight.detach()[0, 0] = kept

    assert diverged().skipped
    assert all(torch.equal(before[name], one) for name, one in trainer.trained.items())
    assert not trainer.update(batches, 1e-3).skipped  # and the count in a row starts over
    for _ in range(4):
        diverged()
    with pytest.raises(DrafterError, match="5 updates in a row .* training.lr"):
        diverged()
    assert trainer.skipped == 6


@pytest.mark.parametrize("where", ["features that no counted row reads", "a final state that gives no loss"])
def test_a_state_that_is_not_finite_is_found_wherever_it_is(where: str) -> None:
    drafter = small_drafter()
    batch = small_batch(drafter, [9, 14], masked=0.0)
    head = small_head(drafter)
    if where.startswith("features"):
        batch.features[8, 3] = math.nan  # of the last token: only gradients see it
    else:
        batch.final[3] = math.nan  # its likeliest token seems to be 0, which is outside the draft vocabulary
        assert not head.in_draft_V[0]

    def trainer(bad_shards: str) -> Trainer:
        settings = TrainingSection(dtype="float32", bad_shards=bad_shards)
        return Trainer(drafter, head, DrafterSection(ttt_steps=3), settings, Team(), lambda row: f"sequence {row}")

    packed = PackedBatch(*batch.parts()[:4], lengths=(9, 14), rows=(5, 6))
    with pytest.raises(DrafterError, match="sequence 5: expected finite states"):
        trainer("stop").update([packed], 1e-3)
    found = trainer("skip").update([packed], 1e-3)
    assert not found.skipped
    assert found.positions == 14 - 2
    assert all(bool(one.isfinite().all()) for one in drafter.parameters())


def test_recomputing_the_mlp_changes_nothing(tiny: Tiny) -> None:
    plain, frugal = (tiny.request(f"recompute-{on}", epochs=1, recompute=on) for on in (False, True))
    for request in (plain, frugal):
        whole_run(request)
    assert all(torch.equal(exported(frugal)[name], one) for name, one in exported(plain).items())


@pytest.mark.slow
def test_a_compiled_layer_learns_the_same(tiny: Tiny) -> None:
    plain, compiled = (tiny.request(f"compile-{on}", epochs=1, compile=on) for on in (False, True))
    for request in (plain, compiled):
        whole_run(request)
    np.testing.assert_allclose(losses(compiled), losses(plain), rtol=1e-3)


def acceptance_trainer(kind: str) -> Trainer:
    drafter = small_drafter()
    section, settings = DrafterSection(ttt_steps=3, loss=kind), TrainingSection(dtype="float32")
    return Trainer(drafter, small_head(drafter), section, settings, Team())


@torch.no_grad()
def by_hand(trainer: Trainer, packed: PackedBatch, accepted: Any = None) -> Loss:
    """With the weights as they are, and the verifier asked anew."""
    parts = packed.token_ids_T, packed.loss_mask_T, packed.features_TF, packed.final_TD, packed.lengths
    kind = trainer.section.loss
    return ttt_loss(trainer.drafter, trainer.head, *parts, steps=3, kind=kind, accepted_K=accepted)


@pytest.mark.parametrize("kind", ACCEPTANCE)
def test_losses_that_look_at_acceptance_ask_the_whole_vocabulary(kind: str) -> None:
    trainer, batch = acceptance_trainer(kind), small_batch(small_drafter(), [12, 9], masked=0.0)
    packed = PackedBatch(*batch.parts()[:4], (12, 9), (0, 1))
    for _ in range(2):  # asked, then remembered
        assert trainer.evaluate([packed]).loss == pytest.approx(float(by_hand(trainer, packed).loss))


def test_the_hybrid_loss_weighs_by_the_update_before_however_a_batch_is_cut() -> None:
    batch = small_batch(small_drafter(), [12, 9], masked=0.0)
    tensors, lengths = batch.parts()[:4], batch.lengths
    (whole,) = packed = [PackedBatch(*tensors, tuple(lengths), (0, 1))]
    parts = enumerate(zip(*(one.split(lengths) for one in tensors), strict=True))
    cut = [PackedBatch(*part, (lengths[row],), (row,)) for row, part in parts]
    one, other = acceptance_trainer("lk_hybrid"), acceptance_trainer("lk_hybrid")
    assert one.accepted is None
    for _ in range(3):
        expected = by_hand(one, whole, one.accepted)
        assert (expected.learnt < expected.positions).all()
        found = one.update(packed, 1e-2)
        assert found.loss == pytest.approx(float(expected.loss), rel=1e-5)
        assert other.update(cut, 1e-2).loss == pytest.approx(found.loss, rel=1e-5)
        np.testing.assert_allclose(one.accepted, expected.accepted / expected.learnt, rtol=1e-5)
        np.testing.assert_allclose(one.accepted, other.accepted, rtol=1e-4)
    before = one.accepted
    # Held-out losses can be compared: each row by its own acceptance.
    own, weighed = (float(by_hand(one, whole, accepted).loss) for accepted in (None, before))
    assert one.evaluate(packed).loss == pytest.approx(own, rel=1e-5)
    assert own != pytest.approx(weighed, rel=1e-3)
    assert one.accepted == before
    resumed = acceptance_trainer("lk_hybrid")
    resumed.restore(one.snapshot())
    assert resumed.accepted == before
    assert resumed.update(packed, 1e-2).loss == one.update(packed, 1e-2).loss


def test_a_step_that_nothing_was_learnt_at_yet_is_weighed_by_its_own_rows() -> None:
    trainer = acceptance_trainer("lk_hybrid")
    short = small_batch(small_drafter(), [3] * 8, masked=0.0)  # tokens for the first step only
    trainer.update([PackedBatch(*short.parts()[:4], (3,) * 8, tuple(range(8)))], 1e-3)
    assert trainer.accepted is not None
    first, *others = trainer.accepted
    assert 0 < first < 1
    assert np.isnan(others).all()
    batch = small_batch(small_drafter(), [12, 9], masked=0.0)
    packed = PackedBatch(*batch.parts()[:4], (12, 9), (8, 9))
    steps = [by_hand(trainer, packed, accepted).cross_entropy for accepted in (None, trainer.accepted, (first,) * 3)]
    own, mixed, all_given = steps
    torch.testing.assert_close(mixed, torch.cat([all_given[:1], own[1:]]))
    assert trainer.update([packed], 1e-3).loss == pytest.approx(
        float((mixed * 0.8 ** torch.arange(3)).sum() / (10 + 7)), rel=1e-5
    )
    assert not np.isnan(trainer.accepted).any()


def test_the_hybrid_loss_stopped_and_resumed_ends_in_the_same_bits(tiny: Tiny) -> None:
    undisturbed, cut = (
        tiny.request(name, {"loss": "lk_hybrid"}, checkpoint_every=3) for name in ("hybrid", "hybrid-cut")
    )
    assert whole_run(undisturbed) is not None
    assert whole_run(cut, stop=after(4)) is None
    (state,) = Path(cut.run).glob("checkpoints/*4/state.json")
    assert len(json.loads(state.read_text())["accepted"]) == cut.drafter.ttt_steps
    assert whole_run(cut) is not None
    assert all(torch.equal(exported(cut)[name], one) for name, one in exported(undisturbed).items())
    np.testing.assert_array_equal(losses(cut), losses(undisturbed))


@pytest.mark.slow
def test_muon_learns_and_resumes_in_the_same_bits(tiny: Tiny) -> None:
    undisturbed, cut = (
        tiny.request(name, epochs=8, optimizer="muon", lr=2e-2, checkpoint_every=3) for name in ("muon", "muon-cut")
    )
    summary = whole_run(undisturbed)
    assert summary is not None
    assert summary["loss_after"] < 0.8 * summary["loss_before"]
    assert whole_run(cut, stop=after(5)) is None
    whole_run(cut)
    assert all(torch.equal(exported(cut)[name], one) for name, one in exported(undisturbed).items())


def test_a_damaged_shard_ends_the_run_with_its_name_or_is_skipped_and_counted(tiny: Tiny, tmp_path: Path) -> None:
    import shutil

    from storage import layout
    from storage.errors import ShardCorrupt

    shutil.copytree(f"{tiny.root}/dataset", tmp_path / "dataset")
    path = tmp_path / "dataset" / layout.shard_key(1)
    data = bytearray(path.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    path.write_bytes(data)
    stops = changed(tiny.request("bad-stop", epochs=1), dataset=str(tmp_path / "dataset"))
    with pytest.raises(ShardCorrupt, match=layout.shard_key(1)):
        whole_run(stops)
    skips = changed(tiny.request("bad-skip", epochs=1, bad_shards="skip"), dataset=str(tmp_path / "dataset"))
    summary = whole_run(skips)
    assert summary is not None
    assert summary["bad_sequences"] > 0
    lines = [json.loads(line) for line in Run(skips.run).store.get("metrics.jsonl").decode().splitlines()]
    assert sum(line.get("bad_sequences", 0) for line in lines) == summary["bad_sequences"]


def test_training_goes_on_while_a_checkpoint_is_written(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    request = tiny.request("async", epochs=2, checkpoint_every=3, evaluate_every=1000)
    claim(request, open_sources(request))
    session = Session(request, Team())
    save, during = Checkpoints.save, []

    def slow(self: Checkpoints, update: int, *rest: Any) -> None:
        until = time.monotonic() + (30 if update < session.total else 0)
        while session.progress.update <= update and time.monotonic() < until:
            time.sleep(0.01)
        save(self, update, *rest)
        during.append((update, session.progress.update))

    monkeypatch.setattr(Checkpoints, "save", slow)
    summary = session.run_to_end(lambda: False)
    assert summary is not None
    assert [update for update, _ in during] == [3, 6, 9, summary["updates"]][: len(during)]  # one after another
    assert any(after_it > update for update, after_it in during)
    # What was stored is what was there when it was asked for, not what training made of it since.
    run, shapes = Run(request.run), session.trainer.shapes()
    newest = run.checkpoints.newest(shapes)
    assert newest == summary["updates"]
    kept = run.checkpoints.load(newest, shapes)[1].model
    assert torch.equal(kept["fc.weight"], session.trainer.trained["fc.weight"])


def test_every_update_says_what_loading_took(tiny: Tiny) -> None:
    request = tiny.request("telemetry", epochs=1)
    whole_run(request)
    lines = [json.loads(line) for line in Run(request.run).store.get("metrics.jsonl").decode().splitlines()]
    assert all(0 <= line["wait_share"] <= 1 and line["padding"] == 0 and line["tokens"] > 0 for line in lines)
    assert sum(line["fetched_bytes"] for line in lines) > 0
    assert sum(line["decode_s"] for line in lines) > 0


def test_the_rate_rises_and_falls() -> None:
    settings = TRAINING.model_copy(update={"lr": 1.0, "warmup": 0.1, "min_lr_share": 0.1})
    rates = [learning_rate(update, 100, settings) for update in range(100)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10] == 1.0
    assert all(earlier > later for earlier, later in zip(rates[10:], rates[11:], strict=False))
    assert 0.1 < rates[-1] < 0.11
    assert learning_rate(0, 1, settings.model_copy(update={"warmup": 0.0})) == 1.0


@pytest.mark.parametrize(
    ("dtype", "times", "said"), [("bfloat16", 50.0, True), ("bfloat16", 0.3, False), ("float32", 50.0, False)]
)
def test_a_cpu_that_is_slow_in_bfloat16_is_told_of(
    tiny: Tiny, dtype: str, times: float, said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("drafter.trainer.bf16_over_fp32", lambda: times)  # what this very CPU is good at is not known
    whole_run(tiny.request(f"told-{dtype}-{times}", epochs=1, dtype=dtype))
    assert ("50 times as long for a product in bfloat16" in caplog.text) == said


def test_bfloat16_learns_too(tiny: Tiny) -> None:
    summary = whole_run(tiny.request("bf16", epochs=8, lr=1e-2, dtype="bfloat16", checkpoint_every=100))
    assert summary is not None
    assert summary["loss_after"] < 0.8 * summary["loss_before"]


def test_a_run_is_of_one_thing_and_says_what_differs(tiny: Tiny) -> None:
    request = tiny.request("same", epochs=1)
    whole_run(request)
    assert claim(request, open_sources(request)) == Run(request.run).summary()
    other_pieces = tiny.request("same", epochs=1, workers=2, micro_batch_tokens=160, checkpoint_every=2)
    assert claim(other_pieces, open_sources(other_pieces)) is not None
    other = changed(tiny.request("same", {"ttt_steps": 3}, epochs=1, lr=0.5), held_out=0.3)
    with pytest.raises(DrafterError) as refused:
        claim(other, open_sources(other))
    line = str(refused.value)
    assert "drafter.ttt_steps: 2 -> 3" in line
    assert "training.lr: 0.003 -> 0.5" in line
    assert "evaluation.held_out: 0.2 -> 0.3" in line
    assert "training.run=<other name>" in line
    assert "\n" not in line
    assert claim(other, open_sources(other), fresh=True) is None
    assert Run(request.run).store.sizes().keys() == {"run.json", "owner.json"}


def test_a_driver_that_another_took_over_from_ends_in_one_line(tiny: Tiny) -> None:
    first, second = (tiny.request("owned", checkpoint_every=3) for _ in range(2))

    def meanwhile(act: Any) -> Any:
        asked = iter([None, act])
        return lambda: bool((next(asked, None) or (lambda: None))())

    def takes_over(fresh: bool) -> Any:
        return lambda: claim(second, open_sources(second), fresh=fresh)

    with pytest.raises(DrafterError, match=r"owner\.json: .* another driver has taken over") as refused:
        whole_run(first, stop=meanwhile(takes_over(fresh=False)))
    assert "\n" not in str(refused.value)
    assert Run(first.run).checkpoints.updates() == []
    with pytest.raises(DrafterError, match="another driver has taken over"):
        train(first)  # as its workers would, started again
    with pytest.raises(DrafterError, match=r"owner\.json"):
        whole_run(first, stop=meanwhile(takes_over(fresh=True)))
    run = Run(first.run)
    old = run.id()
    claim(first, open_sources(first), fresh=True)
    with pytest.raises(DrafterError, match=r"run\.json: id: .* started over by another driver"):
        run.require_own(first.owner, old)
    assert whole_run(second) is not None


def test_the_last_checkpoint_is_written_once_and_holds_the_last_evaluation(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = tiny.request("once", checkpoint_every=1, keep_checkpoints=1, epochs=1)
    saved: list[int] = []
    save = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda self, at, *rest: (saved.append(at), save(self, at, *rest))[1])
    summary = whole_run(request)
    assert summary is not None
    assert saved == list(range(1, summary["updates"] + 1))
    Run(request.run).store.delete("summary.json")  # killed between the two
    again = whole_run(request)
    assert again is not None
    assert again["evaluations"] == summary["evaluations"]
    assert len(saved) == summary["updates"]


def test_fresh_deletes_what_was_measured_too(tiny: Tiny) -> None:
    request = tiny.request("measured", epochs=1)
    claim(request, open_sources(request))
    for name in ("evaluation.json", "evaluation.svg", "serve.json"):
        Run(request.run).store.put(name, b"{}")
    claim(request, open_sources(request), fresh=True)
    assert Run(request.run).store.sizes().keys() == {"run.json", "owner.json"}


def test_on_object_storage(s3_server: str, tmp_path: Path) -> None:
    import uuid

    tiny = make_tiny(f"s3://statehouse/{uuid.uuid4().hex}", tmp_path)
    request = tiny.request("run", epochs=1)
    assert whole_run(request, stop=after(3)) is None
    summary = whole_run(request)
    assert summary is not None
    assert summary["resumed"] == 1
    assert {"run.json", "metrics.jsonl", "summary.json", "drafter/config.json", "drafter/model.safetensors"} < set(
        Run(request.run).store.sizes()
    )


def test_what_does_not_belong_together_is_refused_in_one_line(tiny: Tiny, tmp_path: Path) -> None:
    request = tiny.request("refused")

    def refused(error: type[StatehouseError], message: str, **fields: Any) -> None:
        with pytest.raises(error, match=message) as caught:
            one = changed(request, **fields)
            open_sources(one)
            Session(one, Team())
        assert "\n" not in str(caught.value)

    refused(DatasetMissing, "no dataset", dataset=str(tmp_path / "nothing"))
    refused(DrafterError, "no draft vocabulary; make one with .*coverage", vocabulary=str(tmp_path / "nothing"))
    make_vocabulary(str(tmp_path / "other"), 999)
    refused(
        ContractMismatch,
        "another verifier: vocab_size: expected 1000, .* found 999",
        vocabulary=str(tmp_path / "other"),
    )
    make_vocabulary(str(tmp_path / "tuned"), verifier={"weights_hash": "x", "tokenizer_hash": "t"})
    refused(ContractMismatch, "another verifier: weights_hash", vocabulary=str(tmp_path / "tuned"))
    make_dataset(str(tmp_path / "silent"), tiny.verifier, make_sequences(loss=False))
    refused(DrafterError, "no loss tokens", dataset=str(tmp_path / "silent"))
    make_dataset(str(tmp_path / "finetuned"), tiny.verifier, weights_hash="x")
    refused(ContractMismatch, "weights_hash: expected x", dataset=str(tmp_path / "finetuned"))
    refused(
        DrafterError,
        "training.micro_batch_tokens is 20",
        training=TRAINING.model_copy(update={"micro_batch_tokens": 20}),
    )
