"""Draft vocabularies in the files of others: SpecForge's vocab_mapping.pt, speculators' d2t / t2d, tensors of a checkpoint.

All of them hold `d2t` int64 offsets and `t2d` bool, as DraftVocab does, so nothing is translated: only checked. The order
of ids within a frequency tie differs (speculators and we: lower id first; SpecForge: first seen), which matters when a
map is made, not when it is read.

    SpecForge    vocab_mapping.pt         {"d2t": [draft_vocab] int64, "t2d": [vocab] bool}
    speculators  d2t-N.npy, t2d-N.npy     also d2t.npy / t2d.npy and .pt of one tensor each
    SGLang       `d2t` (and an ignored `t2d`) among the drafter's weights; for EAGLE-2 drafters, which have none, a list of
                 ids as `--speculative-token-map` (FR-Spec); EAGLE-3 ignores that option
    vLLM         `d2t` and `t2d` among the drafter's weights

torch is imported only to read or write `.pt`, and reads weights only: no code comes out of a file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vocab.errors import VocabError
from vocab.mapping import HEADER, DraftVocab

Format = Literal["statehouse", "specforge", "speculators", "token-map"]
FORMATS: tuple[Format, ...] = ("statehouse", "specforge", "speculators", "token-map")


def load_any(
    where: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    size: int | None = None,
    expected_hash: str | None = None,
) -> DraftVocab:
    """A draft vocabulary from a folder of ours, a SpecForge .pt, a speculators folder or d2t file, a .safetensors,
    or a token map.

    vocab_size, size, expected_hash: what it must have; a cached map of another size or content is the commonest way to
    train on the wrong one. Raises VocabError that says what was expected and found.
    """
    path = Path(where)
    if not path.exists():
        raise VocabError(f"{path}: no such file or folder; expected a draft vocabulary")
    if path.is_dir() and (path / HEADER).exists():
        found = DraftVocab.load(path)
    elif path.is_dir():
        found = _speculators(*_pair(path))
    elif path.suffix == ".safetensors":
        found = _from_tensors(_safetensors(path), path, vocab_size)
    elif path.name.startswith(("d2t", "t2d")):
        found = _speculators(*_pair(path.parent, path.name))
    elif path.suffix == ".pt":
        found = _from_tensors(_torch_load(path), path, vocab_size)
    else:
        raise VocabError(f"{path}: expected a folder, .pt, .npy or .safetensors with d2t and t2d")
    return check_fits(found, vocab_size=vocab_size, size=size, expected_hash=expected_hash, where=str(path))


def check_fits(
    vocabulary: DraftVocab,
    *,
    vocab_size: int | None = None,
    size: int | None = None,
    expected_hash: str | None = None,
    where: str = "draft vocabulary",
) -> DraftVocab:
    """The draft vocabulary itself when it is the one that was meant. Raises VocabError otherwise."""
    for what, expected, found in (
        ("verifier's vocabulary", vocab_size, vocabulary.vocab_size),
        ("draft vocabulary", size, vocabulary.size),
        ("hash", expected_hash, vocabulary.hash),
    ):
        if expected is not None and expected != found:
            raise VocabError(
                f"{where}: {what}: expected {expected}, found {found}: it was made for something else; "
                "choose it again from this dataset's counts"
            )
    return vocabulary


def save_as(vocabulary: DraftVocab, where: str | os.PathLike[str], form: str) -> list[Path]:
    """Write the draft vocabulary in a format of FORMATS; returns the files. Raises VocabError when that is not possible.

    statehouse: a folder. specforge: `where` is the .pt. speculators: a folder with d2t.npy and t2d.npy.
    token-map: a .pt list of target ids, as SGLang's --speculative-token-map takes for drafters without a d2t.
    """
    path = Path(where)
    try:
        if form == "statehouse":
            vocabulary.save(path)
            return [path]
        if form == "speculators":
            path.mkdir(parents=True, exist_ok=True)
            np.save(path / "d2t.npy", vocabulary.d2t)
            np.save(path / "t2d.npy", vocabulary.t2d)
            return [path / "d2t.npy", path / "t2d.npy"]
        if form in ("specforge", "token-map"):
            torch = _torch()
            content: Any = (
                {"d2t": torch.from_numpy(vocabulary.d2t.copy()), "t2d": torch.from_numpy(vocabulary.t2d.copy())}
                if form == "specforge"
                else vocabulary.target_ids.tolist()
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, path)
            return [path]
    except OSError as error:
        raise VocabError(f"cannot write the draft vocabulary to {path}: {error.strerror or error}") from error
    raise VocabError(f"format: expected one of {', '.join(FORMATS)}, found {form!r}")


def padded(vocabulary: DraftVocab, vocab_size: int) -> DraftVocab:
    """The same ids of a verifier whose embedding is padded to `vocab_size` rows (more rows than the tokeniser has ids).

    The padding is never proposed. Raises VocabError when it would cut ids off instead.
    """
    if vocab_size < vocabulary.vocab_size:
        raise VocabError(f"padding: expected at least {vocabulary.vocab_size} ids, found {vocab_size}")
    mask = np.zeros(vocab_size, np.bool_)
    mask[: vocabulary.vocab_size] = vocabulary.t2d
    return DraftVocab(vocabulary.d2t, mask, vocabulary.provenance)


def _from_tensors(tensors: Any, where: Path, vocab_size: int | None) -> DraftVocab:
    if isinstance(tensors, list) or (hasattr(tensors, "ndim") and tensors.ndim == 1):
        return _from_token_map(tensors, where, vocab_size)
    if not isinstance(tensors, Mapping) or "d2t" not in tensors:
        found = sorted(map(str, tensors))[:6] if isinstance(tensors, Mapping) else type(tensors).__name__
        raise VocabError(f"{where}: expected tensors d2t and t2d, found {found}")
    d2t = _array(tensors["d2t"])
    if "t2d" in tensors:
        t2d = _array(tensors["t2d"])
    elif vocab_size is None:
        raise VocabError(f"{where}: has d2t without t2d (SGLang's checkpoints do); give the verifier's vocabulary size")
    else:
        targets = np.arange(d2t.size) + d2t
        if d2t.size and int(targets.max()) >= vocab_size:
            raise VocabError(
                f"{where}: d2t: target id {int(targets.max())} is outside the vocabulary of {vocab_size} ids"
            )
        t2d = np.isin(np.arange(vocab_size), targets)
    return _checked(d2t, t2d, where)


def _from_token_map(ids: Any, where: Path, vocab_size: int | None) -> DraftVocab:
    """Target ids in any order, as FR-Spec's files hold them (a list, or one tensor)."""
    if vocab_size is None:
        raise VocabError(f"{where}: a list of ids, as SGLang's token maps are; give the verifier's vocabulary size")
    try:
        return DraftVocab.from_ids(np.asarray(ids), vocab_size, provenance={"imported_from": where.name})
    except (VocabError, ValueError) as error:
        raise VocabError(f"{where}: {error}") from error


def _checked(d2t: NDArray[Any], t2d: NDArray[Any], where: Path) -> DraftVocab:
    try:
        return DraftVocab(d2t, t2d, {"imported_from": where.name})
    except VocabError as error:
        raise VocabError(f"{where}: {error}") from error


def _pair(folder: Path, name: str | None = None) -> tuple[Path, Path]:
    """d2t and t2d of a speculators folder: d2t.npy, d2t-32000.npy, .pt. Raises VocabError when they are none or many."""
    given = sorted(folder.glob("d2t*.npy")) + sorted(folder.glob("d2t*.pt"))
    if name is not None:
        given = [folder / name.replace("t2d", "d2t")]
    if len(given) != 1:
        raise VocabError(
            f"{folder}: expected one draft vocabulary (d2t*.npy), found {[one.name for one in given]}; name it"
        )
    other = given[0].with_name(given[0].name.replace("d2t", "t2d"))
    for path in (given[0], other):
        if not path.exists():
            raise VocabError(f"{path}: no such file; d2t and t2d belong together")
    return given[0], other


def _speculators(d2t: Path, t2d: Path) -> DraftVocab:
    return _checked(_one(d2t), _one(t2d), d2t)


def _one(path: Path) -> NDArray[Any]:
    if path.suffix == ".pt":
        return _array(_torch_load(path))
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except (ValueError, OSError, EOFError) as error:
        raise VocabError(f"{path}: expected a .npy of numbers, found {error}") from error


def _array(tensor: Any) -> NDArray[Any]:
    return np.asarray(tensor.numpy() if hasattr(tensor, "numpy") else tensor)


def _safetensors(path: Path) -> dict[str, Any]:
    """d2t and t2d of a checkpoint, without reading its other tensors."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="np") as file:
            names = set(file.keys())
            return {name: file.get_tensor(name) for name in ("d2t", "t2d") if name in names} or dict.fromkeys(names)
    except Exception as error:  # the library raises an error of its own
        raise VocabError(f"{path}: expected a safetensors file, found {error!r}") from error


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise VocabError("a .pt needs torch; pip install 'statehouse[drafter]'") from error
    return torch


def _torch_load(path: Path) -> Any:
    try:
        return _torch().load(path, map_location="cpu", weights_only=True)
    except VocabError:
        raise
    except Exception as error:  # a damaged or unsafe file raises what torch pleases
        raise VocabError(
            f"{path}: expected tensors saved by torch, found {' '.join(str(error).split())[:120]}"
        ) from error
