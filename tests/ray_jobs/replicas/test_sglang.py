"""What can be said about the SGLang replica without starting an engine."""

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ray_jobs.replicas import engine_process, open_replica
from ray_jobs.replicas.engine_process import CPU_PATH, ENGINE_PATH
from ray_jobs.replicas.replica import ReplicaConfig
from ray_jobs.replicas.sglang import SGLangReplica, engine_layer_ids, read_states
from storage.errors import RecipeError, ReplicaFailed


def deepseek_reads(ids: list[int]) -> set[int]:
    """Outputs (0-based layers) that SGLang's DeepSeek models capture for a list of ids; their code, in short."""
    inputs = [i + 1 for i in ids] if ids and ids[0] == 1 else ids
    return {i - 1 for i in inputs}


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral"])
def test_most_families_take_the_layers_own_ids(model_type: str) -> None:
    assert engine_layer_ids([1, 14, 26], model_type) == [1, 14, 26]


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "kimi_k2"])
@pytest.mark.parametrize("layers", [[1, 29, 57], [0, 29, 57], [2, 4, 6], [5], [0, 1], [1]])
def test_deepseek_families_capture_the_outputs_asked_for(model_type: str, layers: list[int]) -> None:
    assert deepseek_reads(engine_layer_ids(layers, model_type)) == set(layers)


def test_layer_zero_alone_cannot_be_said_to_deepseek() -> None:
    with pytest.raises(RecipeError, match="another layer beside it"):
        engine_layer_ids([0], "deepseek_v3")


# ---- the file that states come in ----


def states_file(folder: Path, ids: np.ndarray, states: np.ndarray, packed: np.ndarray | None = None) -> Path:
    k = 0 if packed is None else packed.shape[1] // 2
    head = struct.pack("<8sIIIII", b"SHSTATE2", int(states.dtype != np.float32), *states.shape, k)
    head += ids.astype("<i4").tobytes()
    path = folder / "prefill-0.states"
    data = head.ljust(-(-len(head) // 64) * 64, b"\0") + states.tobytes()
    if packed is not None:
        data = data.ljust(-(-len(data) // 64) * 64, b"\0") + packed.astype("<f4").tobytes()
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_states_are_read_exactly_and_the_file_is_gone(tmp_path: Path, dtype: type) -> None:
    ids = np.array([3, 1, 2], dtype=np.int32)
    states = np.random.default_rng(0).normal(size=(3, 4, 8)).astype(dtype)
    path = states_file(tmp_path, ids, states)
    read, packed = read_states(path, tmp_path, ids)
    assert packed is None
    assert not path.exists()
    assert read.dtype == dtype
    assert not read.flags.writeable
    np.testing.assert_array_equal(read, states)


def test_a_teacher_summary_behind_the_states_is_read_exactly(tmp_path: Path) -> None:
    ids, packed = np.array([3, 1, 2], dtype=np.int32), np.arange(15, dtype=np.float32).reshape(3, 5)
    states = np.ones((3, 4, 7), np.float32)
    read, summary = read_states(states_file(tmp_path, ids, states, packed), tmp_path, ids)
    np.testing.assert_array_equal(read, states)
    np.testing.assert_array_equal(summary, packed)
    cut = states_file(tmp_path, ids, states, packed)
    cut.write_bytes(cut.read_bytes()[:-4])
    with pytest.raises(ReplicaFailed, match="another sequence"):
        read_states(cut, tmp_path, ids)


def test_the_states_of_another_sequence_are_refused(tmp_path: Path) -> None:
    ids = np.array([3, 1, 2], dtype=np.int32)
    states = np.zeros((3, 4, 8), dtype=np.float32)
    with pytest.raises(ReplicaFailed, match="another sequence"):
        read_states(states_file(tmp_path, ids, states), tmp_path, np.array([3, 1, 9], dtype=np.int32))
    with pytest.raises(ReplicaFailed, match="another sequence"):
        read_states(states_file(tmp_path, ids, states), tmp_path, ids[:2])
    cut = states_file(tmp_path, ids, states)
    cut.write_bytes(cut.read_bytes()[:-4])
    with pytest.raises(ReplicaFailed, match="another sequence"):
        read_states(cut, tmp_path, ids)


def test_a_file_outside_the_private_folder_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(ReplicaFailed, match="outside its folder"):
        read_states(tmp_path / "x.states", tmp_path / "private", np.zeros(1, dtype=np.int32))


# ---- what starting needs ----


def test_the_plugin_is_found_where_nothing_is_installed(tmp_path: Path) -> None:
    code = "from importlib.metadata import entry_points as e; print(*e(group='sglang.srt.plugins').names)"
    run = [sys.executable, "-c", code]
    found = subprocess.run(run, cwd=tmp_path, env={"PYTHONPATH": str(ENGINE_PATH)}, capture_output=True, text=True)
    assert "statehouse_capture" in found.stdout.split(), found.stderr
    without = subprocess.run(run, cwd=tmp_path, env={}, capture_output=True, text=True)
    assert "statehouse_capture" not in without.stdout.split(), "the plugin is installed: this test proves nothing"


def test_stand_ins_stay_out_of_this_process() -> None:
    assert not [p for p in sys.path if Path(p) == CPU_PATH]


def test_two_replicas_take_different_ports() -> None:
    first = engine_process._take_ports("31900-31999", 2)
    second = engine_process._take_ports("31900-31999", 2)
    assert not {port for port, _ in first} & {port for port, _ in second}
    for _, lock in first + second:
        lock.close()


def test_no_free_port_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ReplicaFailed, match=rf"no free port in {port}-{port} .*extraction\.replica\.ports="):
            engine_process._take_ports(f"{port}-{port}", 1)


def test_two_users_of_one_machine_share_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("STATEHOUSE_LOG_DIR", raising=False)
    for user in (1000, 1001):
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        ((_, lock),) = engine_process._take_ports("31800-31899", 1)
        lock.close()
        assert engine_process._new_log_file().parent.name == f"statehouse-logs-{user}"
    assert sorted(path.name for path in tmp_path.glob("statehouse-ports*")) == [
        "statehouse-ports-1000",
        "statehouse-ports-1001",
    ]


def test_locks_that_cannot_be_written_are_not_called_a_want_of_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"statehouse-ports-{os.getuid()}"
    folder.touch()  # no folder at all: the mode of one says nothing to root
    with pytest.raises(ReplicaFailed, match=rf"{folder} holds a lock for each, and none can be written .*TMPDIR"):
        engine_process._take_ports("31800-31899", 1)


def test_an_aborted_prefill_is_told_in_the_engines_words(verifier_folder: Path) -> None:
    class Engine:
        log_file = "engine.log"

        def ask(self, *_given: object, **_more: object) -> list[dict[str, object]]:
            reason = {"type": "abort", "message": "out of memory"}
            return [{"handle": None, "finish_reason": reason, "output_ids": []}]

    replica = SGLangReplica(ReplicaConfig(), verifier_folder, (1, 3))
    with pytest.raises(ReplicaFailed, match=r"SGLang aborted a request: out of memory; log engine\.log"):
        replica._capture(Engine(), [np.arange(3)], "prefill-")  # type: ignore[arg-type]


def test_a_dead_owners_shared_memory_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    left_by_sglang = tmp_path / "sglang_loads_x.shm"
    left_by_sglang.touch()
    living, folder = engine_process._private_folder()
    dead, abandoned = engine_process._private_folder()
    dead.write(str(left_by_sglang))
    dead.close()
    third, other = engine_process._private_folder()
    assert folder.exists()
    assert not abandoned.exists()
    assert not left_by_sglang.exists()
    for lock, path in ((living, folder), (third, other)):
        (path / "owner.lock").unlink()
        path.rmdir()
        lock.close()


@pytest.fixture
def verifier_folder(tmp_path: Path) -> Path:
    config = {"vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 9, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    return tmp_path


def test_arguments_of_the_recipe_win_and_the_captures_own_stay(verifier_folder: Path) -> None:
    config = ReplicaConfig(gpus=8, args={"mem_fraction_static": 0.7, "tp_size": 4, "trust_remote_code": True})
    arguments = SGLangReplica(config, verifier_folder, (1, 3, 5))._arguments([31000, 31001])
    assert arguments["mem_fraction_static"] == 0.7
    assert (arguments["device"], arguments["tp_size"], arguments["disable_radix_cache"]) == ("cuda", 4, True)
    assert arguments["return_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert "attention_backend" not in arguments
    assert "decode_attention_backend" not in arguments


def test_a_family_that_sglang_captures_wrong_is_refused_at_once(verifier_folder: Path) -> None:
    config = json.loads((verifier_folder / "config.json").read_text()) | {"model_type": "gemma3_text"}
    (verifier_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReplicaFailed, match="engine=transformers"):
        open_replica(ReplicaConfig(), verifier_folder, (1, 3))


def test_a_request_before_start_fails_clearly(verifier_folder: Path) -> None:
    replica = open_replica(ReplicaConfig(), verifier_folder, (1, 3))
    with pytest.raises(ReplicaFailed, match="call start"):
        replica.prefill([np.array([1, 2])])
    replica.stop()
