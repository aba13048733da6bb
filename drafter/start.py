"""Start a drafter from another one, of the same vocabulary or of another: what fits is kept, row by row of the lm_head.

Shape suffixes as in drafter/model.py.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafter.checkpoint import read_whole
from drafter.config import DrafterConfig
from drafter.errors import DrafterError
from drafter.export import CONFIG, TENSORS, read_json
from drafter.layer_ids import captured_layers
from drafter.model import Drafter
from drafter.recipe import DrafterSection
from drafter.speculators import load_any, read_any_config
from storage.errors import StatehouseError
from storage.objects import open_store

_HEAD = "lm_head.weight"
# Not the other drafter's: they follow from the new vocabulary; and so does the embedding, from the verifier, unless the
# drafters are of another width.
_OWN, _EMBEDDING = ("d2t", "t2d"), "embed_tokens.weight"
# In what the two may differ.
_FREE = ("draft_vocab_size", "max_position_embeddings")


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


def begin(drafter: Drafter, section: DrafterSection, verifier: Mapping[str, Any] | None = None) -> str:
    """Starts the drafter from section.start_from, if there is one; says what became of it in one line.

    verifier: its config.json (`load_start`).
    """
    if section.start_from is None:
        return f"from=random lm_head={section.lm_head}"
    other = load_start(section.start_from, drafter, verifier)
    return f"from={section.start_from} {start_from(drafter, other, head=section.lm_head != 'frozen')}"


@torch.no_grad()
def start_from(drafter: Drafter, other: Drafter, *, head: bool = True) -> Started:
    """Gives `drafter` the other's weights. head: the lm_head's rows too (not where they are frozen to the verifier's).

    Raises DrafterError that lists the fields in which the two differ, but for the size of the draft vocabulary.
    """
    _require_same(drafter.config, other.config)
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


def _require_same(own: DrafterConfig, other: DrafterConfig) -> None:
    ours, theirs = own.model_dump(mode="json"), other.model_dump(mode="json")
    differing = [name for name in ours if name not in _FREE and ours[name] != theirs[name]]
    if not differing:
        return
    said = ", ".join(f"{name}: expected {ours[name]}, found {theirs[name]}" for name in differing)
    fix = "give drafter.config those fields"
    if "capture_layers" in differing:
        fix = f"extract a dataset with extraction.capture_layers={theirs['capture_layers']}"
    raise DrafterError(f"start_from: another drafter: {said}; {fix}, or start from random")


def load_start(where: str, drafter: Drafter, verifier: Mapping[str, Any] | None = None) -> Drafter:
    """The drafter to start from: a folder of either kind, or a URI with its config.json and model.safetensors.

    verifier: its config.json, which tells the layers that the other drafter reads where its own config leaves that open
    (`drafter.layer_ids`). Where nothing tells, they are taken to be this drafter's.
    Raises StatehouseError when there is none, one that this package does not train, or one that differs (`start_from`).
    """
    with _at_hand(where, (CONFIG, TENSORS)) as folder:
        other = _config(folder, drafter.config, verifier)
        return load_any(folder, drafter.embed_tokens.weight, capture_layers=other.capture_layers, verifier=verifier)


def check_start(where: str, config: DrafterConfig, verifier: Mapping[str, Any] | None = None) -> None:
    """Raises StatehouseError, as `load_start` does, when no drafter of this config can start from there; reads no tensor."""
    with _at_hand(where, (CONFIG,)) as folder:
        _config(folder, config, verifier)
    if not (any(Path(where).glob("*.safetensors")) if os.path.isdir(where) else open_store(where).exists(TENSORS)):
        raise DrafterError(f"start_from: {where}: expected a drafter's folder, found no {TENSORS} in it")


def _config(folder: str, own: DrafterConfig, verifier: Mapping[str, Any] | None) -> DrafterConfig:
    """What the config.json in the folder says, once it is found to be a drafter like ours."""
    named = captured_layers(read_json(folder)[1], verifier)
    other = read_any_config(folder, named or own.capture_layers, verifier)
    _require_same(own, other)
    return other


@contextmanager
def _at_hand(where: str, names: Sequence[str]) -> Iterator[str]:
    """A local folder with these files of `where`; in errors it is called by its own name."""
    if os.path.isdir(where):
        yield where
        return
    with tempfile.TemporaryDirectory(prefix="statehouse-start-") as folder:
        try:
            store = open_store(where)
            for name in names:
                Path(folder, name).write_bytes(read_whole(store, name))
        except StatehouseError as error:
            raise DrafterError(f"start_from: {where}: expected a drafter's folder, found {error}") from None
        try:
            yield folder
        except DrafterError as error:
            raise DrafterError(str(error).replace(folder, where)) from None
