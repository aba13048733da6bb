"""Files by path, glob or URI: local as they are, on object storage through fsspec (s3://, gs://, ...)."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from vocab.errors import VocabError


def is_remote(uri: str) -> bool:
    return "://" in uri and not uri.startswith("file://")


def find_files(patterns: Sequence[str], what: str) -> list[str]:
    """The files that paths and globs name, sorted within each, every file once. what: names the list in errors.

    Raises VocabError for one that names no file, or a store that cannot be read.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        names = _remote(pattern, what) if is_remote(pattern) else _local(pattern.removeprefix("file://"))
        if not names:
            raise VocabError(f"{what}: {pattern}: no such file; expected a path, a glob or a URI of files of token ids")
        found |= dict.fromkeys(names)
    return list(found)


def _local(pattern: str) -> list[str]:
    path = os.path.expanduser(pattern)
    names = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
    return [os.path.realpath(name) for name in names if os.path.isfile(name)]


def _remote(pattern: str, what: str) -> list[str]:
    try:
        import fsspec

        filesystem, path = fsspec.url_to_fs(pattern)
        names = sorted(filesystem.glob(path)) if any(c in path for c in "*?[") else [path]
        names = [name for name in names if filesystem.isfile(name)]
    except Exception as error:  # every file system of fsspec has errors of its own (botocore's are no OSErrors)
        raise VocabError(
            f"{what}: {pattern}: cannot be read ({_first_line(error)}); check the URI and the credentials"
        ) from None
    return [name if "://" in name else f"{pattern.split('://')[0]}://{name}" for name in names]


def open_file(uri: str) -> IO[bytes]:
    """The file, for reading. Raises OSError for a local one, VocabError for any other."""
    if not is_remote(uri):
        return Path(uri.removeprefix("file://")).expanduser().open("rb")
    try:
        import fsspec

        opened: Any = fsspec.open(uri, "rb").open()
    except Exception as error:  # as above
        raise VocabError(f"{uri}: cannot read it: {_first_line(error)}") from None
    file: IO[bytes] = opened
    return file


def read_file(uri: str) -> bytes:
    """The whole file. Raises OSError for a local one, VocabError for any other."""
    with open_file(uri) as file:
        return file.read()


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
