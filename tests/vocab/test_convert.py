"""Maps of SpecForge, speculators and checkpoints go in and come out unchanged, and one that does not fit is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from vocab.__main__ import main
from vocab.convert import FORMATS, check_fits, load_any, padded, save_as
from vocab.coverage import frequency_order
from vocab.errors import VocabError
from vocab.keep import read_ids
from vocab.mapping import DraftVocab

torch = pytest.importorskip("torch")
MAP = DraftVocab.from_ids([1, 2, 5, 9], 12)


def target(folder: Path, form: str) -> Path:
    return folder / ("map.pt" if form in ("specforge", "token-map") else "folder")


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "token-map"])
def test_every_format_gives_back_the_same_map(tmp_path: Path, form: str) -> None:
    save_as(MAP, target(tmp_path, form), form)
    assert load_any(target(tmp_path, form), vocab_size=12, size=4, expected_hash=MAP.hash) == MAP


def test_files_are_as_their_readers_expect(tmp_path: Path) -> None:
    save_as(MAP, tmp_path / "a" / "vocab_mapping.pt", "specforge")
    tensors = torch.load(tmp_path / "a" / "vocab_mapping.pt", weights_only=True)
    assert sorted(tensors) == ["d2t", "t2d"]
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert (torch.arange(4) + tensors["d2t"]).tolist() == tensors["t2d"].nonzero().squeeze(1).tolist() == [1, 2, 5, 9]
    save_as(MAP, tmp_path / "b", "speculators")
    assert np.load(tmp_path / "b" / "d2t.npy").tolist() == [1, 1, 3, 6]
    save_as(MAP, tmp_path / "hot.pt", "token-map")
    assert torch.load(tmp_path / "hot.pt", weights_only=True) == [1, 2, 5, 9]


def test_token_maps_are_read_whatever_their_order(tmp_path: Path) -> None:
    save_as(MAP, tmp_path / "hot.pt", "token-map")
    torch.save(torch.tensor([9, 2, 1, 5]), tmp_path / "tensor.pt")
    for name in ("hot.pt", "tensor.pt"):
        assert load_any(tmp_path / name, vocab_size=12) == MAP
        with pytest.raises(VocabError, match="give the verifier's vocabulary size"):
            load_any(tmp_path / name)
    torch.save([[1], 2, "x"], tmp_path / "odd.pt")
    torch.save([13], tmp_path / "large.pt")
    for name in ("odd.pt", "large.pt"):
        with pytest.raises(VocabError, match=name):
            load_any(tmp_path / name, vocab_size=12)


def test_vllm_scatters_draft_logits_to_the_ids_they_stand_for(tmp_path: Path) -> None:
    """What its EAGLE-3 head does with the tensor it loads as `draft_id_to_target_id`."""
    MAP.save(tmp_path)
    d2t = safetensors.numpy.load_file(tmp_path / "draft_vocab.safetensors")["d2t"]
    assert d2t.dtype == np.int64
    logits = np.array([[0.5, 3.0, 1.0, 2.0]])
    wide = np.full((1, 12), -np.inf)
    wide[:, np.arange(4) + d2t] = logits
    assert wide.argmax(1).tolist() == MAP.target_ids[logits.argmax(1)].tolist() == [2]
    assert np.isneginf(wide[:, ~MAP.t2d]).all()


_SGLANG = """
import sys, types
from safetensors.torch import load_file
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3 as Model
from sglang.srt.speculative.spec_utils import load_token_map
model = types.SimpleNamespace(named_parameters=lambda: [], hot_token_id=None)
Model.load_weights(model, load_file(sys.argv[1]).items())
print("found", Model.get_hot_token_id(model).tolist(), load_token_map(sys.argv[2]).tolist())
"""


@pytest.mark.slow
@pytest.mark.sglang
def test_sglangs_own_loaders_read_our_files(tmp_path: Path) -> None:
    """`d2t` in a checkpoint, by its EAGLE-3 model, and the token map of EAGLE-2. Serving: tests/e2e/test_drafter.py."""
    pytest.importorskip("sglang")
    MAP.save(tmp_path / "ours")
    save_as(MAP, tmp_path / "hot.pt", "token-map")
    command = [sys.executable, "-c", _SGLANG, tmp_path / "ours" / "draft_vocab.safetensors", tmp_path / "hot.pt"]
    cpu = Path(__file__).parents[2] / "ray_jobs" / "replicas" / "cpu_path"  # what SGLang lacks where there is no GPU
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(cpu)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "found [1, 2, 5, 9] [1, 2, 5, 9]" in done.stdout


def test_speculators_files_with_sizes_in_their_names_and_pt(tmp_path: Path) -> None:
    np.save(tmp_path / "d2t-4.npy", MAP.d2t)
    np.save(tmp_path / "t2d-4.npy", MAP.t2d)
    assert load_any(tmp_path) == load_any(tmp_path / "d2t-4.npy") == load_any(tmp_path / "t2d-4.npy") == MAP
    folder = tmp_path / "pt"
    folder.mkdir()
    torch.save(torch.from_numpy(MAP.d2t.copy()), folder / "d2t.pt")
    with pytest.raises(VocabError, match=r"t2d\.pt: no such file; d2t and t2d belong together"):
        load_any(folder)
    torch.save(torch.from_numpy(MAP.t2d.copy()), folder / "t2d.pt")
    assert load_any(folder) == MAP
    np.save(tmp_path / "d2t-5.npy", MAP.d2t)
    with pytest.raises(VocabError, match="expected one draft vocabulary"):
        load_any(tmp_path)


def test_the_map_of_a_checkpoint_with_and_without_t2d(tmp_path: Path) -> None:
    weights = {"lm_head.weight": np.zeros((4, 2), np.float32), "d2t": MAP.d2t}
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    assert load_any(tmp_path / "model.safetensors", vocab_size=12) == MAP
    with pytest.raises(VocabError, match="give the verifier's vocabulary size"):
        load_any(tmp_path / "model.safetensors")
    with pytest.raises(VocabError, match="target id 9 is outside the vocabulary of 9 ids"):
        load_any(tmp_path / "model.safetensors", vocab_size=9)
    safetensors.numpy.save_file({"x": MAP.d2t}, tmp_path / "other.safetensors")
    with pytest.raises(VocabError, match=r"expected tensors d2t and t2d, found \['x'\]"):
        load_any(tmp_path / "other.safetensors")


def test_a_map_of_another_size_content_or_verifier_is_refused() -> None:
    for wrong, named in (
        ({"vocab_size": 13}, "verifier's vocabulary: expected 13, found 12"),
        ({"size": 3}, "draft vocabulary: expected 3, found 4"),
        ({"expected_hash": "0" * 64}, "hash: expected 0000"),
    ):
        with pytest.raises(VocabError, match=named):
            check_fits(MAP, **wrong)  # type: ignore[arg-type]


def test_target_ids_in_place_of_offsets_are_refused(tmp_path: Path) -> None:
    torch.save({"d2t": torch.tensor(MAP.target_ids), "t2d": torch.tensor(MAP.t2d)}, tmp_path / "map.pt")
    with pytest.raises(VocabError, match=r"map\.pt: d2t: .* d2t holds offsets"):
        load_any(tmp_path / "map.pt")


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(VocabError, match="no such file or folder"):
        load_any(tmp_path / "none")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(VocabError, match=r"text\.pt: expected tensors saved by torch"):
        load_any(tmp_path / "text.pt")
    (tmp_path / "list.txt").write_text("1")
    with pytest.raises(VocabError, match="expected a folder, .pt, .npy or .safetensors"):
        load_any(tmp_path / "list.txt")
    with pytest.raises(VocabError, match="expected one of statehouse, specforge"):
        save_as(MAP, tmp_path / "x", "other")


def test_code_never_comes_out_of_a_file(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"d2t": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(VocabError, match="expected tensors saved by torch"):
        load_any(tmp_path / "evil.pt")
    np.save(tmp_path / "d2t.npy", np.array([Evil()], object), allow_pickle=True)
    np.save(tmp_path / "t2d.npy", MAP.t2d)
    with pytest.raises(VocabError, match=r"d2t\.npy: expected a \.npy of numbers"):
        load_any(tmp_path / "d2t.npy")
    assert not (tmp_path / "ran").exists()


def test_padding_adds_ids_that_are_never_proposed() -> None:
    wide = padded(MAP, 16)
    assert (wide.vocab_size, wide.size) == (16, 4)
    assert wide.target_ids.tolist() == MAP.target_ids.tolist()
    assert not wide.t2d[12:].any()
    with pytest.raises(VocabError, match="at least 12 ids, found 11"):
        padded(MAP, 11)


def test_lists_of_ids_are_read_from_json_lines_and_maps(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[5, 1]")
    (tmp_path / "b.txt").write_text("5\n1\n")
    assert read_ids(str(tmp_path / "a.json")).tolist() == read_ids(str(tmp_path / "b.txt")).tolist() == [5, 1]
    MAP.save(tmp_path / "map")
    assert read_ids(str(tmp_path / "map")).tolist() == [1, 2, 5, 9]
    for text in ("[]", "[-1]", "x", "[1.5, [2]]"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(VocabError, match=r"bad\.json: expected"):
            read_ids(str(tmp_path / "bad.json"))


def test_the_commands_convert_and_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MAP.save(tmp_path / "ours")
    assert (
        main(["convert", str(tmp_path / "ours"), str(tmp_path / "map.pt"), "--to", "specforge", "--pad-to", "16"]) == 0
    )
    assert "4 of 16 ids" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "map.pt"), str(tmp_path / "x"), "--to", "speculators", "--size", "5"]) == 1
    assert "draft vocabulary: expected 5, found 4" in capsys.readouterr().err
    DraftVocab.from_ids([1, 2, 3], 12).save(tmp_path / "other")
    assert main(["overlap", str(tmp_path / "ours"), str(tmp_path / "other")]) == 0
    assert "both 2, first only 2, second only 1" in capsys.readouterr().out


def test_peers_choose_the_same_ids_but_for_ties(tmp_path: Path) -> None:
    """Their own functions on the same tokens; needs $STATEHOUSE_PEERS_PYTHON."""
    peers = os.environ.get("STATEHOUSE_PEERS_PYTHON")
    if not peers:
        pytest.skip("no $STATEHOUSE_PEERS_PYTHON: SpecForge and speculators are not installed")
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    vocab, draft = 2000, 500
    share = 1 / np.arange(1, vocab + 1) ** 1.05
    ids = random.choice(vocab, (200, 256), p=share / share.sum())
    mask = random.random((200, 256)) < 0.8
    pq.write_table(pa.table({"token_ids": ids.tolist(), "loss_mask": mask.tolist()}), tmp_path / "ids.parquet")
    script = str(Path(__file__).with_name("peer_vocab.py"))
    command = [peers, script, str(tmp_path / "ids.parquet"), str(vocab), str(draft), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = np.bincount(ids[mask], minlength=vocab)
    ours = DraftVocab.from_counts(counts, draft)
    last = counts[frequency_order(counts)[draft - 1]]
    for peer in ("speculators", "specforge"):
        theirs = load_any(tmp_path / f"map_{peer}.pt", vocab_size=vocab, size=draft)
        differing = np.flatnonzero(theirs.t2d != ours.t2d)
        assert (counts[differing] == last).all(), peer  # only ids as frequent as the last one chosen
        assert theirs.coverage(counts) == ours.coverage(counts)
    assert load_any(tmp_path / "map_speculators.pt") == ours  # its ties go to the lower id, as ours do
