"""A list of token ids from a file: what policy `list` keeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vocab.convert import load_any
from vocab.errors import VocabError


def read_ids(where: str) -> NDArray[np.int64]:
    """Ids in the order of a JSON list or of lines with one id each; of a saved draft vocabulary, ascending. [n] int64.

    Raises VocabError when the file is none of these.
    """
    path = Path(where)
    if path.is_dir() or path.suffix in (".pt", ".npy", ".safetensors"):
        return load_any(path).target_ids
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VocabError(f"{path}: cannot read a list of token ids: {error}") from error
    try:
        values = json.loads(text) if text.lstrip().startswith("[") else [int(line) for line in text.split()]
        ids = np.array(values, np.int64)
    except (ValueError, TypeError, OverflowError) as error:
        raise VocabError(f"{path}: expected a JSON list of token ids, or one id a line, found {error}") from error
    if ids.ndim != 1 or ids.size == 0 or (ids < 0).any():
        raise VocabError(f"{path}: expected token ids of 0 and above, found {str(values)[:40]}")
    return ids
