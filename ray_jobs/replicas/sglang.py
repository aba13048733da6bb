"""The real engine: SGLang, on GPUs with tensor parallelism and on a CPU.

An `sglang.Engine` lives in a process of its own (engine_path/statehouse_engine.py), because SGLang kills the process
that owns it when a scheduler dies, without an exception. Here a death is the end of a pipe: every waiting request
fails with ReplicaFailed, and the caller lives. The caller imports neither torch nor sglang.

Capture runs inside the engine's scheduler by a plugin (engine_path/statehouse_capture.py) that SGLang finds by entry
point in a folder on its path; nothing is installed. States come back as one file a request in a private folder on
/dev/shm, mapped and unlinked here: never as lists, never as pickles.

Where there is no GPU, stand-ins for what SGLang lacks on a CPU (cpu_path/) are on the engine's path, and only there.
"""

import contextlib
import logging
import mmap
import secrets
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from drafter.errors import DrafterError
from drafter.layer_ids import sglang_ids
from ray_jobs.replicas.engine_process import EngineProcess
from ray_jobs.replicas.replica import (
    SAMPLED,
    Forwarded,
    Generation,
    Heard,
    Replica,
    ReplicaConfig,
    Sampling,
    unheard,
    unpack_summary,
    validate_ids,
    validate_layers,
    validate_prompts,
)
from ray_jobs.verifier import VerifierShape, check_weights, read_config, text_config
from storage.errors import RecipeError, ReplicaFailed
from storage.teacher import NONE, topk_of

log = logging.getLogger(__name__)

# Families whose states SGLang 0.5.23 captures wrong; the canary would refuse them too, later and with more words.
BROKEN_FAMILIES = {"gemma3": "states lack the residual", "gemma3_text": "states lack the residual"}

CANARY_TOKENS = 24
CANARY_TOLERANCE = 0.02  # relative L2 of a slot, normed, from what the next layer read

# Of a states file, as engine_path/statehouse_capture.py writes it.
_HEADER = struct.Struct("<8sIIIII")
_MAGIC = b"SHSTATE2"
_DTYPES: tuple[Any, ...] = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
_ALIGNMENT = 64


def engine_layer_ids(capture_layers: Sequence[int], model_type: str) -> list[int]:
    """SGLang's ids for the outputs of 0-based decoder layers (`drafter.layer_ids`); states come back by ascending layer.

    model_type: of the language model's config (a wrapper's `text_config`).
    """
    try:
        return sglang_ids([int(layer) for layer in capture_layers], model_type)
    except DrafterError as error:
        raise RecipeError(str(error)) from None


def engine_arguments(config: ReplicaConfig, folder: Path, wrapped: bool, ports: list[int]) -> dict[str, Any]:
    """sglang.Engine's arguments that capture and serving share; config.args win where nothing here depends on them.

    wrapped: whether the language model is a part of a multi-modal one. ports: two free ones.
    """
    arguments: dict[str, Any] = {
        "log_level": "info",
        "skip_server_warmup": True,
        "grammar_backend": "none",
        "tp_size": max(1, config.gpus),
    }
    if wrapped:  # Kimi-K2.5: the language model alone, no image processor
        arguments["enable_multimodal"] = False
    if config.gpus == 0:
        arguments |= {
            "mem_fraction_static": 0.2,
            "max_total_tokens": config.max_total_tokens,
            "max_running_requests": 64,
            "chunked_prefill_size": -1,
            "prefill_attention_backend": "intel_amx",  # the stand-in's, batched over requests in decode
            "decode_attention_backend": "intel_amx",
        }
    arguments |= config.args
    if "attention_backend" in config.args:  # one name for both: ours for each would win over it
        for name in ("prefill_attention_backend", "decode_attention_backend"):
            if name not in config.args:
                arguments.pop(name, None)
    return arguments | {
        "model_path": str(folder),
        "dtype": config.dtype,
        "device": "cuda" if config.gpus else "cpu",
        "nccl_port": ports[0],
        "port": ports[1],
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "sampling_backend": "pytorch",
    }


class SGLangReplica(Replica):
    """One sglang.Engine in its own process, with capture."""

    def __init__(
        self, config: ReplicaConfig, folder: Path, capture_layers: tuple[int, ...], teacher: str = NONE
    ) -> None:
        check_weights(folder)
        if teacher != NONE and config.args.get("enable_dp_attention"):
            raise RecipeError(
                "extraction.replica.args.enable_dp_attention: its ranks hold different tokens, which the teacher summary "
                "cannot join yet; leave it out, or set extraction.teacher=none"
            )
        self.teacher = teacher
        self.config = config
        self.folder = Path(folder).resolve()
        self.capture_layers = capture_layers
        verifier = read_config(folder)
        self.shape = VerifierShape.from_config(verifier)
        self.model_type = str(text_config(verifier).get("model_type", ""))
        self.wrapped = "text_config" in verifier
        if self.model_type in BROKEN_FAMILIES:
            raise ReplicaFailed(
                f"SGLang captures wrong states of {self.model_type}: {BROKEN_FAMILIES[self.model_type]}; "
                f"{folder}; "
                f"set extraction.replica.engine=transformers"
            )
        validate_layers(capture_layers, self.shape.num_layers)
        self._layer_ids = engine_layer_ids(capture_layers, self.model_type)
        self._engine: EngineProcess | None = None

    # ---- life ----

    def start(self) -> None:
        if self._engine is not None:
            raise ReplicaFailed("the SGLang replica is running already; call stop() first")
        began = time.monotonic()
        topk = 0 if self.teacher == NONE else max(1, topk_of(self.teacher))
        engine = EngineProcess(self.config, self._arguments, self.capture_layers, topk)
        self._engine = engine
        try:
            self._canary(engine)
        except BaseException:
            self.stop()
            raise
        log.info(
            "replica ready engine=sglang version=%s tp=%d seconds=%.1f log=%s",
            engine.info["engine_version"],
            engine.info["tp_size"],
            time.monotonic() - began,
            engine.log_file,
        )

    def _arguments(self, ports: list[int]) -> dict[str, Any]:
        """sglang.Engine's arguments. The recipe's own win, except where the capture depends on them."""
        return engine_arguments(self.config, self.folder, self.wrapped, ports) | {
            "enable_return_aux_hidden_states": True,
            "speculative_algorithm": "EAGLE3",  # names the layer convention; no drafter is loaded
            "return_aux_hidden_state_layer_ids": self._layer_ids,
        }

    def stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.stop()

    def _running(self) -> EngineProcess:
        if self._engine is None:
            raise ReplicaFailed("the SGLang replica is not running; call start() first")
        return self._engine

    # ---- work ----

    @property
    def longest(self) -> int:
        return self._running().max_length - SAMPLED

    def forward(self, batch: Sequence[np.ndarray]) -> list[Forwarded]:
        engine = self._running()
        validate_ids(batch, self.shape.vocab_size, self.longest)
        return [forwarded for forwarded, _ in self._capture(engine, batch, "prefill-")]

    def _capture(
        self, engine: EngineProcess, batch: Sequence[np.ndarray], prefix: str
    ) -> list[tuple[Forwarded, dict[str, Any]]]:
        """States, teacher summary and handle of each sequence."""
        sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}  # 0 new tokens: no handle
        requests = [(np.asarray(ids).tolist(), sampling) for ids in batch]
        captured = []
        for ids, reply in zip(batch, engine.ask(requests, prefix, capture=True), strict=True):
            finish_kind(reply, engine)  # an aborted one has no handle
            handle = reply["handle"] or {"error": "no handle came back: the capture plugin is not loaded"}
            if "error" in handle:
                raise ReplicaFailed(
                    f"SGLang captured no states: {handle['error']}; "
                    f"expected {len(ids)} rows for a sequence of {len(ids)} tokens; "
                    f"log {engine.log_file}"
                )
            states, packed = read_states(Path(handle["path"]), engine.private, np.asarray(ids, dtype=np.int32))
            if (packed is None) != (self.teacher == NONE):
                raise ReplicaFailed(
                    f"SGLang captured no teacher summary, {self.teacher} was asked; log {engine.log_file}"
                )
            summary = None if packed is None else unpack_summary(packed, self.teacher)
            captured.append((Forwarded(self._checked(states, engine), summary), handle))
        return captured

    def _checked(self, states_TLH: np.ndarray, engine: EngineProcess) -> np.ndarray:
        expected = (len(self.capture_layers) + 1, self.shape.hidden_size, _dtype(self.config))
        found = (*states_TLH.shape[1:], states_TLH.dtype)
        if found != expected:
            raise ReplicaFailed(
                f"SGLang captured states of another shape; "
                f"expected slots, hidden size, dtype {expected}; found {found}; "
                f"log {engine.log_file}"
            )
        return states_TLH

    def _canary(self, engine: EngineProcess) -> None:
        """Prove at start what nobody would notice later: plugin, slots, layers, no cache between two equal prompts."""
        ids = (np.arange(1, CANARY_TOKENS + 1, dtype=np.int64) * 9973) % self.shape.vocab_size
        (forwarded, handle), (again, _) = self._capture(engine, [ids, ids], "canary-")
        first = forwarded.states
        if not np.isfinite(first.astype(np.float32)).all():
            raise ReplicaFailed(f"the canary's states are not finite; log {engine.log_file}")
        del again  # its length and ids were checked: an engine with a prefix cache returns one row
        for k in range(first.shape[1] - 1):
            if np.array_equal(first[:, k], first[:, k + 1]):
                raise ReplicaFailed(f"the canary's slots {k} and {k + 1} are equal; log {engine.log_file}")
        self._canary_teacher(handle["teacher_errors"], engine)
        errors = handle["layer_errors"]
        if errors is None or None in errors:
            # nothing comparable passed by: CUDA graphs, quantised norms, rows scattered over ranks
            log.warning("canary: layer ids not proven from inside the engine, errors=%s", errors)
            return
        names = [f"layer {layer}" for layer in self.capture_layers] + ["final state"]
        wrong = [f"{n} {e:.3g}" for n, e in zip(names, errors, strict=True) if not e <= CANARY_TOLERANCE]
        if wrong:
            raise ReplicaFailed(
                f"SGLang's captured states are not the outputs of the layers asked for; "
                f"{self.model_type}, capture layers {list(self.capture_layers)}; "
                f"expected relative error <= {CANARY_TOLERANCE} at the canary; found {', '.join(wrong)}; "
                f"set extraction.replica.engine=transformers, or install another sglang version"
            )

    def _canary_teacher(self, errors: list[float] | None, engine: EngineProcess) -> None:
        if self.teacher == NONE:
            return
        if errors is None:
            raise ReplicaFailed(f"the canary's teacher summary was not compared with logits; log {engine.log_file}")
        if not max(errors) <= CANARY_TOLERANCE:
            raise ReplicaFailed(
                f"the teacher summary is not that of SGLang's own logits; {self.model_type}; expected a relative error <= "
                f"{CANARY_TOLERANCE} at the canary; found {errors[0]:.3g} of the log-sum-exp, {errors[1]:.3g} of the argmax; "
                f"set extraction.teacher=none, or install another sglang version"
            )

    def generate(
        self, prompts: Sequence[np.ndarray], samplings: Sequence[Sampling], heard: Heard = unheard
    ) -> list[Generation]:
        engine = self._running()
        validate_prompts(prompts, samplings, self.shape.vocab_size, engine.max_length)
        requests = [
            (np.asarray(prompt).tolist(), _sampling_params(sampling))
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]

        def made(reply: dict[str, Any]) -> Generation:
            return Generation(np.asarray(reply["output_ids"], dtype=np.int32), finish_kind(reply, engine))

        def hear(at: int, reply: dict[str, Any]) -> None:
            with contextlib.suppress(ReplicaFailed):  # an aborted one: told below, when the others have been heard
                heard(at, made(reply))

        replies = engine.ask(requests, "generate-", capture=False, heard=hear)
        return [made(reply) for reply in replies]

    def describe(self) -> dict[str, Any]:
        info = self._running().info
        return {
            "engine": "sglang",
            "engine_version": info["engine_version"],
            "tp_size": info["tp_size"],
            "engine_dtype": self.config.dtype,
        }


def finish_kind(reply: dict[str, Any], engine: EngineProcess) -> str:
    """ "stop" or "length". Raises ReplicaFailed for a request that SGLang aborted."""
    reason = reply["finish_reason"]
    kind = reason.get("type", "unknown") if isinstance(reason, dict) else str(reason)
    if kind == "abort":
        raise ReplicaFailed(f"SGLang aborted a request: {reason.get('message')}; log {engine.log_file}")
    return kind


def _dtype(config: ReplicaConfig) -> Any:
    return _DTYPES[0] if config.dtype == "float32" else _DTYPES[1]


def _sampling_params(sampling: Sampling) -> dict[str, Any]:
    seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "sampling_seed": seed,
    }


def read_states(path: Path, private: Path, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Map a states file and unlink it: states [T, L, H], read-only, freed with the array; packed teacher summary or None.

    private: the folder that the file must lie in. ids: [T] int32, the token ids that were sent; the file must hold
    the same. Raises ReplicaFailed when it does not.
    """
    if path.parent != private:
        raise ReplicaFailed(f"the engine named a states file outside its folder: {path}")
    with open(path, "rb") as file:
        path.unlink()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    magic, dtype, tokens, slots, hidden, topk = _HEADER.unpack_from(mapped)
    offset = -(-(_HEADER.size + 4 * tokens) // _ALIGNMENT) * _ALIGNMENT
    expected = end = offset + tokens * slots * hidden * _DTYPES[dtype].itemsize if magic == _MAGIC else -1
    if topk:
        end = -(-end // _ALIGNMENT) * _ALIGNMENT
        expected = end + 4 * tokens * (1 + 2 * topk)
    if len(mapped) != expected or not np.array_equal(np.frombuffer(mapped, "<i4", tokens, _HEADER.size), ids):
        raise ReplicaFailed(
            f"the engine returned the states of another sequence; "
            f"expected {len(ids)} tokens, {expected} bytes; found {tokens} tokens, {len(mapped)} bytes"
        )
    packed = np.frombuffer(mapped, np.float32, tokens * (1 + 2 * topk), end).reshape(tokens, -1) if topk else None
    states = np.frombuffer(mapped, _DTYPES[dtype], tokens * slots * hidden, offset).reshape(tokens, slots, hidden)
    return states, packed
