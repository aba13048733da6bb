"""Rows of the user's files -> tokenised prompts and sequences, or rejects with a reason. docs/prompts.md lists all forms.

A row is a conversation (`ray_jobs/conversations.py`), `text`, or `token_ids` (+ `loss_mask`). A conversation that ends with
a question is answered by `generate`; everything else is a whole sequence already. Loss masks come from the chat template
(`ray_jobs/chat_template.py`): the text is cut where the assistant begins and ends to speak and the pieces are tokenised apart,
so a token never belongs to both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ray_jobs.chat_template import ChatTemplate, Rendered
from ray_jobs.conversations import CONVERSATION_KEYS, Reject, conversation_of
from ray_jobs.prompt_files import PromptFile, first_line, parse, read_lines
from ray_jobs.recipe import PromptSource
from storage.errors import RecipeError
from storage.sequences import sequence_id

# `kind`: "generate" needs a response; "given" is a whole sequence already. `row`: "file:line".
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
# code: one word, for counting. row: number of the line or row in its file, from 1. text: how the row begins.
REJECTS_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("file", pa.string()),
        ("row", pa.int64()),
        ("code", pa.string()),
        ("reason", pa.string()),
        ("text", pa.string()),
    ]
)
FORMS = (*CONVERSATION_KEYS, "text", "token_ids")


@dataclass(frozen=True)
class Limits:
    """vocab_size: ids must lie below it. max_length: tokens of a sequence. end_ids: ids that end a turn."""

    vocab_size: int
    max_length: int
    end_ids: frozenset[int] = field(default_factory=frozenset)


# How the rows of a source are made into sequences, where nothing is said.
DEFAULTS = PromptSource(path="-")


@lru_cache(maxsize=2)
def load_tokenizer(folder: str, trust_remote_code: bool = False) -> Any:
    """The verifier's own tokeniser, from its folder; nothing is downloaded."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # transformers raises whatever its tokeniser's loader does
        raise RecipeError(
            f"verifier.model {folder}: its tokeniser cannot be loaded ({first_line(error)}); "
            f"download the verifier again, or set verifier.trust_remote_code when the tokeniser is code of its own"
        ) from None
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


def tokenise(
    row: dict[str, Any], tokenizer: Any, limits: Limits, entry: PromptSource = DEFAULTS
) -> list[dict[str, Any]]:
    """`PROMPTS_SCHEMA` without source and row: one, or several where a conversation or a long sequence takes more.

    Raises Reject.
    """
    if "input_ids" in row and "token_ids" not in row:
        row = {**row, "token_ids": row["input_ids"]}
    forms = [form for form in FORMS if form in row]
    if entry.use is not None:
        forms = [form for form in forms if form == entry.use]
    if len(forms) > 1:
        raise Reject("bad_row", f"found {' and '.join(forms)}, expected one; say which with `use: {forms[0]}`")
    if not forms:
        expected = entry.use or ", ".join(FORMS)
        raise Reject("bad_row", f"expected one of {expected}; found {', '.join(sorted(row)) or 'nothing'}")
    if forms[0] == "token_ids":
        return _pretokenised(row, limits, entry)
    if forms[0] == "text":
        return _plain_text(row["text"], tokenizer, limits, entry)
    conversation = conversation_of({key: row[key] for key in row if key not in FORMS or key == forms[0]})
    template = _template(tokenizer, limits.end_ids, entry.thinking, tuple(sorted(entry.template_args.items())))
    if not conversation.given:
        text = template.prompt(conversation)
        ids = _ids(tokenizer, text)
        if not ids:
            raise Reject("empty", "the prompt is empty")
        group = _group(_ids(tokenizer, template.group_text(conversation)))
        if len(ids) >= (longest := _longest(limits, entry)):
            raise Reject("too_long", f"the prompt has {len(ids):,} tokens, which leaves no room below {longest:,}")
        return [_checked("generate", group, ids, [False] * len(ids), limits)]
    group = _group(_ids(tokenizer, template.group_text(conversation)))
    made = []
    for rendered in template.sequences(conversation, last_turn=entry.train_on == "last_turn"):
        made += _fitted(group, *encode(tokenizer, rendered), limits, entry)
    return made


@lru_cache(maxsize=8)
def _template(
    tokenizer: Any, ends: frozenset[int], thinking: bool | None, more: tuple[tuple[str, Any], ...]
) -> ChatTemplate:
    arguments = {} if thinking is None else {"thinking": thinking, "enable_thinking": thinking}
    ends_as_text = [str(tokenizer.decode([token])) for token in sorted(ends)]
    return ChatTemplate(tokenizer, ends_as_text, {**arguments, **dict(more)})


def encode(tokenizer: Any, rendered: Rendered) -> tuple[list[int], list[bool]]:
    """(token ids, mask) of a text: the mask is True exactly on the tokens of its spans. Raises Reject.

    A verifier's own words begin with a token of their own, whatever stood before; so spans are tokenised apart. A tokeniser
    that writes a space before every text (sentencepiece's dummy prefix) cannot: it reads the whole, and cuts by offsets.
    """
    cuts = [0, *(cut for span in rendered.spans for cut in span), len(rendered.text)]
    if not _cuts_freely(tokenizer):
        return _by_offsets(tokenizer, rendered.text, cuts)
    ids: list[int] = []
    mask: list[bool] = []
    for at, (low, high) in enumerate(zip(cuts, cuts[1:], strict=False)):
        if low < high:
            piece = _ids(tokenizer, rendered.text[low:high])
            ids += piece
            mask += [at % 2 == 1] * len(piece)
    return ids, mask


@lru_cache(maxsize=8)
def _cuts_freely(tokenizer: Any) -> bool:
    """Whether two texts tokenised apart and put together decode to the two texts put together."""
    halves = ("bench", "mark")
    ids = [token for half in halves for token in _ids(tokenizer, half)]
    return str(tokenizer.decode(ids)).strip() == "".join(halves)


def _by_offsets(tokenizer: Any, text: str, cuts: list[int]) -> tuple[list[int], list[bool]]:
    if not getattr(tokenizer, "is_fast", False):
        raise Reject(
            "no_exact_mask", "this tokeniser neither cuts texts nor gives offsets, so no exact loss mask exists"
        )
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.array(found["offset_mapping"], np.int64).reshape(-1, 2)
    mask = np.zeros(len(offsets), bool)
    for start, stop in zip(cuts[1::2], cuts[2::2], strict=False):
        inside = (offsets[:, 0] < stop) & (offsets[:, 1] > start)
        if ((offsets[inside, 0] < start) | (offsets[inside, 1] > stop)).any():
            raise Reject("no_exact_mask", "one token holds both question and answer, so no exact loss mask exists")
        mask |= inside
    return list(found["input_ids"]), mask.tolist()


def _plain_text(text: Any, tokenizer: Any, limits: Limits, entry: PromptSource) -> list[dict[str, Any]]:
    """All of it counts for the loss, but for what the tokeniser puts in front (a begin-of-text token)."""
    if not isinstance(text, str) or not text.strip():
        raise Reject("empty" if isinstance(text, str) else "bad_row", "text must be a string that says something")
    ids = list(tokenizer(text)["input_ids"])
    front = len(ids) > 1 and ids[0] == tokenizer.bos_token_id and not text.startswith(str(tokenizer.bos_token))
    return _fitted(_group(ids), ids, [not front] + [True] * (len(ids) - 1), limits, entry)


def _pretokenised(row: dict[str, Any], limits: Limits, entry: PromptSource) -> list[dict[str, Any]]:
    ids = row["token_ids"]
    mask = row.get("loss_mask")
    if not isinstance(ids, list) or not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise Reject("bad_row", "token_ids must be a list of integers")
    if not ids:
        raise Reject("empty", "token_ids is empty")
    for at, token in enumerate(ids):
        if not 0 <= token < limits.vocab_size:
            raise Reject(
                "bad_ids", f"token_ids[{at}] is {token}, outside the verifier's vocabulary of {limits.vocab_size:,}"
            )
    if mask is None:
        mask = [True] * len(ids)
    if not isinstance(mask, list) or len(mask) != len(ids) or any(value not in (0, 1) for value in mask):
        raise Reject("bad_row", f"loss_mask must be a list of {len(ids)} booleans, one for each of token_ids")
    mask = [bool(value) for value in mask]
    first = mask.index(True) if any(mask) else 0
    return _fitted(_group(ids[:first] or ids), ids, mask, limits, entry)


def _fitted(group: str, ids: list[int], mask: list[bool], limits: Limits, entry: PromptSource) -> list[dict[str, Any]]:
    """The sequence as one of the right length, or several. Raises Reject."""
    longest = _longest(limits, entry)
    if len(ids) < entry.min_length:
        raise Reject("too_short", f"{len(ids):,} tokens are fewer than min_length {entry.min_length:,}")
    if not any(mask):
        raise Reject("nothing_to_learn", "no token of it counts for the loss")
    if len(ids) <= longest:
        return [_checked("given", group, ids, mask, limits)]
    if entry.truncation == "drop":
        raise Reject("too_long", f"{len(ids):,} tokens are more than {longest:,}")
    starts = range(0, len(ids), longest) if entry.truncation == "split" else (0,)
    pieces = [(ids[low : low + longest], mask[low : low + longest]) for low in starts]
    kept = [(one, marked) for one, marked in pieces if any(marked) and len(one) >= entry.min_length]
    if not kept:
        raise Reject("nothing_to_learn", f"of the first {longest:,} of {len(ids):,} tokens none counts for the loss")
    return [_checked("given", group, one, marked, limits) for one, marked in kept]


def _longest(limits: Limits, entry: PromptSource) -> int:
    return min(limits.max_length, entry.max_length or limits.max_length)


def _checked(kind: str, group: str, ids: Sequence[int], mask: Sequence[bool], limits: Limits) -> dict[str, Any]:
    if (largest := max(ids)) >= limits.vocab_size:
        raise Reject(
            "bad_ids", f"it holds token id {largest}, outside the verifier's vocabulary of {limits.vocab_size:,}"
        )
    token_ids, loss_mask = np.array(ids, np.int32), np.array(mask, bool)
    return {
        "id": sequence_id(token_ids, loss_mask),
        "group": group,
        "kind": kind,
        "token_ids": token_ids,
        "loss_mask": loss_mask,
    }


def _group(ids: Sequence[int]) -> str:
    return sequence_id(np.array(ids, np.int32), np.zeros(len(ids), bool))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def prepare_line(
    file: PromptFile, number: int, line: bytes, tokenizer: Any, limits: Limits
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """(`PROMPTS_SCHEMA` of one row, none) or (none, `REJECTS_SCHEMA`). Never raises for what the row holds."""
    try:
        made = tokenise(parse(line), tokenizer, limits, file.entry)
    except Reject as reject:
        code, reason = reject.code, str(reject)
    except Exception as error:  # a row that we did not foresee must not end the run of all others
        code, reason = "unexpected", f"{type(error).__name__}: {first_line(error)}"
    else:
        return [{**one, "source": file.source, "row": f"{file.path}:{number}"} for one in made], None
    text = line[:200].decode("utf-8", "replace").strip()
    return [], {
        "source": file.source, "file": file.path, "row": number, "code": code, "reason": reason, "text": text
    }  # fmt: skip


def prepare_file(file: PromptFile, tokenizer: Any, limits: Limits) -> Iterator[dict[str, Any]]:
    """Every row of a file: `PROMPTS_SCHEMA`, or `REJECTS_SCHEMA` under the key "reject". Raises RecipeError."""
    for number, line in read_lines(file.path, file.entry.limit, file.entry.skip):
        made, reject = prepare_line(file, number, line, tokenizer, limits)
        yield from made
        if reject is not None:
            yield {"reject": reject}
