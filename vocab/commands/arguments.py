"""Types of arguments that several commands share."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NoReturn

from vocab.errors import VocabError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def positive(text: str) -> int:
    try:
        value = int(text.replace("_", ""))
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above zero, found {text!r}")
    return value


def sizes(text: str) -> list[int]:
    return [positive(part) for part in text.split(",") if part.strip()] or [positive(text)]


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to below 1, found {text!r}")
    return value


def write_json(path: str | None, content: dict[str, Any]) -> None:
    """Write `content` as JSON when a path was given."""
    if path is not None:
        Path(path).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: str) -> dict[str, Any]:
    """A JSON object from a file. Raises VocabError when it is none."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise VocabError(f"{path}: expected JSON, found {error}") from error
    if not isinstance(content, dict):
        raise VocabError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content
