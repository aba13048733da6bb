"""evaluate: the acceptance length tau(k) of a run's drafter, offline, by walking held-out sequences of its dataset.

Beside it, on the same sequences: an untrained drafter and the run's own with its d2t off by one (the two controls), and
the ceiling: what a greedy drafter of this draft vocabulary that always knew the verifier's likeliest token would get.
Sequences that the verifier did not write are left out. Writes evaluation.json and evaluation.svg into the run's folder,
and of a drafter with the whole vocabulary walks.npz, its rounds at the longest draft length: with `vocab.walks` or
`python -m vocab tradeoff --walks` they say what a smaller draft vocabulary would cost.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from drafter.acceptance import Tally, draft_chains, greedy_ceiling, shifted_d2t, tally_sequence, tau_interval
from drafter.metrics import Fair, fair_metrics
from drafter.run import EVALUATION, EVALUATION_PLOT, WALKS, Run
from drafter.sources import open_verifier_weights
from drafter.teacher import TopK
from drafter.verifier_head import VerifierHead
from ray_jobs import job
from ray_jobs.inputs import Inputs, open_verifier
from ray_jobs.measuring import (
    held_out_sequences,
    load_drafter,
    measured_as,
    other_datasets,
    require_held_out,
    section_of,
    training_filter,
    untrained,
    untrained_seed,
)
from ray_jobs.provenance import provenance
from ray_jobs.recipe import Recipe
from ray_jobs.tau_plot import draw_taus
from ray_jobs.verifier import resolve_verifier
from storage import open_dataset
from storage.errors import RecipeError, StatehouseError
from vocab.acceptance_model import Walks, join_walks, walks_bytes, walks_of

DRAFTER, UNTRAINED, SHIFTED, CEILING = "drafter", "untrained", "d2t off by one", "ceiling"
# Tokens of one forward pass: at K * H = 21,504 their features are 700 MB in fp32.
_BATCH_TOKENS = 1 << 13
# Of fewer sequences a bootstrap shows a spread that is far too small.
_LEAST_FOR_INTERVAL = 5


@dataclass(frozen=True)
class Measured:
    """One sequence. tallies: {drafter: {k: Tally}}. hits: {drafter: first drafts that are the verifier's likeliest token}.

    tokens: of its responses. judged: tokens of responses with a token before them to draft from. own: those of them
    that are the verifier's likeliest. walks: the drafter's rounds at the longest draft length, where it has the whole
    vocabulary.
    """

    source: str
    tokens: int
    judged: int
    own: int
    tallies: dict[str, dict[int, Tally]]
    hits: dict[str, int]
    walks: Walks | None
    # Of each drafter, teacher-forced (drafter.metrics): not of the ceiling.
    fair: dict[str, Fair]


def measure(recipe: Recipe, rows: Sequence[int], device: str = "cpu") -> list[Measured]:
    """Measures the run's drafter, its controls and the ceiling on these sequences of the recipe's dataset."""
    dataset = open_dataset(recipe.dataset.uri)
    run = Run(recipe.run_uri)
    weights = open_verifier_weights(
        str(resolve_verifier(recipe.verifier.model, revision=recipe.verifier.revision)), dataset
    )
    with tempfile.TemporaryDirectory(prefix="statehouse-drafter-") as folder:
        trained = load_drafter(run, Path(folder), weights, dataset.contract)
    drafters = {
        DRAFTER: trained,
        UNTRAINED: untrained(trained, weights, section_of(run), untrained_seed(recipe)),
        SHIFTED: shifted_d2t(trained),
    }
    drafters = {name: drafter.eval().to(device) for name, drafter in drafters.items()}
    norm = weights.final_norm(dataset.contract, dataset.uri)
    head = VerifierHead(weights.lm_head_VD.float().to(device), trained.draft_vocab, norm)
    steps, measured = max(recipe.evaluation.draft_lengths), []
    lengths = dataset.sequences["length"].to_numpy()
    for part in _batches(rows, lengths, _BATCH_TOKENS):
        sequences = dataset.read_many(part)
        counts = [len(one.token_ids) for one in sequences]
        ids_T = torch.from_numpy(np.concatenate([one.token_ids for one in sequences])).long().to(device)
        mask_T = torch.from_numpy(np.concatenate([one.loss_mask for one in sequences])).to(device)
        hidden_TLD = torch.cat([one.torch() for one in sequences]).float().to(device)
        final_TD: torch.Tensor | None = None
        top_k: TopK | None = None
        if dataset.contract.final_state == "absent":  # then the likeliest tokens are stored
            top_k = TopK.of([one.teacher for one in sequences]).to(torch.device(device))
            features_TF, best_T = hidden_TLD.flatten(1), top_k.ids_TK[:, 0]
        else:
            final_TD = hidden_TLD[:, -1]
            features_TF, best_T = hidden_TLD[:, :-1].flatten(1), head.argmax(final_TD)
        batch = (ids_T, mask_T, features_TF, counts, steps)
        chains = {name: draft_chains(drafter, *batch) for name, drafter in drafters.items()}
        numbers = [str(at) for at in range(len(sequences))]
        fair = {
            name: fair_metrics(drafter, head, ids_T, mask_T, features_TF, final_TD, counts, numbers, steps, top_k)
            for name, drafter in drafters.items()
        }
        accepted = {name: found.accepted_T for name, found in chains.items()}
        accepted[CEILING] = greedy_ceiling(best_T, head.in_draft_V[best_T], ids_T, mask_T, counts, steps)
        # A first draft stands after each token of a response that has another behind it: the drafter's places.
        place_T = chains[DRAFTER].first_T >= 0
        own_T = place_T & (best_T == ids_T.roll(-1))
        hits = {name: place_T & (found.first_T == best_T) for name, found in chains.items()}
        hits[CEILING] = place_T & head.in_draft_V[best_T]
        end = 0
        for number, one, count in zip(numbers, sequences, counts, strict=True):
            here = slice(end, end := end + count)
            tallies = {
                name: tally_sequence(accepted_T[here].cpu().numpy(), one.loss_mask, recipe.evaluation.draft_lengths)
                for name, accepted_T in accepted.items()
            }
            right = {name: int(hit_T[here].sum()) for name, hit_T in hits.items()}
            places, own = int(place_T[here].sum()), int(own_T[here].sum())
            walks = None
            if trained.draft_vocab.size == trained.draft_vocab.vocab_size:
                walks = walks_of(accepted[DRAFTER][here].cpu().numpy(), one.token_ids, one.loss_mask, steps)
            measured.append(
                Measured(
                    one.source,
                    int(one.loss_mask.sum()),
                    places,
                    own,
                    tallies,
                    right,
                    walks,
                    {name: found[number] for name, found in fair.items()},
                )
            )
    return measured


def _batches(rows: Sequence[int], lengths: np.ndarray, tokens: int) -> Iterator[list[int]]:
    """Consecutive rows that hold at most `tokens` tokens together, at least one row each."""
    part: list[int] = []
    held = 0
    for row in rows:
        if part and held + int(lengths[row]) > tokens:
            yield part
            part, held = [], 0
        part.append(int(row))
        held += int(lengths[row])
    if part:
        yield part


def measure_all(recipe: Recipe, rows: Sequence[int], lengths: np.ndarray) -> list[Measured]:
    """The same, spread over the cluster where there is more than one task of it."""
    tasks = list(_batches(rows, lengths, recipe.evaluation.task_tokens))
    gpus = recipe.training.gpus_per_worker
    if len(tasks) == 1 and not gpus:  # a Ray of its own would take longer to start
        return measure(recipe, tasks[0])
    import ray

    job.start_ray()
    _require_room(recipe)
    task = ray.remote(num_cpus=recipe.training.cpus_per_worker, num_gpus=gpus)(measure)
    references = [task.remote(recipe, part, "cuda" if gpus else "cpu") for part in tasks]
    progress = job.Progress("evaluate", "tasks", len(tasks))
    tokens = dict(zip(references, (int(lengths[part].sum()) for part in tasks), strict=True))
    waiting = list(references)
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        for reference in ready:
            try:
                ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, StatehouseError):
                    raise error.cause from None
                if isinstance(error.cause, (MemoryError, torch.OutOfMemoryError)):
                    raise _lost(error.cause) from None
                raise
            except ray.exceptions.RayError as error:  # its process, or its node
                raise _lost(error) from None
            progress.step(tokens[reference])
    return [one for reference in references for one in ray.get(reference)]


def _lost(error: Exception) -> StatehouseError:
    """A task that died with its process, which Ray has tried again in vain."""
    said = " ".join(str(error).split())[:300]
    return StatehouseError(
        f"a task of evaluate was lost: {type(error).__name__}: {said}; most often memory is what it lacked: lower "
        f"evaluation.task_tokens, or set training.cpus_per_worker so that fewer run on a node; then run the command again"
    )


def _require_room(recipe: Recipe) -> None:
    """Raises RecipeError when no node can ever hold one task (it would wait for ever)."""
    cpus, gpus = recipe.training.cpus_per_worker, recipe.training.gpus_per_worker
    if not job.fitting(cpus, gpus):
        all_cpus, all_gpus = job.cluster_size()
        raise RecipeError(
            f"a task of evaluate needs {cpus} CPUs and {gpus} GPUs on one node, the cluster has {all_cpus:g} and "
            f"{all_gpus:g} in all, and no such node; add one, or lower training.cpus_per_worker or .gpus_per_worker"
        )


def summarise(measured: Sequence[Measured], draft_lengths: Sequence[int], seed: int = 0) -> dict[str, Any]:
    """Sums over sequences, of each source and of "all", as JSON can hold them. NaN becomes null."""
    sources = sorted({one.source for one in measured})
    groups = {source: [one for one in measured if one.source == source] for source in sources}
    return {name: _summary(part, draft_lengths, seed) for name, part in {**groups, "all": list(measured)}.items()}


def _summary(measured: Sequence[Measured], draft_lengths: Sequence[int], seed: int) -> dict[str, Any]:
    judged = sum(one.judged for one in measured)
    drafters = {}
    for name in measured[0].tallies:
        taus = {}
        for k in draft_lengths:
            each = [one.tallies[name][k] for one in measured]
            total = sum(each, Tally.zero(k))
            low, high = math.nan, math.nan
            if len(each) >= _LEAST_FOR_INTERVAL:
                verifies, accepted = (
                    np.array([getattr(one, part) for one in each]) for part in ("verifies", "accepted")
                )
                low, high = tau_interval(verifies, accepted, seed=seed)
            taus[str(k)] = {
                "tau": _number(total.tau),
                "interval_95": [_number(low), _number(high)],
                "verifies": total.verifies,
                "accepted": total.accepted,
                "cut_verifies": total.cut_verifies,
                "cut_accepted": total.cut_accepted,
                "conditional": [_number(share) for share in total.conditional],
            }
        hits = sum(one.hits[name] for one in measured)
        drafters[name] = {"tau": taus, "greedy_accuracy": _number(hits / judged if judged else math.nan)}
        if name in measured[0].fair:
            total_fair = sum((one.fair[name] for one in measured), Fair.zero(max(draft_lengths)))
            drafters[name]["fair"] = total_fair.shares()
    return {
        "sequences": len(measured),
        "tokens": sum(one.tokens for one in measured),
        "own_argmax": _number(sum(one.own for one in measured) / judged if judged else math.nan),
        "drafters": drafters,
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(float(value), 6)


def render(summary: dict[str, Any], draft_lengths: Sequence[int]) -> Table:
    longest = str(max(draft_lengths))
    table = Table(title="Acceptance length τ(k), offline, on held-out sequences", title_justify="left")
    table.add_column("source")
    for name in ("sequences", "tokens", "own argmax"):
        table.add_column(name, justify="right")
    table.add_column("drafter")
    for k in draft_lengths:
        table.add_column(f"τ({k})", justify="right")
    for name in (f"95 % of τ({longest})", f"% right at 1..{longest}", "passes", "greedy"):
        table.add_column(name, justify="right")
    for source, found in summary.items():
        table.add_section()
        for at, (name, one) in enumerate(found["drafters"].items()):
            last = one["tau"][longest]
            low, high = last["interval_95"]
            facts = [f"{found['sequences']:,}", f"{found['tokens']:,}", _share(found["own_argmax"])]
            table.add_row(
                *([source, *facts] if at == 0 else [""] * 4),
                name,
                *(_tau(one["tau"][str(k)]["tau"]) for k in draft_lengths),
                "-" if low is None else f"{low:.2f}-{high:.2f}",
                " ".join("-" if share is None else f"{100 * share:.0f}" for share in last["conditional"]),
                f"{last['verifies']:,}",
                _share(one["greedy_accuracy"]),
                style="bold" if name == DRAFTER else "",
            )
    return table


def _tau(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def run(recipe: Recipe, args: argparse.Namespace) -> None:
    trained = Run(recipe.run_uri)
    dataset = open_dataset(recipe.dataset.uri)
    require_held_out(trained, recipe.evaluation)
    verifier = open_verifier(recipe)
    prompts = Inputs(recipe.dataset.inputs_uri).read_prompts(recipe, verifier, "evaluate")
    held = held_out_sequences(dataset, prompts, recipe.evaluation)
    lengths = dataset.sequences["length"].to_numpy().astype(np.int64)
    others = other_datasets(trained, dataset)
    job.log.info(
        "evaluate start run=%s held_out=%d tokens=%s%s",
        trained.uri,
        len(held.rows),
        f"{lengths[held.rows].sum():,}",
        f" left_out={held.left_out!r}" if held.left_out else "",
    )
    draft_lengths = sorted(set(recipe.evaluation.draft_lengths))
    measured = measure_all(recipe, held.rows.tolist(), lengths)
    summary = summarise(measured, draft_lengths, recipe.evaluation.seed)
    result = {
        "run": trained.uri,
        "identity": trained.identity(),
        "dataset": {"uri": dataset.uri, "fingerprint": dataset.fingerprint},
        "evaluation": measured_as(recipe),
        "temperature": recipe.generation.temperature,
        "left_out": {"given": held.given, "unknown": held.unknown, "datasets": others},
        "untrained_seed": untrained_seed(recipe),
        "sources": summary,
        "provenance": provenance(recipe),
    }
    trained.store.put(EVALUATION, json.dumps(result, indent=1).encode() + b"\n")
    trained.store.put(
        EVALUATION_PLOT, draw_taus(summary, draft_lengths, f"τ(k) of {recipe.run_uri.rsplit('/', 1)[-1]}").encode()
    )
    if walks := [one.walks for one in measured if one.walks is not None]:
        trained.store.put(WALKS, walks_bytes(join_walks(walks)))
    else:
        trained.store.delete(WALKS)  # of an earlier evaluation: it would not belong to this one
    Console(width=None if Console().is_terminal else 150).print(render(summary, draft_lengths))
    _explain(summary["all"], recipe, held.left_out, others, training_filter(trained))
    longest = str(draft_lengths[-1])
    taus = {name: one["tau"][longest]["tau"] for name, one in summary["all"]["drafters"].items()}
    job.log.info(
        "evaluate done k=%s %s where=%s/%s",
        longest,
        " ".join(f"tau_{name.replace(' ', '_')}={_tau(tau)}" for name, tau in taus.items()),
        trained.uri,
        f"{EVALUATION} walks={WALKS}" if walks else EVALUATION,
    )


def _explain(every: dict[str, Any], recipe: Recipe, left_out: str, others: Sequence[str], filtered: str) -> None:
    """What bounds these numbers, in words."""
    longest = str(max(recipe.evaluation.draft_lengths))
    ceiling = every["drafters"][CEILING]["tau"][longest]["tau"]
    print(
        f"% right at 1..{longest}: of the drafts at that place of the chain whose forerunners were all right. greedy: first "
        f"drafts after every token that are the verifier's likeliest, which is no τ.\n"
        f"{_share(every['own_argmax'])} of the response tokens are the verifier's own likeliest (temperature "
        f"{recipe.generation.temperature:g}), so a drafter that always knew those, with this draft "
        f"vocabulary, would get τ({longest}) = {_tau(ceiling)} here."
    )
    if left_out:
        print(f"Left out of the held-out sequences: {left_out}.")
    if others:
        print(
            f"Measured on {recipe.dataset.uri} alone. The run was trained on {', '.join(others)}, too: what is held out "
            f"of those counts in the run's held-out loss, and in no τ."
        )
    if filtered:
        print(
            f"Measured on all held-out sequences. The run was trained on those of training.filter ({filtered}) alone, and its "
            f"held-out loss is of those."
        )


if __name__ == "__main__":
    job.main(job.parser("evaluate", __doc__ or ""), run)
