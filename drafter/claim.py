"""Before any worker starts: what is asked for is checked, and the run is made, found, or found finished."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafter.config import DrafterConfig, follow
from drafter.errors import DrafterError
from drafter.export import require_servable
from drafter.layer_ids import family, sglang_ids
from drafter.recipe import TrainingSection
from drafter.run import RUN, SUMMARY, Run
from drafter.sources import Request, Sources
from drafter.start import check_start
from drafter.tracking import require_trackers
from drafter.verifier_weights import VerifierWeights


def claim(request: Request, sources: Sources, *, fresh: bool = False) -> dict[str, Any] | None:
    """Makes or finds the run; returns the summary of a finished one, else None. Once for all workers, before they start.

    A driver that is still training the run ends at its next checkpoint. Raises DrafterError when the run is of something
    else.
    """
    require_trackers(request.training.trackers)
    run = Run(request.run)
    run.store.probe()
    if fresh:
        run.take_over(request.owner)  # first, so that nobody writes into what is deleted
    vocabulary = sources.vocabulary
    provenance = {
        **request.provenance,
        "datasets": sources.where(),
        "draft_vocabulary": {
            "uri": request.vocabulary, "hash": vocabulary.hash, "size": vocabulary.size, "made_of": vocabulary.provenance,
        },
    }  # fmt: skip
    run.claim(sources.identity(request), provenance, fresh=fresh)
    if (summary := run.summary()) is None:
        run.take_over(request.owner)
    else:
        _require_chosen_alike(run, summary, request.training)
    return summary


def require_start(request: Request, config: DrafterConfig, verifier: Mapping[str, Any], *, fresh: bool = False) -> None:
    """Before a run is made: raises StatehouseError when it can never start from what drafter.start_from names.

    A run that is there already is not asked again. verifier: its config.json.
    """
    start = request.drafter.start_from
    if start is not None and (fresh or not Run(request.run).store.exists(RUN)):
        check_start(start, config, verifier)


def finished(request: Request, sources: Sources) -> dict[str, Any] | None:
    """The summary of the run if it is there and finished, else None; writes nothing.

    Raises DrafterError when the run is of something else.
    """
    run = Run(request.run)
    if not run.store.exists(RUN):
        return None
    run.claim(sources.identity(request), request.provenance)
    if (summary := run.summary()) is not None:
        _require_chosen_alike(run, summary, request.training)
    return summary


def _require_chosen_alike(run: Run, summary: Mapping[str, Any], settings: TrainingSection) -> None:
    """Raises DrafterError when the finished run's drafter was chosen by settings that would have chosen another one.

    They are no part of the identity, since an unfinished run may go on with others. Summaries of before do not name
    them, but say which update was exported.
    """
    best = (summary.get("best") or {}).get("update")
    updates, exported = summary.get("updates"), summary.get("exported")
    then = dict(summary.get("chosen_by") or {})
    if not then and exported is not None and best is not None:
        then = {"export": "last" if exported == updates else "best"}
    now = chosen_by(settings)
    same = {
        "export": best is None or best == updates,
        "patience": not summary.get("ended_early") and settings.patience is None,
        "bad_shards": not summary.get("bad_sequences"),
    }
    if said := [
        f"training.{name}: {found} -> {now[name]}"
        for name, found in then.items()
        if name in now and found != now[name] and not same[name]
    ]:
        raise DrafterError(
            f"{run.uri}/{SUMMARY}: this run is finished, and its drafter was chosen otherwise: {'; '.join(said)}; train "
            f"beside it with training.run=<other name>, or start it over with --fresh"
        )


def chosen_by(settings: TrainingSection) -> dict[str, Any]:
    """The settings that say which drafter a run ends with, beside those that say what is learnt."""
    return {"export": settings.export, "patience": settings.patience, "bad_shards": settings.bad_shards}


def drafter_config(request: Request, sources: Sources, weights: VerifierWeights) -> DrafterConfig:
    """The drafter that is asked for. Raises DrafterError when there can be none such, or none that SGLang serves, or when
    the dataset's final states cannot be read.
    """
    layers, changed = sources.dataset.contract.capture_layers, request.drafter.config
    config = follow(weights.config, sources.vocabulary.size, layers, changed)
    contract = sources.dataset.contract
    for name, found, expected, whose in (
        ("target_hidden_size", config.target_hidden_size, contract.hidden_size, "the states of the dataset"),
        ("vocab_size", config.vocab_size, contract.vocab_size, "the verifier"),
        ("capture_layers", list(config.capture_layers), list(layers), "the states of the dataset"),
    ):
        if found != expected:
            raise DrafterError(
                f"drafter.config.{name}: expected {expected}, of {whose} ({sources.dataset.uri}), found {found}; leave it out"
            )
    if config.own_embedding and request.drafter.lm_head != "trained":
        raise DrafterError(
            f"drafter.lm_head: expected trained for a drafter of width {config.hidden_size}, found "
            f"{request.drafter.lm_head}: the verifier's rows are {config.target_hidden_size} wide"
        )
    require_servable(config)
    layer_ids(request, config, weights)
    weights.final_norm(contract, sources.dataset.uri)
    return config


def layer_ids(request: Request, config: DrafterConfig, weights: VerifierWeights) -> tuple[int, ...]:
    """SGLang's numbers for the captured layers: those of the request, else as the verifier's family counts.

    Raises DrafterError for layers that have none.
    """
    return request.layer_ids or tuple(sglang_ids(config.capture_layers, family(weights.config)))
