"""The files that a recipe's `prompts` name, and their rows: JSONL, Parquet, Hugging Face datasets on disk; local or remote."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

from ray_jobs.conversations import Reject
from ray_jobs.recipe import PromptSource, Recipe
from storage.errors import RecipeError

Row = dict[str, Any]
# Of a Hugging Face dataset, written by `save_to_disk`.
_STATE, _SPLITS = "state.json", "dataset_dict.json"
# More rows than any file has.
_ALL = 1 << 60


@dataclass(frozen=True)
class PromptFile:
    """path: a file. source: the label of its rows. entry: the recipe's, that named it."""

    path: str
    source: str
    entry: PromptSource


def expand(path: str) -> list[str]:
    """Files that a path, a glob, or the folder of a dataset names, sorted. Raises RecipeError when there are none."""
    import fsspec

    try:
        filesystem, pattern = fsspec.url_to_fs(path)
        filesystem.invalidate_cache()  # listings are kept for as long as the process lives, and with them ETags
        found = sorted(filesystem.glob(pattern)) if _is_glob(path) else [pattern]
        files = []
        for name in found:
            if filesystem.isfile(name):
                files.append(name)
            elif filesystem.isdir(name):
                files += _dataset_files(filesystem, name.rstrip("/"), path)
    except RecipeError:
        raise
    except Exception as error:  # every file system of fsspec has errors of its own (botocore's are no OSErrors)
        raise RecipeError(
            f"prompts: {path}: cannot be read ({first_line(error)}); check the path and credentials"
        ) from None
    if not files:
        raise RecipeError(f"prompts: {path}: no such file; correct `prompts` in the recipe")
    protocol = path.split("://")[0] + "://" if "://" in path else ""
    return [name if "://" in name else protocol + name for name in files]


def _dataset_files(filesystem: Any, folder: str, path: str) -> list[str]:
    """The Arrow files of a dataset that `save_to_disk` wrote, in its order; none of a folder that is something else."""
    if filesystem.exists(f"{folder}/{_SPLITS}"):
        splits = json.loads(filesystem.cat_file(f"{folder}/{_SPLITS}"))["splits"]
        if len(splits) != 1:
            raise RecipeError(
                f"prompts: {path}: holds the splits {', '.join(splits)}; name one of them, such as {path.rstrip('/')}/{splits[0]}"
            )
        folder = f"{folder}/{splits[0]}"
    if not filesystem.exists(f"{folder}/{_STATE}"):
        if _is_glob(path):
            return []
        raise RecipeError(
            f"prompts: {path}: is a folder, and no Hugging Face dataset on disk ({_STATE} is missing); "
            f"name its files with a glob, such as {path.rstrip('/')}/*.jsonl"
        )
    state = json.loads(filesystem.cat_file(f"{folder}/{_STATE}"))
    return [f"{folder}/{file['filename']}" for file in state["_data_files"]]


def _is_glob(path: str) -> bool:
    return any(character in path for character in "*?[")


def input_files(recipe: Recipe) -> list[PromptFile]:
    """The recipe's files in its order, no row of one twice. Raises RecipeError for missing ones."""
    return files_of(recipe.prompts)


def files_of(sources: Iterable[PromptSource]) -> list[PromptFile]:
    """The same of any sources. Two may name one file when they read other rows of it, or agree in everything."""
    files: list[PromptFile] = []
    for entry in sources:
        for path in expand(entry.path):
            source = entry.source or PurePosixPath(path).name.split(".")[0]
            if entry.source is None and path.endswith(".arrow"):  # all are called data-00000-of-00001
                source = PurePosixPath(path).parent.name if _is_glob(entry.path) else PurePosixPath(entry.path).name
            file = PromptFile(path, source, entry)
            if not any(_is_again(file, other) for other in files if other.path == path):
                files.append(file)
    return files


def _is_again(file: PromptFile, other: PromptFile) -> bool:
    """Whether two entries that name one file mean the same. Raises RecipeError where it cannot be told which one holds."""
    rows, others = (range(one.entry.skip, one.entry.skip + (one.entry.limit or _ALL)) for one in (file, other))
    if rows.stop <= others.start or others.stop <= rows.start:
        return False
    same = file.entry.model_copy(update={"path": "", "source": None}) == other.entry.model_copy(
        update={"path": "", "source": None}
    )
    if not same or file.source != other.source:
        raise RecipeError(
            f"prompts: {file.path}: two entries with other settings name the same rows of it; keep one of them, narrow a "
            f"glob, or give each rows of its own by `skip` and `limit`"
        )
    return True


def _portable(path: str) -> str:
    """Relative where the file lies below the working folder: `ray job submit` runs every job in another copy of that."""
    return path.removeprefix(os.getcwd() + os.sep)


def fingerprints(recipe: Recipe) -> dict[str, str]:
    """{path: what changes with its content} of the recipe's files: an ETag or checksum where the store has one, else
    a sha256 of the content. Raises RecipeError when one cannot be read.
    """
    import fsspec

    found = {}
    for file in input_files(recipe):
        try:
            filesystem, name = fsspec.url_to_fs(file.path)
            about = filesystem.info(name)
            tag = about.get("ETag") or about.get("etag") or about.get("md5Hash")
            if tag is None:
                with filesystem.open(name, "rb") as opened:
                    tag = hashlib.file_digest(opened, "sha256").hexdigest()
        except Exception as error:  # as in `expand`
            raise RecipeError(f"prompts: {file.path}: cannot be read ({first_line(error)})") from None
        found[_portable(file.path)] = str(tag)
    return found


def read_lines(path: str, limit: int | None = None, skip: int = 0) -> Iterator[tuple[int, bytes]]:
    """Rows of one file as JSON, `limit` of them behind the first `skip`: (number of its line or row from 1, JSON).

    Lines of JSONL are given as they are, whatever they hold. Raises RecipeError for a file that cannot be read.
    """
    read = _columnar if path.endswith((".parquet", ".arrow")) else _jsonl
    try:
        yield from islice(read(path), skip, None if limit is None else skip + limit)
    except Exception as error:  # likewise, and those of the decompressors, of Parquet and of Arrow
        raise RecipeError(
            f"prompts: {path}: cannot be read ({first_line(error)}); expected JSONL, Parquet or a dataset on disk"
        ) from None


def read_rows(path: str, limit: int | None = None, skip: int = 0) -> Iterator[tuple[str, Row | Reject]]:
    """The same, parsed: ("file:line", row or why it cannot be used). Raises RecipeError."""
    for number, line in read_lines(path, limit, skip):
        try:
            yield f"{path}:{number}", parse(line)
        except Reject as reject:
            yield f"{path}:{number}", reject


def _jsonl(path: str) -> Iterator[tuple[int, bytes]]:
    import fsspec
    import pyarrow as pa

    zstd = path.endswith((".zst", ".zstd"))
    with fsspec.open(path, "rb", compression=None if zstd else "infer") as file:
        # zstandard's reader ends a torn file without a word, and stops behind the first frame; Arrow's does neither.
        lines = io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")) if zstd else file
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line


def _columnar(path: str) -> Iterator[tuple[int, bytes]]:
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    with fsspec.open(path, "rb") as file:
        if path.endswith(".parquet"):
            batches: Iterable[Any] = pq.ParquetFile(file).iter_batches(batch_size=256)
        elif file.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(file)
            batches = (reader.get_batch(at) for at in range(reader.num_record_batches))
        else:
            file.seek(0)
            batches = pa.ipc.open_stream(file)
        number = 0
        for batch in batches:
            for low in range(0, len(batch), 256):  # `save_to_disk` writes batches of thousands
                for row in batch.slice(low, 256).to_pylist():
                    number += 1
                    yield (
                        number,
                        json.dumps(_without_nulls(row), ensure_ascii=False, default=str).encode("utf-8", "replace"),
                    )


def _without_nulls(value: Any) -> Any:
    """Columns give every message the keys of all others, as nulls."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(inner) for inner in value]
    return value


def parse(line: bytes) -> Row:
    """Raises Reject."""
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Reject("not_json", "half of a surrogate pair: the text was cut inside a character") from None
    except (ValueError, RecursionError) as error:
        raise Reject("not_json", f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise Reject("not_json", f"expected a JSON object, found {type(row).__name__}")
    return row


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
