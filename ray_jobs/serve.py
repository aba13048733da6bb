"""serve: the run's drafter in the real SGLang, on real prompts, greedily; is the output the verifier's own, and is tau true?

Serves evaluation.serve_prompts prompts speculatively, then reads every response once more through the verifier alone:
each token must be its likeliest (ties below 1e-4 are counted), and each verify pass must have accepted what the offline
walk over the same response says, but for the last block. Anything else is an error and exit code 1.
`--controls` also serves an untrained drafter, the run's own with its d2t off by one, and the verifier without any. Writes serve.json into the run's folder.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from drafter.run import SERVED, Run
from drafter.sources import open_verifier_weights
from ray_jobs import job
from ray_jobs.inputs import open_verifier
from ray_jobs.measuring import load_drafter, require_held_out
from ray_jobs.oracle import TIE, Verdict
from ray_jobs.provenance import provenance
from ray_jobs.recipe import Recipe
from ray_jobs.replicas.speculative import Served
from ray_jobs.serve_prompts import ServePrompt, choose_prompts
from ray_jobs.serving import NONE, SHIFTED, TRAINED, UNTRAINED, OracleActor, ServeActor
from ray_jobs.supervisor import reason_of
from storage import open_dataset
from storage.errors import ReplicaFailed, StatehouseError


def report(
    prompts: Sequence[ServePrompt], served: Sequence[Served], verdicts: Sequence[Verdict], seconds: float
) -> dict[str, Any]:
    """Response by response, and sums, as JSON can hold them."""
    rows = []
    for prompt, one, verdict in zip(prompts, served, verdicts, strict=True):
        rows.append(
            {
                "source": prompt.source,
                "row": prompt.row,
                "prompt_tokens": len(prompt.token_ids),
                "tokens": len(one.token_ids),
                "finish_reason": one.finish_reason,
                "verifies": one.verifies,
                "accepted": one.accepted,
                "passes": list(one.passes),
                "offline_verifies": len(verdict.walked),
                "offline_accepted": sum(verdict.walked),
                "offline_passes": list(verdict.walked),
                "cut": verdict.cut,
                "differing_passes": list(verdict.differing),
                "last_block_agrees": verdict.last_agrees,
                "ties": verdict.ties,
                "draft_ties": verdict.draft_ties,
                "mismatches": [asdict(mismatch) for mismatch in verdict.mismatches],
            }
        )
    return {"responses": rows, "total": _total(rows, seconds)}


def _total(rows: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    names = ("tokens", "verifies", "accepted", "offline_verifies", "offline_accepted", "ties", "draft_ties")
    total: dict[str, Any] = {"responses": len(rows)} | {name: sum(row[name] for row in rows) for name in names}
    return total | {
        "tau": _tau(total["accepted"], total["verifies"]),
        "offline_tau": _tau(total["offline_accepted"], total["offline_verifies"]),
        "before_last_block": sum(sum(row["passes"][:-1]) for row in rows),
        "offline_before_last_block": sum(sum(row["offline_passes"][:-1]) for row in rows),
        "identical": sum(not row["mismatches"] for row in rows),
        "agreeing": sum(not row["differing_passes"] for row in rows),
        "last_blocks_agreeing": sum(row["last_block_agrees"] for row in rows),
        "seconds": round(seconds, 2),
        "tokens_per_s": round(total["tokens"] / max(seconds, 1e-9), 2),
    }


def _tau(accepted: int, verifies: int) -> float | None:
    return round(1 + accepted / verifies, 6) if verifies else None


def render(found: dict[str, Any], draft_length: int) -> Table:
    table = Table(title=f"Served by SGLang, {draft_length} drafts a pass, and walked offline", title_justify="left")
    for name, justify in (
        ("#", "right"), ("source", "left"), ("tokens", "right"), ("end", "left"), ("passes", "right"),
        ("accepted", "right"), ("τ", "right"), ("offline passes", "right"), ("accepted", "right"), ("τ", "right"),
        ("but last block", "right"), ("last", "right"), ("output", "left"), ("passes", "left"),
    ):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for number, row in enumerate(found["responses"], 1):
        table.add_row(
            str(number),
            row["source"],
            str(row["tokens"]),
            row["finish_reason"],
            str(row["verifies"]),
            str(row["accepted"]),
            _show(_tau(row["accepted"], row["verifies"])),
            str(row["offline_verifies"]),
            str(row["offline_accepted"]),
            _show(_tau(row["offline_accepted"], row["offline_verifies"])),
            f"{sum(row['passes'][:-1])} / {sum(row['offline_passes'][:-1])}",
            f"{(row['passes'] or [0])[-1]} / {(row['offline_passes'] or [0])[-1]}{' cut' if row['cut'] else ''}",
            _output(row),
            _passes(row),
        )
    total = found["total"]
    table.add_section()
    table.add_row(
        "", "all", str(total["tokens"]), "", str(total["verifies"]), str(total["accepted"]), _show(total["tau"]),
        str(total["offline_verifies"]), str(total["offline_accepted"]), _show(total["offline_tau"]),
        f"{total['before_last_block']} / {total['offline_before_last_block']}", "",
        f"{total['identical']} of {total['responses']}", f"{total['agreeing']} of {total['responses']}", style="bold",
    )  # fmt: skip
    return table


def _output(row: dict[str, Any]) -> str:
    if row["mismatches"]:
        return f"{len(row['mismatches'])} wrong"
    return f"identical, {row['ties']} ties" if row["ties"] else "identical"


def _passes(row: dict[str, Any]) -> str:
    said = f"{len(row['differing_passes'])} differ" if row["differing_passes"] else "equal"
    return f"{said}, {row['draft_ties']} ties" if row["draft_ties"] else said


def _show(tau: float | None) -> str:
    return "-" if tau is None else f"{tau:.3f}"


# ---- the job -------------------------------------------------------------------------------------------------------


class _Served:
    """One kind of drafter after another, each in an engine of its own, and the oracle beside them."""

    def __init__(self, recipe: Recipe, prompts: Sequence[ServePrompt]) -> None:
        import ray

        self.recipe, self.prompts = recipe, prompts
        self.token_ids = [prompt.token_ids for prompt in prompts]
        config = recipe.extraction.replica
        self.server = ray.remote(num_cpus=config.cpus, num_gpus=config.gpus, max_restarts=0)(ServeActor)
        self.oracle_gpus = config.gpus if recipe.evaluation.oracle == "sglang" else 0
        self.oracle: Any = None
        if not self.oracle_gpus:  # on GPUs it waits for those that the server has
            self._start_oracle()

    def serve(self, kind: str) -> tuple[list[Served], float, dict[str, Any]]:
        """Responses, the seconds they took, and what the engine is."""
        import ray

        server = self.server.remote(self.recipe, kind)
        try:
            about = _result(server.start.remote())
            job.log.info("serve ready kind=%r seconds=%.0f prompts=%d", kind, about["start_seconds"], len(self.prompts))
            served, seconds = _result(server.serve.remote(self.token_ids))
        finally:
            ray.wait([server.stop.remote()], timeout=20)
            ray.kill(server, no_restart=True)
        return served, seconds, about

    def judge(self, kind: str, served: Sequence[Served]) -> list[Verdict]:
        if self.oracle is None:
            self._start_oracle()
        _result(self.oracle_ready)
        verdicts: list[Verdict] = _result(self.oracle.judge.remote(kind, self.token_ids, served))
        if self.oracle_gpus:  # the next server needs them
            self.stop()
        return verdicts

    def _start_oracle(self) -> None:
        import ray

        # On a CPU it is idle while the engine serves, so it asks for no core of its own.
        actor = ray.remote(num_cpus=0, num_gpus=self.oracle_gpus, max_restarts=0)(OracleActor)
        self.oracle = actor.remote(self.recipe)
        self.oracle_ready = self.oracle.start.remote()

    def stop(self) -> None:
        """Ends the oracle, if there is one."""
        import ray

        if self.oracle is not None:
            ray.wait([self.oracle.stop.remote()], timeout=20)
            ray.kill(self.oracle, no_restart=True)
            self.oracle = None


def _result(reference: Any) -> Any:
    """What an actor returned. Raises the StatehouseError that it raised, ReplicaFailed when it died."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, StatehouseError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise ReplicaFailed(f"an actor of serve died: {reason_of(error)}; run the same command again") from None


def run(recipe: Recipe, args: argparse.Namespace) -> None:
    trained = Run(recipe.run_uri)
    dataset = open_dataset(recipe.dataset.uri)
    verifier = open_verifier(recipe)
    with tempfile.TemporaryDirectory(prefix="statehouse-drafter-") as folder:  # its errors before anything starts
        load_drafter(trained, Path(folder), open_verifier_weights(verifier.folder, dataset), dataset.contract)
    if not recipe.evaluation.prompts:
        require_held_out(trained, recipe.evaluation)
    prompts = choose_prompts(recipe, verifier)
    draft_length = max(recipe.evaluation.draft_lengths)
    job.start_ray()
    _require_room(recipe)
    job.log.info(
        "serve start run=%s prompts=%d draft_length=%d dtype=%s; an engine takes about a minute to start",
        trained.uri, len(prompts), draft_length, recipe.evaluation.serve_dtype,
    )  # fmt: skip
    serving = _Served(recipe, prompts)
    kinds = [TRAINED, UNTRAINED, SHIFTED, NONE] if args.controls else [TRAINED]
    found: dict[str, Any] = {}
    responses: dict[str, list[Served]] = {}
    try:
        for kind in kinds:
            responses[kind], seconds, about = serving.serve(kind)
            verdicts = serving.judge(kind, responses[kind])
            found[kind] = {"engine": about, **report(prompts, responses[kind], verdicts, seconds)}
    finally:
        serving.stop()
    console = Console(width=None if Console().is_terminal else 160)
    console.print(render(found[TRAINED], draft_length))
    if args.controls:
        console.print(_controls(found, responses))
    result = {
        "run": trained.uri,
        "identity": trained.identity(),
        "dataset": {"uri": dataset.uri, "fingerprint": dataset.fingerprint},
        "draft_length": draft_length,
        "dtype": recipe.evaluation.serve_dtype,
        "oracle": recipe.evaluation.oracle,
        "tie": TIE,
        "served": found,
        "provenance": provenance(recipe),
    }
    trained.store.put(SERVED, json.dumps(result, indent=1).encode() + b"\n")
    total = found[TRAINED]["total"]
    job.log.info(
        "serve done identical=%d/%d ties=%d tau=%s offline_tau=%s accepted=%d verifies=%d tokens_per_s=%s where=%s/%s",
        total["identical"], total["responses"], total["ties"], _show(total["tau"]), _show(total["offline_tau"]),
        total["accepted"], total["verifies"], total["tokens_per_s"], trained.uri, SERVED,
    )  # fmt: skip
    _require_proof(recipe, found, f"{trained.uri}/{SERVED}")


def _require_room(recipe: Recipe) -> None:
    """Raises ReplicaFailed when the cluster can never place the engine (it would wait for ever)."""
    config, (cpus, gpus) = recipe.extraction.replica, job.cluster_size()
    if not job.fitting(config.cpus, config.gpus):
        raise ReplicaFailed(
            f"serving needs {config.cpus} CPUs and {config.gpus} GPUs on one node, the cluster has {cpus:g} and {gpus:g} in "
            f"all, and no such node; add one, or lower extraction.replica.cpus or .gpus"
        )


def _controls(found: dict[str, Any], responses: dict[str, list[Served]]) -> Table:
    """What the drafter is worth: beside one that has learnt nothing, and beside none."""
    table = Table(title="Controls, the same prompts, all at work at once", title_justify="left")
    for name in ("served with", "tokens", "passes", "accepted", "τ served", "τ offline", "tokens/s", "same output"):
        table.add_column(name, justify="left" if name == "served with" else "right")
    reference = responses[TRAINED]
    for kind, one in found.items():
        total = one["total"]
        pairs = zip(responses[kind], reference, strict=True)
        same = sum(np.array_equal(mine.token_ids, first.token_ids) for mine, first in pairs)
        table.add_row(
            kind, str(total["tokens"]), str(total["verifies"]), str(total["accepted"]), _show(total["tau"]),
            _show(total["offline_tau"]), f"{total['tokens_per_s']:.1f}", f"{same} of {total['responses']}",
        )  # fmt: skip
    return table


def _require_proof(recipe: Recipe, found: dict[str, Any], where: str) -> None:
    """Raises StatehouseError when an output is not the verifier's own, or counts differ before the last block."""
    if recipe.evaluation.serve_dtype != "float32":
        print("In bfloat16 rounding decides between close tokens: the comparison is shown, but it proves nothing.")
        return
    for kind, one in found.items():
        total = one["total"]
        if wrong := total["responses"] - total["identical"]:
            first = next((at, row) for at, row in enumerate(one["responses"], 1) if row["mismatches"])
            mismatch = first[1]["mismatches"][0]
            raise StatehouseError(
                f"{wrong} of {total['responses']} responses served with {kind!r} are not the verifier's own greedy output: "
                f"response {first[0]}, token {mismatch['position']}: expected id {mismatch['best']}, found "
                f"{mismatch['token']}, whose logit is {mismatch['gap']:.2g} lower; see {where}"
            )
        if differing := total["responses"] - total["agreeing"]:
            number, row = next((at, row) for at, row in enumerate(one["responses"], 1) if row["differing_passes"])
            raise StatehouseError(
                f"{differing} of {total['responses']} responses served with {kind!r} accepted other drafts than the offline "
                f"walk: response {number}, pass {row['differing_passes'][0]} of {row['verifies']}; the server computes "
                f"another drafter than this package: see {where}"
            )
    if UNTRAINED in found and found[UNTRAINED]["total"]["accepted"] >= found[TRAINED]["total"]["accepted"]:
        raise StatehouseError(
            f"the run's drafter had {found[TRAINED]['total']['accepted']} drafts accepted, an untrained one "
            f"{found[UNTRAINED]['total']['accepted']}: it has learnt nothing; train it longer"
        )


if __name__ == "__main__":
    arguments = job.parser("serve", __doc__ or "")
    arguments.add_argument(
        "--controls", action="store_true", help="also serve an untrained drafter, one with a wrong d2t, none"
    )
    job.main(arguments, run)
