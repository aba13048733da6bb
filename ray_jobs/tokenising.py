"""What the tasks of `prepare` do: read the lines of a file, tokenise a block of lines. No Ray in here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pyarrow as pa

from ray_jobs.prompt_files import PromptFile, read_lines
from ray_jobs.prompts import PROMPTS_SCHEMA, Limits, end_ids, load_tokenizer, prepare_line
from ray_jobs.verifier import resolve_verifier
from storage.errors import RecipeError, StatehouseError

_LINES = 64
# One row of the corpus. `rows` closes a file: how many were read; `error` says why it could not be.
LINES_SCHEMA = pa.schema(
    [("at", pa.int64()), ("number", pa.int64()), ("line", pa.binary()), ("rows", pa.int64()), ("error", pa.string())]
)
# A prompt, or a reject (`code`), or the end of a file.
DONE_SCHEMA = pa.schema(
    [
        *PROMPTS_SCHEMA,
        ("at", pa.int64()),
        ("number", pa.int64()),
        ("rows", pa.int64()),
        ("error", pa.string()),
        ("code", pa.string()),
        ("reason", pa.string()),
        ("text", pa.string()),
    ]
)


def read_file(batch: pa.Table, files: list[PromptFile]) -> Iterator[pa.Table]:
    """The lines of one file, and a row that closes it."""
    at = batch["at"][0].as_py()
    count, held = 0, []
    last: dict[str, Any] = {"at": at, "number": -1, "line": None, "error": None}
    try:
        for number, line in read_lines(files[at].path, files[at].entry.limit, files[at].entry.skip):
            count += 1
            held.append({"at": at, "number": number, "line": line, "rows": None, "error": None})
            if len(held) == _LINES:
                yield pa.Table.from_pylist(held, schema=LINES_SCHEMA)
                held = []
    except RecipeError as error:  # would come back wrapped in a traceback of Ray's
        last["error"] = str(error)
    yield pa.Table.from_pylist([*held, {**last, "rows": count}], schema=LINES_SCHEMA)


@lru_cache(maxsize=1)
def _tokeniser(model: str, revision: str | None, trust: bool) -> tuple[Any, frozenset[int]]:
    folder = str(resolve_verifier(model, revision=revision))
    tokenizer = load_tokenizer(folder, trust)
    return tokenizer, end_ids(folder, tokenizer)


def tokenise_block(
    batch: pa.Table, files: list[PromptFile], verifier: tuple[str, str | None, bool], limits: Limits
) -> Iterator[pa.Table]:
    try:
        tokenizer, ends = _tokeniser(*verifier)
    except StatehouseError as error:  # this node lacks the verifier
        yield pa.Table.from_pylist([{"at": batch["at"][0].as_py(), "error": str(error)}], schema=DONE_SCHEMA)
        return
    limits = Limits(limits.vocab_size, limits.max_length, ends)
    done: list[dict[str, Any]] = []
    for row in batch.to_pylist():
        where = {"at": row["at"], "number": row["number"]}
        if row["rows"] is not None:
            done.append({**where, "rows": row["rows"], "error": row["error"]})
            continue
        made, reject = prepare_line(files[row["at"]], row["number"], row["line"], tokenizer, limits)
        done += [{**one, **where} for one in made]
        if reject is not None:
            done.append({**where, **{name: reject[name] for name in ("code", "reason", "text")}})
        if len(done) >= _LINES:
            yield pa.Table.from_pylist(done, schema=DONE_SCHEMA)
            done = []
    yield pa.Table.from_pylist(done, schema=DONE_SCHEMA)
