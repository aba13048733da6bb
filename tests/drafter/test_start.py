"""Training starts from another drafter only where the two read the same states, and says so before a run is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dense import small_config, small_drafter

from drafter import checkpoint
from drafter.errors import DrafterError
from drafter.export import CONFIG, TENSORS, export_sglang
from drafter.run import Run
from drafter.speculators import export_speculators
from drafter.start import check_start, load_start, start_from
from storage.local_store import LocalStore

LAYERS = "capture_layers: expected .0, 2, 6., found .1, 3, 4.; extract a dataset with extraction.capture_layers="


def rewritten(folder: Path, without: tuple[str, ...] = (), **changed: Any) -> None:
    config = json.loads((folder / CONFIG).read_text()) | changed
    (folder / CONFIG).write_text(json.dumps({name: one for name, one in config.items() if name not in without}))


@pytest.mark.parametrize("kind", ["sglang", "speculators"])
def test_a_drafter_of_other_layers_is_no_start(tmp_path: Path, kind: str) -> None:
    if kind == "sglang":
        export_sglang(small_drafter(1), tmp_path)
    else:
        export_speculators(small_drafter(1), tmp_path, verifier="them")
    other = small_drafter(2, capture_layers=(0, 2, 6))
    for where in (str(tmp_path), f"file://{tmp_path}"):
        with pytest.raises(DrafterError, match=LAYERS):
            load_start(where, other)
        with pytest.raises(DrafterError, match=LAYERS):
            check_start(where, other.config)
        check_start(where, small_config(draft_vocab_size=20))
        own = small_drafter(2)
        assert start_from(own, load_start(where, own)).rows_new < 11


def test_layers_that_a_config_leaves_open_are_the_servers_or_else_ours(tmp_path: Path) -> None:
    export_sglang(small_drafter(1), tmp_path)
    rewritten(tmp_path, ("statehouse", "eagle_config", "eagle_aux_hidden_state_layer_ids"))
    ours = small_drafter(2, capture_layers=(0, 2, 6))
    assert load_start(str(tmp_path), ours).config.capture_layers == (0, 2, 6)
    eight = {"num_hidden_layers": 8, "model_type": "llama"}
    assert load_start(str(tmp_path), small_drafter(2), eight).config.capture_layers == (1, 3, 4)
    with pytest.raises(DrafterError, match="expected .0, 2, 6., found .1, 3, 4."):
        load_start(str(tmp_path), ours, eight)


def test_layer_ids_are_read_as_the_verifiers_family_counts_them(tmp_path: Path) -> None:
    export_sglang(small_drafter(1), tmp_path)
    rewritten(
        tmp_path,
        ("statehouse", "eagle_aux_hidden_state_layer_ids"),
        eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
    )
    deepseek = {"model_type": "deepseek_v3", "num_hidden_layers": 8}
    assert load_start(str(tmp_path), small_drafter(2), deepseek).config.capture_layers == (1, 3, 4)
    with pytest.raises(DrafterError, match="expected .1, 3, 4., found .2, 4, 5."):
        load_start(str(tmp_path), small_drafter(2), {"model_type": "llama"})


def test_what_is_no_drafter_is_refused_without_reading_tensors(tmp_path: Path) -> None:
    config = small_config()
    for where in (str(tmp_path / "none"), str(tmp_path)):
        with pytest.raises(DrafterError, match=str(tmp_path)):
            check_start(where, config)
    export_sglang(small_drafter(1), tmp_path)
    (tmp_path / TENSORS).unlink()
    for where in (str(tmp_path), f"file://{tmp_path}"):
        with pytest.raises(DrafterError, match=f"{tmp_path}: expected a drafter's folder, found no {TENSORS}"):
            check_start(where, config)
    export_sglang(small_drafter(1, intermediate_size=32), tmp_path)
    with pytest.raises(DrafterError, match="intermediate_size: expected 24, found 32; give drafter.config"):
        check_start(str(tmp_path), config)


def test_weights_come_in_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request for 4 GB would not end within a store's time limit."""
    monkeypatch.setattr(checkpoint, "RANGE_BYTES", 4096)
    run, drafter = Run(str(tmp_path / "run")), small_drafter(1)
    run.put_drafter(drafter)
    whole, longest = LocalStore.get, []

    def get(store: LocalStore, key: str) -> bytes:
        longest.append(len(data := whole(store, key)))
        return data

    monkeypatch.setattr(LocalStore, "get", get)
    fetched = run.fetch_drafter(tmp_path / "copy")
    assert (fetched / TENSORS).read_bytes() == (tmp_path / "run/drafter" / TENSORS).read_bytes()
    assert load_start(f"file://{tmp_path}/run/drafter", drafter).config == drafter.config
    assert max(longest) <= 4096 < (fetched / TENSORS).stat().st_size
