"""What is masked in decodes to exactly what the assistant said and its end token, whatever the template does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import templates
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import END, MARKS, bot, call, masked_in, prepared, said, user, with_template

from ray_jobs.conversations import Reject

Make = Callable[[str], Any]
WORDS = st.text(st.characters(max_codepoint=0x2FF, exclude_categories=("Cs", "Cc")), min_size=1, max_size=30).filter(
    lambda text: text.strip() and not set("<>|") & set(text)
)
TALK = [
    {"role": "system", "content": "Be kind."},
    user("Hi?"),
    bot("Hello there."),
    user("More?"),
    bot("\nYes, more. "),
]
REASONED = [user("Hi?"), bot("Hello 42.", reasoning_content="42"), user("More?"), bot("Yes.", reasoning_content="hm")]


@pytest.fixture(scope="module")
def make(smollm2: Path) -> Make:
    return cache(lambda template: with_template(smollm2, template, MARKS, END))


@pytest.mark.parametrize("name", ["PLAIN", "SYSTEM_DEFAULT", "ODD_PROMPT", "TAGS"])
def test_every_turn_is_masked_in_and_nothing_else(make: Make, name: str) -> None:
    tokenizer = make(getattr(templates, name))
    (sequence,) = prepared(tokenizer, {"messages": TALK})
    assert masked_in(tokenizer, sequence) == ["Hello there.<|end|>", "\nYes, more. <|end|>"]
    shown = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert tokenizer.decode(sequence["token_ids"]) == shown
    assert said(tokenizer, {"messages": TALK}, train_on="last_turn") == [["\nYes, more. <|end|>"]]


def test_a_template_that_trims_shows_what_the_verifier_would_say(make: Make) -> None:
    assert said(make(templates.TRIMMED), {"messages": TALK}) == [["Hello there.<|end|>", "Yes, more.<|end|>"]]


def test_white_space_that_the_prompt_lacks_is_the_verifiers_to_say(make: Make) -> None:
    assert said(make(templates.NO_PROMPT), {"messages": TALK}) == [[" Hello there.<|end|>", " \nYes, more. <|end|>"]]


@settings(deadline=None, max_examples=25)
@given(
    turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3),
    name=st.sampled_from(["PLAIN", "TAGS", "ODD_PROMPT"]),
)
def test_it_holds_for_any_words(make: Make, turns: list[tuple[str, str]], name: str) -> None:
    tokenizer = make(getattr(templates, name))
    messages = [message for ask, answer in turns for message in (user(ask), bot(answer))]
    assert said(tokenizer, {"messages": messages}) == [[answer + END for _, answer in turns]]


def test_the_template_is_given_what_the_recipe_says(make: Make) -> None:
    tokenizer = make("<|sys|>{{ date_string | default('today') }}<|end|>" + templates.PLAIN)
    made = prepared(tokenizer, {"prompt": "Hi?"}, template_args={"date_string": "26 Jul 2024"})
    assert tokenizer.decode(made[0]["token_ids"]) == "<|sys|>26 Jul 2024<|end|><|user|>Hi?<|end|>\n<|bot|>"


def test_generation_tags_agree_with_transformers(make: Make) -> None:
    tokenizer = make(templates.TAGS)
    talk = [*TALK[:-1], bot("Yes, more.")]
    theirs = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    (ours,) = prepared(tokenizer, {"messages": talk})
    assert ours["token_ids"].tolist() == theirs["input_ids"]
    more = ours["loss_mask"].astype(int) - theirs["assistant_masks"]
    assert [tokenizer.decode([token]) for token in ours["token_ids"][more != 0]] == [END, END]  # the tags leave it out


def test_a_turn_whose_reasoning_history_drops_gets_a_sequence_of_its_own(make: Make) -> None:
    tokenizer = make(templates.LAST_REASONING)
    first, last = prepared(tokenizer, {"messages": REASONED})
    assert masked_in(tokenizer, first) == ["<think>\n42\n</think>\n\nHello 42.<|end|>"]
    assert masked_in(tokenizer, last) == ["<think>\nhm\n</think>\n\nYes.<|end|>"]
    assert tokenizer.decode(last["token_ids"]) == (
        "<|user|>Hi?<|end|>\n<|bot|>Hello 42.<|end|>\n<|user|>More?<|end|>\n<|bot|><think>\nhm\n</think>\n\nYes.<|end|>\n"
    )
    assert first["group"] == last["group"]
    assert said(tokenizer, {"messages": REASONED}, train_on="last_turn") == [["<think>\nhm\n</think>\n\nYes.<|end|>"]]


def test_an_empty_think_block_of_the_template_is_nobodys_words(make: Make) -> None:
    tokenizer = make(templates.LAST_REASONING)
    (sequence,) = prepared(tokenizer, {"messages": [user("Hi?"), bot("Hello.")]})
    assert masked_in(tokenizer, sequence) == ["Hello.<|end|>"]
    assert "<think>\n\n</think>\n\nHello." in tokenizer.decode(sequence["token_ids"])


def test_with_thinking_off_the_prompt_holds_the_empty_block_and_reasoning_is_refused(make: Make) -> None:
    tokenizer = make(templates.LAST_REASONING)
    talk = [user("Hi?"), bot("Hello.")]
    (asked,), (given,) = (prepared(tokenizer, {"messages": one}, thinking=False) for one in (talk[:1], talk))
    assert tokenizer.decode(asked["token_ids"]).endswith("<|bot|><think>\n\n</think>\n\n")
    assert given["token_ids"][: len(asked["token_ids"])].tolist() == asked["token_ids"].tolist()
    assert masked_in(tokenizer, given) == ["Hello.<|end|>"]
    with pytest.raises(Reject, match="set `thinking: true`"):
        prepared(tokenizer, {"messages": REASONED}, thinking=False)


@pytest.mark.parametrize("inline", [False, True])
def test_reasoning_that_the_template_never_shows_is_put_back_behind_the_prompt(make: Make, inline: bool) -> None:
    tokenizer = make(templates.NO_REASONING)
    messages = REASONED
    if inline:
        messages = [user("Hi?"), bot("<think>42</think>Hello 42."), user("More?"), bot("<think>hm</think>Yes.")]
    first, last = prepared(tokenizer, {"messages": messages})
    assert masked_in(tokenizer, first) == ["<think>42</think>Hello 42.<|end|>"]
    assert masked_in(tokenizer, last) == ["<think>hm</think>Yes.<|end|>"]
    if not inline:
        assert "<|bot|><think></think>Hello 42.<|end|>" in tokenizer.decode(last["token_ids"])
    opened = prepared(tokenizer, {"messages": messages}, thinking=True)[0]
    assert masked_in(tokenizer, opened) == ["42</think>Hello 42.<|end|>"]  # the prompt has said <think>
    assert "<think><think>" not in tokenizer.decode(opened["token_ids"])
    with pytest.raises(Reject, match="set `thinking: true`"):
        prepared(tokenizer, {"messages": messages}, thinking=False)


def test_tool_calls_are_the_assistants_words_and_tool_answers_are_not(make: Make) -> None:
    tokenizer = make(templates.TOOLS)
    talk = [user("Rain?"), bot("", tool_calls=[call("w", '{"at": "Rome"}'), call("v", {})]),
            {"role": "tool", "content": "sunny"}, bot("No rain.")]  # fmt: skip
    row = {"messages": talk, "tools": [{"type": "function", "function": {"name": "w", "parameters": {}}}]}
    (sequence,) = prepared(tokenizer, row)
    assert masked_in(tokenizer, sequence) == ['<|call|>w{"at": "Rome"}<|call|>v{}<|end|>', "No rain.<|end|>"]
    assert tokenizer.decode(sequence["token_ids"]).startswith('<|sys|>[{"type": "function"')
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "Rain?"},
            {
                "from": "function_call",
                "value": '[{"name": "w", "arguments": {"at": "Rome"}}, {"name": "v", "arguments": {}}]',
            },
            {"from": "observation", "value": "sunny"},
            {"from": "gpt", "value": "No rain."},
        ],
        "tools": '[{"name": "w", "parameters": {}}]',
    }
    assert prepared(tokenizer, sharegpt)[0]["id"] == sequence["id"]
    (asked,) = prepared(tokenizer, {"messages": talk[:3]})
    assert asked["kind"] == "generate"
    assert tokenizer.decode(asked["token_ids"]).endswith("<|tool|>sunny<|end|>\n<|bot|>")


def test_an_empty_think_block_before_a_tool_call_is_nobodys_words(make: Make) -> None:
    tokenizer = make(templates.REASONING_TOOLS)
    for text in ("", "Let me see."):
        row = {"messages": [user("Rain?"), bot(text, tool_calls=[call("w", {})])]}
        assert said(tokenizer, row) == [[f"{text}<|call|>w<|end|>"]]
        assert said(tokenizer, row, thinking=False) == [[f"{text}<|call|>w<|end|>"]]


def test_tools_that_are_shown_with_the_first_question_need_no_turn_of_their_own(make: Make) -> None:
    talk = [{"role": "system", "content": "Be brief."}, user("Rain?"), bot("No.")]
    row = {"messages": talk, "tools": [{"type": "function", "function": {"name": "w", "parameters": {}}}]}
    assert said(make(templates.TOOLS_WITH_QUESTION), row) == [["No.<|end|>"]]


@pytest.mark.parametrize(
    ("template", "row", "code"),
    [
        ("PLAIN", {"messages": [user("q"), bot("", tool_calls=[call("w", {})])]}, "not_shown"),
        ("PLAIN", {"messages": [user("q")], "tools": [{"name": "w"}]}, "not_shown"),
        ("TAGS", {"messages": [user("q"), bot("a", reasoning_content="r")]}, "reasoning_not_shown"),
        ("PLAIN", {"messages": [user("q"), bot("a<|end|>b")]}, "end_inside"),
        ("TAGS", {"messages": [user("q"), bot("a<|end|>b")]}, "end_inside"),
        ("TOOLS", {"messages": [user("q"), bot("", tool_calls=[call("w", "{")])]}, "bad_tools"),
        ("TOOLS", {"messages": [user("q"), bot("", tool_calls=[call("w", {"at": "a<|end|>b"})])]}, "end_inside"),
        ("PLAIN", {"messages": [user("q"), bot("", tool_calls=[call("w", {})]), user("r")]}, "not_shown"),
        ("NO_TOOL_TURNS", {"messages": [user("q"), bot("w()"), {"role": "tool", "content": "s"}]}, "not_shown"),
        (
            "NO_TOOL_TURNS",
            {"messages": [user("q"), bot("w()"), {"role": "tool", "content": "s"}, bot("a")]},
            "not_shown",
        ),
        ("{{ messages[0]['content'] }}x", {"messages": [user("q"), bot("a")]}, "no_exact_mask"),
        ("{{ raise_exception('no') }}", {"messages": [user("q"), bot("a")]}, "template_refused"),
        ("{{ messages[-1]['content'] }}", {"messages": [user("q"), bot("a"), user("r")]}, "not_shown"),
    ],
)
def test_what_has_no_exact_mask_is_refused(make: Make, template: str, row: dict[str, Any], code: str) -> None:
    with pytest.raises(Reject) as caught:
        prepared(make(getattr(templates, template, template)), row)
    assert caught.value.code == code, str(caught.value)


def test_a_tokeniser_that_begins_every_text_with_a_space_is_cut_by_offsets(smollm2: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Sequence

    tokenizer = with_template(smollm2, "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>\n{% endfor %}"
                              "{% if add_generation_prompt %}assistant:{% endif %}", MARKS, END)  # fmt: skip
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([ByteLevel(add_prefix_space=True)])
    (sequence,) = prepared(tokenizer, {"messages": [user("Hi?"), bot("Hello.")]})
    assert masked_in(tokenizer, sequence) == [" Hello.<|end|>"]
