"""A replica: one verifier engine behind a small interface, and the config that opens it.

The states that a replica returns follow one convention, whatever the engine: slot k < len(capture_layers) is the
output of decoder layer capture_layers[k] (0-based, so transformers' `hidden_states[layer + 1]`), the last slot is the
final state *after* the last norm, i.e. what the lm_head reads.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from ray_jobs.verifier import VerifierShape
from storage.errors import RecipeError, StatehouseError
from storage.teacher import TeacherSummary, topk_of

# Engine arguments that the capture depends on. `extraction.replica.args` may not name them.
CAPTURE_ARGUMENTS = {
    "model_path": "the verifier comes from verifier.model",
    "dtype": "set extraction.replica.dtype",
    "device": "follows from extraction.replica.gpus",
    "nccl_port": "taken from extraction.replica.ports",
    "port": "taken from extraction.replica.ports",
    "skip_tokenizer_init": "token ids go in and come out, text never does",
    "disable_radix_cache": "a cached prefix would return no states for it",
    "enable_mixed_chunk": "the capture tells prefill from decode by the batch",
    "enable_return_aux_hidden_states": "it is the capture",
    "return_aux_hidden_state_layer_ids": "set extraction.capture_layers",
    "speculative_algorithm": "it names the capture convention",
    "speculative_draft_model_path": "the capture runs without a drafter",
    "sampling_backend": "per-request seeds need the pytorch sampler",
    "pp_size": "the capture sees one pipeline stage only",
}


# Of min(context, KV cache), what SGLang 0.5.23 takes no prompt into: 1 and 5 more (`max_req_input_len`).
SGLANG_MARGIN = 6
# An engine samples one token behind each prefill.
SAMPLED = 1

# Engine arguments that do not change the states, so that a dataset may be finished with others.
NEUTRAL_ARGUMENTS = frozenset(
    {
        "attention_backend", "chunked_prefill_size", "cuda_graph_max_bs", "decode_attention_backend",
        "disable_cuda_graph", "dist_timeout", "log_level", "max_prefill_tokens", "max_running_requests",
        "mem_fraction_static", "prefill_attention_backend", "schedule_policy", "trust_remote_code", "watchdog_timeout",
    }
)  # fmt: skip


class ReplicaConfig(BaseModel):
    """One engine: which, on what, and with which arguments (`extraction.replica` in a recipe)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["sglang", "transformers"] = "sglang"
    # GPUs of this replica, all of them one tensor-parallel group; 0 runs on the CPU.
    gpus: int = Field(default=0, ge=0)
    cpus: int = Field(default=1, ge=1)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    # OpenMP threads of a CPU engine. More than the idle cores makes it many times slower.
    threads: int = Field(default=1, ge=1)
    start_timeout_s: float = Field(default=600, gt=0)
    # A request that takes longer fails; an engine that died fails at once.
    request_timeout_s: float = Field(default=600, gt=0)
    # Range the engine may take ports from, "first-last".
    ports: str = "31000-31999"
    # KV cache of a CPU engine, in tokens, and so the longest sequence. A GPU engine sizes its own.
    max_total_tokens: int = Field(default=16384, ge=128)
    # Passed to the engine as they are (sglang.Engine's arguments).
    args: dict[str, Any] = Field(default_factory=dict)

    @field_validator("ports")
    @classmethod
    def _ports_are_a_range(cls, ports: str) -> str:
        parse_ports(ports)
        return ports

    @field_validator("args")
    @classmethod
    def _args_leave_the_capture_alone(cls, args: dict[str, Any]) -> dict[str, Any]:
        taken = [f"{name} ({CAPTURE_ARGUMENTS[name]})" for name in args if name in CAPTURE_ARGUMENTS]
        if taken:
            raise ValueError(f"extraction.replica.args may not set {', '.join(taken)}")
        return args


def parse_ports(ports: str) -> range:
    """ "31000-31999" -> range(31000, 32000). Raises ValueError on anything else."""
    first, dash, last = ports.partition("-")
    if not (dash and first.isdigit() and last.isdigit() and 1024 <= int(first) <= int(last) <= 65535):
        raise ValueError(f"ports must be first-last within 1024-65535, such as 31000-31999; found {ports!r}")
    return range(int(first), int(last) + 1)


@dataclass(frozen=True)
class Sampling:
    """How to draw one response. temperature 0 is greedy; seed None draws a fresh one."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 256
    seed: int | None = None
    # Ids that end a response, besides the verifier's own end-of-sequence ids.
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_new_tokens < 1:
            raise RecipeError(
                f"bad sampling {self}; expected temperature >= 0, 0 < top_p <= 1, max_new_tokens >= 1; "
                f"correct the recipe's generation section"
            )


@dataclass(frozen=True)
class Generation:
    """One response. token_ids: [new tokens] int32, the end token included where the verifier produced one."""

    token_ids: np.ndarray
    # "stop": an end token; "length": max_new_tokens reached.
    finish_reason: str


# Called with the index of a prompt and its response, as soon as that one is finished.
Heard = Callable[[int, Generation], None]


def unheard(_index: int, _generation: Generation) -> None:
    pass


@dataclass(frozen=True)
class Forwarded:
    """One sequence after a prefill. states: [T, len(capture_layers) + 1, H], read-only. teacher: as the replica was asked."""

    states: np.ndarray
    teacher: TeacherSummary | None = None


class Replica(ABC):
    """One verifier engine. `prefill` and `generate` may run at the same time, in two threads."""

    shape: VerifierShape

    @property
    @abstractmethod
    def longest(self) -> int:
        """Tokens of the longest sequence that `forward` takes, once started."""

    @abstractmethod
    def start(self) -> None:
        """Start the engine and prove its capture; ReplicaFailed when either does not work."""

    @abstractmethod
    def forward(self, batch: Sequence[np.ndarray]) -> list[Forwarded]:
        """Hidden states of every token of every sequence, and the teacher summary that the replica was opened for.

        batch: [T_i] integer token ids each. States come in the engine's dtype (float32, or ml_dtypes.bfloat16).
        Raises StatehouseError for ids that no engine may see, ReplicaFailed when the engine fails.
        """

    def prefill(self, batch: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The states of `forward` alone: one [T_i, len(capture_layers) + 1, H] array for each sequence."""
        return [one.states for one in self.forward(batch)]

    @abstractmethod
    def generate(
        self, prompts: Sequence[np.ndarray], samplings: Sequence[Sampling], heard: Heard = unheard
    ) -> list[Generation]:
        """One response to each prompt ([T_i] integer token ids), by the sampling of the same index.

        heard(index, response) is called in this thread, once for each, also when the engine fails before the others are.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What the contract records: engine, engine_version, tp_size, engine_dtype."""

    @abstractmethod
    def stop(self) -> None:
        """End the engine and remove what it left behind. May be called more than once, and before start."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def unpack_summary(packed: np.ndarray, teacher: str) -> TeacherSummary:
    """packed: [T, 1 + 2k] float32 as engine_path/statehouse_teacher.py makes it: log-sum-exp, logits, ids."""
    k = (packed.shape[1] - 1) // 2
    ids = packed[:, 1 + k :].astype(np.int32)
    argmax, norm = np.ascontiguousarray(ids[:, 0]), packed[:, 0].astype(np.float32)
    if not topk_of(teacher):
        return TeacherSummary(argmax, norm)
    return TeacherSummary(argmax, norm, ids, packed[:, 1 : 1 + k].astype(np.float32))


# ---- checks that every engine shares -------------------------------------------------------------------------------


def validate_layers(capture_layers: Sequence[int], num_layers: int) -> None:
    """Raise RecipeError unless the layers are ascending, distinct and capturable.

    The last layer is not: engines return a layer's output as the next layer's input, and transformers' last entry is
    already normed.
    """
    layers = list(capture_layers)
    if not layers or layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] > num_layers - 2:
        raise RecipeError(
            f"cannot capture layers {layers} of a verifier of {num_layers} layers; "
            f"expected ascending, distinct outputs of decoder layers 0 to {num_layers - 2} "
            f"(layer {num_layers - 1} is captured as the final state); "
            f"correct extraction.capture_layers"
        )


def validate_ids(batch: Sequence[np.ndarray], vocab_size: int, max_length: int) -> None:
    """Raise StatehouseError unless every sequence is 1 to max_length ids in [0, vocab_size).

    An id out of range does not fail a request: it kills the engine and every process around it.
    """
    for index, sequence in enumerate(batch):
        ids = np.asarray(sequence)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise StatehouseError(
                f"sequence {index} of {len(batch)} is no list of token ids; "
                f"expected [tokens] integers; found shape {ids.shape}, dtype {ids.dtype}"
            )
        if not 1 <= len(ids) <= max_length:
            raise StatehouseError(
                f"sequence {index} of {len(batch)} has {len(ids)} tokens; "
                f"expected 1 to {max_length}, the engine's limit; "
                f"lower dataset.max_length, or raise extraction.replica.max_total_tokens"
            )
        bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if len(bad):
            raise StatehouseError(
                f"sequence {index} of {len(batch)} holds a token id that the verifier does not have; "
                f"expected ids 0 to {vocab_size - 1}; "
                f"found {int(ids[bad[0]])} at position {int(bad[0])} ({len(bad)} such ids); "
                f"tokenise with the verifier's own tokenizer"
            )


def validate_prompts(
    prompts: Sequence[np.ndarray], samplings: Sequence[Sampling], vocab_size: int, max_length: int
) -> None:
    """validate_ids, and room for each response within max_length."""
    if len(prompts) != len(samplings):
        raise StatehouseError(f"{len(prompts)} prompts but {len(samplings)} samplings: one for each prompt is needed")
    validate_ids(prompts, vocab_size, max_length)
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        if len(prompt) + sampling.max_new_tokens > max_length:
            raise StatehouseError(
                f"prompt {index} of {len(prompts)} leaves no room for its response; "
                f"expected prompt + max_new_tokens <= {max_length}, the engine's limit; "
                f"found {len(prompt)} + {sampling.max_new_tokens}; "
                f"lower generation.max_new_tokens, or drop the prompt"
            )
