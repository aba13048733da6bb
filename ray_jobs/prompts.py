"""Rows of the user's files -> tokenised prompts or rejects with a reason. Pure but for reading files.

A row is one of
- `messages` (OpenAI style): that end with a user turn are answered by `generate`, that end with an assistant turn are a
  given response;
- `prompt`: a string, the same as one user turn; with `response`, a given response;
- `token_ids` (+ `loss_mask`): a whole sequence, tokenised already.
Loss masks come from token ids: prompt and response are tokenised apart, never searched for in text.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from ray_jobs.recipe import PromptSource, Recipe
from storage.errors import RecipeError
from storage.sequences import sequence_id

# `kind`: "generate" needs a response; "given" is a whole sequence already.
PROMPTS_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("group", pa.string()),
        ("kind", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("row", pa.string()),
    ]
)
REJECTS_SCHEMA = pa.schema(
    [("source", pa.string()), ("row", pa.string()), ("reason", pa.string()), ("text", pa.string())]
)


class ChatTokenizer(Protocol):
    """The part of a transformers tokeniser that is used here."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any: ...


class Reject(Exception):
    """Why a row cannot be used, in words for the person who wrote it."""


@dataclass(frozen=True)
class Limits:
    """vocab_size: ids must lie below it. max_length: tokens of a sequence. end_ids: ids that end a turn."""

    vocab_size: int
    max_length: int
    end_ids: frozenset[int] = field(default_factory=frozenset)


@lru_cache(maxsize=2)
def load_tokenizer(folder: str, trust_remote_code: bool = False) -> Any:
    """The verifier's own tokeniser, from its folder; nothing is downloaded."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # transformers raises whatever its tokeniser's loader does
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RecipeError(f"verifier.model {folder}: its tokeniser cannot be loaded ({reason})") from None
    return tokenizer


def end_ids(folder: str, tokenizer: Any) -> frozenset[int]:
    """Ids that end an assistant's turn: the tokeniser's eos and those of config.json and generation_config.json."""
    found = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        path = Path(folder) / name
        if path.exists():
            value = json.loads(path.read_text()).get("eos_token_id")
            found.update(value if isinstance(value, list) else [value])
    return frozenset(int(token) for token in found if token is not None)


def expand(path: str) -> list[str]:
    """Files that a path or glob names, sorted. Raises RecipeError when there are none."""
    import fsspec

    try:
        filesystem, pattern = fsspec.url_to_fs(path)
        found = sorted(filesystem.glob(pattern)) if any(c in path for c in "*?[") else [pattern]
        found = [name for name in found if filesystem.isfile(name)]
    except Exception as error:  # every file system of fsspec has errors of its own (botocore's are no OSErrors)
        raise RecipeError(
            f"prompts: {path}: cannot be read ({_first_line(error)}); check the path and credentials"
        ) from None
    if not found:
        raise RecipeError(f"prompts: {path}: no such file; correct `prompts` in the recipe")
    protocol = path.split("://")[0] + "://" if "://" in path else ""
    return [name if "://" in name else protocol + name for name in found]


def input_files(recipe: Recipe) -> list[dict[str, Any]]:
    """{path, source, limit, skip} of every file the recipe names, each file once. Raises RecipeError for missing ones."""
    return files_of(recipe.prompts)


def files_of(sources: Iterable[PromptSource]) -> list[dict[str, Any]]:
    """The same of any sources."""
    files: dict[str, dict[str, Any]] = {}
    for entry in sources:
        for path in expand(entry.path):
            source = entry.source or PurePosixPath(path).name.split(".")[0]
            files.setdefault(path, {"path": path, "source": source, "limit": entry.limit, "skip": entry.skip})
    return list(files.values())


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
        path = file["path"]
        try:
            filesystem, name = fsspec.url_to_fs(path)
            about = filesystem.info(name)
            tag = about.get("ETag") or about.get("etag") or about.get("md5Hash")
            if tag is None:
                with filesystem.open(name, "rb") as opened:
                    tag = hashlib.file_digest(opened, "sha256").hexdigest()
        except Exception as error:  # as in `expand`
            raise RecipeError(f"prompts: {path}: cannot be read ({_first_line(error)})") from None
        found[_portable(path)] = str(tag)
    return found


def read_rows(path: str, limit: int | None = None, skip: int = 0) -> Iterator[tuple[str, dict[str, Any] | Reject]]:
    """Rows of one JSONL or Parquet file, `limit` of them behind the first `skip`: ("file:line", row or why it cannot be
    read). Raises RecipeError.
    """
    read = _read_parquet if path.endswith(".parquet") else _read_jsonl
    try:
        yield from islice(read(path), skip, None if limit is None else skip + limit)
    except Exception as error:  # likewise, and those of the decompressors and of Parquet
        raise RecipeError(
            f"prompts: {path}: cannot be read ({_first_line(error)}); expected JSONL or Parquet"
        ) from None


def _read_jsonl(path: str) -> Iterator[tuple[str, dict[str, Any] | Reject]]:
    import fsspec

    with fsspec.open(path, "rt", compression="infer", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{path}:{number}", _parse(line)


def _read_parquet(path: str) -> Iterator[tuple[str, dict[str, Any] | Reject]]:
    import fsspec
    import pyarrow.parquet as pq

    with fsspec.open(path, "rb") as file:
        number = 0
        for batch in pq.ParquetFile(file).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", {key: value for key, value in row.items() if value is not None}


def _parse(line: str) -> dict[str, Any] | Reject:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Reject("half of a surrogate pair: the text was cut inside a character")
    except (ValueError, RecursionError) as error:
        return Reject(f"not JSON: {error}")
    return row if isinstance(row, dict) else Reject(f"expected a JSON object, found {type(row).__name__}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def tokenise(row: dict[str, Any], tokenizer: ChatTokenizer, limits: Limits) -> dict[str, Any]:
    """`PROMPTS_SCHEMA` without source and row. Raises Reject."""
    kinds = [kind for kind in ("messages", "prompt", "token_ids") if kind in row]
    if len(kinds) > 1:
        raise Reject(f"expected one of messages, prompt, token_ids; found {' and '.join(kinds)}")
    if "token_ids" in row:
        return _pretokenised(row, limits)
    messages = _messages(row)
    given = messages[-1]["role"] == "assistant"
    prompt = messages[:-1] if given else messages
    prompt_text = _template(tokenizer, prompt, generation=True)
    prompt_ids = _ids(tokenizer, prompt_text)
    if not prompt_ids:
        raise Reject("the prompt is empty")
    group = sequence_id(np.array(prompt_ids), np.zeros(len(prompt_ids), bool))
    if not given:
        if len(prompt_ids) >= limits.max_length:
            raise Reject(f"the prompt has {len(prompt_ids):,} tokens, which leaves no room below {limits.max_length:,}")
        return _row("generate", group, prompt_ids, [False] * len(prompt_ids), limits)
    whole = _template(tokenizer, messages, generation=False)
    if not whole.startswith(prompt_text):
        raise Reject("the chat template changes the prompt once the answer follows, so no exact loss mask exists")
    answer_ids = _ids(tokenizer, whole[len(prompt_text) :])
    # The template may add text behind the end token (a line break): the verifier never produces it.
    ends = [at for at, token in enumerate(answer_ids) if token in limits.end_ids]
    said = ends[-1] + 1 if ends else len(answer_ids)
    if not said:
        raise Reject("the response is empty")
    mask = [False] * len(prompt_ids) + [True] * said + [False] * (len(answer_ids) - said)
    return _row("given", group, prompt_ids + answer_ids, mask, limits)


def _row(kind: str, group: str, ids: list[int], mask: list[bool], limits: Limits) -> dict[str, Any]:
    if len(ids) > limits.max_length:
        raise Reject(f"{len(ids):,} tokens are more than {limits.max_length:,}")
    if (largest := max(ids)) >= limits.vocab_size:
        raise Reject(f"it holds token id {largest}, outside the verifier's vocabulary of {limits.vocab_size:,}")
    token_ids, loss_mask = np.array(ids, np.int32), np.array(mask, bool)
    return {
        "id": sequence_id(token_ids, loss_mask),
        "group": group,
        "kind": kind,
        "token_ids": token_ids,
        "loss_mask": loss_mask,
    }


def _pretokenised(row: dict[str, Any], limits: Limits) -> dict[str, Any]:
    ids = row["token_ids"]
    mask = row.get("loss_mask")
    if not isinstance(ids, list) or not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise Reject("token_ids must be a list of integers")
    if not ids:
        raise Reject("token_ids is empty")
    for at, token in enumerate(ids):
        if not 0 <= token < limits.vocab_size:
            raise Reject(f"token_ids[{at}] is {token}, outside the verifier's vocabulary of {limits.vocab_size:,}")
    if mask is None:
        mask = [True] * len(ids)
    if not isinstance(mask, list) or len(mask) != len(ids) or any(value not in (0, 1) for value in mask):
        raise Reject(f"loss_mask must be a list of {len(ids)} booleans, one for each of token_ids")
    mask = [bool(value) for value in mask]
    first = mask.index(True) if any(mask) else len(ids)
    prefix = np.array(ids[:first] or ids, np.int32)
    return _row("given", sequence_id(prefix, np.zeros(len(prefix), bool)), ids, mask, limits)


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    if "prompt" in row:
        if not isinstance(row["prompt"], str):
            raise Reject(f"prompt must be a string, found {type(row['prompt']).__name__}")
        messages = [{"role": "user", "content": row["prompt"]}]
        if "response" in row:
            messages.append({"role": "assistant", "content": row["response"]})
    elif "messages" in row:
        messages = row["messages"]
    else:
        raise Reject(f"expected one of messages, prompt, token_ids; found {', '.join(sorted(row)) or 'nothing'}")
    if not isinstance(messages, list) or not messages:
        raise Reject("messages is empty")
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Reject(f"messages[{at}] must have a role and a content")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise Reject(
                f"messages[{at}] ({message['role']}): content must be a string, found {type(content).__name__}"
            )
        if not (content or "").strip():
            raise Reject(f"messages[{at}] ({message['role']}) is empty")
    if messages[-1]["role"] not in ("user", "assistant"):
        raise Reject(f"messages must end with a user or an assistant turn, found {messages[-1]['role']!r}")
    if len(messages) == 1 and messages[0]["role"] == "assistant":
        raise Reject("messages holds an answer without a question")
    return messages


def _template(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], *, generation: bool) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
    except Exception as error:  # jinja templates raise as they like
        raise Reject(f"the chat template refuses it ({_first_line(error)})") from None
    return str(text)


def _ids(tokenizer: ChatTokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def prepare_file(
    path: str, source: str, limit: int | None, tokenizer: ChatTokenizer, limits: Limits, skip: int = 0
) -> Iterator[dict[str, Any]]:
    """Every row of a file: `PROMPTS_SCHEMA`, or `REJECTS_SCHEMA` under the key "reject"."""
    for row_name, row in read_rows(path, limit, skip):
        try:
            if isinstance(row, Reject):
                raise row
            yield {**tokenise(row, tokenizer, limits), "source": source, "row": row_name}
        except Reject as reject:
            text = "" if isinstance(row, Reject) else json.dumps(row, ensure_ascii=False, default=str)[:200]
            yield {"reject": {"source": source, "row": row_name, "reason": str(reject), "text": text}}
