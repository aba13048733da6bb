"""A conversation -> the text that the verifier really sees, and in it, to the character, what the assistant says.

The chat template alone decides. It is rendered up to each assistant turn, as a server does it (`prompt`), and with the turn
(`text`). What the turn adds is the assistant's; where the template does not simply append, the turn's content is replaced by
a sentinel that occurs nowhere, and what stands in both renderings is the template's. With `{% generation %}` tags the
template says it itself. No text is ever searched for what looks like an answer.

Some templates rewrite history: they drop the reasoning of earlier turns. No single text then shows every turn as the
verifier saw it, and a turn that a later rendering changes gets a sequence of its own.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ray_jobs.conversations import Conversation, Message, Reject

THINK, END_THINK = "<think>", "</think>"
_SENTINEL = "Zq7statehouse7qZ"
_PROBE_ARGUMENTS = '{"zq7key": 1}'
# A think block, or the end of one that the prompt has begun, that a template writes where nothing was thought.
_EMPTY_THINK = re.compile(rf"\s*(?:{THINK})?\s*{END_THINK}\s*")


@dataclass(frozen=True)
class Rendered:
    """One sequence. spans: [start, stop) of each stretch of text that is the assistant's, end tokens included, ascending."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Turn:
    """prompt: what the verifier is given. text: prompt and answer as the template shows them, or would."""

    prompt: str
    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """The chat template of a tokeniser. end_tokens: texts of the tokens that end a turn. arguments: what the template is
    given besides messages and tools.
    """

    def __init__(
        self, tokenizer: Any, end_tokens: Sequence[str] = (), arguments: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.tokenizer = tokenizer
        self.end_tokens = tuple(end_tokens)
        self.arguments = dict(arguments)
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.special_tokens = tuple(sorted(special | set(tokenizer.all_special_tokens)))
        self._arguments_as_text: bool | None = None
        self._tagged: dict[str, bool] = {}
        self._mutating: dict[str, Any] = {}

    # ---- rendering ---------------------------------------------------------------------------------------------------

    def prompt(self, conversation: Conversation) -> str:
        """The text up to where the verifier is to speak. Raises Reject."""
        messages = self._messages(conversation)
        text = self._render(messages, conversation.tools, generation=True)
        self._check_shown(messages, conversation.tools, text)
        self._check_calls_shown(messages, conversation.tools)
        return text

    def group_text(self, conversation: Conversation) -> str:
        """What all conversations that begin with the same question share: the prompt of their first answer."""
        first = next((at for at, one in enumerate(conversation.messages) if one["role"] == "assistant"), None)
        return self._render(self._messages(conversation)[:first], conversation.tools, generation=True)

    def sequences(self, conversation: Conversation, last_turn: bool = False) -> list[Rendered]:
        """As few sequences as show every trained turn just as the verifier saw it: one, unless the template rewrites
        history. Raises Reject.
        """
        messages = self._messages(conversation)
        self._check_calls_shown(messages, conversation.tools)
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        left = [self._turn(messages, at, conversation.tools) for at in (turns[-1:] if last_turn else turns)]
        self._check_shown(messages, conversation.tools, left[-1].text)
        found: list[Rendered] = []
        while left:
            last = left.pop()
            inside = [turn for turn in left if last.text.startswith(turn.text)]
            left = [turn for turn in left if not last.text.startswith(turn.text)]
            found.append(Rendered(last.text, tuple(span for turn in [*inside, last] for span in turn.spans)))
        return found[::-1]

    def _render(self, messages: list[Message], tools: Any, *, generation: bool) -> str:
        from jinja2.exceptions import SecurityError

        settings = {"add_generation_prompt": generation, **self.arguments}
        try:
            try:
                text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **settings)
            except SecurityError:
                text = self._render_mutating(messages, tools, settings)
        except Exception as error:  # jinja templates raise as they like
            raise _refused(error) from None
        return str(text)

    def _render_mutating(self, messages: list[Message], tools: Any, settings: dict[str, Any]) -> str:
        """Kimi-K2-Thinking's template appends to a list of its own, which transformers' sandbox forbids. This one allows it,
        on copies; it is still a sandbox.
        """
        from jinja2.sandbox import SandboxedEnvironment
        from transformers.utils.chat_template_utils import _compile_jinja_template

        source = self.tokenizer.get_chat_template(None, tools)
        if source not in self._mutating:
            strict = _compile_jinja_template(source).environment
            ours = SandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=[type(one) for one in strict.extensions.values()]
            )
            ours.filters.update(strict.filters)
            ours.globals.update(strict.globals)
            self._mutating[source] = ours.from_string(source)
        given = {"messages": copy.deepcopy(messages), "tools": copy.deepcopy(tools), "documents": None}
        return str(self._mutating[source].render(**given, **{**self.tokenizer.special_tokens_map, **settings}))

    def _messages(self, conversation: Conversation) -> list[Message]:
        """With the arguments of tool calls in the form that this template takes."""
        if not any("tool_calls" in message for message in conversation.messages):
            return conversation.messages
        if self._arguments_as_text is None:
            self._arguments_as_text = self._takes_text()
        form = _as_text if self._arguments_as_text else _as_object
        made = []
        for message in conversation.messages:
            calls = [
                {**call, "function": {**call["function"], "arguments": form(call["function"]["arguments"])}}
                for call in message.get("tool_calls", [])
            ]
            made.append({**message, "tool_calls": calls} if calls else message)
        return made

    def _takes_text(self) -> bool:
        """Whether arguments given as JSON text are shown as they are, neither refused nor quoted once more."""
        call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": _PROBE_ARGUMENTS}}
        probe: list[Message] = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            return _PROBE_ARGUMENTS in self._render(probe, None, generation=False)
        except Reject:
            return False

    def _check_shown(self, messages: list[Message], tools: Any, text: str) -> None:
        """Raises Reject when the template silently leaves out a question, an instruction, or the tools."""
        for at, message in enumerate(messages):
            if message["role"] in ("system", "user") and message["content"].strip() not in text:
                raise Reject("not_shown", f"the chat template leaves messages[{at}] ({message['role']}) out")
        if tools:
            alike = [{"type": "function", "function": {"name": _SENTINEL}}]
            # With the first question: Llama 3.1 shows the tools there, and refuses them without one.
            asked = next((at for at, message in enumerate(messages) if message["role"] == "user"), 0)
            if _SENTINEL not in self._render(messages[: asked + 1], alike, generation=False):
                raise Reject("not_shown", "the chat template leaves the tools out")

    def _check_calls_shown(self, messages: list[Message], tools: Any) -> None:
        """Raises Reject when the template silently leaves out tool calls, or what the tools answered."""
        for at, message in enumerate(messages):
            if "tool_calls" in message and not self._shows(messages, at, tools, _with_other_calls(message)):
                raise Reject("not_shown", f"the chat template leaves the tool calls of messages[{at}] out")
            if message["role"] == "tool" and not self._shows(messages, at, tools, {**message, "content": _SENTINEL}):
                raise Reject("not_shown", f"the chat template leaves messages[{at}] (tool) out")

    # ---- one turn ----------------------------------------------------------------------------------------------------

    def _turn(self, messages: list[Message], at: int, tools: Any) -> _Turn:
        prompt = self._render(messages[:at], tools, generation=True)
        message, reasoned = messages[at], _with_other_reasoning(messages[at])
        if reasoned is not None and prompt.rstrip().endswith(END_THINK):
            raise Reject(
                "reasoning_refused",
                f"messages[{at}] reasons, but this prompt tells the verifier not to; set `thinking: true` for this source",
            )
        shown = reasoned is None or self._shows(messages, at, tools, reasoned)
        calls = json.dumps([call["function"] for call in message.get("tool_calls", [])], ensure_ascii=False)
        if held := [token for token in self.end_tokens if token in calls]:
            raise Reject("end_inside", f"a tool call holds {held[0]}, at which the verifier would have stopped")
        if self._has_tags(tools):
            if not shown:
                raise Reject("reasoning_not_shown", f"the chat template leaves the reasoning of messages[{at}] out")
            return self._tagged_turn(messages[: at + 1], tools, prompt)
        text = self._render(messages[: at + 1], tools, generation=False)
        if (
            reasoned is not None and "reasoning_content" not in message
        ):  # it is in the content, in the verifier's own form
            as_said = text.startswith(prompt) and text.startswith(message["content"].strip(), len(prompt))
            shown = shown and as_said
        if not shown:
            return self._restored_turn(messages, at, tools, prompt)
        start, stop = self._content(messages, at, tools, prompt, text)
        return _Turn(prompt, text, ((start, self._end(text, start, stop)),))

    def _content(self, messages: list[Message], at: int, tools: Any, prompt: str, text: str) -> tuple[int, int]:
        """[start, stop) of the assistant's own words in `text`, without what may follow: tool calls, the end token."""
        message = messages[at]
        content, appended = message["content"], text.startswith(prompt)
        own = "reasoning_content" in message or not content.strip() or END_THINK in content
        if appended:
            for form in (content, content.strip()):
                if form and text.startswith(form, len(prompt)):
                    return len(prompt), len(prompt) + len(form)
        if not content.strip():
            if appended:
                empty = _EMPTY_THINK.match(text, len(prompt))
                start = empty.end() if empty else len(prompt)
                return start, start
            raise Reject("no_exact_mask", "the chat template shows a tool call otherwise than it asks for one")
        before, after = self._around(messages, at, tools, "content")
        start, stop = len(before), len(text) - len(after)
        if appended and own:  # the reasoning is the assistant's too, with its marks
            start, before = len(prompt), prompt
        elif "reasoning_content" in message:
            before = self._around(messages, at, tools, "reasoning_content")[0]
            start = len(before)
        elif appended and not before[len(prompt) :].strip():
            start = len(
                prompt
            )  # the white space is the assistant's to say; an empty think block of the template is not
        if not (text.startswith(before) and text.endswith(after) and start <= stop):
            raise Reject("no_exact_mask", "the chat template changes with the answer, so no exact loss mask exists")
        return start, stop

    def _shows(self, messages: list[Message], at: int, tools: Any, changed: Message) -> bool:
        return _SENTINEL in self._render([*messages[:at], changed], tools, generation=False)

    def _around(self, messages: list[Message], at: int, tools: Any, key: str) -> tuple[str, str]:
        """What the template writes before and after messages[at][key]."""
        changed = [*messages[:at], {**messages[at], key: _SENTINEL}]
        parts = self._render(changed, tools, generation=False).split(_SENTINEL)
        if len(parts) != 2:
            raise Reject("no_exact_mask", f"the chat template shows {key} of messages[{at}] {len(parts) - 1} times")
        return parts[0], parts[1]

    def _restored_turn(self, messages: list[Message], at: int, tools: Any, prompt: str) -> _Turn:
        """A turn whose reasoning the template drops at once (Kimi-K2-Thinking, DeepSeek): the verifier did say it, so it is
        put back behind the prompt that it was given, and the end comes from the template.
        """
        said = messages[at]["content"]
        if reasoning := messages[at].get("reasoning_content"):
            said = f"{THINK}{reasoning}{END_THINK}{said}"
        bare = {key: value for key, value in messages[at].items() if key != "reasoning_content"}
        _, after = self._around([*messages[:at], bare], at, tools, "content")
        if any(not self._one_token(mark) for mark in (THINK, END_THINK)):
            raise Reject("reasoning_not_shown", f"the chat template leaves the reasoning of messages[{at}] out")
        said = said.removeprefix(THINK)
        if not prompt.rstrip().endswith(THINK):
            said = THINK + said
        text = prompt + said + after
        return _Turn(prompt, text, ((len(prompt), self._end(text, len(prompt), len(prompt) + len(said))),))

    def _one_token(self, text: str) -> bool:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) == 1

    def _end(self, text: str, start: int, stop: int) -> int:
        """Where the turn ends, its end token included: `stop` is where the assistant's words end at the earliest."""
        if inside := [token for token in self.end_tokens if token in text[start:stop]]:
            raise Reject("end_inside", f"the answer holds {inside[0]}, at which the verifier would have stopped")
        ends = [(found, token) for token in self.end_tokens if (found := text.find(token, stop)) >= 0]
        if ends:
            found, token = min(ends)
            return found + len(token)
        # A verifier that does not name the token its template ends turns with: the last special one is it.
        last = max(
            (text.rfind(token, stop) + len(token) for token in self.special_tokens if token in text[stop:]), default=0
        )
        return last or stop + len(text[stop:].rstrip())

    # ---- templates with {% generation %} tags ------------------------------------------------------------------------

    def _has_tags(self, tools: Any) -> bool:
        template = self.tokenizer.get_chat_template(None, tools)
        if template not in self._tagged:
            import jinja2

            found = [value for _, kind, value in jinja2.Environment().lex(template) if kind in ("block_begin", "name")]
            self._tagged[template] = any(
                name == "generation" and begin.startswith("{%") for begin, name in zip(found, found[1:], strict=False)
            )
        return self._tagged[template]

    def _tagged_turn(self, messages: list[Message], tools: Any, prompt: str) -> _Turn:
        """What stands between the tags of the last turn, and the end token directly behind."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, indices = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(None, tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.arguments},
            )
        except Exception as error:
            raise _refused(error) from None
        text, shared = texts[0], _common(prompt, texts[0])
        # Tags lie in turns of the history too; those of this turn begin behind what was there before it.
        before = self._tag_count(messages[:-1], tools)
        spans = [(start, stop) for start, stop in indices[0][before:] if stop > start]
        if not spans:
            raise Reject("no_exact_mask", "the chat template's generation tags leave the answer out")
        content = messages[-1]["content"].strip()
        if content and content not in text[shared:]:
            raise Reject("not_shown", "the chat template leaves the answer out")
        *first, (start, stop) = spans
        followed = [
            stop + len(token) for token in (*self.end_tokens, *self.special_tokens) if text.startswith(token, stop)
        ]
        for low, high in spans:
            if held := [token for token in self.end_tokens if token in text[low:high].removesuffix(token)]:
                raise Reject("end_inside", f"the answer holds {held[0]}, at which the verifier would have stopped")
        ended = text[start:stop].endswith(self.end_tokens) if self.end_tokens else False
        return _Turn(prompt, text, (*first, (start, followed[0] if followed and not ended else stop)))

    def _tag_count(self, messages: list[Message], tools: Any) -> int:
        """Pairs of tags that the turns before open, whatever they hold."""
        from transformers.utils.chat_template_utils import render_jinja_template

        if not any(message["role"] == "assistant" for message in messages):
            return 0
        _, indices = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=self.tokenizer.get_chat_template(None, tools),
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.arguments},
        )
        return len(indices[0])


def _with_other_calls(message: Message) -> Message:
    # Kimi shows a call's id, which holds the name, where there is one.
    calls = [
        {**call, "id": _SENTINEL, "function": {**call["function"], "name": _SENTINEL}} for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _with_other_reasoning(message: Message) -> Message | None:
    """None when it does not reason."""
    if "reasoning_content" in message:
        return {**message, "reasoning_content": _SENTINEL}
    reasoning, found, answer = message["content"].partition(END_THINK)
    if not found or not reasoning.removeprefix(THINK).strip():
        return None
    return {**message, "content": f"{THINK}{_SENTINEL}{END_THINK}{answer}"}


def _common(a: str, b: str) -> int:
    """Length of their common prefix."""
    if b.startswith(a):
        return len(a)
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _refused(error: Exception) -> Reject:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return Reject("template_refused", f"the chat template refuses it ({reason})")


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise Reject("bad_tools", f"arguments of a tool call: not JSON: {error}") from None
