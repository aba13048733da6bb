"""Waiting for a store that is down: a server that restarts takes longer than the store's own few retries."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from storage.errors import StoreError
from storage.objects import ObjectMissing

log = logging.getLogger("statehouse")

Result = TypeVar("Result")
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 5.0
# Seconds between two lines about it: many threads wait at once.
_SAY_EVERY_S = 5.0
_said = [-_SAY_EVERY_S]


def patiently(action: Callable[[], Result], seconds: float, stop: threading.Event | None = None) -> Result:
    """Does it again, with growing pauses, while the store fails, for at most `seconds`; then raises its StoreError.

    An object that is not there (ObjectMissing) is not waited for. stop: ends the waiting early when it is set.
    """
    stop = stop or threading.Event()
    began, wait = time.monotonic(), _FIRST_WAIT_S
    while True:
        try:
            return action()
        except ObjectMissing:
            raise
        except StoreError as error:
            waited = time.monotonic() - began
            if waited >= seconds or stop.is_set():
                raise
            if time.monotonic() - _said[0] >= _SAY_EVERY_S:
                _said[0] = time.monotonic()
                log.warning("store fails, trying again waited=%.0fs of=%.0fs: %s", waited, seconds, error)
        stop.wait(min(wait, max(0.05, seconds - waited)))
        wait = min(2 * wait, _LONGEST_WAIT_S)
