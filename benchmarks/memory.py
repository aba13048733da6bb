"""How much memory a stream takes, in a process of its own: `python -m benchmarks.memory URI AHEAD_BYTES TOTAL_BYTES`.

Prints JSON: bytes read, seconds, resident bytes before the first sequence and at most.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from storage import open_dataset


def resident() -> int:
    """Bytes of this process that lie in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak() -> int:
    """The most bytes of this process that ever lay in memory. (`ru_maxrss` counts those of the process that started it.)"""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main(uri: str, ahead_bytes: int, total_bytes: int) -> None:
    dataset = open_dataset(uri)
    dataset.read(0)  # imports, connections, compiled loops
    per_token = dataset.plan.geometry.bytes_per_token
    lengths = dataset.sequences["length"].to_numpy()
    random = np.random.default_rng(0)
    order: list[int] = []
    while sum(int(lengths[index]) for index in order) * per_token < total_bytes:
        order += random.permutation(len(dataset)).tolist()
    before, most, ended = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.01):
            most = max(most, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, done = time.perf_counter(), 0
    for states in dataset.stream(order, ahead_bytes=ahead_bytes):
        done += states.hidden.nbytes
        if done >= total_bytes:
            break
    ended.set()
    watcher.join()
    seconds = time.perf_counter() - began
    print(json.dumps({"bytes": done, "seconds": seconds, "before": before, "most": most}))


def measure(uri: str, ahead_bytes: int, total_bytes: int) -> dict[str, float]:
    """Runs `main` in a new process."""
    command = [sys.executable, "-m", "benchmarks.memory", uri, str(ahead_bytes), str(total_bytes)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
