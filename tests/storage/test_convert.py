"""Features of SpecForge and speculators, both ways. What we write loads in their own classes where these are installed.

The files are made in the documented formats; where $STATEHOUSE_PEERS_PYTHON names a Python with both projects, theirs are
made and ours are loaded by their own code (in another process: their pins are not ours).
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tiny import HIDDEN, LAYERS, VOCAB, contract, fill, planned, sealed, sequences

from storage import open_dataset
from storage.cli import main
from storage.convert.norm import FinalNorm
from storage.convert.safetensors_file import read_tensor, to_safetensors
from storage.convert.specforge import export_specforge, import_specforge
from storage.convert.speculators import export_speculators, import_speculators
from storage.errors import ContractMismatch, PlanConflict, ShardCorrupt, StatehouseError
from storage.objects import LocalStore, open_store
from storage.seal import seal_dataset
from storage.shard import to_bits
from storage.verify import verify

torch = pytest.importorskip("torch", reason="SpecForge's files are torch files")
PEERS = os.environ.get("STATEHOUSE_PEERS_PYTHON")
with_peers = pytest.mark.skipif(
    not PEERS, reason="STATEHOUSE_PEERS_PYTHON names no Python with specforge and speculators"
)


def contract_file(folder: Path, **changes: object) -> str:
    path = folder / "contract.json"
    path.write_text(contract(**changes).model_dump_json())
    return str(path)


def states(length: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return to_bits((random.standard_normal((length, LAYERS, HIDDEN)) * 3).astype(np.float32))


def tensor(bits: np.ndarray) -> object:
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)


def write_specforge(folder: Path, count: int = 12) -> dict[str, np.ndarray]:
    """{sequence's first tokens: states}; every third file is gzipped, in folders as SpecForge makes them."""
    kept = {}
    for number in range(count):
        random, length = np.random.default_rng(number), 20 + 7 * number
        ids, bits = random.integers(0, VOCAB, length), states(length, number)
        mask = np.arange(length) >= 5
        data = {
            "input_ids": torch.from_numpy(ids),
            "loss_mask": torch.from_numpy(mask.astype(np.int64)),
            "aux_hidden_state": tensor(bits[:, :-1].reshape(1, length, -1)),
            "hidden_state": tensor(bits[None, :, -1]),
        }
        path = folder / f"rows_{number // 5 * 5}" / f"data_{number}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(data, path)
        if number % 3 == 0:
            path.with_suffix(".ckpt.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
        kept[str(ids.tolist())] = bits
    return kept


def assert_holds(uri: str, kept: dict[str, np.ndarray]) -> None:
    dataset = open_dataset(uri)
    assert len(dataset) == len(kept)
    for one in dataset.stream():
        assert (one.hidden.view(np.uint16) == kept[str(one.token_ids.tolist())]).all()
        assert one.loss_mask.tolist() == (np.arange(len(one.token_ids)) >= 5).tolist()
    assert verify(dataset.store, full=True).ok


def test_specforge_features_become_a_dataset_bit_for_bit(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = write_specforge(tmp_path / "features")
    main(["convert", "specforge", str(tmp_path / "features"), uri, "--contract", contract_file(tmp_path)])
    assert "12 sequences" in capsys.readouterr().out
    assert_holds(uri, kept)
    before = open_dataset(uri).fingerprint
    done = import_specforge(tmp_path / "features", uri, contract=uri)  # again: everything is there
    assert done.seal.fingerprint == before


def test_a_conversion_that_was_cut_off_is_carried_on(tmp_path: Path) -> None:
    kept = write_specforge(tmp_path / "features", 40)
    uri, terms = str(tmp_path / "dataset"), contract_file(tmp_path)

    def stop(_tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_specforge(tmp_path / "features", uri, contract=terms, step=stop)
    first = (tmp_path / "dataset/hidden/c/0/0/0/0").stat().st_mtime_ns
    import_specforge(tmp_path / "features", uri, contract=terms)
    assert (tmp_path / "dataset/hidden/c/0/0/0/0").stat().st_mtime_ns == first
    assert_holds(uri, kept)
    write_specforge(tmp_path / "more", 41)
    with pytest.raises(PlanConflict):
        import_specforge(tmp_path / "more", uri, contract=terms)


def test_truncated_files_are_named_or_left_out_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = write_specforge(tmp_path / "features")
    bad = [tmp_path / "features/rows_0/data_1.ckpt", tmp_path / "features/rows_0/data_3.ckpt.gz"]
    for path in bad:
        path.write_bytes(path.read_bytes()[:-200])
    terms, uri = contract_file(tmp_path), str(tmp_path / "dataset")
    with pytest.raises(ShardCorrupt, match=r"data_1\.ckpt: cannot be read.*--skip-bad"):
        import_specforge(tmp_path / "features", uri, contract=terms)
    assert not (tmp_path / "dataset").exists()
    main(["convert", "specforge", str(tmp_path / "features"), uri, "--contract", terms, "--skip-bad", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert sorted(document["skipped"]) == sorted(map(str, bad))
    assert len(open_dataset(uri)) == len(kept) - 2


def test_files_that_do_not_fit_the_contract_are_refused(tmp_path: Path) -> None:
    write_specforge(tmp_path / "features", 2)
    uri = str(tmp_path / "dataset")
    for changes, error, message in (
        ({"capture_layers": (1, 3)}, StatehouseError, r"aux_hidden_state has shape \[1, \d+, 192\]"),
        ({"hidden_size": 32}, StatehouseError, "correct the contract"),
        ({"final_state": "pre_norm"}, ContractMismatch, "after the last norm"),
        ({"vocab_size": 10}, StatehouseError, "outside the verifier's vocabulary of 10"),
    ):
        with pytest.raises(error, match=message):
            import_specforge(tmp_path / "features", uri, contract=contract_file(tmp_path, **changes))
    with pytest.raises(StatehouseError, match="do not say what their states are states of; give --contract"):
        import_specforge(tmp_path / "features", uri)
    (tmp_path / "contract.json").write_text('{"verifier": "x"}')
    with pytest.raises(StatehouseError, match="contract field config_hash"):
        import_specforge(tmp_path / "features", uri, contract=str(tmp_path / "contract.json"))


@pytest.mark.parametrize("compress", [False, True])
def test_to_specforge_and_back_is_the_same_dataset(tmp_path: Path, compress: bool) -> None:
    _, seal = sealed(str(tmp_path / "a"), sequences(20, 60))
    dataset = open_dataset(str(tmp_path / "a"))
    assert export_specforge(dataset, tmp_path / "features", compress=compress) == 20
    files = sorted(path.stat().st_mtime_ns for path in (tmp_path / "features").rglob("*.ckpt*"))
    export_specforge(dataset, tmp_path / "features", compress=compress)  # again: nothing is written
    assert sorted(path.stat().st_mtime_ns for path in (tmp_path / "features").rglob("*.ckpt*")) == files
    import_specforge(tmp_path / "features", str(tmp_path / "b"))  # statehouse.json has the contract
    one, two = dataset, open_dataset(str(tmp_path / "b"))
    assert two.sequences["id"].to_pylist() == one.sequences["id"].to_pylist()
    assert two.contract == one.contract
    for index in range(20):
        assert (one.read(index).hidden.view(np.uint16) == two.read(index).hidden.view(np.uint16)).all()
    path = next((tmp_path / "features").rglob("data_3.ckpt*"))
    path.write_bytes(next((tmp_path / "features").rglob("data_4.ckpt*")).read_bytes())
    with pytest.raises(ShardCorrupt, match=r"data_3\.ckpt.*does not hold sequence"):
        export_specforge(dataset, tmp_path / "features", compress=compress)
    assert seal.sequences == 20


def verifier_folder(folder: Path, seed: int = 5) -> tuple[Path, np.ndarray]:
    folder.mkdir(exist_ok=True)
    weight = np.random.default_rng(seed).uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-5}))
    (folder / "model.safetensors").write_bytes(to_safetensors({"model.norm.weight": to_bits(weight)}))
    return folder, to_bits(weight).view(ml_dtypes.bfloat16).astype(np.float32)


def normed(bits: np.ndarray, weight: np.ndarray) -> np.ndarray:
    x = bits.view(ml_dtypes.bfloat16).astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def pre_norm_dataset(uri: str) -> None:
    plan = planned(uri, sequences(20, 60), final_state="pre_norm")
    fill(uri, plan)
    seal_dataset(open_store(uri), plan)


def test_speculators_data_with_the_state_before_the_norm_is_kept_bit_for_bit_both_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pre_norm_dataset(str(tmp_path / "a"))
    main(["export", "speculators", str(tmp_path / "a"), str(tmp_path / "data")])
    assert "wrote 20 files" in capsys.readouterr().out
    bits, dtype = read_tensor(tmp_path / "data/hidden_states/hs_7.safetensors", "hidden_states")
    assert dtype == "BF16"
    assert (bits == open_dataset(str(tmp_path / "a")).read(7).hidden.view(np.uint16)).all()
    main(["convert", "speculators", str(tmp_path / "data"), str(tmp_path / "b")])
    one, two = open_dataset(str(tmp_path / "a")), open_dataset(str(tmp_path / "b"))
    assert one.sequences["id"].to_pylist() == two.sequences["id"].to_pylist()
    for index in range(20):
        assert (one.read(index).hidden.view(np.uint16) == two.read(index).hidden.view(np.uint16)).all()


def test_the_norm_is_applied_where_the_contract_wants_the_state_after_it(tmp_path: Path) -> None:
    pre_norm_dataset(str(tmp_path / "a"))
    export_speculators(open_dataset(str(tmp_path / "a")), tmp_path / "data")
    terms = contract_file(tmp_path)
    with pytest.raises(ContractMismatch, match="before the last norm, the contract says 'post_norm'; give --verifier"):
        import_speculators(tmp_path / "data", str(tmp_path / "b"), contract=terms)
    folder, weight = verifier_folder(tmp_path / "verifier")
    import_speculators(tmp_path / "data", str(tmp_path / "b"), contract=terms, verifier=str(folder))
    before, after = open_dataset(str(tmp_path / "a")), open_dataset(str(tmp_path / "b"))
    for index in range(20):
        x, y = before.read(index).hidden, after.read(index).hidden
        assert (x[:, :-1].view(np.uint16) == y[:, :-1].view(np.uint16)).all()
        assert y[:, -1].astype(np.float64) == pytest.approx(
            normed(x[:, -1].view(np.uint16), weight), rel=2**-8, abs=1e-30
        )


def test_what_is_exported_after_the_norm_gives_the_stored_state_under_their_norm(tmp_path: Path) -> None:
    pre_norm_dataset(str(tmp_path / "raw"))
    export_speculators(open_dataset(str(tmp_path / "raw")), tmp_path / "theirs")
    folder, weight = verifier_folder(tmp_path / "verifier")
    terms = contract_file(tmp_path)
    import_speculators(tmp_path / "theirs", str(tmp_path / "a"), contract=terms, verifier=str(folder))
    dataset = open_dataset(str(tmp_path / "a"))
    with pytest.raises(ContractMismatch, match="after the last norm, speculators' are before it; give --verifier"):
        export_speculators(dataset, tmp_path / "data")
    export_speculators(dataset, tmp_path / "data", verifier=str(folder))
    for index in range(20):
        bits, _ = read_tensor(tmp_path / f"data/hidden_states/hs_{index}.safetensors", "hidden_states")
        stored = dataset.read(index).hidden[:, -1].astype(np.float64)
        again = normed(np.ascontiguousarray(bits[:, -1]), weight)
        assert np.linalg.norm(again - stored, axis=-1) == pytest.approx(
            0, abs=0.01 * np.linalg.norm(stored, axis=-1).max()
        )
    other, _ = verifier_folder(tmp_path / "other", seed=6)
    with pytest.raises(StatehouseError, match="is --verifier the verifier of this dataset"):
        export_speculators(dataset, tmp_path / "wrong", verifier=str(other))


def test_rows_whose_file_is_of_another_request_truncated_or_missing_are_named(tmp_path: Path) -> None:
    pre_norm_dataset(str(tmp_path / "a"))
    export_speculators(open_dataset(str(tmp_path / "a")), tmp_path / "data")
    files = tmp_path / "data" / "hidden_states"
    files.joinpath("hs_2.safetensors").write_bytes(files.joinpath("hs_3.safetensors").read_bytes())
    files.joinpath("hs_5.safetensors").write_bytes(files.joinpath("hs_5.safetensors").read_bytes()[:-10])
    files.joinpath("hs_8.safetensors").unlink()
    with pytest.raises(ShardCorrupt, match=r"hs_2\.safetensors: holds the states of \d+ other tokens"):
        import_speculators(tmp_path / "data", str(tmp_path / "b"))
    done = import_speculators(tmp_path / "data", str(tmp_path / "b"), skip_bad=True)
    assert sorted(Path(path).name for path in done.skipped) == [f"hs_{n}.safetensors" for n in (2, 5, 8)]
    assert len(open_dataset(str(tmp_path / "b"))) == 17


def test_norms_that_are_not_plain_or_not_there_are_refused(tmp_path: Path) -> None:
    folder, _ = verifier_folder(tmp_path / "v")
    with pytest.raises(StatehouseError, match="64 channels, the contract 32"):
        FinalNorm.from_verifier(folder).require_size(32)
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma2", "rms_norm_eps": 1e-6}))
    with pytest.raises(StatehouseError, match="no plain RMSNorm"):
        FinalNorm.from_verifier(folder)
    with pytest.raises(StatehouseError, match=r"config\.json"):
        FinalNorm.from_verifier(tmp_path / "none")


def peers(code: str, *arguments: str) -> str:
    assert PEERS is not None
    run = subprocess.run([PEERS, "-c", code, *arguments], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.strip().splitlines()[-1]


_LOAD_SPECFORGE = """
import sys
from specforge.data.preprocessing import build_offline_eagle3_dataset
for folder in sys.argv[1:]:
    data = build_offline_eagle3_dataset(folder, max_len=4096)
    total = 0
    for index in range(len(data)):
        item = data[index]
        assert item["hidden_state"].shape[-1] == 3 * item["target"].shape[-1]
        assert item["input_ids"].shape == item["loss_mask"].shape
        total += item["input_ids"].shape[1]
    print(len(data), total, end=" ")
"""

_LOAD_SPECULATORS = """
import sys
from speculators.train.data import ArrowDataset
data = ArrowDataset(max_len=4096, datapath=sys.argv[1], on_missing="raise")
total = 0
for index in range(len(data)):
    item = data[index]
    assert type(item) is dict, item
    assert item["hidden_states"].shape[-1] == 3 * item["verifier_last_hidden_states"].shape[-1]
    assert len(item["loss_mask"]) == len(item["input_ids"]) == data.approx_lengths[index]
    total += len(item["input_ids"])
print(len(data), total)
"""

# SpecForge's own collector needs a GPU engine; these are its writer's calls, on its own field names.
_MAKE = """
import sys, torch
from pathlib import Path
from datasets import Dataset
from safetensors.torch import save_file
out, layers, hidden = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
(out / "speculators" / "hidden_states").mkdir(parents=True)
(out / "specforge").mkdir()
torch.manual_seed(0)
rows = {"input_ids": [], "loss_mask": [], "seq_len": []}
for i in range(6):
    n = 30 + 5 * i
    ids, mask = torch.randint(0, 1000, (n,)), (torch.arange(n) >= 5).long()
    states = torch.randn(n, layers, hidden).to(torch.bfloat16)
    save_file({"token_ids": ids, "hidden_states": states}, str(out / "speculators" / "hidden_states" / f"hs_{i}.safetensors"))
    torch.save({"input_ids": ids, "loss_mask": mask, "hidden_state": states[None, :, -1].clone(),
                "aux_hidden_state": states[None, :, :-1].flatten(2).clone()}, out / "specforge" / f"data_{i}.ckpt")
    for name, value in (("input_ids", ids.tolist()), ("loss_mask", mask.tolist()), ("seq_len", n)):
        rows[name].append(value)
data = Dataset.from_dict(rows)
data.set_format("torch")
data.save_to_disk(str(out / "speculators"))
from speculators.train.data import ArrowDataset
from specforge.data.preprocessing import build_offline_eagle3_dataset
assert len(ArrowDataset(4096, str(out / "speculators"), on_missing="raise")) == 6
assert len(build_offline_eagle3_dataset(str(out / "specforge"))) == 6
print("made")
"""


@with_peers
def test_what_we_export_loads_in_their_own_dataset_classes(tmp_path: Path) -> None:
    sealed(str(tmp_path / "a"), sequences(20, 60))
    dataset = open_dataset(str(tmp_path / "a"))
    export_specforge(dataset, tmp_path / "plain")
    export_specforge(dataset, tmp_path / "gzip", compress=True)
    pre_norm_dataset(str(tmp_path / "b"))
    export_speculators(open_dataset(str(tmp_path / "b")), tmp_path / "speculators")
    expected = f"20 {dataset.plan.tokens}"
    assert peers(_LOAD_SPECFORGE, str(tmp_path / "plain"), str(tmp_path / "gzip")) == f"{expected} {expected}"
    assert peers(_LOAD_SPECULATORS, str(tmp_path / "speculators")) == expected


@with_peers
def test_what_their_packages_write_is_converted(tmp_path: Path) -> None:
    assert peers(_MAKE, str(tmp_path), str(LAYERS), str(HIDDEN)) == "made"
    import_specforge(tmp_path / "specforge", str(tmp_path / "a"), contract=contract_file(tmp_path))
    terms = contract_file(tmp_path, final_state="pre_norm")
    import_speculators(tmp_path / "speculators", str(tmp_path / "b"), contract=terms)
    one, two = open_dataset(str(tmp_path / "a")), open_dataset(str(tmp_path / "b"))
    assert len(one) == len(two) == 6
    for index in range(6):  # the same numbers by two ways
        assert (one.read(index).hidden.view(np.uint16) == two.read(index).hidden.view(np.uint16)).all()
    for uri in ("a", "b"):
        assert verify(LocalStore(tmp_path / uri), full=True).ok
