"""The oracle itself, on a tiny random Llama: what its slots are."""

from pathlib import Path

import numpy as np
import pytest

from ray_jobs.replicas import open_replica
from ray_jobs.replicas.replica import ReplicaConfig, Sampling
from storage.errors import RecipeError, ReplicaFailed, StatehouseError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
LAYERS = (1, 3, 6)


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_slots_are_outputs_of_the_layers_and_the_normed_final_state(tiny_llama: Path) -> None:
    with open_replica(ReplicaConfig(engine="transformers", dtype="float32"), tiny_llama, LAYERS) as replica:
        ids = np.arange(5, 25)
        (states,) = replica.prefill([ids])
        model = replica._model  # type: ignore[attr-defined]
        seen = {}
        for layer in LAYERS:
            model.model.layers[layer].register_forward_hook(lambda m, a, out, layer=layer: seen.update({layer: out}))
        model.lm_head.register_forward_pre_hook(lambda m, args: seen.update(final=args[0]))
        with torch.inference_mode():
            model(torch.tensor(ids)[None])
    for slot, name in enumerate([*LAYERS, "final"]):
        value = seen[name][0] if isinstance(seen[name], tuple) else seen[name]
        np.testing.assert_allclose(states[:, slot], value.reshape(len(ids), -1).numpy(), rtol=1e-5, atol=1e-6)


def test_dtype_and_shape_follow_the_config(tiny_llama: Path) -> None:
    with open_replica(ReplicaConfig(engine="transformers"), tiny_llama, (2,)) as replica:
        states = replica.prefill([np.array([5]), np.array([5, 6, 7])])
        assert [(s.shape, s.dtype.name) for s in states] == [((1, 2, 32), "bfloat16"), ((3, 2, 32), "bfloat16")]
        assert replica.describe()["engine_dtype"] == "bfloat16"


def test_generation_ends_at_its_ends(tiny_llama: Path) -> None:
    with open_replica(ReplicaConfig(engine="transformers", dtype="float32"), tiny_llama, LAYERS) as replica:
        prompt = np.array([5, 6, 7])
        (free,) = replica.generate([prompt], [Sampling(max_new_tokens=8, ignore_eos=True)])
        assert (len(free.token_ids), free.finish_reason, free.token_ids.dtype) == (8, "length", np.int32)
        stop = int(free.token_ids[3])
        first = int(np.flatnonzero(free.token_ids == stop)[0])
        (cut,) = replica.generate([prompt], [Sampling(max_new_tokens=8, ignore_eos=True, stop_token_ids=(stop,))])
        assert cut.finish_reason == "stop"
        np.testing.assert_array_equal(cut.token_ids, free.token_ids[: first + 1])


def test_the_last_layer_cannot_be_captured(tiny_llama: Path) -> None:
    with pytest.raises(RecipeError, match="captured as the final state"):
        open_replica(ReplicaConfig(engine="transformers"), tiny_llama, (1, 7))


def test_bad_ids_and_a_stopped_replica(tiny_llama: Path) -> None:
    replica = open_replica(ReplicaConfig(engine="transformers"), tiny_llama, LAYERS)
    replica.start()
    with pytest.raises(StatehouseError, match="128 at position 1"):
        replica.prefill([np.array([1, 128])])
    with pytest.raises(StatehouseError, match="has 65 tokens"):
        replica.prefill([np.zeros(65, dtype=np.int32)])
    replica.stop()
    with pytest.raises(ReplicaFailed, match="not running"):
        replica.prefill([np.array([1])])
