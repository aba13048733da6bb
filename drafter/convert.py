"""Turn a drafter of one format into one of another, or say what a drafter is.

    python -m drafter.convert drafters/kimi out/for-vllm --to speculators --verifier /models/Kimi-K2.5
    python -m drafter.convert drafters/aq-medai out/for-sglang --to sglang --verifier /models/Kimi-K2
    python -m drafter.convert drafters/kimi

Reads folders of either kind: SGLang's (and any EAGLE-3 drafter with the same tensors) and speculators'. Every tensor is
checked: one that is missing, left over, misshapen or not finite is an error, and nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from drafter.errors import DrafterError
from drafter.export import CONFIG, export_sglang, read_json
from drafter.layer_ids import INPUT_ID_FAMILIES, alike, family, sglang_ids
from drafter.model import Drafter
from drafter.speculators import export_speculators, load_any
from drafter.verifier_weights import read_verifier_weights
from storage.errors import StatehouseError


def parser() -> argparse.ArgumentParser:
    parsed = argparse.ArgumentParser(
        prog="python -m drafter.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parsed.add_argument("folder", metavar="FROM", help="config.json and safetensors of a drafter")
    parsed.add_argument("out", metavar="TO", nargs="?", help="folder to write; only says what FROM is when left out")
    parsed.add_argument("--to", choices=("sglang", "speculators"), default="sglang", help="default: %(default)s")
    parsed.add_argument(
        "--verifier", metavar="FOLDER", help="the verifier: its embedding, its name for vLLM, its layers"
    )
    parsed.add_argument("--verifier-name", metavar="NAME", help="what vLLM is to load (default: --verifier)")
    parsed.add_argument("--layers", help="captured layers, 0-based outputs, where FROM does not name them: 1,14,26")
    parsed.add_argument("--layer-ids", help="SGLang's numbers for them (default: as the verifier's family has them)")
    parsed.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), help="of the weights; FROM's by default")
    parsed.add_argument("--draft-length", type=int, default=3, help="what vLLM proposes a pass; default: %(default)s")
    return parsed


def describe(drafter: Drafter) -> str:
    config = drafter.config
    trained = sum(one.numel() for one in drafter.parameters()) - drafter.embed_tokens.weight.numel()
    on = [name for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)]
    on += [f"bias of {config.attention_bias}"] if config.attention_bias else []
    rows = {
        "hidden size": f"{config.hidden_size} (verifier's states: {config.target_hidden_size})",
        "heads": f"{config.num_attention_heads} of {config.head_dim}, {config.num_key_value_heads} for keys and values",
        "intermediate size": str(config.intermediate_size),
        "draft vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,}",
        "captured layers": f"{list(config.capture_layers)} (0-based outputs)",
        "RoPE": f"base {config.rope_theta:g}, {config.rope_scaling or 'plain'}",
        "variants": ", ".join(on) or "none",
        "parameters": f"{trained / 1e6:,.2f} M without the embedding, {drafter.fc.weight.dtype}",
        "cache": f"{config.kv_bytes_per_token:,} bytes of keys and values a token, in bf16",
    }
    return "\n".join(f"{name:18s} {value}" for name, value in rows.items())


def numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    """Comma-separated numbers. Raises DrafterError when they are none."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise DrafterError(
            f"{option}: expected numbers with commas between them, such as 1,14,26, found {text!r}"
        ) from None


def served_ids(folder: str, layers: Sequence[int], verifier: Mapping[str, Any] | None = None) -> tuple[int, ...] | None:
    """SGLang's numbers for the layers that the drafter in `folder` reads; None for the layers' own.

    They depend on the verifier's family: that of `verifier` (its config.json), or of the folder that a config of
    speculators names, if it is on this machine. Raises DrafterError when nothing tells.
    """
    _, found = read_json(folder)
    named = ((found.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    if verifier is None and named and Path(named, CONFIG).is_file():
        verifier = read_json(named)[1]
    if verifier is not None:
        return tuple(sglang_ids(layers, family(verifier)))
    if family(found) in INPUT_ID_FAMILIES:  # a copy of the verifier's config with a few changes
        return tuple(sglang_ids(layers, family(found)))
    own = (found.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if own and sorted(own) in (list(layers), [layer + 1 for layer in layers]):
        return tuple(own)  # as it was served
    if alike(layers):
        return None
    raise DrafterError(
        f"--to sglang: expected --verifier or --layer-ids, found neither: SGLang's numbers for the layers {list(layers)} "
        f"depend on the verifier's family"
    )


def convert(args: argparse.Namespace) -> str:
    weights = read_verifier_weights(args.verifier) if args.verifier else None
    embedding = None if weights is None else weights.embedding_VD
    layers = numbers(args.layers, "--layers")
    known = None if weights is None else weights.config
    drafter = load_any(args.folder, embedding, capture_layers=layers, verifier=known)
    said = describe(drafter)
    if args.out is None:
        return said
    dtype = getattr(torch, args.dtype) if args.dtype else None
    if args.to == "sglang":
        ids = numbers(args.layer_ids, "--layer-ids") or served_ids(args.folder, drafter.config.capture_layers, known)
        export_sglang(drafter, args.out, dtype=dtype, layer_ids=ids)
    else:
        name = args.verifier_name or args.verifier
        if name is None:
            raise DrafterError(
                "--to speculators: expected --verifier-name (what vLLM is to load) or --verifier, found none"
            )
        architectures = weights.config.get("architectures") if weights is not None else None
        export_speculators(
            drafter, args.out, verifier=name, architectures=architectures or ("LlamaForCausalLM",),
            draft_length=args.draft_length, dtype=dtype,
        )  # fmt: skip
    return f"{said}\nwritten            {args.out}, for {args.to}"


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        print(convert(args))
    except StatehouseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
