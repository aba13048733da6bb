"""Run as a script: dies by SIGKILL at one write step after the other, each time in a fresh dataset, and carries on.

    python kill_steps.py URI local|s3 STRIDE

A step is a system call that makes an object appear (link, rename; before it and after it), on S3 a PUT (after its
response). Every child is a fork, so a step costs a fraction of a second. Prints one JSON object: {step: how it ended}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import tiny

from storage import open_dataset
from storage.errors import StatehouseError
from storage.kernels import kernels
from storage.objects import LocalStore, RemoteStore, open_store

TABLE = tiny.sequences(16, 500)
kernels()  # once, not in every child


def steps_of(kind: str) -> list[tuple[object, str, bool]]:
    """(owner, function, whether before it, too)."""
    if kind == "local":
        return [(os, "link", True), (os, "replace", True)]
    return [(RemoteStore, "create", False), (RemoteStore, "put", False)]


def die_at(kind: str, step: int) -> None:
    """From the `step`-th chance on there is no process any more."""
    seen = 0

    def reached() -> None:
        nonlocal seen
        if seen == step:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    for owner, name, before in steps_of(kind):
        real = getattr(owner, name)

        def wrapped(*args: object, _real=real, _before=before, **kwargs: object) -> object:  # type: ignore[no-untyped-def]
            if _before:
                reached()
            result = _real(*args, **kwargs)
            reached()
            return result

        setattr(owner, name, wrapped)


def child(work) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    """(exit code, signal) of a fork that runs `work`."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return (os.waitstatus_to_exitcode(status), 0) if os.WIFEXITED(status) else (0, os.WTERMSIG(status))


def recover(uri: str) -> None:
    """What is there is refused or whole; the same command completes it, and writes nothing a second time."""
    store = open_store(uri)
    before = times(store)
    try:
        check(uri)
        finished = True
    except StatehouseError as error:
        assert "ray_jobs.extract" in str(error) or "no dataset" in str(error), error
        finished = False
    tiny.sealed(uri, TABLE)
    check(uri)
    after = times(store)
    assert {key: after[key] for key in before} == before, "an object was written again"
    if finished:
        assert after.keys() == before.keys()


def times(store: LocalStore | RemoteStore) -> dict[str, object]:
    """When each object was written; copies of receipts may be rewritten."""
    keys = [key for key in store.sizes() if not key.startswith("receipts/")]
    if isinstance(store, LocalStore):
        return {key: (store.root / key).stat().st_mtime_ns for key in keys}
    import obstore

    return {key: obstore.head(store._store, key)["last_modified"] for key in keys}


def check(uri: str) -> None:
    for states in open_dataset(uri).stream():
        assert (states.hidden.view(np.uint16) == tiny.states_of(states.id, len(states.token_ids))).all()


def main(uri: str, kind: str, stride: int) -> None:
    ended: dict[int, str] = {}
    step = 0
    while True:
        place = f"{uri}/{step}"

        def work(place: str = place, step: int = step) -> None:
            die_at(kind, step)
            tiny.sealed(place, TABLE)

        code, number = child(work)
        if number != signal.SIGKILL:
            assert code == 0, f"step {step}: the undisturbed run failed"
            break
        code, number = child(lambda place=place: recover(place))
        ended[step] = "recovered" if (code, number) == (0, 0) else f"FAILED {code} {number}"
        step += stride
    print(json.dumps(ended))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
