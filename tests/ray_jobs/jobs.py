"""Running the jobs as a user does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# Rows that need no engine to answer them.
GIVEN = [{"token_ids": list(range(n, n + 40 + n % 30)), "loss_mask": [0] * 5 + [1] * (35 + n % 30)} for n in range(500)]


class Finished:
    def __init__(self, process: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = process.returncode, process.stdout, process.stderr

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]


def start_driver(job: str, recipe: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`python -m ray_jobs.<job>` in a session of its own; with a Ray of its own unless RAY_ADDRESS is given."""
    return subprocess.Popen(
        [sys.executable, "-m", f"ray_jobs.{job}", str(recipe), *arguments],
        cwd=ROOT,
        env={name: value for name, value in {**os.environ, **environment}.items() if value},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 240) -> Finished:
    out, err = process.communicate(timeout=seconds)
    return Finished(subprocess.CompletedProcess([], process.returncode, out, err))


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, outside the range Ray gives its workers (10002-19999)."""
    sockets = []
    while len(sockets) < count:
        one = socket.socket()
        one.bind(("127.0.0.1", 0))
        if not 10000 <= one.getsockname()[1] < 20000:
            sockets.append(one)
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def ok(finished: Finished) -> Finished:
    assert finished.code == 0, finished.err
    return finished
