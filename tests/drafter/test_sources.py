"""What is trained on: several datasets by weight, filters, long sequences by policy, and runs that name what they read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tiny_training import Tiny, changed, make_dataset, make_sequences, make_verifier

from drafter.claim import claim
from drafter.errors import DrafterError
from drafter.recipe import TrainingSection
from drafter.run import Run
from drafter.session import Session, train
from drafter.sources import Request, open_sources
from drafter.team import Team
from storage import open_dataset
from storage.errors import ContractMismatch, StatehouseError


@pytest.fixture(scope="module")
def second(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = str(tmp_path_factory.mktemp("second") / "dataset")
    make_dataset(uri, tiny.verifier, make_sequences(count=20, seed=9))
    return uri


def with_training(tiny: Tiny, run: str = "mixed", **training: Any) -> Request:
    settings = tiny.request().training.model_dump() | training
    return changed(tiny.request(run), training=TrainingSection.model_validate(settings))


def test_two_datasets_by_weight(tiny: Tiny, second: str) -> None:
    request = with_training(tiny, datasets=[{"uri": second, "weight": 2}], epochs=2)
    session = Session(request, Team())
    items, own = session.sources.items, session.sources.training_items
    assert session.sources.mixture.datasets[1].uri == second
    for epoch in range(2):
        updates = range(epoch * session.per_epoch, (epoch + 1) * session.per_epoch)
        seen = np.concatenate([part for update in updates for part in session._batches(update)[0]])
        times = np.bincount(seen, minlength=len(items.row))
        assert (times[own] == 1 + items.part[own]).all()
        assert not times[session.sources.held_items].any()


def test_a_run_on_a_mixture_trains_and_names_its_datasets(tiny: Tiny, second: str) -> None:
    request = with_training(tiny, "named", datasets=[{"uri": second, "weight": 0.5}], epochs=1)
    claim(request, open_sources(request))
    assert train(request) is not None
    document = json.loads(Run(request.run).store.get("run.json"))
    prints = [open_dataset(one).fingerprint for one in (request.dataset, second)]
    assert document["identity"]["datasets"] == {prints[0]: 1.0, prints[1]: 0.5}
    assert [one["uri"] for one in document["provenance"]["datasets"]] == [request.dataset, second]
    assert document["provenance"]["draft_vocabulary"]["uri"] == request.vocabulary
    other = with_training(tiny, "named", datasets=[{"uri": second, "weight": 1}], epochs=1)
    with pytest.raises(DrafterError, match=r"datasets\.\w+: 0.5 -> 1.0"):
        claim(other, open_sources(other))


def test_a_run_is_not_carried_on_with_its_datasets_in_another_order(tiny: Tiny, second: str, tmp_path: Path) -> None:
    third = str(tmp_path / "third")
    make_dataset(third, tiny.verifier, make_sequences(count=6, seed=11))
    one, other = (
        with_training(tiny, "ordered", datasets=[{"uri": uri} for uri in uris])
        for uris in ((second, third), (third, second))
    )
    claim(one, open_sources(one))
    claim(one, open_sources(one))
    with pytest.raises(DrafterError, match=r"order of training\.datasets: \w{12}\.\.\., .* -> "):
        claim(other, open_sources(other))


def test_the_recipes_own_dataset_can_be_weighed_by_a_relative_folder_too(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny.root)
    request = with_training(tiny, datasets=[{"uri": "dataset/", "weight": 0.5}])
    sources = open_sources(request)
    assert sources.weights == (0.5,)
    assert Session(request, Team()).per_epoch < Session(with_training(tiny), Team()).per_epoch


def test_a_dataset_that_says_nothing_of_the_verifier_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    for name, fields, said in (
        (
            "nothing",
            {"final_state": "absent"},
            "expected final states, or a stored top-k .*found none with teacher none",
        ),
        ("fewer", {"top_k": 4}, None),
        ("more", {"top_k": 8}, None),
    ):
        make_dataset(str(tmp_path / name), tiny.verifier, make_sequences(seed=len(name)), **fields)
        request = changed(tiny.request(name), dataset=str(tmp_path / name))
        if said is None:
            open_sources(request)
            continue
        with pytest.raises(DrafterError, match=said):
            open_sources(request)
    settings = tiny.request().training.model_dump() | {"datasets": [{"uri": str(tmp_path / "more")}]}
    mixed = changed(
        tiny.request("mixed"), dataset=str(tmp_path / "fewer"), training=TrainingSection.model_validate(settings)
    )
    with pytest.raises(DrafterError, match=r"expected one top-k for all datasets, found topk\(4\) of .*topk\(8\) of"):
        open_sources(mixed)


def test_filters_restrict_what_is_trained_on_and_held_out(tiny: Tiny) -> None:
    sources = open_sources(with_training(tiny, filter={"sources": ["code"], "min_length": 15, "max_length": 30}))
    rows = sources.mixture.sequences
    assert set(rows["source"].to_pylist()) == {"code"}
    lengths = rows["length"].to_numpy()
    assert lengths.min() >= 15
    assert lengths.max() <= 30
    assert len(sources.held_items)


@pytest.mark.parametrize("policy", ["drop", "split"])
def test_long_sequences_are_dropped_or_split(tiny: Tiny, policy: str) -> None:
    lengths = open_dataset(f"{tiny.root}/dataset").sequences["length"].to_numpy()
    sources = open_sources(with_training(tiny, max_length=20, long_sequences=policy))
    items = sources.items
    assert items.length.max() <= 20
    if policy == "drop":
        assert len(items.row) == (lengths <= 20).sum()
    else:
        assert items.length.sum() == lengths.sum()
        held = set(items.row[sources.held_items].tolist())
        assert not held & set(items.row[sources.training_items].tolist())  # no piece of a held-out sequence
    request = with_training(tiny, f"long-{policy}", max_length=20, long_sequences=policy, epochs=1)
    claim(request, open_sources(request))
    assert train(request) is not None


def test_what_cannot_be_mixed_is_one_line(tiny: Tiny, tmp_path: Path) -> None:
    def refused(error: type[StatehouseError], message: str, **training: Any) -> None:
        with pytest.raises(error, match=message) as caught:
            open_sources(with_training(tiny, **training))
        assert "\n" not in str(caught.value)

    refused(
        DrafterError,
        "training.filter.sources: expected some of chat, code, found 'poems'",
        filter={"sources": ["poems"]},
    )
    refused(StatehouseError, "no sequence of .* is left by its filter", filter={"min_length": 1000})
    refused(DrafterError, "training.max_length is 4, and all 48 sequences are longer", max_length=4)
    shutil.copytree(f"{tiny.root}/dataset", tmp_path / "copy")
    refused(StatehouseError, "no sequence of 48 is new", datasets=[{"uri": str(tmp_path / "copy")}])
    make_dataset(str(tmp_path / "other"), make_verifier(tmp_path / "verifier", seed=3), make_sequences(4, 5))
    refused(ContractMismatch, "weights_hash", datasets=[{"uri": str(tmp_path / "other")}])


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"min_workers": 3, "workers": 2}, "min_workers is 3, above workers, 2"),
        ({"max_length": 100, "micro_batch_tokens": 80}, "max_length is 100, above micro_batch_tokens"),
        ({"optimizer": "muon", "parallel": "shard"}, "muon needs whole matrices"),
        ({"filter": {"min_length": 9, "max_length": 8}}, "min_length is 9, above max_length, 8"),
        ({"betas": (0.9, 1)}, "less than 1"),
        ({"seed": 1 << 64}, "less than 9223372036854775808"),
        ({"datasets": [{"uri": "s3://a/b", "weight": 1e18}]}, "less than or equal to 1000"),
        ({"loader": {"cache": ""}}, "at least 1 character"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(training: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainingSection(**training)
