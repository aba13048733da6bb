"""How long a draft step, a verifier step and a training step take, from a GPU's bandwidth, FLOP/s and links.

A matrix product takes the longer of reading its weights and doing its arithmetic, both at a share of the peak that
servers reach. Added to that: a fixed overhead a step (launches, sampling, the host), collectives under tensor
parallelism, and passes over the logits. A roofline ranks sizes and shows where speed comes from; it is no measurement:
measure with `vocab.measure`, and give measured times instead where there are some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vocab.errors import VocabError
from vocab.hardware import Gpu
from vocab.shapes import Drafter, Verifier

Server = Literal["sglang", "vllm"]


@dataclass(frozen=True)
class Assumptions:
    """What a server reaches of the peaks, and what the peaks do not say. Times in microseconds.

    The defaults are round figures for bf16 kernels under CUDA graphs, given to be replaced: 0.8 and 0.6 are what
    memory-bound and compute-bound GEMMs commonly reach; overheads are tens of microseconds for a one-layer graph and a
    few hundred for a large model with its scheduler.
    """

    bandwidth_share: float = 0.8
    compute_share: float = 0.6
    draft_overhead_us: float = 60.0
    verify_overhead_us: float = 400.0
    # Extra launches of a mapped vocabulary, each draft step: the gather d2t[id]. SGLang also falls back from its fused
    # top-1 chain to a list of columns joined at the end (eagle_worker_v2: only when `hot_token_id` is None).
    map_overhead_us: float = 6.0
    # Tokens in the KV cache of each sequence.
    context: int = 2048

    def __post_init__(self) -> None:
        for name in ("bandwidth_share", "compute_share"):
            if not 0 < getattr(self, name) <= 1:
                raise VocabError(f"{name}: expected a share above 0, at most 1, found {getattr(self, name)}")
        for name in ("draft_overhead_us", "verify_overhead_us", "map_overhead_us", "context"):
            if not getattr(self, name) >= 0:
                raise VocabError(f"{name}: expected at least 0, found {getattr(self, name)}")


@dataclass(frozen=True)
class Machine:
    """`tensor_parallel` GPUs of one kind that share every matrix.

    measured_step_s: {(draft vocabulary, batch): seconds} of whole draft steps, used instead of the roofline where given.
    measured_verify_s: {tokens in the batch: seconds} of verifier steps, likewise, interpolated in between.
    """

    gpu: Gpu
    tensor_parallel: int = 1
    assumptions: Assumptions = field(default_factory=Assumptions)
    server: Server = "sglang"
    measured_step_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    measured_verify_s: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise VocabError(f"tensor_parallel: expected at least 1, found {self.tensor_parallel}")
        if self.server not in ("sglang", "vllm"):
            raise VocabError(f"server: expected sglang or vllm, found {self.server!r}")

    def matmul(self, parameters: float, rows: float, bytes_each: float = 2.0) -> float:
        """Seconds of rows x matrices of `parameters` weights in all, split over the GPUs."""
        assumed = self.assumptions
        read = parameters * bytes_each / (self.gpu.bandwidth_gbs * 1e9 * assumed.bandwidth_share)
        compute = 2 * parameters * rows / (self.gpu.bf16_tflops * 1e12 * assumed.compute_share)
        return max(read, compute) / self.tensor_parallel

    def stream(self, moved: float) -> float:
        """Seconds for `moved` bytes through the memory of all GPUs together."""
        return moved / (self.tensor_parallel * self.gpu.bandwidth_gbs * 1e9 * self.assumptions.bandwidth_share)

    def all_reduce(self, size: float) -> float:
        """Seconds of one all-reduce of `size` bytes; nothing on one GPU."""
        return self._collective(2 * size)

    def all_gather(self, size: float) -> float:
        """Seconds of one all-gather whose result has `size` bytes; nothing on one GPU."""
        return self._collective(size)

    def _collective(self, moved: float) -> float:
        if self.tensor_parallel == 1:
            return 0.0
        share = (self.tensor_parallel - 1) / self.tensor_parallel
        return self.gpu.link_latency_us * 1e-6 + moved * share / (self.gpu.link_gbs * 1e9)


def draft_step(machine: Machine, drafter: Drafter, size: int, batch: int, *, rows: float | None = None) -> float:
    """Seconds of one draft step of `batch` sequences with a draft vocabulary of `size` ids.

    rows: of the first step of a round, which takes the verifier's features of all tokens accepted last time through fc;
    None for the later steps, which feed back their own state and skip fc. Logits are needed of one row a sequence.
    """
    measured = machine.measured_step_s.get((size, batch))
    if measured is not None:
        return measured
    head = drafter.lm_head(size)
    body = drafter.body if rows is not None else drafter.body - drafter.fc
    seconds = machine.matmul(body, batch if rows is None else rows) + machine.matmul(head, batch)
    seconds += 2 * machine.all_reduce(2.0 * drafter.hidden_size * (batch if rows is None else rows))
    # Logits are written once in bf16 and read once for the argmax.
    seconds += machine.stream(2 * 2.0 * batch * size) + machine.all_gather(2.0 * batch * size)
    if size < drafter.vocab_size:
        seconds += machine.assumptions.map_overhead_us * 1e-6
        if machine.server == "vllm":  # scatters into [batch, vocabulary], then takes the argmax over all of it
            seconds += machine.stream(2 * 2.0 * batch * drafter.vocab_size)
    return seconds + machine.assumptions.draft_overhead_us * 1e-6


def expected_experts(experts: int, per_token: int, tokens: float) -> float:
    """Distinct experts that `tokens` tokens read in one layer, when each picks `per_token` of `experts` alike.

    experts x (1 - (1 - per_token / experts) ^ tokens): an upper bound on the mean, since real routing is uneven and
    neighbouring tokens agree.
    """
    if experts == 0:
        return 0.0
    return experts * (1 - (1 - per_token / experts) ** tokens)


def verifier_step(machine: Machine, verifier: Verifier, batch: int, tokens: int) -> float:
    """T(B, k+1): seconds of one verifier step of `batch` sequences with `tokens` new tokens each."""
    rows = batch * tokens
    if machine.measured_verify_s:
        return _interpolated(machine.measured_verify_s, rows)
    seconds = machine.matmul(verifier.dense, rows, verifier.dense_bytes)
    if verifier.experts:
        distinct = expected_experts(verifier.experts, verifier.experts_per_token, rows)
        read = machine.stream(distinct * verifier.expert_parameters * verifier.moe_layers * verifier.expert_bytes)
        active = verifier.experts_per_token * verifier.expert_parameters * verifier.moe_layers
        compute = machine.matmul(active, rows, 0.0)
        seconds += max(read, compute)
    seconds += machine.stream(batch * machine.assumptions.context * verifier.kv_bytes)
    seconds += 2 * verifier.layers * machine.all_reduce(2.0 * verifier.hidden_size * rows)
    seconds += machine.stream(2 * 2.0 * rows * verifier.vocab_size) + machine.all_gather(
        2.0 * rows * verifier.vocab_size
    )
    return seconds + machine.assumptions.verify_overhead_us * 1e-6


def _interpolated(measured: Mapping[int, float], rows: int) -> float:
    """Linear between the two measurements around `rows`; beyond the last, from the slope of the last two."""
    known = sorted(measured)
    if rows <= known[0] or len(known) == 1:
        return measured[known[0]]
    upper = next((at for at in known if at >= rows), known[-1])
    lower = known[known.index(upper) - 1]
    slope = (measured[upper] - measured[lower]) / (upper - lower)
    return measured[lower] + slope * (rows - lower)


def round_seconds(
    machine: Machine, verifier: Verifier, drafter: Drafter, size: int, batch: int, k: int, tau: float
) -> float:
    """Seconds of one round: k draft steps, then the verifier on k+1 tokens. tau: tokens that a round yields."""
    first = draft_step(machine, drafter, size, batch, rows=batch * tau)
    later = (k - 1) * draft_step(machine, drafter, size, batch) if k > 1 else 0.0
    return first + later + verifier_step(machine, verifier, batch, k + 1)


def fits(machine: Machine, verifier: Verifier, drafter: Drafter, size: int, batch: int) -> bool:
    """Whether weights and KV cache leave a tenth of the memory free."""
    cache = batch * machine.assumptions.context * verifier.kv_bytes
    used = verifier.weight_bytes + 2.0 * drafter.total(size) + cache
    return used <= 0.9 * machine.tensor_parallel * machine.gpu.memory_gb * 1e9


@dataclass(frozen=True)
class TrainingCost:
    """Of one draft-vocabulary size. flops_per_token: forward and backward of all TTT steps, teacher rows included.

    state_bytes: fp32 weights, gradients and two Adam moments of what is trained, once (a DDP worker holds all of it).
    gradient_bytes: what each of `workers` sends in one update's ring all-reduce, fp32.
    """

    size: int
    trained_parameters: int
    flops_per_token: float
    state_bytes: int
    gradient_bytes: float


def training_cost(
    drafter: Drafter, size: int, *, ttt_steps: int = 7, workers: int = 8, frozen_head: bool = False
) -> TrainingCost:
    """Cost of training with a draft vocabulary of `size` ids; the embedding is frozen, attention's own work not counted.

    A frozen head costs 4 FLOPs a weight (no gradient of the weights), a trained one 6. The teacher's logits over the
    draft rows cost 2 a weight, once a token. Raises VocabError for steps or workers below 1.
    """
    if ttt_steps < 1 or workers < 1:
        raise VocabError(f"training: expected at least one step and worker, found {ttt_steps} and {workers}")
    head = drafter.lm_head(size)
    trained = drafter.body + (0 if frozen_head else head)
    layer = drafter.body - drafter.fc
    flops = 6.0 * drafter.fc + ttt_steps * (6.0 * layer + (4.0 if frozen_head else 6.0) * head) + 2.0 * head
    traffic = 0.0 if workers == 1 else 2 * (workers - 1) / workers * 4.0 * trained
    return TrainingCost(size, trained, flops, 16 * trained, traffic)


def chain_length(values: Mapping[int, float]) -> int:
    """The largest draft length in {k: tau(k)}. Raises VocabError for none, or taus no acceptance can give."""
    if not values or any(k < 1 or not 1 <= tau <= k + 1 or not math.isfinite(tau) for k, tau in values.items()):
        raise VocabError(f"tau: expected {{draft length: 1 to draft length + 1}}, found {dict(values)}")
    return max(values)
