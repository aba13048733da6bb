"""The Ray actors of `serve`: one owns the engine that serves, one the verifier that reads the output again."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from drafter.acceptance import shifted_d2t
from drafter.export import export_sglang
from drafter.model import Drafter
from drafter.run import Run
from drafter.verifier_weights import VerifierWeights, read_verifier_weights
from ray_jobs.measuring import load_drafter, section_of, untrained, untrained_seed
from ray_jobs.oracle import Verdict, judge
from ray_jobs.recipe import Recipe
from ray_jobs.replicas import open_replica
from ray_jobs.replicas.replica import Replica, ReplicaConfig
from ray_jobs.replicas.sglang import engine_layer_ids
from ray_jobs.replicas.speculative import Served, SpeculativeReplica
from ray_jobs.verifier import read_config, resolve_verifier, text_config
from storage import open_dataset
from storage.contract import Contract
from storage.errors import ReplicaFailed, StatehouseError

# What is served: the run's drafter, one that has learnt nothing, the run's with a wrong map, none at all.
TRAINED, UNTRAINED, SHIFTED, NONE = "drafter", "untrained", "d2t off by one", "no drafter"


def make_drafter(recipe: Recipe, kind: str, weights: VerifierWeights, contract: Contract, folder: Path) -> Drafter:
    """The drafter of this kind (not NONE), in fp32 on the CPU. folder: for a copy of the run's files."""
    run = Run(recipe.run_uri)
    trained = load_drafter(run, folder, weights, contract)
    if kind == TRAINED:
        return trained
    if kind == SHIFTED:
        return shifted_d2t(trained)
    return untrained(trained, weights, section_of(run), untrained_seed(recipe))


def replica_config(recipe: Recipe, engine: str) -> ReplicaConfig:
    """extraction.replica with another engine, in the dtype that is to be served."""
    args = dict(recipe.extraction.replica.args)
    if recipe.verifier.trust_remote_code:
        args["trust_remote_code"] = True
    changed: dict[str, Any] = {"engine": engine, "dtype": recipe.evaluation.serve_dtype, "args": args}
    if engine == "transformers":
        changed["gpus"] = 0
    return recipe.extraction.replica.model_copy(update=changed)


class ServeActor:
    """One serving engine, on the CPUs and GPUs of extraction.replica."""

    def __init__(self, recipe: Recipe, kind: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="statehouse-serve-")
        self._recipe, self._kind = recipe, kind
        self._replica: SpeculativeReplica | None = None

    def start(self) -> dict[str, Any]:
        """Fetches the drafter and starts the engine; what it is. Raises StatehouseError."""
        recipe, began = self._recipe, perf_counter()
        folder = resolve_verifier(recipe.verifier.model, revision=recipe.verifier.revision)
        drafter = None if self._kind == NONE else self._exported(folder)
        config = replica_config(recipe, "sglang")
        self._replica = SpeculativeReplica(config, folder, drafter, max(recipe.evaluation.draft_lengths))
        self._replica.start()
        return {**self._replica.describe(), "start_seconds": round(perf_counter() - began, 1)}

    def _exported(self, verifier: Path) -> Path:
        """The folder that the engine is given: the run's own files, or a control's."""
        fetched, made = Path(self._folder.name, "run"), Path(self._folder.name, "served")
        weights = read_verifier_weights(verifier)
        contract = open_dataset(self._recipe.dataset.uri).contract
        drafter = make_drafter(self._recipe, self._kind, weights, contract, fetched)
        if self._kind == TRAINED:
            return fetched
        model_type = str(text_config(read_config(verifier)).get("model_type", ""))
        export_sglang(drafter, made, layer_ids=engine_layer_ids(contract.capture_layers, model_type))
        return made

    def serve(self, prompts: Sequence[np.ndarray]) -> tuple[list[Served], float]:
        """Greedy responses to all prompts at once, and the seconds they took."""
        if self._replica is None:
            raise ReplicaFailed("the serving actor is not started")
        tokens = self._recipe.evaluation.serve_tokens
        self._replica.generate(prompts[:1], min(4, tokens), ignore_eos=True)  # the first request does what is done once
        began = perf_counter()
        served = self._replica.generate(prompts, tokens)
        return served, perf_counter() - began

    def stop(self) -> None:
        if self._replica is not None:
            self._replica.stop()
        self._folder.cleanup()


class OracleActor:
    """The verifier alone, in the served dtype, with the drafters beside it."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._replica: Replica | None = None
        self._drafters: dict[str, Drafter] = {}

    def start(self) -> None:
        """Raises StatehouseError when verifier or dataset cannot be opened."""
        recipe = self._recipe
        folder = resolve_verifier(recipe.verifier.model, revision=recipe.verifier.revision)
        self._contract = open_dataset(recipe.dataset.uri).contract
        self._weights = read_verifier_weights(folder)
        self._lm_head_VD = self._weights.lm_head_VD.float()
        config = replica_config(recipe, recipe.evaluation.oracle)
        self._replica = open_replica(config, folder, self._contract.capture_layers)
        self._replica.start()

    def judge(self, kind: str, prompts: Sequence[np.ndarray], served: Sequence[Served]) -> list[Verdict]:
        """One verdict a response. Without a drafter only its tokens are judged."""
        if self._replica is None:
            raise ReplicaFailed("the oracle is not started")
        drafter = self._drafter(kind)
        verdicts = []
        for prompt, one in zip(prompts, served, strict=True):
            ids = np.concatenate([prompt, one.token_ids]).astype(np.int32)
            (states,) = self._replica.prefill([ids])
            if len(states) != len(ids):
                raise StatehouseError(f"the oracle read {len(states)} tokens of {len(ids)}; look at its log")
            verdicts.append(
                judge(
                    states.astype(np.float32), ids, len(prompt), one.passes, self._lm_head_VD, drafter,
                    max(self._recipe.evaluation.draft_lengths),
                )
            )  # fmt: skip
        return verdicts

    def _drafter(self, kind: str) -> Drafter | None:
        if kind == NONE:
            return None
        if kind not in self._drafters:
            with tempfile.TemporaryDirectory(prefix="statehouse-oracle-") as folder:
                drafter = make_drafter(self._recipe, kind, self._weights, self._contract, Path(folder))
            self._drafters[kind] = drafter.eval()
        return self._drafters[kind]

    def stop(self) -> None:
        if self._replica is not None:
            self._replica.stop()
