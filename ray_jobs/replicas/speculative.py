"""Serving: the verifier in SGLang, with an exported drafter (EAGLE-3 speculative decoding) or without one, greedily.

The same engine process and CPU stand-ins as the capture's (sglang.py), but nothing is captured: this is what a user of
the drafter runs. Per response it tells how many verify passes there were and what each accepted.

Tested on a CPU. With `config.gpus` the engine gets SGLang's own defaults for attention and memory; that path is the
same but for those arguments, and has not run here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from drafter.export import load_sglang
from drafter.verifier_weights import read_verifier_weights
from ray_jobs.replicas.engine_process import EngineProcess
from ray_jobs.replicas.replica import ReplicaConfig, Sampling, validate_prompts
from ray_jobs.replicas.sglang import engine_arguments, finish_kind
from ray_jobs.verifier import VerifierShape, check_weights, read_config
from storage.errors import RecipeError, ReplicaFailed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """One greedy response. token_ids: [new tokens] int32, the end token included where there is one.

    verifies: passes of the verifier over drafts; the first token of a response comes from the prefill. accepted:
    drafts that they accepted, as SGLang counts them: the last pass in full, though the response may be cut within it.
    passes: the same, pass by pass. All are 0 or empty without a drafter.
    """

    token_ids: np.ndarray
    # "stop": an end token; "length": max_new_tokens reached.
    finish_reason: str
    verifies: int
    accepted: int
    passes: tuple[int, ...]


class SpeculativeReplica:
    """One sglang.Engine in its own process. drafter: an exported folder, None serves without.

    draft_length: drafts of one verify pass, a chain without branches.
    """

    def __init__(self, config: ReplicaConfig, folder: Path, drafter: Path | None, draft_length: int) -> None:
        check_weights(folder)
        if draft_length < 1:
            raise RecipeError(f"draft_length: expected at least 1, found {draft_length}; set evaluation.draft_lengths")
        if config.engine != "sglang":
            raise RecipeError(
                f"extraction.replica.engine: serving needs sglang, found {config.engine}; leave the engine out"
            )
        self.config = config
        self.folder = Path(folder).resolve()
        self.drafter = None if drafter is None else Path(drafter).resolve()
        self.draft_length = draft_length
        verifier = read_config(folder)
        self.shape = VerifierShape.from_config(verifier)
        self.wrapped = "text_config" in verifier
        self._engine: EngineProcess | None = None
        if self.drafter is not None:
            # SGLang keeps random numbers where a tensor is missing, without a word: so look before it does.
            load_sglang(self.drafter, read_verifier_weights(self.folder).embedding_VD)

    def start(self) -> None:
        """Raises ReplicaFailed when the engine does not come up."""
        if self._engine is not None:
            raise ReplicaFailed("the serving replica is running already; call stop() first")
        began = time.monotonic()
        self._engine = EngineProcess(self.config, self._arguments, ())
        log.info(
            "server ready version=%s draft_length=%d drafter=%s seconds=%.1f log=%s",
            self._engine.info["engine_version"],
            self.draft_length if self.drafter else 0,
            self.drafter,
            time.monotonic() - began,
            self._engine.log_file,
        )

    def _arguments(self, ports: list[int]) -> dict[str, Any]:
        arguments = engine_arguments(self.config, self.folder, self.wrapped, ports)
        if self.drafter is None:
            return arguments
        return arguments | {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(self.drafter),
            "speculative_num_steps": self.draft_length,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": self.draft_length + 1,  # SGLang counts the root of the chain too
        }

    def generate(self, prompts: Sequence[np.ndarray], max_new_tokens: int, ignore_eos: bool = False) -> list[Served]:
        """One greedy response to each prompt ([T_i] integer token ids), all of them at work at once.

        Raises StatehouseError for prompts that the engine cannot take, ReplicaFailed when it fails.
        """
        engine = self._running()
        sampling = Sampling(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
        room = engine.max_length - self.draft_length - 1  # drafts lie in the cache before they are accepted
        validate_prompts(prompts, [sampling] * len(prompts), self.shape.vocab_size, room)
        params = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos}
        requests = [(np.asarray(prompt).tolist(), params) for prompt in prompts]
        return [self._served(reply, engine) for reply in engine.ask(requests, "serve-", capture=False)]

    def _served(self, reply: dict[str, Any], engine: EngineProcess) -> Served:
        kind = finish_kind(reply, engine)
        found = reply["speculation"]
        passes = tuple(int(count) for count in found["passes"])
        served = Served(
            np.asarray(reply["output_ids"], np.int32), kind, int(found["verifies"]), int(found["accepted"]), passes
        )
        if (len(passes), sum(passes)) != (served.verifies, served.accepted):
            raise ReplicaFailed(
                f"SGLang counts {served.verifies} verify passes and {served.accepted} accepted drafts, its plugin noted "
                f"{list(passes)}: another sglang version than 0.5.23, or the plugin is not loaded; log {engine.log_file}"
            )
        return served

    def describe(self) -> dict[str, Any]:
        """For provenance: engine, engine_version, tp_size, engine_dtype, draft_length."""
        info = self._running().info
        return {
            "engine": "sglang",
            "engine_version": info["engine_version"],
            "tp_size": info["tp_size"],
            "engine_dtype": self.config.dtype,
            "draft_length": self.draft_length if self.drafter else 0,
        }

    def stop(self) -> None:
        """May be called more than once, and before start."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.stop()

    def _running(self) -> EngineProcess:
        if self._engine is None:
            raise ReplicaFailed("the serving replica is not running; call start() first")
        return self._engine

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
