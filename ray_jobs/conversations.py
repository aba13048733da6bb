"""Rows of the many kinds people keep conversations in -> one canonical conversation. Pure.

`messages` (OpenAI: role, content, tool_calls, reasoning_content), `conversations` (ShareGPT: from, value), `prompt` with or
without `response`, `turns` (Spec-Bench: the first question). What comes out is what a chat template is given.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

Message = dict[str, Any]

# ShareGPT's names and OpenAI's, as they are found in the wild. A `function_call` turn is an assistant's tool call.
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "tool": "tool", "function": "tool", "function_response": "tool", "observation": "tool",
    "function_call": "function_call",
}  # fmt: skip
CONVERSATION_KEYS = ("messages", "conversations", "prompt", "turns")


class Reject(Exception):
    """Why a row cannot be used. code: one word for counting; text: for the person who wrote the row."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return Reject, (self.code, str(self))


@dataclass(frozen=True)
class Conversation:
    """messages: role (system, user, assistant, tool) and content (a string, "" in turns that only call tools or only
    reason) of each; assistants may have reasoning_content and tool_calls (OpenAI's form). tools: definitions, or None.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    @property
    def given(self) -> bool:
        """Whether it ends with an answer; else the verifier is to answer."""
        return bool(self.messages[-1]["role"] == "assistant")


def conversation_of(row: dict[str, Any]) -> Conversation:
    """The conversation of a row that has one of CONVERSATION_KEYS. Raises Reject."""
    if "prompt" in row:
        messages = _prompt_and_response(row)
    elif "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise Reject("bad_row", "turns must be a list of questions")
        messages = [{"role": "user", "content": turns[0]}]
    else:
        key = "messages" if "messages" in row else "conversations"
        messages = _json(row[key], key)
        if not isinstance(messages, list) or not messages:
            raise Reject("empty", f"{key} is empty")
    if "messages" not in row and isinstance(system := row.get("system"), str) and system.strip():
        messages = [{"role": "system", "content": system}, *messages]
    canonical = [_message(message, at) for at, message in enumerate(messages)]
    _check_order(canonical)
    return Conversation(canonical, _tools(row.get("tools")))


def _prompt_and_response(row: dict[str, Any]) -> list[Message]:
    if not isinstance(row["prompt"], str):
        raise Reject("bad_row", f"prompt must be a string, found {type(row['prompt']).__name__}")
    messages: list[Message] = [{"role": "user", "content": row["prompt"]}]
    for key in ("response", "completion"):
        if key in row:
            return [*messages, {"role": "assistant", "content": row[key]}]
    return messages


def _message(message: Any, at: int) -> Message:
    if not isinstance(message, dict):
        raise Reject("bad_row", f"messages[{at}] must have a role and a content")
    said = message.get("role", message.get("from"))
    if not isinstance(said, str):
        raise Reject("bad_row", f"messages[{at}] must have a role and a content")
    role = ROLES.get(said.lower())
    if role is None:
        raise Reject("bad_row", f"messages[{at}] has the role {said!r}, expected one of {', '.join(ROLES)}")
    where = f"messages[{at}] ({said})"
    content = _content(message.get("content", message.get("value")), where)
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _tool_calls(_json(content, where), where)}
    made: Message = {"role": role, "content": content}
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            made[key] = message[key]
    if role == "assistant":
        reasoning = message.get("reasoning_content", message.get("reasoning"))
        if reasoning is not None and not isinstance(reasoning, str):
            raise Reject("bad_row", f"{where}: reasoning_content must be a string, found {type(reasoning).__name__}")
        if reasoning and reasoning.strip():
            made["reasoning_content"] = reasoning
        if calls := message.get("tool_calls"):
            made["tool_calls"] = _tool_calls(_json(calls, where), where)
    if not (content.strip() or "tool_calls" in made):
        raise Reject("empty", f"{where} is empty")
    return made


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):  # OpenAI's list of parts
        part = content[0]
        content = part["text"] if part.get("type") == "text" and isinstance(part.get("text"), str) else content
    if not isinstance(content, str):
        raise Reject("bad_row", f"{where}: content must be a string, found {type(content).__name__}")
    return content


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    made = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise Reject("bad_tools", f"{where}: a tool call needs a name and arguments")
        arguments = function.get("arguments", {})
        if not isinstance(arguments, dict | str):
            raise Reject("bad_tools", f"{where}: arguments of a tool call must be an object or its JSON")
        one: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if isinstance(call.get("id"), str):
            one["id"] = call["id"]
        made.append(one)
    return made


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    tools = _json(tools, "tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Reject("bad_tools", "tools must be a list of tool definitions")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _json(value: Any, where: str) -> Any:
    """Parquet and datasets often hold nested lists as JSON."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Reject("bad_row", f"{where}: not JSON: {error}") from None


def _check_order(messages: list[Message]) -> None:
    last = messages[-1]["role"]
    if last == "system":
        raise Reject("bad_row", "messages must end with a user, a tool or an assistant turn, found 'system'")
    first = next((message["role"] for message in messages if message["role"] != "system"), None)
    if first == "assistant":
        _no_question()


def _no_question() -> NoReturn:
    raise Reject("no_question", "messages holds an answer without a question before it")
