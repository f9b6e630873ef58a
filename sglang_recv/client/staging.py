"""Staging buffers of one session: slots used in turn, and a buffer of its own for a tensor above a slot."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from sglang_recv.client.link import RankLink
from sglang_recv.client.pack import Packer, Pending, Prepared, Tables
from sglang_recv.client.pool import Pools, pools_on
from sglang_recv.manifest import Views
from sglang_recv.memory import ExportableBuffer, allocate
from sglang_recv.wire import OfferBuffer

#: Offers before their answers are read: more would fill the rank's socket.
_UNANSWERED: Final = 64


class Buffer:
    """Memory of one size on every device that this session feeds, under one id."""

    def __init__(self, number: int, nbytes: int, devices: Sequence[str]) -> None:
        self.number = number
        self.nbytes = nbytes
        #: Rounds below this one must be acknowledged before the buffer may be written again.
        self.free_at = 0
        #: Copies into it that were started.
        self.pending: list[Pending] = []
        #: Streams that do more of them.
        self.streams: dict[torch.cuda.Stream, None] = {}
        self.parts: dict[str, ExportableBuffer] = {}
        self.views: dict[str, Views] = {}
        try:
            for device in devices:
                part = self.parts[device] = allocate(torch.device(device), nbytes)
                with torch.inference_mode(False):
                    self.views[device] = Views(part.tensor())
        except BaseException:
            self.close()
            raise

    @property
    def total(self) -> int:
        """Bytes on all devices together."""
        return sum(part.nbytes for part in self.parts.values())

    def offer(self, links: Sequence[RankLink], session: str, timeout: float) -> None:
        """Send every rank the part on its device; :meth:`RankLink.mapped` takes the answers."""
        for link in links:
            _offer(link, session, self.number, self.parts[link.device], timeout)

    @property
    def packed(self) -> bool:
        """True when nothing that was started can still be on its way: on a CPU."""
        return not any(self.pending) and not self.streams

    def mark(self) -> None:
        """Before others may use the streams: wait for nothing that comes after the copies."""
        self.pending += [stream.record_event() for stream in self.streams]
        self.streams.clear()

    def wait_packed(self) -> None:
        """Return once the device has done every copy that was started."""
        self.mark()
        for event in self.pending:
            if event is not None:
                event.synchronize()
        self.pending.clear()

    def close(self) -> None:
        """Free the memory on this side, once no copy writes it."""
        with contextlib.suppress(RuntimeError):  # of a device in trouble: the memory is given back all the same
            self.wait_packed()
        self.pending.clear()
        self.streams.clear()
        self.views.clear()
        for part in self.parts.values():
            part.close()


class Staging:
    """All buffers of one session.

    Parameters
    ----------
    links
        The ranks that map them.
    session
        Id of the session.
    timeout
        Seconds for a rank to map one buffer.
    lends
        False to leave pools alone.
    """

    def __init__(self, links: Sequence[RankLink], session: str, timeout: float, *, lends: bool = True) -> None:
        self._links = links
        self._session = session
        self._timeout = timeout
        self._devices = tuple(dict.fromkeys(link.device for link in links))
        self._next = 0
        #: Buffers that ranks have not answered for.
        self._offered = 0
        self._buffers: dict[int, Buffer] = {}
        self.slots: list[Buffer] = []
        self.slot_bytes = 0
        self.peak_bytes = 0
        self._packers = {device: Packer(torch.device(device)) for device in self._devices}
        #: What may be sent from where it is: a rank reads only what is on its own device.
        alone = lends and len(self._devices) == 1
        self.pools = Pools(pools_on(torch.device(self._devices[0])) if alone else ())
        self._lent: dict[int, int] = {}
        self._closing = threading.Lock()

    def allocate(self, slots: int, slot_bytes: int) -> None:
        """Make the slots, of ``slot_bytes`` bytes each per device; ranks get them by :meth:`offer`.

        Raises
        ------
        StagingMemoryError
            When a device has not enough memory.
        """
        self.slot_bytes = slot_bytes
        try:
            while len(self.slots) < slots:
                self.slots.append(self._make(slot_bytes))
        except BaseException:
            self.close()
            raise

    def offer(self) -> None:
        """Let every rank map the slots; :meth:`wait_mapped` takes the answers."""
        self._offer(self.slots)

    def add(self, nbytes: int) -> Buffer:
        """Allocate a buffer and let every rank map it.

        Raises
        ------
        StagingMemoryError
            When a device has not enough memory.
        """
        buffer = self._make(nbytes)
        self._offer([buffer])
        self.wait_mapped()
        return buffer

    def lend(self, pool: int) -> int:
        """The number of the buffer as which ranks map a pool; they are offered it when it is first asked for."""
        if pool not in self._lent:
            self.pools.by_number[pool].lend()
            number = self._lent[pool] = self._next
            self._next += 1
            if self._offered >= _UNANSWERED:
                self.wait_mapped()
            for link in self._links:
                _offer(link, self._session, number, self.pools.by_number[pool].buffer, self._timeout)
            self._offered += 1
        return self._lent[pool]

    def smallest_lent(self, pool: int = 0) -> int:
        """Bytes of the smallest pool that is lent, ``pool`` among them; 0 when there is none."""
        numbers = {*self._lent, pool} - {0}
        return min((self.pools.by_number[number].nbytes for number in numbers), default=0)

    def streams(self) -> list[torch.cuda.Stream]:
        """The current ones of all GPUs."""
        return [torch.cuda.current_stream(device) for device in self._devices if torch.device(device).type == "cuda"]

    def _make(self, nbytes: int) -> Buffer:
        buffer = Buffer(self._next, nbytes, self._devices)
        self._next += 1
        self._buffers[buffer.number] = buffer
        self._count()
        return buffer

    def _count(self) -> None:
        scratch = sum(packer.scratch_bytes for packer in self._packers.values())
        self.peak_bytes = max(self.peak_bytes, scratch + sum(b.total for b in self._buffers.values()))

    def _offer(self, buffers: Sequence[Buffer]) -> None:
        # All of them before the first answer: ranks and this side work at the same time.
        for buffer in buffers:
            buffer.offer(self._links, self._session, self._timeout)
            self._offered += 1

    def wait_mapped(self) -> None:
        """Return once every rank has mapped all that it was offered."""
        while self._offered:
            self._offered -= 1
            for link in self._links:
                link.mapped(self._timeout)

    def drop(self, buffer: Buffer) -> None:
        """Free a buffer that every rank has unmapped."""
        del self._buffers[buffer.number]
        buffer.close()

    def pack(self, buffer: Buffer, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Start copying tensors to their offsets, on every device."""
        for device, views in buffer.views.items():
            buffer.pending.append(self._packers[device].pack(views, tensors))

    def pack_one(self, buffer: Buffer, offset: int, tensor: torch.Tensor) -> None:
        """Start copying one tensor to its offset, on every device."""
        for device, views in buffer.views.items():
            stream = self._packers[device].pack_one(views, offset, tensor)
            if stream is not None:
                buffer.streams[stream] = None

    def prepare(
        self, tables: Tables, first: int, tensors: Sequence[torch.Tensor], addresses: np.ndarray | None
    ) -> list[Prepared] | None:
        """What :meth:`pack_prepared` needs; None when some device needs :meth:`pack`. ``addresses`` are as in
        :meth:`Packer.prepare`."""
        found = [packer.prepare(tables, first, tensors, addresses) for packer in self._packers.values()]
        return None if None in found else [prepared for prepared in found if prepared is not None]

    def pack_prepared(self, buffer: Buffer, tables: Tables, first: int, prepared: Sequence[Prepared]) -> None:
        """Start copying tensors ``first`` and following of a known bucket by kernels."""
        for (device, packer), work in zip(self._packers.items(), prepared, strict=True):
            buffer.pending.append(packer.pack_prepared(buffer.views[device], tables, first, work))
        self._count()

    def close(self) -> None:
        """Free everything on this side; idempotent, and safe on several threads.

        The ranks have unmapped theirs when the session is over.
        """
        # What one cannot free must not keep the rest.
        with self._closing, contextlib.ExitStack() as everything:
            self.slots.clear()
            for packer in self._packers.values():
                everything.callback(packer.close)
            while self._buffers:
                everything.callback(self._buffers.popitem()[1].close)
            while self._lent:
                everything.callback(self.pools.by_number[self._lent.popitem()[0]].give_back)


def _offer(link: RankLink, session: str, number: int, part: ExportableBuffer, timeout: float) -> None:
    with part.export_fd() as fd:
        link.offer(OfferBuffer(session, number, part.kind.value, part.nbytes), fd.fileno(), timeout)
