"""Start a drafter from another one, of the same vocabulary or of another: what fits is kept, row by row of the lm_head.

Shape suffixes as in drafter/model.py.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from drafter.errors import DrafterError
from drafter.export import CONFIG, TENSORS
from drafter.model import Drafter
from drafter.recipe import DrafterSection
from drafter.speculators import load_any
from storage.errors import StatehouseError
from storage.objects import open_store

_HEAD = "lm_head.weight"
# Not the other drafter's: they follow from the new vocabulary; and so does the embedding, from the verifier, unless the
# drafters are of another width.
_OWN, _EMBEDDING = ("d2t", "t2d"), "embed_tokens.weight"


@dataclass(frozen=True)
class Started:
    """kept: tensors taken as they were. rows_kept: of the lm_head, tokens at the same draft id; rows_mapped: tokens at
    another draft id; rows_new: tokens that the other drafter lacks, left as they were initialised. rows_dropped: tokens
    of the other drafter that this one lacks.
    """

    kept: tuple[str, ...]
    rows_kept: int
    rows_mapped: int
    rows_new: int
    rows_dropped: int

    def __str__(self) -> str:
        return (
            f"tensors_kept={len(self.kept)} rows_kept={self.rows_kept} rows_mapped={self.rows_mapped} "
            f"rows_new={self.rows_new} rows_dropped={self.rows_dropped}"
        )


def begin(drafter: Drafter, section: DrafterSection) -> str:
    """Starts the drafter from section.start_from, if there is one; says what became of it in one line."""
    if section.start_from is None:
        return f"from=random lm_head={section.lm_head}"
    other = load_start(section.start_from, drafter)
    return f"from={section.start_from} {start_from(drafter, other, head=section.lm_head != 'frozen')}"


@torch.no_grad()
def start_from(drafter: Drafter, other: Drafter, *, head: bool = True) -> Started:
    """Gives `drafter` the other's weights. head: the lm_head's rows too (not where they are frozen to the verifier's).

    Raises DrafterError that lists the fields in which the two differ, but for the size of the draft vocabulary.
    """
    ours, theirs = drafter.config.model_dump(), other.config.model_dump()
    free = ("draft_vocab_size", "max_position_embeddings")
    differing = [name for name in ours if name not in free and ours[name] != theirs[name]]
    if differing:
        said = ", ".join(f"{name}: expected {ours[name]}, found {theirs[name]}" for name in differing)
        raise DrafterError(
            f"start_from: another drafter: {said}; give drafter.config those fields, or start from random"
        )
    state, given = drafter.state_dict(), other.state_dict()
    own = _OWN if drafter.config.own_embedding else (*_OWN, _EMBEDDING)
    kept = tuple(name for name in state if name not in (*own, _HEAD))
    for name in kept:
        state[name].copy_(given[name])
    own_V = torch.full((drafter.config.vocab_size,), -1)
    own_V[torch.from_numpy(drafter.draft_vocab.target_ids)] = torch.arange(drafter.config.draft_vocab_size)
    to = own_V[torch.from_numpy(other.draft_vocab.target_ids)]
    at = (to >= 0).nonzero().squeeze(1)
    if head:
        rows = given[_HEAD][at.to(given[_HEAD].device)]
        state[_HEAD][to[at].to(state[_HEAD].device)] = rows.to(state[_HEAD])
    same = int((to[at] == at).sum())
    return Started(
        kept, same, len(at) - same, drafter.config.draft_vocab_size - len(at), other.config.draft_vocab_size - len(at)
    )


def load_start(where: str, drafter: Drafter) -> Drafter:
    """The drafter to start from: a folder of either kind, or a URI with its config.json and model.safetensors.

    Raises StatehouseError when there is none, or one that this package does not train.
    """
    embedding, layers = drafter.embed_tokens.weight, drafter.config.capture_layers
    if os.path.isdir(where):
        return load_any(where, embedding, capture_layers=layers)
    with tempfile.TemporaryDirectory(prefix="statehouse-start-") as folder:
        try:
            store = open_store(where)
            for name in (CONFIG, TENSORS):
                Path(folder, name).write_bytes(store.get(name))
        except StatehouseError as error:
            raise DrafterError(f"start_from: {where}: expected a drafter's folder, found {error}") from None
        return load_any(folder, embedding, capture_layers=layers)
