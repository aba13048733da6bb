"""What lies beside a dataset, at `<dataset.uri>-inputs`: prepared prompts, rejects, responses. None of it is the dataset.

prepare.json                what prompts.parquet was made from
prompts.parquet             accepted prompts and given sequences
rejects.parquet             refused rows with reasons
responses/, parts/          on-policy responses (ray_jobs/answers.py)
generated.parquet           how each sequence with a response was drawn, to be joined to sequences.parquet by id
generate.json               counts of the responses, for people
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ray_jobs.answers import QUARANTINED, RESPONSES, RESPONSES_SCHEMA, read_rows, response_of
from ray_jobs.prompt_files import fingerprints
from ray_jobs.recipe import Recipe
from ray_jobs.replicas.replica import NEUTRAL_ARGUMENTS, SAMPLED, SGLANG_MARGIN, validate_layers
from ray_jobs.thinking import Response
from ray_jobs.verifier import (
    default_capture_layers,
    describe_verifier,
    read_config,
    resolve_verifier,
    text_config,
)
from storage.commit import digest
from storage.contract import Contract, sha256_json
from storage.errors import RecipeError, StatehouseError
from storage.layout import parquet_bytes
from storage.objects import ObjectMissing, ObjectStore, open_store
from storage.sequences import Sequence
from storage.spool import SequenceSpool, SpooledSequences
from storage.token_chunks import TableRows

log = logging.getLogger("statehouse")

PREPARED = "prepare.json"
PROMPTS = "prompts.parquet"
REJECTS = "rejects.parquet"
GENERATED = "generated.parquet"
GENERATE_SUMMARY = "generate.json"

# id: of the sequence, as in the dataset's sequences.parquet. row: "file:line" of the prompt.
GENERATED_SCHEMA = pa.schema(
    [("id", pa.string()), ("source", pa.string()), ("row", pa.string())]
    + [field for field in RESPONSES_SCHEMA if field.name not in ("token_ids", "reason")]
)


@dataclass(frozen=True)
class Verifier:
    """The verifier of a recipe as found on this machine. facts: what `describe_verifier` says of it."""

    folder: str
    facts: dict[str, Any]
    capture_layers: tuple[int, ...]


def open_verifier(recipe: Recipe) -> Verifier:
    """Finds, checks and describes the verifier. Raises StatehouseError when weights or config are missing."""
    folder = resolve_verifier(recipe.verifier.model, revision=recipe.verifier.revision)
    facts = describe_verifier(folder)
    if recipe.verifier.shape is not None:
        for field, said in recipe.verifier.shape.model_dump().items():
            if facts[field] != said:
                raise RecipeError(f"verifier.shape.{field} is {said:,}, but {folder}/config.json says {facts[field]:,}")
    layers = recipe.extraction.capture_layers or tuple(default_capture_layers(facts["num_layers"]))
    validate_layers(layers, facts["num_layers"])
    _require_room(recipe, str(folder))
    return Verifier(str(folder), facts, tuple(layers))


def _require_room(recipe: Recipe, folder: str) -> None:
    """Raises RecipeError when the engine could not prefill the longest sequence: before anything is planned for it."""
    config = recipe.extraction.replica
    limits = {
        "the verifier's max_position_embeddings": text_config(read_config(Path(folder))).get("max_position_embeddings")
    }
    spare = SAMPLED
    if config.engine == "sglang":
        spare += SGLANG_MARGIN
        for name in ("context_length", "max_total_tokens"):
            limits[f"extraction.replica.args.{name}"] = config.args.get(name)
        if "context_length" in config.args:  # it counts in the place of the verifier's own
            limits.pop("the verifier's max_position_embeddings")
        if config.gpus == 0 and "max_total_tokens" not in config.args:
            limits["extraction.replica.max_total_tokens"] = config.max_total_tokens
    for name, limit in limits.items():
        if isinstance(limit, int) and recipe.dataset.max_length > limit - spare:
            raise RecipeError(
                f"dataset.max_length is {recipe.dataset.max_length:,}; expected at most {limit - spare:,}: {name} is {limit:,}, "
                f"of which {config.engine} keeps {spare}; lower dataset.max_length"
            )


def make_contract(recipe: Recipe, verifier: Verifier) -> Contract:
    from importlib.metadata import PackageNotFoundError, version

    config = recipe.extraction.replica
    try:
        engine_version = version(config.engine)
    except PackageNotFoundError:
        engine_version = "not installed"
    return Contract(
        verifier=recipe.verifier.model,
        revision=recipe.verifier.revision,
        capture_layers=verifier.capture_layers,
        final_state="post_norm" if recipe.extraction.layers == "all" else "absent",
        engine_args={name: value for name, value in config.args.items() if name not in NEUTRAL_ARGUMENTS},
        engine=config.engine,
        engine_version=engine_version,
        engine_dtype=config.dtype,
        tp_size=max(1, config.gpus),
        **verifier.facts,
    )


def inputs_hash(recipe: Recipe, verifier: Verifier) -> str:
    """Equal for recipes that prepare the same prompts in the same way."""
    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json")
    paths = [Path(verifier.folder) / name for name in names] + sorted(Path(verifier.folder).glob("*.py"))
    return sha256_json(
        {
            "prompts": [source.model_dump(mode="json") for source in recipe.prompts],
            "max_length": recipe.dataset.max_length,
            "vocab_size": verifier.facts["vocab_size"],
            "config": verifier.facts["config_hash"],  # it names end tokens
            "tokenizer": verifier.facts["tokenizer_hash"],
            "template": verifier.facts["chat_template_hash"],
            "files": {path.name: digest(path.read_bytes()) for path in paths if path.exists()},
        }
    )


def sampling_hash(recipe: Recipe, verifier: Verifier, source: str = "") -> str:
    """Responses to prompts of a source that were drawn under another hash are other responses."""
    # How many prompts a unit holds does not count. Two drivers at once with two sizes may both answer a prompt; of what
    # is stored, the same answer is taken each time.
    settings = recipe.generation.of(source).model_dump(mode="json", exclude={"batch_size"})
    return sha256_json(
        {**settings, "verifier": verifier.facts["weights_hash"], "max_length": recipe.dataset.max_length}
    )


def sampling_hashes(recipe: Recipe, verifier: Verifier, prompts: pa.Table) -> dict[str, str]:
    """{prompt id: the hash that its response must have been drawn under}."""
    by_source = {source: sampling_hash(recipe, verifier, source) for source in prompts["source"].unique().to_pylist()}
    columns = (prompts["id"].to_pylist(), prompts["source"].to_pylist())
    return {prompt: by_source[source] for prompt, source in zip(*columns, strict=True)}


class Inputs:
    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.store: ObjectStore = open_store(uri)

    def write_rejects(self, rejects: pa.Table) -> str:
        """Returns where they are."""
        self.store.put(REJECTS, parquet_bytes(rejects))
        return f"{self.store.uri}/{REJECTS}"

    def clear(self) -> None:
        """What an earlier `prepare` left counts no longer."""
        self.store.delete(PREPARED)
        self.store.delete(REJECTS)

    def write_prompts(self, prompts: pa.Table | bytes, summary: dict[str, Any]) -> None:
        """prepare.json goes last and names the digest of prompts.parquet, so that no mixture of two runs counts."""
        data = prompts if isinstance(prompts, bytes) else parquet_bytes(prompts)
        self.store.put(PROMPTS, data)
        summary = {**summary, "prompts_sha256": digest(data)}
        self.store.put(PREPARED, json.dumps(summary, indent=1, sort_keys=True).encode() + b"\n")

    def read_summary(self) -> dict[str, Any] | None:
        try:
            return dict(json.loads(self.store.get(PREPARED)))
        except ObjectMissing:
            return None
        except (ValueError, TypeError):
            raise StatehouseError(f"{self.store.uri}/{PREPARED}: damaged; run the prepare job again") from None

    def read_prompts(self, recipe: Recipe, verifier: Verifier, job: str) -> pa.Table:
        """`PROMPTS_SCHEMA`. Raises StatehouseError when `prepare` has not run, or ran for another recipe."""
        summary = self.read_summary()
        again = f"run `python -m ray_jobs.prepare RECIPE` before {job}"
        if summary is None:
            raise StatehouseError(f"{self.store.uri}: no prepared prompts; {again}")
        if summary.get("inputs_hash") != inputs_hash(recipe, verifier):
            raise StatehouseError(
                f"{self.store.uri}: prepared from other prompts, dataset.max_length or tokeniser than this recipe's; {again}"
            )
        try:
            files = fingerprints(recipe)
        except RecipeError as error:
            log.warning("prompt files cannot be compared with those that were prepared: %s", error)
        else:
            prepared = summary.get("files") or {}
            changed = sorted(name for name in {*files, *prepared} if files.get(name) != prepared.get(name))
            if changed:
                raise StatehouseError(
                    f"{self.store.uri}: {', '.join(changed[:3])} changed since they were prepared; {again}"
                )
        try:
            data = self.store.get(PROMPTS)
        except ObjectMissing:
            data = b""
        if digest(data) != summary.get("prompts_sha256"):
            raise StatehouseError(f"{self.store.uri}/{PROMPTS}: missing or not what {PREPARED} names; {again}")
        return pq.read_table(pa.BufferReader(data))

    def response_rows(self, hashes: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """{prompt id: its `RESPONSES_SCHEMA` row} of the responses drawn under the hash that `hashes` asks for.

        A prompt that was quarantined once and answered later is answered. Raises StatehouseError for a damaged file.
        """
        found: dict[str, dict[str, Any]] = {}
        for key in sorted(self.store.sizes(RESPONSES)):
            for row in read_rows(self.store, key):
                prompt = row["prompt_id"]
                if hashes.get(prompt) != row["sampling_hash"]:
                    continue
                if prompt not in found or found[prompt]["finish_reason"] == QUARANTINED:
                    found[prompt] = row
        return found

    def read_responses(self, hashes: Mapping[str, str]) -> dict[str, Response]:
        """{prompt id: its response}, likewise."""
        return {prompt: response_of(row) for prompt, row in self.response_rows(hashes).items()}

    def write_generated(self, table: pa.Table, summary: dict[str, Any]) -> None:
        """`GENERATED_SCHEMA`, and counts of the responses, for people."""
        self.store.put(GENERATED, parquet_bytes(table))
        self.store.put(GENERATE_SUMMARY, json.dumps(summary, indent=1, sort_keys=True).encode() + b"\n")


def prompt_rows(prompts: pa.Table) -> Iterator[dict[str, Any]]:
    """Rows of `PROMPTS_SCHEMA`, token ids and loss mask as arrays [T]: as lists they would take nine times the memory."""
    for batch in prompts.to_batches(max_chunksize=1024):
        tokens = TableRows(pa.Table.from_batches([batch]))
        rest = batch.select([name for name in batch.schema.names if name not in ("token_ids", "loss_mask")])
        for at, row in enumerate(rest.to_pylist()):
            ids, mask = tokens.row(at)
            yield {**row, "token_ids": ids, "loss_mask": mask}


def answered(prompt: Mapping[str, Any], response: Response) -> Sequence:
    """A prompt (`PROMPTS_SCHEMA`) and the response to it, which is what counts for the loss."""
    said = np.ones(len(response.token_ids), bool)
    if response.forced is not None:
        said[response.forced] = False  # the verifier never chose it
    ids = np.concatenate([prompt["token_ids"], response.token_ids])
    mask = np.concatenate([prompt["loss_mask"], said])
    return Sequence(prompt["source"], prompt["group"], ids, mask)


def generated_table(prompts: pa.Table, rows: Mapping[str, dict[str, Any]]) -> pa.Table:
    """`GENERATED_SCHEMA` of prompts and the response_rows to them, those without a token left out."""
    found = []
    for prompt in prompt_rows(prompts):
        row = rows[prompt["id"]]
        if len(row["token_ids"]):
            found.append({**row, **prompt, "id": answered(prompt, response_of(row)).id, "prompt_id": prompt["id"]})
    return pa.Table.from_pylist(
        [{name: one.get(name) for name in GENERATED_SCHEMA.names} for one in found], GENERATED_SCHEMA
    )


def compose_sequences(
    spool: SequenceSpool, prompts: pa.Table, responses: Mapping[str, Response], uri: str
) -> tuple[SpooledSequences, dict[str, int]]:
    """Prompts with their responses, and given sequences, in a new spool; and counts worth telling.

    Raises StatehouseError when responses are missing.
    """
    counts = dict.fromkeys(("given", "generated", "length_capped", "empty", "quarantined", "duplicates"), 0)
    missing = 0
    for row in prompt_rows(prompts):
        if row["kind"] == "generate":
            if row["id"] not in responses:
                missing += 1
                continue
            response = responses[row["id"]]
            if response.finish_reason == QUARANTINED:
                counts["quarantined"] += 1
                continue
            if not len(response.token_ids):
                counts["empty"] += 1
                continue
            counts["generated"] += 1
            counts["length_capped"] += response.finish_reason == "length"
            spool.add(answered(row, response))
        else:
            counts["given"] += 1
            spool.add(Sequence(row["source"], row["group"], row["token_ids"], row["loss_mask"]))
    if missing:
        raise StatehouseError(
            f"{uri}: {missing} of {len(prompts)} prompts have no response yet; run `python -m ray_jobs.generate RECIPE`"
        )
    sequences = spool.finish()
    counts["duplicates"] = spool.count - len(sequences)
    return sequences, counts
