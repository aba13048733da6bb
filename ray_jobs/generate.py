"""generate: on-policy responses of the verifier to the prepared prompts, at `<dataset.uri>-inputs/responses`.

Exact token ids are kept. Finished work units are objects of their own, so a killed job carries on where it stood.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
from typing import Any

import numpy as np

from ray_jobs import job
from ray_jobs.inputs import Inputs, open_verifier, sampling_hash
from ray_jobs.recipe import Recipe
from ray_jobs.replicas.replica import Sampling
from ray_jobs.supervisor import Supervisor
from ray_jobs.worker import GenerateUnit, replicas_of


def prompt_seed(seed: int, prompt_id: str) -> int:
    """A seed of its own for each prompt, so that a response does not depend on its neighbours: 31 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()[:4], "little") >> 1


def make_units(recipe: Recipe, prompts: list[dict[str, Any]]) -> list[GenerateUnit]:
    """Prompts in order, `generation.batch_size` a unit. The response ends where the sequence would be too long."""
    settings = recipe.generation
    units = []
    for low in range(0, len(prompts), settings.batch_size):
        batch = prompts[low : low + settings.batch_size]
        token_ids = [np.array(row["token_ids"], np.int32) for row in batch]
        samplings = [
            Sampling(
                temperature=settings.temperature,
                top_p=settings.top_p,
                max_new_tokens=min(settings.max_new_tokens, recipe.dataset.max_length - len(ids)),
                seed=prompt_seed(settings.seed, row["id"]),
            )
            for row, ids in zip(batch, token_ids, strict=True)
        ]
        units.append(GenerateUnit([row["id"] for row in batch], token_ids, samplings))
    return units


def run(recipe: Recipe, args: argparse.Namespace, replicas: Supervisor | None = None) -> None:
    """replicas: to be used and left running; by default the job's own."""
    verifier = open_verifier(recipe)
    inputs = Inputs(recipe.dataset.inputs_uri)
    prompts = inputs.read_prompts(recipe, verifier, "generate")
    sampling = sampling_hash(recipe, verifier)
    inputs.store.probe()
    finished = inputs.read_responses(sampling)
    wanted = [row for row in prompts.to_pylist() if row["kind"] == "generate"]
    pending = [row for row in wanted if row["id"] not in finished]
    if not pending:
        job.log.info("generate done prompts=%d, all answered before", len(wanted))
        return
    job.start_ray()
    units = make_units(recipe, pending)
    job.log.info(
        "generate start prompts=%d answered_before=%d units=%d", len(pending), len(wanted) - len(pending), len(units)
    )
    progress = job.Progress("generate", "units", len(units))
    finishes: dict[str, int] = {}

    def done(unit: GenerateUnit, responses: list[tuple[np.ndarray, str]]) -> None:
        rows: list[dict[str, Any]] = [
            {
                "prompt_id": prompt_id,
                "token_ids": token_ids,
                "finish_reason": finish,
                "sampling_hash": sampling,
                "temperature": one.temperature,
                "top_p": one.top_p,
                "seed": one.seed,
            }
            for prompt_id, one, (token_ids, finish) in zip(unit.prompt_ids, unit.samplings, responses, strict=True)
        ]
        inputs.write_responses(rows)
        for row in rows:
            finishes[row["finish_reason"]] = finishes.get(row["finish_reason"], 0) + 1
        progress.step(sum(len(row["token_ids"]) for row in rows), **finishes)

    with contextlib.nullcontext(replicas) if replicas else replicas_of(recipe, verifier) as supervisor:
        supervisor.run("generate", units, done, progress.wait)
    job.log.info(
        "generate done prompts=%d tokens=%s seconds=%.1f where=%s/responses",
        len(wanted),
        f"{progress.tokens:,}",
        progress.seconds,
        inputs.store.uri,
    )


if __name__ == "__main__":
    job.main(job.parser("generate", __doc__ or ""), run)
