"""What `evaluate` and `serve` share: the run's drafter, its controls, and which sequences may be measured.

All three are refused when they do not belong together: a drafter of another verifier, sequences it was trained on,
text that the verifier did not write.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import ValidationError

from drafter.config import DrafterConfig
from drafter.errors import DrafterError
from drafter.export import load_sglang, read_config
from drafter.initial import new_drafter
from drafter.model import Drafter
from drafter.recipe import DrafterSection
from drafter.run import Run
from drafter.verifier_weights import VerifierWeights
from ray_jobs.recipe import EvaluationConfig, Recipe
from storage import Dataset
from storage.contract import Contract
from storage.errors import ContractMismatch, StatehouseError
from vocab.split import held_out_mask

# ---- sequences -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOut:
    """rows: of the dataset's sequences, held out and written by the verifier. The others are counts of held-out ones.

    given: sequences that came with the prompts, which nobody knows the author of. unknown: of no prompt that is at hand.
    """

    rows: NDArray[np.int64]
    given: int
    unknown: int

    @property
    def left_out(self) -> str:
        """In words, "" when nothing was."""
        parts = [(self.given, "given, not generated"), (self.unknown, "of prompts that are not at hand")]
        return ", ".join(f"{count} {what}" for count, what in parts if count)


def held_out_sequences(dataset: Dataset, prompts: pa.Table, evaluation: EvaluationConfig) -> HeldOut:
    """The held-out sequences that the verifier wrote. prompts: `ray_jobs.prompts.PROMPTS_SCHEMA`.

    Raises StatehouseError when none is left.
    """
    groups, ids = (dataset.sequences[name].to_pylist() for name in ("group", "id"))
    held = np.flatnonzero(held_out_mask(groups, evaluation.held_out, evaluation.seed))
    kinds: dict[str, set[str]] = {"generate": set(), "given": set()}
    for prompt, kind in zip(prompts["id"].to_pylist(), prompts["kind"].to_pylist(), strict=True):
        kinds[kind].add(prompt)  # of a prompt without a response the id is the group
    given = np.array([ids[row] in kinds["given"] for row in held], bool)
    written = np.array([groups[row] in kinds["generate"] for row in held], bool) & ~given
    found = HeldOut(held[written], int(given.sum()), int((~given & ~written).sum()))
    if not len(held):
        raise StatehouseError(
            f"{dataset.uri}: none of its {len(dataset)} sequences is held out by evaluation.held_out="
            f"{evaluation.held_out:g} and evaluation.seed={evaluation.seed}; raise evaluation.held_out and train again"
        )
    if not len(found.rows):
        raise StatehouseError(
            f"{dataset.uri}: none of its {len(held)} held-out sequences was written by the verifier ({found.left_out}), "
            f"and tau means nothing on other text; prepare prompts without answers and run generate and extract"
        )
    return found


def measured_as(recipe: Recipe) -> dict[str, Any]:
    """The settings that `evaluate` measures by; with others it is another evaluation of the same run."""
    evaluation = recipe.evaluation
    return {
        "draft_lengths": sorted(set(evaluation.draft_lengths)),
        "held_out": evaluation.held_out,
        "seed": evaluation.seed,
    }


def require_held_out(run: Run, evaluation: EvaluationConfig) -> None:
    """Raises StatehouseError when the run was trained on sequences that this recipe calls held out."""
    trained = run.identity().get("evaluation") or {}
    share, seed = trained.get("held_out"), trained.get("seed")
    if share is None or seed != evaluation.seed or evaluation.held_out > share:
        raise StatehouseError(
            f"{run.uri}: trained with evaluation.held_out={share} and evaluation.seed={seed}, so it has seen some of what "
            f"held_out={evaluation.held_out:g} and seed={evaluation.seed} hold out; set them as they were in training"
        )


def other_datasets(run: Run, dataset: Dataset) -> list[str]:
    """What else than this dataset the run was trained on: URIs as they were then, or fingerprints."""
    where = {one["fingerprint"]: one["uri"] for one in run.provenance().get("datasets", [])}
    found = [where.get(one, one[:12]) for one in run.identity().get("datasets", {}) if one != dataset.fingerprint]
    return [uri for uri in found if uri != dataset.uri]  # repaired since, it has another fingerprint


def training_filter(run: Run) -> str:
    """What restricted the sequences that the run was trained on, as a recipe says it; "" where nothing did."""
    found = (run.identity().get("training") or {}).get("filter") or {}
    return ", ".join(f"{name}={value}" for name, value in found.items() if value is not None)


# ---- drafters ------------------------------------------------------------------------------------------------------


def load_drafter(run: Run, folder: Path, weights: VerifierWeights, contract: Contract) -> Drafter:
    """The run's finished drafter, in fp32 on the CPU. folder: where a copy of its files goes.

    Raises DrafterError when there is none or it is damaged, ContractMismatch when it is another verifier's.
    """
    identity = run.identity()
    config = drafter_config(run.fetch_drafter(folder), run)
    found: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.target_hidden_size,
        "capture_layers": list(config.capture_layers),
    }
    expected: dict[str, Any] = {
        "vocab_size": contract.vocab_size,
        "hidden_size": contract.hidden_size,
        "capture_layers": list(contract.capture_layers),
    }
    if identity.get("verifier_weights") != contract.weights_hash:
        found["weights_hash"], expected["weights_hash"] = identity.get("verifier_weights"), contract.weights_hash
    elif identity.get("contract") != contract.hash:
        found["contract"], expected["contract"] = identity.get("contract"), contract.hash
    if differing := [name for name in found if found[name] != expected[name]]:
        said = "; ".join(
            f"{name}: expected {_short(expected[name])}, found {_short(found[name])}" for name in differing
        )
        raise ContractMismatch(
            f"{run.uri}: a drafter of another verifier than the dataset's: {said}; train one on this dataset"
        )
    try:
        return load_sglang(folder, weights.embedding_VD).float()
    except DrafterError as error:
        raise _named(error, folder, run) from None


def drafter_config(folder: Path, run: Run) -> DrafterConfig:
    """The config of a fetched drafter. Raises DrafterError that names the run."""
    try:
        return read_config(folder)
    except DrafterError as error:
        raise _named(error, folder, run) from None


def _named(error: DrafterError, folder: Path, run: Run) -> DrafterError:
    """The error with the run's own name in the place of the copy's."""
    return DrafterError(str(error).replace(str(folder), f"{run.uri}/drafter"))


def _short(value: Any) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) == 64 else str(value)


def untrained(drafter: Drafter, weights: VerifierWeights, section: DrafterSection, seed: int) -> Drafter:
    """The control that has learnt nothing: the same shape, vocabulary and kind of head, as training would start it.

    seed: another than the run's, so that it is not the very drafter that was trained. In fp32 on the CPU.
    """
    return new_drafter(drafter.config, drafter.draft_vocab, weights, section, seed).float()


def untrained_seed(recipe: Recipe) -> int:
    return recipe.training.seed + 1


def section_of(run: Run) -> DrafterSection:
    """The drafter section that the run was trained with."""
    try:
        return DrafterSection(**run.identity().get("drafter", {}))
    except (ValidationError, TypeError):
        raise StatehouseError(
            f"{run.uri}: run.json holds no drafter section; start the run over with --fresh"
        ) from None
