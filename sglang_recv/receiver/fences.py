"""A thread that waits for the device, so that the service thread need not: the next round's messages come meanwhile."""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass

import torch

from sglang_recv.channel import Wakeup
from sglang_recv.receiver.mailbox import RoundDone, SessionEnded

Fenced = RoundDone | SessionEnded


@dataclass(frozen=True)
class Reached:
    """The device has done what ``event`` follows; or it failed."""

    event: Fenced
    error: Exception | None


class Fences:
    """Waits for the fences of events, in order.

    Parameters
    ----------
    device
        What the fences are of. On a CPU they are reached when they are made, and no thread is needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.wakeup = Wakeup()
        self._asked: queue.SimpleQueue[Fenced | None] = queue.SimpleQueue()
        self._reached: deque[Reached] = deque()
        self._thread: threading.Thread | None = None
        if device.type != "cpu":
            self._thread = threading.Thread(target=self._run, name="sglang-recv-fences", daemon=True)
            self._thread.start()

    def put(self, event: Fenced) -> None:
        """Wait for the fence of ``event``."""
        if self._thread is None:
            self._reached.append(_reached(event))
        else:
            self._asked.put(event)

    def take(self) -> list[Reached]:
        """Events whose fences were reached, in order."""
        self.wakeup.clear()
        found = []
        while self._reached:
            found.append(self._reached.popleft())
        return found

    def close(self) -> None:
        """End the thread once it has waited for what it was given."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()
        self.wakeup.close()

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # else waiting would make a context on the first GPU
        while (event := self._asked.get()) is not None:
            self._reached.append(_reached(event))
            self.wakeup.set()


def _reached(event: Fenced) -> Reached:
    try:
        event.fence.synchronize()
    except Exception as error:
        return Reached(event, error)
    return Reached(event, None)
