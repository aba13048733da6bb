"""Whole draft steps measured on this device: decoder layer, lm_head, argmax, and the way back to the verifier's ids.

Four paths for each size, since a server's path depends on the map: `none` (no map: the ids are the verifier's), `identity`
(a d2t of zeros over the whole vocabulary: what the gather alone costs), `gather` (a real d2t: SGLang) and `scatter` (a
real d2t into a [batch, vocabulary] buffer, then the argmax over it: vLLM). Needs torch. On a CPU the times rank sizes of
small drafters; they say nothing about a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vocab.errors import VocabError
from vocab.mapping import DraftVocab

Path = Literal["none", "identity", "gather", "scatter"]


@dataclass(frozen=True)
class StepTime:
    """Seconds of one draft step: median of the repetitions, and the fastest. size: ids of the draft vocabulary."""

    size: int
    batch: int
    path: str
    seconds: float
    fastest: float


@dataclass(frozen=True)
class StepShape:
    """Widths of the measured layer (Llama's: gated MLP, grouped heads) and how many tokens its cache holds."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int = 512


def measure_steps(
    shape: StepShape,
    vocab_size: int,
    sizes: Sequence[int],
    batches: Sequence[int] = (1,),
    *,
    device: str = "cpu",
    dtype: str = "bfloat16",
    repeats: int = 20,
    seed: int = 0,
) -> list[StepTime]:
    """Times of every size, batch size and path that fits it. The whole vocabulary has `none` and `identity`.

    Weights are random; a step reads all of them, which is what it costs. Raises VocabError without torch or for a device
    it does not have.
    """
    try:
        import torch
    except ImportError as error:
        raise VocabError("measuring needs torch; pip install 'statehouse[drafter]'") from error
    try:
        place = torch.device(device)
        torch.zeros(1, device=place)
    except (RuntimeError, AssertionError) as error:
        raise VocabError(f"device: {device!r} is not there: {str(error).splitlines()[0]}") from error
    kind = getattr(torch, dtype)
    random = np.random.default_rng(seed)
    layer = _Layer(torch, shape, place, kind)
    found = []
    with torch.inference_mode():
        for size in sizes:
            ids = random.choice(vocab_size, size, replace=False)
            vocabulary = DraftVocab.full(vocab_size) if size == vocab_size else DraftVocab.from_ids(ids, vocab_size)
            d2t = torch.from_numpy(vocabulary.d2t.copy()).to(place)
            targets = torch.from_numpy(vocabulary.target_ids.copy()).to(place)
            head = torch.randn(size, shape.hidden_size, device=place, dtype=kind) * 0.02
            paths: tuple[Path, ...] = ("none", "identity") if size == vocab_size else ("none", "gather", "scatter")
            for batch in batches:
                state = torch.randn(batch, shape.hidden_size, device=place, dtype=kind)
                buffer = torch.full((batch, vocab_size), float("-inf"), device=place, dtype=kind)
                cache = layer.cache(batch)
                for path in paths:
                    step = _step(torch, layer, head, state, cache, path, d2t, targets, buffer)
                    times = _timed(torch, step, place, repeats)
                    found.append(StepTime(size, batch, path, statistics.median(times), min(times)))
    return found


def _step(
    torch: Any, layer: _Layer, head: Any, state: Any, cache: Any, path: Path, d2t: Any, targets: Any, buffer: Any
) -> Callable[[], Any]:
    def run() -> Any:
        logits = layer(state, cache) @ head.T
        if path == "scatter":
            return buffer.index_copy(1, targets, logits).argmax(dim=-1)
        best = logits.argmax(dim=-1)
        return best if path == "none" else best + d2t[best]

    return run


def _timed(torch: Any, step: Callable[[], Any], place: Any, repeats: int) -> list[float]:
    wait = torch.cuda.synchronize if place.type == "cuda" else lambda: None
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - began)
    return times


class _Layer:
    """One EAGLE-3 decoder layer on one token a sequence, with a full cache: what a later draft step runs."""

    def __init__(self, torch: Any, shape: StepShape, place: Any, kind: Any) -> None:
        def weight(rows: int, columns: int) -> Any:
            return torch.randn(rows, columns, device=place, dtype=kind) * 0.02

        wide, s = 2 * shape.hidden_size, shape
        self.torch, self.shape, self.place, self.kind = torch, shape, place, kind
        self.q = weight(s.heads * s.head_dim, wide)
        self.kv = weight(2 * s.kv_heads * s.head_dim, wide)
        self.o = weight(s.hidden_size, s.heads * s.head_dim)
        self.up = weight(2 * s.intermediate_size, s.hidden_size)
        self.down = weight(s.hidden_size, s.intermediate_size)

    def cache(self, batch: int) -> tuple[Any, Any]:
        s = self.shape
        size = (batch, s.kv_heads, s.context, s.head_dim)
        keys, values = (self.torch.randn(*size, device=self.place, dtype=self.kind) for _ in range(2))
        return keys, values

    def __call__(self, state: Any, cache: tuple[Any, Any]) -> Any:
        torch, s = self.torch, self.shape
        functional = torch.nn.functional
        inputs = torch.cat(
            [functional.rms_norm(state, (s.hidden_size,)), functional.rms_norm(state, (s.hidden_size,))], dim=-1
        )
        query = (inputs @ self.q.T).view(-1, s.heads, 1, s.head_dim)
        _ = inputs @ self.kv.T
        attended = functional.scaled_dot_product_attention(query, *cache, enable_gqa=True)
        state = state + attended.reshape(state.shape[0], -1) @ self.o.T
        gate, up = (functional.rms_norm(state, (s.hidden_size,)) @ self.up.T).chunk(2, dim=-1)
        return functional.rms_norm(state + (functional.silu(gate) * up) @ self.down.T, (s.hidden_size,))
