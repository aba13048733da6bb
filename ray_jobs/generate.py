"""generate: on-policy responses of the verifier to the prepared prompts, at `<dataset.uri>-inputs/responses`.

Exact token ids are kept. Replicas store what they have finished at once (ray_jobs/answers.py), so a killed job carries on
where it stood. A prompt that no replica can answer is quarantined with its reason.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from ray_jobs import job
from ray_jobs.answers import QUARANTINED, clear_parts, response_of, unit_key
from ray_jobs.inputs import Inputs, Verifier, generated_table, open_verifier, prompt_rows, sampling_hashes
from ray_jobs.policies import first_line
from ray_jobs.prompts import end_ids, load_tokenizer
from ray_jobs.provenance import provenance
from ray_jobs.recipe import Recipe
from ray_jobs.replicas.replica import Sampling
from ray_jobs.supervisor import Supervisor
from ray_jobs.thinking import Budget, Response, one_token
from ray_jobs.worker import GenerateUnit, replicas_of
from storage.errors import RecipeError, StatehouseError


def prompt_seed(seed: int, prompt_id: str) -> int:
    """A seed of its own for each prompt, so that a response does not depend on its neighbours: 31 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()[:4], "little") >> 1


def settings_of(recipe: Recipe, sources: list[str], tokenizer: Any) -> dict[str, tuple[Sampling, Budget | None]]:
    """{source: how its responses are drawn}; the seed is the recipe's. Raises RecipeError for what no response can have."""
    if unknown := sorted(set(recipe.generation.sources) - set(sources)):
        raise RecipeError(
            f"generation.sources.{unknown[0]}: no prompt comes from it; the sources are {', '.join(sorted(sources))}"
        )
    made = {}
    for source in sources:
        settings = recipe.generation.of(source)
        stop = tuple(one_token(tokenizer, text, "generation.stop") for text in settings.stop)
        budget = None
        if settings.thinking_budget is not None:
            begin, end = (one_token(tokenizer, text, "generation.think_tokens") for text in settings.think_tokens)
            budget = Budget(settings.thinking_budget, begin, end)
        sampling = Sampling(settings.temperature, settings.top_p, settings.max_new_tokens, settings.seed, stop)
        made[source] = (sampling, budget)
    return made


def make_units(
    recipe: Recipe,
    prompts: list[dict[str, Any]],
    settings: dict[str, tuple[Sampling, Budget | None]],
    hashes: Mapping[str, str],
    uri: str,
    finished: Container[str] = (),
) -> list[GenerateUnit]:
    """All prompts in order, `generation.batch_size` a unit, less the finished ones. The response ends where the sequence
    would be too long. hashes: {prompt id: its sampling hash}. uri: where the responses go.

    Units do not depend on what is finished: a driver that starts while another is at work has the same ones, and of two
    answers to a unit only the first is stored.
    """
    units = []
    for low in range(0, len(prompts), recipe.generation.batch_size):
        batch = [row for row in prompts[low : low + recipe.generation.batch_size] if row["id"] not in finished]
        if not batch:
            continue
        token_ids = [np.array(row["token_ids"], np.int32) for row in batch]
        samplings = []
        for row, prompt in zip(batch, token_ids, strict=True):
            one, _ = settings[row["source"]]
            room = min(one.max_new_tokens, recipe.dataset.max_length - len(prompt))
            seed = prompt_seed(one.seed or 0, row["id"])
            samplings.append(Sampling(one.temperature, one.top_p, room, seed, one.stop_token_ids))
        budgets = [settings[row["source"]][1] for row in batch]
        ids = [row["id"] for row in batch]
        drawn = [hashes[key] for key in ids]
        units.append(GenerateUnit(uri, unit_key(ids, drawn), ids, token_ids, samplings, budgets, drawn))
    return units


def tally(responses: Iterable[Response], ends: frozenset[int]) -> Counter[str]:
    """How many were capped at their length, say nothing but their end, were made to stop thinking, or are none."""
    counts: Counter[str] = Counter()
    for one in responses:
        if one.finish_reason == QUARANTINED:
            counts["quarantined"] += 1
            continue
        counts["responses"] += 1
        counts["tokens"] += len(one.token_ids)
        counts["length_capped"] += one.finish_reason == "length"
        counts["empty"] += all(int(token) in ends for token in one.token_ids[:2])
        counts["thinking_ended"] += one.forced is not None
    return counts


def run(recipe: Recipe, args: argparse.Namespace, replicas: Supervisor | None = None) -> None:
    """replicas: to be used and left running; by default the job's own."""
    verifier = open_verifier(recipe)
    inputs = Inputs(recipe.dataset.inputs_uri)
    prompts = inputs.read_prompts(recipe, verifier, "generate")
    prompts = prompts.filter(pa.compute.equal(prompts["kind"], "generate"))
    tokenizer = load_tokenizer(verifier.folder, recipe.verifier.trust_remote_code)
    settings = settings_of(recipe, prompts["source"].unique().to_pylist(), tokenizer)
    ends = end_ids(verifier.folder, tokenizer)
    hashes = sampling_hashes(recipe, verifier, prompts)
    inputs.store.probe()
    stored = inputs.read_responses(hashes)
    finished = {
        prompt
        for prompt, response in stored.items()
        if response.finish_reason != QUARANTINED or not getattr(args, "retry_quarantined", False)
    }
    pending = len(prompts) - len(finished)
    if not pending:
        _summarise(recipe, verifier, inputs, prompts, ends, "all answered before")
        return
    job.start_ray()
    units = make_units(recipe, list(prompt_rows(prompts)), settings, hashes, inputs.store.uri, finished)
    job.log.info("generate start prompts=%d answered_before=%d units=%d", pending, len(finished), len(units))
    progress = job.Progress("generate", "units", len(units))
    given_up = sum(stored[prompt].finish_reason == QUARANTINED for prompt in finished)
    limit = max(0, int(recipe.extraction.max_quarantined * len(prompts)) - given_up)
    counts = tally([], ends)

    def done(unit: GenerateUnit, responses: dict[int, Response]) -> None:
        for row, reason in unit.quarantined.items():
            job.log.warning("quarantined prompt=%s reason=%s", unit.prompt_ids[row], first_line(reason))
        unit_counts = tally(responses.values(), ends)
        counts.update(unit_counts, quarantined=len(unit.quarantined))
        told: dict[str, object] = {
            name: counts[name] for name in ("length_capped", "empty", "thinking_ended", "quarantined")
        }
        progress.step(unit_counts["tokens"], lambda: {**told, **supervisor.counts()})

    def waiting(in_flight: int) -> None:
        progress.extra.update(supervisor.counts())
        progress.wait(in_flight)

    with contextlib.nullcontext(replicas) if replicas else replicas_of(recipe, verifier) as supervisor:
        supervisor.run("generate", units, done, waiting, limit, progress.restart)
    clear_parts(inputs.store)
    _summarise(recipe, verifier, inputs, prompts, ends, f"seconds={progress.seconds:.1f}")


def _summarise(
    recipe: Recipe, verifier: Verifier, inputs: Inputs, prompts: pa.Table, ends: frozenset[int], how: str
) -> None:
    """Counts all responses there are, those of earlier runs too, from what is stored."""
    rows = inputs.response_rows(sampling_hashes(recipe, verifier, prompts))
    stored = {prompt: response_of(row) for prompt, row in rows.items()}
    if missing := [prompt for prompt in prompts["id"].to_pylist() if prompt not in stored]:
        raise StatehouseError(
            f"{inputs.uri}: {len(missing)} of {len(prompts)} prompts have no response; run generate again"
        )
    sources: dict[str, list[Response]] = {}
    for prompt, source in zip(prompts["id"].to_pylist(), prompts["source"].to_pylist(), strict=True):
        sources.setdefault(source, []).append(stored[prompt])
    total = tally(stored.values(), ends)
    inputs.write_generated(
        generated_table(prompts, rows),
        {
            **total,
            "quarantined": {prompt: row.get("reason") for prompt, row in rows.items() if _given_up(row)},
            "sources": {
                source: {**tally(responses, ends), "settings": recipe.generation.of(source).model_dump(mode="json")}
                for source, responses in sources.items()
            },
            "provenance": provenance(recipe),
        },
    )
    job.log.info(
        "generate done prompts=%d tokens=%s length_capped=%d empty=%d thinking_ended=%d quarantined=%d %s where=%s/responses",
        len(prompts),
        f"{total['tokens']:,}",
        total["length_capped"],
        total["empty"],
        total["thinking_ended"],
        total["quarantined"],
        how,
        inputs.store.uri,
    )


def _given_up(row: Mapping[str, Any]) -> bool:
    return row["finish_reason"] == QUARANTINED


if __name__ == "__main__":
    arguments = job.parser("generate", __doc__ or "")
    arguments.add_argument("--retry-quarantined", action="store_true", help="ask again what no replica could answer")
    job.main(arguments, run)
