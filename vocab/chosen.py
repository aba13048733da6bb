"""Whether a draft vocabulary is the one that a recipe asks for: by its size, and the recipe that it was made with."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from vocab.config import VocabConfig
from vocab.errors import VocabError
from vocab.mapping import DraftVocab

# Keys of the section that choose the ids; the others concern the report.
_CHOOSING = ("policy", "force_special_tokens", "keep_ids", "datasets", "files")
# What a recipe that says nothing holds out: it stands in no provenance then.
_HELD_OUT, _SEED = 0.02, 0


def require_chosen_as(
    vocabulary: DraftVocab, config: VocabConfig, *, held_out: float = _HELD_OUT, seed: int = _SEED, where: str
) -> None:
    """held_out, seed: of the recipe's evaluation section: ids are chosen on what is not held out. where: its URI.

    Raises VocabError that names the keys with what was expected and found. Of a vocabulary that does not say how it was
    made, only the size can be wrong.
    """
    if wrong := differences(vocabulary, config, held_out=held_out, seed=seed):
        raise VocabError(
            f"{where}: a draft vocabulary that was made with other settings: {'; '.join(wrong)}; run coverage again "
            f"(`python -m ray_jobs.coverage RECIPE`), or name it in training.draft_vocabulary to take it as it is"
        )


def differences(
    vocabulary: DraftVocab, config: VocabConfig, *, held_out: float = _HELD_OUT, seed: int = _SEED
) -> list[str]:
    """`key: expected ..., found ...` of each key that made another vocabulary than the recipe asks for."""
    wanted: dict[str, Any] = {}
    found: dict[str, Any] = {}
    if config.size is not None:
        wanted["vocab.size"], found["vocab.size"] = min(config.size, vocabulary.vocab_size), vocabulary.size
    if (made_with := vocabulary.provenance.get("recipe")) is not None:
        try:
            then, judged = VocabConfig(**made_with.get("vocab", {})), made_with.get("evaluation", {})
        except (ValidationError, AttributeError, TypeError):  # of a version with other keys
            then = None
        if then is not None:
            wanted |= {f"vocab.{name}": getattr(config, name) for name in _CHOOSING}
            found |= {f"vocab.{name}": getattr(then, name) for name in _CHOOSING}
            wanted |= {"evaluation.held_out": held_out, "evaluation.seed": seed}
            found |= {
                "evaluation.held_out": judged.get("held_out", _HELD_OUT),
                "evaluation.seed": judged.get("seed", _SEED),
            }
    return [
        f"{key}: expected {_said(value)}, found {_said(found[key])}"
        for key, value in wanted.items()
        if value != found[key]
    ]


def _said(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
