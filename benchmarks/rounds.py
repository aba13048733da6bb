"""Processes that measure in turn: each says when it is ready, then does a round whenever it is told and says what it found.

They start once, at the same time, and take turns with each other and with this process, so that a drift of the machine
strikes all alike. The other side is `answer`, or the same few lines where nothing of ours can be imported.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent


class RoundFailed(Exception):
    """The process ended; the last line that it wrote to stderr."""


class Rounds:
    """One such process. Use it as a context manager: it ends with it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=ROOT
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # the pipe may be broken
            self._in.close()
        self._out.close()
        self._errors.close()

    def _lines(self) -> Iterator[str]:
        """Of stdout, less what libraries say there."""
        while line := self._out.readline():
            if line.startswith("> "):
                yield line[2:]
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()
        raise RoundFailed(said[-1][:120] if said else f"ended with {self._process.returncode}")

    def ready(self) -> None:
        """Waits until it can begin. Raises RoundFailed."""
        next(self._lines())

    def begin(self) -> None:
        with contextlib.suppress(OSError):  # `found` says why
            self._in.write("\n")
            self._in.flush()

    def found(self) -> Any:
        """What the round that was begun found. Raises RoundFailed."""
        return json.loads(next(self._lines()))

    def __call__(self) -> Any:
        """A round from its beginning to its end. Raises RoundFailed."""
        self.begin()
        return self.found()


def answer(action: Callable[[], Any]) -> None:
    """A process's side: `action()` for each line of stdin, what it returns as JSON; until stdin ends."""
    print("> ready", flush=True)
    for _ in sys.stdin:
        print(f"> {json.dumps(action())}", flush=True)
