"""Processes that take training steps on demand, so that ours and the peers' can be interleaved; and what they train on."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
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
    """A drafter, its verifier's vocabulary, and what it is trained on: sequences of `lengths`, a share with loss.

    padding: tokens at the end of each sequence that carry none.
    """

    hidden: int
    draft: int
    vocab: int
    lengths: tuple[int, ...]
    steps: int
    loss_share: float = 0.6
    padding: tuple[int, ...] = ()

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
    for length, padding in zip(shape.lengths, shape.padding or (0,) * len(shape.lengths), strict=True):
        turns = max(1, length // 200)
        edges = [turn * length // turns for turn in range(turns + 1)]
        for first, end in zip(edges, edges[1:], strict=False):
            asked = round((end - first) * (1 - shape.loss_share))
            parts.append(torch.arange(end - first) >= asked)
            parts[-1] &= torch.arange(first, end) < length - padding
    return torch.cat(parts)


class Side:
    """One process that trains, a step whenever asked. Raises RuntimeError, with what it said, when it cannot."""

    def __init__(self, side: str, folder: Path) -> None:
        program = [sys.executable, "-m", "benchmarks.drafter_step"]
        if side in PEERS:
            program = [os.environ["STATEHOUSE_PEERS_PYTHON"], str(ROOT / "benchmarks" / "drafter_step.py")]
        self.side, self.folder = side, folder
        self.log = tempfile.TemporaryFile("w+", dir=folder)  # noqa: SIM115  closed by `close`
        self.process = subprocess.Popen(
            [*program, side], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def build(self, shape: Shape, dtype: str, lm_head: str = "trained") -> None:
        """Another model in the same process, in place of the one before."""
        verifier = write_verifier(self.folder, shape)
        spec = asdict(shape) | {
            "dtype": dtype, "lm_head": lm_head, "verifier": str(verifier), "folder": str(self.folder), "layers": LAYERS,
            "tensors": str(write_tensors(self.folder, shape, verifier)),
        }  # fmt: skip
        self._ask(json.dumps(spec))

    def step(self) -> dict[str, Any]:
        """{seconds of CPU, loss, peak_mb above the bare process} of one training step."""
        return self._ask("step")

    def _ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            found: dict[str, Any] = json.loads(answer)
            return found
        self.process.wait()
        self.log.seek(0)
        raise RuntimeError(f"{self.side}: {' '.join(self.log.read().split())[-200:]}")

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()
        self.log.close()


@dataclass
class Times:
    """seconds: of each counted step. peak_mb: the largest above the bare process; of a fresh process it means most."""

    seconds: list[float]
    peak_mb: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def interleaved(sides: Mapping[str, Side], repeats: int) -> dict[str, Times]:
    """Steps in turn, one side at a time, so that other work on the machine hurts all alike.

    Two of each do not count: the second is still a tenth slower than those that follow, while memory settles.
    """
    found = {name: Times([], 0.0) for name in sides}
    for turn in range(2 + repeats):
        for name, side in sides.items():
            step = side.step()
            found[name].peak_mb = max(found[name].peak_mb, step["peak_mb"])
            if turn > 1:
                found[name].seconds.append(step["seconds"])
    return found


def measure(shape: Shape, folder: Path, dtype: str, lm_head: str, repeats: int) -> Times:
    """Our step alone, in a fresh process."""
    side = Side("statehouse", folder)
    try:
        side.build(shape, dtype, lm_head)
        return interleaved({"ours": side}, repeats)["ours"]
    finally:
        side.close()
