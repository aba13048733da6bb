"""A drafter as the folder that SGLang serves, and back: config.json and model.safetensors.

SGLang skips names it does not know and keeps random numbers where a name is missing, both without a word. So both
directions go through one explicit list of what the server reads, `sglang_tensors`. The embedding is not in the folder:
the server takes the verifier's (unless the drafter is of another width, then it reads the drafter's own).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from drafter.config import DrafterConfig, checked_config, rope_fields
from drafter.errors import DrafterError
from drafter.layer_ids import captured_layers
from drafter.model import Drafter
from vocab.errors import VocabError
from vocab.mapping import DraftVocab

TENSORS = "model.safetensors"
CONFIG = "config.json"
_ARCHITECTURE = "LlamaForCausalLMEagle3"
_EMBEDDING = "embed_tokens.weight"
# Fields of DrafterConfig that config.json has under the same name.
_SAME = (
    "hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "rope_scaling", "vocab_size", "draft_vocab_size", "max_position_embeddings",
    "norm_before_fc", "fc_norm", "norm_output",
)  # fmt: skip
# Written only where they are on: `norm_output` means something else to SpecForge (norm before the head).
_VARIANTS = ("norm_before_fc", "fc_norm", "norm_output")
# What other EAGLE-3 drafters switch on and this one does not compute.
_REFUSED = ("tie_word_embeddings", "bias", "mlp_bias", "norm_before_residual", "use_aux_norm")
_FIX = "export it again, or point at a folder that holds an EAGLE-3 drafter for SGLang"


def sglang_tensors(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that SGLang reads for a drafter of this config, by name, and of those that others need.

    The maps are there unless the vocabulary is whole: without `d2t` the server skips the look-up of each drafted
    token. `t2d` is not read by SGLang, but by vLLM and SpecForge; biases of q, k and v, which are zero, by vLLM.
    """
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, config.feature_size),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * width),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, queries),
        "midlayer.post_attention_layernorm.weight": (width,),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
        "norm.weight": (width,),
        "lm_head.weight": (config.draft_vocab_size, width),
    }
    if config.attention_bias:
        shapes |= {"midlayer.self_attn.o_proj.bias": (width,)} | _zero_biases(config)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (config.feature_size,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{at}.weight": (config.target_hidden_size,) for at in range(len(config.capture_layers))}
    if config.draft_vocab_size < config.vocab_size:
        shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    if config.own_embedding:
        shapes[_EMBEDDING] = (config.vocab_size, width)
    return shapes


def _zero_biases(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Biases that vLLM adds wherever there is one for the attention's output, and that SGLang drops."""
    widths = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    return {f"midlayer.self_attn.{name}_proj.bias": (heads * config.head_dim,) for name, heads in widths.items()}


def sglang_config(config: DrafterConfig, dtype: torch.dtype, layer_ids: Sequence[int] | None = None) -> dict[str, Any]:
    """config.json of a drafter. layer_ids: as for `export_sglang`."""
    layers = list(config.capture_layers)
    return {
        "architectures": [_ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": bool(config.attention_bias),
        "torch_dtype": str(dtype).removeprefix("torch."),
        **{name: getattr(config, name) for name in _SAME if name not in _VARIANTS or getattr(config, name)},
        # SGLang reads the first, vLLM the second, which counts from 1: it names the layer that reads the state.
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": layers if layer_ids is None else list(layer_ids),
        },
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "statehouse": {"capture_layers": layers},
    }


def require_servable(config: DrafterConfig) -> None:
    """Raises DrafterError for a drafter that SGLang would compute otherwise, whatever its weights."""
    if config.feature_size == config.hidden_size:
        raise DrafterError(
            f"capture_layers: SGLang leaves `fc` out when the features are as wide as the drafter "
            f"({len(config.capture_layers)} * {config.target_hidden_size} = {config.hidden_size}); "
            f"capture another layer beside {list(config.capture_layers)}"
        )


def export_sglang(
    drafter: Drafter,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    layer_ids: Sequence[int] | None = None,
) -> None:
    """Write config.json and model.safetensors for SGLang into `folder`, which is made if need be.

    dtype: of the weights, the drafter's own when left out. layer_ids: SGLang's numbers for the captured layers; they
    are `capture_layers` themselves for most verifiers, but not for the DeepSeek family.
    Raises DrafterError when a tensor is missing, left over, of another shape or not finite, or the folder cannot be
    written; nothing is written then.
    """
    config = drafter.config
    require_servable(config)
    if layer_ids is not None and len(layer_ids) != len(config.capture_layers):
        raise DrafterError(f"layer_ids: expected {len(config.capture_layers)} of them, found {list(layer_ids)}")
    dtype = dtype or drafter.fc.weight.dtype
    shapes = sglang_tensors(config)
    state = served_state(drafter)
    for unread in {_EMBEDDING, "d2t", "t2d"} - set(shapes):
        state.pop(unread)
    write_folder(folder, sglang_config(config, dtype, layer_ids), converted(state, dtype), shapes)


def served_state(drafter: Drafter) -> dict[str, Tensor]:
    """The drafter's tensors, and the zeros that make both servers compute the same."""
    zeros = _zero_biases(drafter.config) if drafter.config.attention_bias else {}
    return drafter.state_dict() | {name: torch.zeros(shape) for name, shape in zeros.items()}


def converted(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: tensor.detach().cpu().to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in state.items()
    }


def write_folder(
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: dict[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """config.json and model.safetensors, once every tensor is found to be of these shapes; see `export_sglang`."""
    _check_tensors("drafter", tensors, shapes, "this is a fault of the program: please report it")
    text = json.dumps(config, indent=2) + "\n"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        part = Path(folder, TENSORS + ".part")
        save_file(tensors, part, metadata={"format": "pt"})
        part.replace(Path(folder, TENSORS))
        part = Path(folder, CONFIG + ".part")
        part.write_text(text)
        part.replace(Path(folder, CONFIG))
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"cannot write the drafter to {folder}: {error}") from error


def load_sglang(
    folder: str | os.PathLike[str],
    embedding_VD: Tensor | None = None,
    *,
    capture_layers: Sequence[int] | None = None,
    verifier: Mapping[str, Any] | None = None,
) -> Drafter:
    """The drafter in a folder that SGLang can serve, whoever made it, in the dtype of its weights, on the CPU.

    embedding_VD: the verifier's; the folder's own, if it has one, serves when this is left out, and always where the
    drafter is of another width than the verifier.
    capture_layers: 0-based decoder outputs, for a folder whose config.json does not name them, or names them wrong.
    verifier: its config.json, without which the ids of some drafters cannot be told (`drafter.layer_ids`).
    Raises DrafterError that names file and field when something is missing, left over, of another shape or type, or
    when the drafter computes what SGLang's plain EAGLE-3 layer does not.
    """
    config = read_config(folder, capture_layers, verifier)
    where, tensors = read_tensors(folder)
    # What others call the same: EAGLE's own code and SGLang say midlayer, vLLM and its exporters layers.0.
    return build(where, config, by_server_names(where, tensors), embedding_VD)


def by_server_names(where: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under SGLang's names. Raises DrafterError when two would get the same one."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        known = name.removeprefix("model.")
        known = "midlayer." + known.removeprefix("layers.0.") if known.startswith("layers.0.") else known
        if known in found:
            raise DrafterError(f"{where}: {name}: expected one tensor of that meaning, found another one; {_FIX}")
        found[known] = tensor
    return found


def read_tensors(folder: str | os.PathLike[str]) -> tuple[str, dict[str, Tensor]]:
    """(what to call them in an error, all tensors) of a folder's safetensors, in one file or in several.

    Raises DrafterError when there are none, or one cannot be read.
    """
    root = Path(folder)
    paths = sorted(root.glob("*.safetensors")) or [root / TENSORS]
    where = str(paths[0] if len(paths) == 1 else root / "*.safetensors")
    found: dict[str, Tensor] = {}
    for path in paths:
        try:
            found |= load(path.read_bytes())
        except OSError as error:
            pickled = any(root.glob("*.bin")) or any(root.glob("*.pt"))
            fix = "save it again as safetensors: pickles are not opened" if pickled else _FIX
            raise DrafterError(f"{path}: cannot read it: {error.strerror or error}; {fix}") from error
        except SafetensorError as error:
            raise DrafterError(f"{path}: expected a safetensors file, found {error}; {_FIX}") from error
    return where, found


def build(where: str, config: DrafterConfig, tensors: dict[str, Tensor], embedding_VD: Tensor | None) -> Drafter:
    """The drafter of these tensors, by SGLang's names, checked one by one; see `load_sglang`."""
    shapes = sglang_tensors(config)
    zeros = _zero_biases(config) if config.attention_bias else {}
    shapes = {name: shape for name, shape in shapes.items() if name in tensors or name not in zeros}
    optional = {
        _EMBEDDING: (config.vocab_size, config.hidden_size),
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
    }
    if "d2t" in tensors:
        shapes.pop("t2d", None)  # says the same
    _check_tensors(where, tensors, shapes | {name: optional[name] for name in optional if name in tensors}, _FIX)
    _check_zeros(where, tensors, zeros)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in zeros}
    if embedding_VD is None and _EMBEDDING not in tensors:
        raise DrafterError(f"{where}: expected {_EMBEDDING}, found none; give the verifier's embedding")
    if embedding_VD is None or (config.own_embedding and _EMBEDDING in tensors):
        embedding_VD = tensors.pop(_EMBEDDING)
    dtype = tensors["fc.weight"].dtype
    drafter = Drafter(config, _draft_vocab(where, config, tensors), embedding_VD).to(dtype)
    drafter.load_state_dict(tensors | {"d2t": drafter.d2t, "t2d": drafter.t2d, _EMBEDDING: drafter.embed_tokens.weight})
    return drafter


def _check_zeros(where: str, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Raises DrafterError when one of these is there and not zero: SGLang drops it, vLLM adds it."""
    for name in names:
        if name in tensors and tensors[name].any():
            raise DrafterError(
                f"{where}: {name}: expected zeros, found other numbers: SGLang gives q, k and v no bias, vLLM does "
                f"(docs/drafter.md); this package trains drafters that both serve alike"
            )


def _check_tensors(where: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], fix: str) -> None:
    """Raises DrafterError for the first tensor that is missing, left over, misshapen, of a wrong type or not finite."""
    if missing := sorted(set(shapes) - set(tensors)):
        raise DrafterError(f"{where}: expected tensors {missing}, found none of that name; {fix}")
    if extra := sorted(set(tensors) - set(shapes)):
        raise DrafterError(f"{where}: expected no tensors but those SGLang reads, found {extra}; {fix}")
    kinds: dict[str, torch.dtype] = {"d2t": torch.int64, "t2d": torch.bool}
    floats = (torch.float32, torch.bfloat16, torch.float16)
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise DrafterError(f"{where}: {name}: expected shape {list(shape)}, found {list(tensor.shape)}; {fix}")
        if tensor.dtype not in ((kinds[name],) if name in kinds else floats):
            raise DrafterError(
                f"{where}: {name}: expected {kinds.get(name, 'floating point')}, found {tensor.dtype}; {fix}"
            )
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise DrafterError(f"{where}: {name}: expected finite numbers, found NaN or infinity; train it again")


def read_config(
    folder: str | os.PathLike[str],
    capture_layers: Sequence[int] | None = None,
    verifier: Mapping[str, Any] | None = None,
) -> DrafterConfig:
    """The checked config of the drafter in `folder`, which SGLang would serve as this package computes it.

    capture_layers, verifier: as for `load_sglang`. Raises DrafterError that names file and field.
    """
    path, found = read_json(folder)
    if found.get("architectures") != [_ARCHITECTURE]:
        raise DrafterError(
            f"{path}: architectures: expected {[_ARCHITECTURE]}, found {found.get('architectures')}; {_FIX}"
        )
    eagle = found.get("eagle_config") or {}
    if found.get("num_hidden_layers") != 1:
        raise DrafterError(
            f"{path}: num_hidden_layers: expected 1, found {found.get('num_hidden_layers')}: SGLang and vLLM norm a second "
            f"layer's input by different weights (docs/drafter.md)"
        )
    for name in _REFUSED:
        if found.get(name) or eagle.get(name):
            raise DrafterError(
                f"{path}: {name}: expected it off or absent, found it on: SGLang and vLLM do not serve it alike, or not as "
                f"this package trains it (docs/drafter.md)"
            )
    layers = capture_layers or captured_layers(found, verifier)
    if not layers:
        raise DrafterError(
            f"{path}: eagle_config.eagle_aux_hidden_state_layer_ids: expected the captured layers, found none; "
            f"name them with capture_layers (--layers), or the verifier (--verifier) whose default they are"
        )
    fields = {name: found[name] for name in _SAME if found.get(name) is not None}
    fields |= {name: True for name in _VARIANTS if eagle.get(name)}
    fields |= bias_fields(found) | rope_fields(found) | {"capture_layers": tuple(layers)}
    fields.setdefault("draft_vocab_size", found.get("vocab_size"))
    fields.setdefault("num_key_value_heads", found.get("num_attention_heads"))
    if "head_dim" not in fields and found.get("hidden_size") and found.get("num_attention_heads"):
        fields["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    return checked_config(fields, str(path))


def bias_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """`attention_bias` of the servers, to both of which it gives o_proj a bias; `build` sees to it that it stays at that."""
    return {"attention_bias": "o_proj" if config.get("attention_bias") else False}


def read_json(folder: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """(its path, what it says) of a folder's config.json. Raises DrafterError when it is none."""
    path = Path(folder, CONFIG)
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise DrafterError(f"{path}: cannot read it: {error.strerror or error}; {_FIX}") from error
    except ValueError as error:
        raise DrafterError(f"{path}: expected JSON, found {error}; {_FIX}") from error
    if not isinstance(found, dict):
        raise DrafterError(f"{path}: architectures: expected a config, found {type(found).__name__}; {_FIX}")
    return path, found


def _draft_vocab(where: str, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> DraftVocab:
    """The draft vocabulary that d2t (and t2d, if it is there) says."""
    if "d2t" not in tensors:
        return DraftVocab.full(config.vocab_size)
    d2t = tensors["d2t"].numpy()
    try:
        if "t2d" in tensors:
            return DraftVocab(d2t, tensors["t2d"].numpy())
        draft = DraftVocab.from_ids(np.arange(d2t.size) + d2t, config.vocab_size)
        return DraftVocab(d2t, draft.t2d)
    except VocabError as error:
        raise DrafterError(f"{where}: {error}; {_FIX}") from error
