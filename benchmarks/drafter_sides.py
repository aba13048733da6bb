"""Processes that take training steps on demand, so that ours and the peers' can be interleaved; and what they train on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parent.parent
PEERS = ("specforge", "speculators")
LAYERS = (1, 14, 26)


@dataclass(frozen=True)
class Shape:
    """A drafter, its verifier's vocabulary, and what it is trained on: sequences of `lengths`, a share with loss."""

    hidden: int
    draft: int
    vocab: int
    lengths: tuple[int, ...]
    steps: int
    loss_share: float = 0.6

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def name(self) -> str:
        return (
            f"H {self.hidden}, {self.draft:,} of {self.vocab:,}, T {self.tokens:,}, TTT {self.steps}, "
            f"{100 * self.loss_share:.0f} % loss"
        )

    def heads(self) -> dict[str, int]:
        """SmolLM2's at 576; about the same elsewhere."""
        heads = {576: 9, 256: 4}[self.hidden]
        return {
            "num_attention_heads": heads, "num_key_value_heads": heads // 3 if heads % 3 == 0 else heads // 2,
            "head_dim": 64, "intermediate_size": {576: 1536, 256: 688}[self.hidden],
        }  # fmt: skip


def write_verifier(folder: Path, shape: Shape) -> Path:
    """A random verifier of one layer, in files as transformers shards them: SpecForge wants an index."""
    path = folder / f"verifier-{shape.hidden}-{shape.vocab}"
    if path.exists():
        return path
    path.mkdir()
    torch.manual_seed(0)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape.hidden, "hidden_act": "silu",
        "num_hidden_layers": 30, "vocab_size": shape.vocab, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
        "torch_dtype": "bfloat16", **shape.heads(),
    }  # fmt: skip
    tensors = {
        "model.embed_tokens.weight": torch.randn(shape.vocab, shape.hidden) * 0.05,
        "model.norm.weight": torch.empty(shape.hidden).uniform_(0.5, 1.5),
        "lm_head.weight": torch.randn(shape.vocab, shape.hidden) * 0.05,
    }
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(tensors, path / "model-00001-of-00001.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_tensors(folder: Path, shape: Shape, verifier: Path) -> Path:
    """Ids, masks and states. The verifier is sure of a token, which is in the draft vocabulary in 98 % of the cases."""
    from safetensors.torch import load_file

    path = folder / f"{abs(hash(shape))}.safetensors"
    if path.exists():
        return path
    weights = load_file(verifier / "model-00001-of-00001.safetensors")
    torch.manual_seed(1)
    draft_ids = torch.randperm(shape.vocab)[: shape.draft].sort().values
    inside = torch.rand(shape.tokens) < 0.98
    said = torch.where(
        inside, draft_ids[torch.randint(shape.draft, (shape.tokens,))], torch.randint(shape.vocab, (shape.tokens,))
    )
    norm = weights["model.norm.weight"].float()
    before = weights["lm_head.weight"][said].float() / norm
    before = (before / before.pow(2).mean(-1, keepdim=True).sqrt()).bfloat16()
    final = before.float() * (before.float().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * norm
    tensors = {
        "token_ids": torch.randint(shape.vocab, (shape.tokens,)), "loss_mask": loss_mask(shape),
        "features": torch.randn(shape.tokens, len(LAYERS) * shape.hidden).bfloat16(), "final": final.bfloat16(),
        "final_before_norm": before, "draft_ids": draft_ids,
    }  # fmt: skip
    save_file(tensors, path)
    return path


def loss_mask(shape: Shape) -> torch.Tensor:
    """[T] bool: conversations of turns of about 200 tokens, each first asked (no loss), then answered (loss)."""
    parts = []
    for length in shape.lengths:
        turns = max(1, length // 200)
        edges = [turn * length // turns for turn in range(turns + 1)]
        for first, end in zip(edges, edges[1:], strict=False):
            asked = round((end - first) * (1 - shape.loss_share))
            parts.append(torch.arange(end - first) >= asked)
    return torch.cat(parts)


class Side:
    """One process that trains, a step whenever asked. Raises RuntimeError, with what it said, when it cannot."""

    def __init__(self, side: str, shape: Shape, folder: Path, dtype: str, lm_head: str = "trained") -> None:
        verifier = write_verifier(folder, shape)
        tensors = write_tensors(folder, shape, verifier)
        spec = asdict(shape) | {
            "side": side, "dtype": dtype, "lm_head": lm_head, "verifier": str(verifier), "tensors": str(tensors),
            "folder": str(folder), "layers": LAYERS,
        }  # fmt: skip
        program = [sys.executable, "-m", "benchmarks.drafter_step"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if side in PEERS:
            program = [os.environ["STATEHOUSE_PEERS_PYTHON"], str(ROOT / "benchmarks" / "drafter_step.py")]
        self.side = side
        self.log = open(folder / f"{side}.log", "w+")  # noqa: SIM115  closed by `close`
        self.process = subprocess.Popen(
            [*program, json.dumps(spec)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            cwd=ROOT, env=environment,
        )  # fmt: skip

    def wait(self) -> dict[str, Any]:
        """The next line of the process."""
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            found: dict[str, Any] = json.loads(line)
            return found
        self.process.wait()
        self.log.seek(0)
        raise RuntimeError(f"{self.side}: {' '.join(self.log.read().split())[-200:]}")

    def step(self) -> dict[str, Any]:
        """{seconds of CPU, loss, peak_mb above the bare process} of one training step."""
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self.wait()

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()
        self.log.close()


@dataclass
class Times:
    """seconds: of each counted step. peak_mb: the largest above the bare process."""

    seconds: list[float]
    peak_mb: float
    loss: float


def interleaved(sides: dict[str, Side], repeats: int, warm: int = 1) -> dict[str, Times]:
    """Steps in turn, one side at a time, so that other work on the machine hurts all alike."""
    found = {name: Times([], 0.0, 0.0) for name in sides}
    for side in sides.values():
        side.wait()
    for turn in range(warm + repeats):
        for name, side in sides.items():
            step = side.step()
            times = found[name]
            times.peak_mb, times.loss = max(times.peak_mb, step["peak_mb"]), step["loss"]
            if turn >= warm:
                times.seconds.append(step["seconds"])
    return found


def measure(sides: Sequence[tuple[str, Side]], repeats: int) -> dict[str, Times]:
    """`interleaved`, and the processes ended whatever happens."""
    try:
        return interleaved(dict(sides), repeats)
    finally:
        for _, side in sides:
            side.close()
