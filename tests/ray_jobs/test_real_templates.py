"""The same proof on the real templates of a dozen verifiers, with SmolLM2's tokeniser and each template's marks added.

STATEHOUSE_CHAT_TEMPLATES names a folder of them (kimi-k2.jinja, llama-3-instruct.jinja, ...); they are not ours to ship.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from templates import bot, call, masked_in, prepared, said, user, with_template

from ray_jobs.conversations import Reject

FOLDER = os.environ.get("STATEHOUSE_CHAT_TEMPLATES")
pytestmark = pytest.mark.skipif(
    not FOLDER or not Path(FOLDER).is_dir(),
    reason="STATEHOUSE_CHAT_TEMPLATES names no folder of real chat templates (*.jinja); ours are tested in any case",
)


def as_it_is(text: str) -> str:
    return text


@dataclass(frozen=True)
class Real:
    """end: the end token. before: what the verifier says before its words. shown: how a template changes them."""

    marks: str
    end: str
    before: str = ""
    shown: Callable[[str], str] = as_it_is
    # Reasoning of an answer, given as reasoning_content, where the template or its prompt has room for it.
    reasoned: str | None = None
    thinking: bool | None = None
    # A call of w(at=Rome).
    called: str | None = None
    shows_tools: bool = True
    split: bool = False  # a text that shows one turn as it was said changes another


KIMI = "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|>"
CHATML = "<|im_start|> <|im_end|>"
REAL = {
    "chatml": Real(CHATML, "<|im_end|>", shown=str.strip),
    "llama-3-instruct": Real("<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>", "<|eot_id|>", shown=str.strip),
    "gemma-it": Real("<start_of_turn> <end_of_turn>", "<end_of_turn>", shown=str.strip),
    "phi-3": Real("<|system|> <|user|> <|assistant|> <|end|>", "<|end|>", shown=str.strip),
    "mistral-instruct": Real("<s> </s> [INST] [/INST]", "</s>", before=" ", shown=str.strip),
    "qwen2.5-instruct": Real(
        CHATML + " <tool_call> </tool_call>", "<|im_end|>",
        called='\n<tool_call>\n{"name": "w", "arguments": {"at": "Rome"}}\n</tool_call>',
    ),
    "qwen3-with-generation-tags": Real(
        CHATML + " <think> </think>", "<|im_end|>", before="<think>\n\n</think>\n\n", split=True
    ),
    "kimi-k2": Real(KIMI, "<|im_end|>"),
    "kimi-k2-thinking": Real(
        KIMI + " <think> </think> <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|>"
        " <|tool_call_argument_begin|> <|tool_call_end|>", "<|im_end|>", reasoned="<think>{}</think>",
        called='<|tool_calls_section_begin|><|tool_call_begin|>functions.w:0<|tool_call_argument_begin|>{"at": "Rome"}'
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseek-v3.1": Real(
        "<｜User｜> <｜Assistant｜> <think> </think> <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜>"
        " <｜tool▁call▁end｜> <｜tool▁calls▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>", reasoned="{}</think>", thinking=True, shows_tools=False,
        called="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>w<｜tool▁sep｜>"
        '{"at": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
}  # fmt: skip
# As the collection that these three come from says: indentation and line breaks are for people, and are taken out before use.
FOR_PEOPLE = {"chatml", "llama-3-instruct", "gemma-it", "phi-3", "mistral-instruct"}
WORDS = st.text(st.characters(max_codepoint=0x2FF, exclude_categories=("Cs", "Cc")), min_size=1, max_size=30).filter(
    lambda text: text.strip() and not set("<>|[]") & set(text)
)
TALKS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3)


@pytest.fixture(params=sorted(REAL), scope="module")
def real(request: pytest.FixtureRequest, smollm2: Path) -> tuple[Real, Any]:
    template = (Path(str(FOLDER)) / f"{request.param}.jinja").read_text()
    if request.param in FOR_PEOPLE:
        template = template.replace("    ", "").replace("\n", "")
    real = REAL[request.param]
    return real, with_template(smollm2, template, real.marks.split(), real.end)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(talk=TALKS, system=st.booleans())
def test_masked_in_is_what_the_assistant_says_and_its_end_token(
    real: tuple[Real, Any], talk: list[tuple[str, str]], system: bool
) -> None:
    kind, tokenizer = real
    messages = [message for ask, answer in talk for message in (user(ask), bot(answer))]
    if system:
        messages = [{"role": "system", "content": "Be kind."}, *messages]
    expected = [kind.before + kind.shown(answer) + kind.end for _, answer in talk]
    sequences = prepared(tokenizer, {"messages": messages})
    found = [text for sequence in sequences for text in masked_in(tokenizer, sequence)]
    assert found == expected
    assert len(sequences) == (len(talk) if kind.split else 1)
    # The rest is the template's, to the letter.
    assert tokenizer.decode(sequences[-1]["token_ids"]) == tokenizer.apply_chat_template(messages, tokenize=False)
    # And what is before each answer is what the verifier is asked with.
    if kind.thinking is None:
        start = int(sequences[0]["loss_mask"].argmax())
        (asked,) = prepared(tokenizer, {"messages": messages[: 1 + system]})
        shared = min(start, len(asked["token_ids"]))
        assert sequences[0]["token_ids"][:shared].tolist() == asked["token_ids"][:shared].tolist()
        assert sequences[0]["group"] == asked["group"]


def test_reasoning_is_masked_in_where_the_verifier_says_it(real: tuple[Real, Any]) -> None:
    kind, tokenizer = real
    messages = [
        user("Hi?"),
        bot("It is 42.", reasoning_content="42"),
        user("More?"),
        bot("Yes.", reasoning_content="hm"),
    ]
    if kind.reasoned is None:
        with pytest.raises(Reject) as caught:
            prepared(tokenizer, {"messages": messages})
        assert caught.value.code == "reasoning_not_shown"
        return
    first, last = kind.reasoned.format("42"), kind.reasoned.format("hm")
    sequences = prepared(tokenizer, {"messages": messages}, thinking=kind.thinking)
    found = [masked_in(tokenizer, sequence) for sequence in sequences]
    assert found == [[first + "It is 42." + kind.end], [last + "Yes." + kind.end]]
    # The history of the second answer is the one that a server shows: without the first one's reasoning.
    ask = {"add_generation_prompt": True, "tokenize": False, "thinking": kind.thinking or False}
    prompt = tokenizer.apply_chat_template(messages[:3], **ask)
    assert tokenizer.decode(sequences[1]["token_ids"]) == prompt + last + "Yes." + kind.end


def test_tool_calls_are_masked_in_and_tool_answers_are_not(real: tuple[Real, Any]) -> None:
    kind, tokenizer = real
    asked = bot("Let me see.", tool_calls=[call("w", {"at": "Rome"}, id="functions.w:0")])
    row: dict[str, Any] = {"messages": [user("Rain?"), asked, {"role": "tool", "content": "sunny"}, bot("No rain.")]}
    if kind.shows_tools:
        row["tools"] = [{"type": "function", "function": {"name": "w", "parameters": {}}}]
    if kind.called is None:
        with pytest.raises(Reject):
            prepared(tokenizer, row)
        return
    assert said(tokenizer, row) == [["Let me see." + kind.called + kind.end, "No rain." + kind.end]]


def test_templates_as_they_lie_there_with_the_white_space_for_people(smollm2: Path) -> None:
    for name in sorted(FOR_PEOPLE):
        kind = REAL[name]
        tokenizer = with_template(
            smollm2, (Path(str(FOLDER)) / f"{name}.jinja").read_text(), kind.marks.split(), kind.end
        )
        ((first, second),) = said(tokenizer, {"messages": [user("Hi?"), bot("Hello. "), user("More?"), bot("\nYes.")]})
        assert [first.lstrip(), second.lstrip()] == ["Hello." + kind.end, "Yes." + kind.end]
