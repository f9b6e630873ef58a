"""The one way in which tests wait for something that no file descriptor announces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], deadline: float, what: str, *, interval: float = 0.05) -> T:
    """Poll until ``predicate`` answers something true, and return that answer.

    Parameters
    ----------
    predicate
        Asked at once and then every ``interval`` seconds. What it raises ends the wait: raise where waiting has become
        hopeless, as when the process waited for has died.
    deadline
        Seconds from now. One last look is taken after it: a machine that stalled must not fail what has come true.
    what
        Names the thing in the error: "the server at URL is ready".

    Raises
    ------
    TimeoutError
        When it is still not true at the deadline.
    """
    end = time.monotonic() + deadline
    pause = threading.Event()
    while True:
        last_look = time.monotonic() >= end
        if answer := predicate():
            return answer
        if last_look:
            raise TimeoutError(f"waited {deadline:g} s in vain until {what}")
        pause.wait(interval)
