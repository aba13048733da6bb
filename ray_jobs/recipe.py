"""Recipes: one YAML file drives all jobs. Sections belong to their rooms; this file composes them.

`section.key=value` on the command line overrides a key; values are YAML. Unknown keys are refused with a suggestion.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from drafter.recipe import DrafterSection, TrainingSection
from ray_jobs.replicas.replica import ReplicaConfig
from ray_jobs.verifier import VerifierShape
from storage.config import DatasetConfig
from storage.errors import RecipeError, StatehouseError
from storage.teacher import MOST_TOPK, parse_teacher, topk_of
from vocab.config import VocabConfig


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Loader(yaml.SafeLoader):
    """YAML without its silent trap: of two equal keys the last would win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


class VerifierConfig(Section):
    # A folder, `bundled:smollm2-135m-instruct`, or a Hugging Face id.
    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    # Shapes for --plan where the weights are not at hand.
    shape: VerifierShape | None = None


class PromptSource(Section):
    """One glob of JSONL (also .gz, .zst, ...) or Parquet files, or a Hugging Face dataset on disk (the folder that
    `save_to_disk` wrote); local or on object storage. docs/prompts.md has every form of a row.
    """

    path: str
    # The domain the prompts come from; the file's stem by default.
    source: str | None = None
    # At most this many rows of each file, behind the first `skip`.
    limit: int | None = Field(default=None, gt=0)
    skip: int = Field(default=0, ge=0)
    # Which form counts where rows hold several, such as `prompt` and `messages`.
    use: Literal["messages", "conversations", "prompt", "turns", "text", "token_ids"] | None = None
    # Which of a conversation's answers count for the loss.
    train_on: Literal["all_turns", "last_turn"] = "all_turns"
    # Sequences longer than max_length are refused, cut at their end, or made into several.
    truncation: Literal["drop", "truncate", "split"] = "drop"
    # Tokens of a whole sequence; shorter ones are refused. Prompts that are yet to be answered may be shorter.
    min_length: int = Field(default=1, ge=1)
    # Below dataset.max_length, which holds for all sources.
    max_length: int | None = Field(default=None, gt=1)
    # Passed to the chat template as `thinking` and `enable_thinking`; its own default when left out.
    thinking: bool | None = None
    # What else the chat template takes, such as Llama 3's date_string, which is today's date when left out.
    template_args: dict[str, bool | int | str] = Field(default_factory=dict)


class SamplingConfig(Section):
    """How responses to one source's prompts are drawn. What is left out is taken from `generation`."""

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_new_tokens: int | None = Field(default=None, gt=0)
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    thinking_budget: int | None = Field(default=None, gt=0)


class GenerationConfig(Section):
    """On-policy responses. Change what a source's are drawn with, and its prompts are answered anew."""

    temperature: float = Field(default=0.7, ge=0)
    top_p: float = Field(default=0.95, gt=0, le=1)
    # Tokens of a response, its thinking and its end token included.
    max_new_tokens: int = Field(default=1024, gt=0)
    # Each prompt is drawn with a seed of its own, made from this one and the prompt.
    seed: int = 0
    # Tokens that end a response besides the verifier's own end tokens, as text: each must be one token.
    stop: tuple[str, ...] = ()
    # Thinking longer than this is ended with `think_tokens[1]`, and the answer follows; unlimited when left out.
    thinking_budget: int | None = Field(default=None, gt=0)
    think_tokens: tuple[str, str] = ("<think>", "</think>")
    # Other settings for some sources, by their labels.
    sources: dict[str, SamplingConfig] = Field(default_factory=dict)
    # Prompts of one work unit, the unit of resume.
    batch_size: int = Field(default=64, gt=0)

    def of(self, source: str) -> GenerationConfig:
        """The settings that hold for one source, with no `sources` left in them."""
        other = self.sources.get(source)
        changed = {} if other is None else other.model_dump(exclude_none=True)
        return self.model_copy(update={**changed, "sources": {}})


class ExtractionConfig(Section):
    replicas: int = Field(default=1, gt=0)
    replica: ReplicaConfig = ReplicaConfig()
    # 0-based outputs of decoder layers, ascending; by default low 1, mid n//2-1, high n-4.
    capture_layers: tuple[int, ...] | None = Field(default=None, min_length=1)
    # all: the captured layers and the final state. aux: without the final state, a quarter less at three layers; the
    # teacher's top-k then has to stand in for it.
    layers: Literal["all", "aux"] = "all"
    # What is kept of the verifier's next-token distribution: none, argmax (with log-sum-exp, 8 bytes a token) or topk(k).
    teacher: str = Field(default="argmax", validate_default=True)
    # A unit that fails this often is bisected for the sequences that make it fail.
    max_attempts: int = Field(default=3, gt=0)
    # Share of the sequences that may be quarantined; more fails the job and the seal.
    max_quarantined: float = Field(default=0.01, ge=0, le=1)
    # Share of the sequences that a second replica forwards, too (at least one; 0 for none), and how far the states of any
    # layer may differ: relative L2. Two bf16 engines differ by about .02.
    self_check: float = Field(default=0.002, ge=0, le=1)
    self_check_limit: float = Field(default=0.1, gt=0)
    # A replica that does not answer a unit for this long, or a health check for the other, is replaced.
    unit_timeout_s: float = Field(default=3600, gt=0)
    health_timeout_s: float = Field(default=120, gt=0)
    # Seconds for which all replicas may wait for nodes with room for them; while one works, others may wait for longer.
    placement_timeout_s: float = Field(default=900, gt=0)
    # A unit that takes so many times as long as others is given to an idle replica, too.
    straggler_factor: float = Field(default=4, gt=1)
    # Seconds for which a replica keeps trying to store a shard that an object store does not take (it is down, say).
    store_patience_s: float = Field(default=600, ge=0)
    # Seconds that units in flight may take to end after SIGTERM.
    drain_s: float = Field(default=30, ge=0)
    # For the cost in the summary and in --plan.
    usd_per_replica_hour: float | None = Field(default=None, ge=0)
    # Sequences whose states calibrate the exponent offsets.
    calibration_sequences: int = Field(default=16, gt=0)
    # For the hours that --plan prints: prefill rate of one replica, where it is known.
    tokens_per_second: float | None = Field(default=None, gt=0)

    @field_validator("teacher")
    @classmethod
    def _known_teacher(cls, teacher: str, given: ValidationInfo) -> str:
        try:
            teacher = parse_teacher(teacher)
        except StatehouseError:
            raise ValueError(f"must be none, argmax or topk(k) with k = 1 to {MOST_TOPK}") from None
        if given.data.get("layers") == "aux" and not topk_of(teacher):
            raise ValueError("extraction.layers=aux leaves out the final state, so this must be topk(k)")
        return teacher


class EvaluationConfig(Section):
    # Share of prompt groups held out: coverage is reported on them, drafters never train on them.
    held_out: float = Field(default=0.02, ge=0, lt=1)
    # Of the choice of held-out groups, and of the resamples of an interval.
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    # Draft lengths k at which the acceptance length tau(k) is measured; the largest is also the one that is served.
    draft_lengths: tuple[Annotated[int, Field(ge=1, le=32)], ...] = Field(default=(1, 2, 3), min_length=1)
    # Held-out tokens of one Ray task: with a small verifier a minute of one core. What fits into one is measured at once.
    task_tokens: int = Field(default=32768, gt=0)
    # JSONL prompts to serve, local or on object storage; the held-out ones of the dataset by default.
    prompts: tuple[PromptSource, ...] = ()
    # At most this many prompts are served, and this many new tokens are asked for each.
    serve_prompts: int = Field(default=20, gt=0)
    serve_tokens: int = Field(default=64, gt=0)
    # Only float32 proves that the output is the verifier's own: in bfloat16 rounding decides too often.
    serve_dtype: Literal["float32", "bfloat16"] = "float32"
    # What reads the served output again: sglang starts a second engine on extraction.replica's GPUs.
    oracle: Literal["transformers", "sglang"] = "transformers"


class Recipe(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    verifier: VerifierConfig
    prompts: tuple[PromptSource, ...] = Field(min_length=1)
    generation: GenerationConfig = GenerationConfig()
    dataset: DatasetConfig
    extraction: ExtractionConfig = ExtractionConfig()
    vocab: VocabConfig = VocabConfig()
    drafter: DrafterSection = DrafterSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def vocab_uri(self) -> str:
        """Where the draft vocabulary lies: beside the dataset, unless the recipe says otherwise."""
        return self.training.draft_vocabulary or self.dataset.vocab_uri

    @property
    def run_uri(self) -> str:
        """Where the training run of this recipe lies, beside its dataset."""
        return f"{self.dataset.uri}-runs/{self.training.run or self.name}"


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Raises RecipeError: one line that names the file, the key, what was expected and found, and the fix."""
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        known = sorted(str(found) for found in Path("recipes").glob("*.yaml"))
        raise RecipeError(
            f"{path}: no such recipe"
            + (f"; there are {', '.join(known)}" if known else "; give the path of a YAML file")
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read as a recipe ({error})") from None
    try:
        document = yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise RecipeError(f"{path}: expected sections such as `verifier:`, found {type(document).__name__}")
    for override in overrides or []:
        _apply(document, override)
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        raise RecipeError(f"{path}: {_explain(error)}") from None


def _apply(document: dict[str, Any], override: str) -> None:
    """Sets `a.b.0.c=value` in place; numbers index lists."""
    key, found, text = override.partition("=")
    if not found or not key:
        raise RecipeError(f"override {override!r}: expected section.key=value, for instance extraction.replicas=2")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise RecipeError(f"override {override!r}: the value is not YAML; quote it") from None
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d+)?[eE][-+]?\d+", value):
        value = float(value)  # YAML 1.1 takes 1e-4 for a string
    *path, last = key.split(".")
    at: Any = document
    try:
        for part in path:
            if isinstance(at, list):
                at = at[int(part)]
            else:
                if at.get(part) is None:
                    at[part] = {}
                at = at[part]
        if isinstance(at, list):
            at[int(last)] = value
        else:
            at[last] = value
    except (ValueError, IndexError, AttributeError, TypeError):
        raise RecipeError(
            f"override {override!r}: the recipe has no section {'.'.join(path)!r} to set a key in"
        ) from None


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = sorted(_known_keys([str(part) for part in first["loc"][:-1]]))
        close = difflib.get_close_matches(str(first["loc"][-1]), known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
        return f"unknown key {where!r}; {hint}"
    if first["type"] == "missing":
        return f"key {where!r} is missing; add it"
    message = first["msg"].removeprefix("Value error, ")
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"key {where!r} is {first['input']!r}: {message}{more}"


def _known_keys(location: list[str]) -> list[str]:
    model: type[BaseModel] = Recipe
    for part in location:
        if part.isdigit():
            continue
        for candidate in _models(model.model_fields[part].annotation):
            model = candidate
    return list(model.model_fields)


def takes_list(key: str) -> bool:
    """Whether the recipe's key of this name (`section.key`) holds a list itself."""
    model: type[BaseModel] = Recipe
    *path, last = key.split(".")
    for part in path:
        found = _models(model.model_fields[part].annotation) if part in model.model_fields else []
        if not found:
            return False
        model = found[0]
    return last in model.model_fields and _is_list(model.model_fields[last].annotation)


def _is_list(annotation: Any) -> bool:
    """tuple[...], or tuple[...] | None."""
    return get_origin(annotation) is tuple or any(get_origin(one) is tuple for one in get_args(annotation))


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]
