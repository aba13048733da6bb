"""Small chat templates of our own, one for each trait that a real one has; and SmolLM2's tokeniser with their marks added."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ray_jobs.prompts import Limits, tokenise
from ray_jobs.recipe import PromptSource

MARKS = ["<|sys|>", "<|user|>", "<|bot|>", "<|call|>", "<|tool|>", "<|end|>", "<think>", "</think>"]
END = "<|end|>"

_ASK = "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}<|end|>\n"
_SYSTEM = "{% elif m['role'] == 'system' %}<|sys|>{{ m['content'] }}<|end|>\n"
_TURN_OF_BOT = "{% if add_generation_prompt %}<|bot|>{% endif %}"
PLAIN = _ASK + _SYSTEM + "{% else %}<|bot|>{{ m['content'] }}<|end|>\n{% endif %}{% endfor %}" + _TURN_OF_BOT
TRIMMED = PLAIN.replace("m['content']", "m['content'] | trim")
SYSTEM_DEFAULT = "{% if messages[0]['role'] != 'system' %}<|sys|>Be of help.<|end|>\n{% endif %}" + PLAIN
# The prompt ends one way, the answer begins another.
ODD_PROMPT = PLAIN.replace("<|bot|>{% endif %}", "<|bot|>\n\n{% endif %}")
NO_PROMPT = PLAIN.replace(_TURN_OF_BOT, "").replace("<|bot|>{{", "{{ ' ' }}{{")
TAGS = PLAIN.replace(
    "<|bot|>{{ m['content'] }}<|end|>", "<|bot|>{% generation %}{{ m['content'] }}{% endgeneration %}<|end|>"
)
# Reasoning is shown behind the last question only, and an empty block where there is none: as Qwen3 does.
LAST_REASONING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}" + _ASK + _SYSTEM + "{% else %}<|bot|>{% if loop.index0 > ns.last %}<think>\n"
    "{{ m['reasoning_content'] | default('') }}\n</think>\n\n{% endif %}{{ m['content'] }}<|end|>\n{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}<|bot|>{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
# Reasoning is never shown, an empty block instead; the prompt opens one when asked to: as DeepSeek and Kimi do.
NO_REASONING = (
    _ASK + _SYSTEM + "{% else %}<|bot|><think></think>{{ m['content'] }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% if thinking is defined %}{{ '<think>' if thinking else '<think></think>' }}"
    "{% endif %}{% endif %}"
)
TOOLS = (
    "{% if tools %}<|sys|>{{ tools | tojson }}<|end|>\n{% endif %}"
    + _ASK
    + _SYSTEM
    + "{% elif m['role'] == 'tool' %}<|tool|>{{ m['content'] }}<|end|>\n"
    "{% else %}<|bot|>{{ m['content'] }}{% for c in m['tool_calls'] or [] %}<|call|>{{ c['function']['name'] }}"
    "{{ c['function']['arguments'] | tojson }}{% endfor %}<|end|>\n{% endif %}{% endfor %}" + _TURN_OF_BOT
)
# Tools are shown with the first question, and refused without one: as Llama 3.1 does.
TOOLS_WITH_QUESTION = (
    "{% if tools and messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('no first user message') }}{% endif %}" + TOOLS
)
# Tools are called behind an empty think block, as a Qwen3 of this kind does.
REASONING_TOOLS = LAST_REASONING.replace(
    "{{ m['content'] }}<|end|>\n{% endif %}{% endfor %}{% if add",
    "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}<|call|>{{ c['function']['name'] }}{% endfor %}<|end|>\n"
    "{% endif %}{% endfor %}{% if add",
)
# Knows nothing of tools, and leaves their answers out.
NO_TOOL_TURNS = PLAIN.replace("{% else %}", "{% elif m['role'] == 'assistant' %}")


def with_template(folder: Path, template: str, marks: list[str], end: str) -> Any:
    """The tokeniser of a folder, with another template and special tokens of its own."""
    tokenizer = copy.copy(_with_marks(folder, tuple(marks), end))
    tokenizer.chat_template = template
    return tokenizer


@cache
def _with_marks(folder: Path, marks: tuple[str, ...], end: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(marks), special_tokens=True)
    tokenizer.eos_token = end
    return tokenizer


def prepared(tokenizer: Any, row: dict[str, Any], **entry: Any) -> list[dict[str, Any]]:
    limits = Limits(len(tokenizer), 100_000, frozenset([tokenizer.eos_token_id]))
    return tokenise(row, tokenizer, limits, PromptSource(path="-", **entry))


def masked_in(tokenizer: Any, sequence: dict[str, Any]) -> list[str]:
    """The text of each stretch of tokens that counts for the loss."""
    ids, mask = sequence["token_ids"], sequence["loss_mask"]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [tokenizer.decode(ids[start:stop]) for start, stop in edges.reshape(-1, 2)]


def said(tokenizer: Any, row: dict[str, Any], **entry: Any) -> list[list[str]]:
    """For each sequence of a row: what is masked in."""
    return [masked_in(tokenizer, one) for one in prepared(tokenizer, row, **entry)]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def bot(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}
