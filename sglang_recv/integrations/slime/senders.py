"""One train rank's sessions: one per engine that has a rank on this device. Knows neither slime nor Megatron."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from sglang_recv import manifest
from sglang_recv.client.client import WeightClient
from sglang_recv.client.session import Session, UpdateReport
from sglang_recv.client.target import HttpTarget
from sglang_recv.integrations.slime.pairing import Engine, Share
from sglang_recv.wire import RankTable

#: Staging slots of a train rank: docs/slime.md tells its users how much memory they take.
_SLOTS: Final = 2


class _Discovered(HttpTarget):
    """An engine whose rank table another train rank has asked for: one question per engine, not per train rank."""

    def __init__(self, engine: Engine, api_key: str | None, timeout: float) -> None:
        super().__init__(engine.url, api_key, timeout)
        self._table = engine.table

    def rank_table(self) -> RankTable:
        """See :class:`sglang_recv.client.target.Target`. It may be old: then the engine's sockets are gone."""
        return self._table


class Senders:
    """Feeds this train rank's shares.

    Parameters
    ----------
    shares, engines
        What this rank feeds, of which engines.
    mode
        What the user asked for.
    slot_bytes
        Bytes of one of the two staging slots; None for the client's own default.
    api_key
        SGLang's admin or API key, where the engines have one.
    deadline
        Seconds that any single wait may take.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        engines: Sequence[Engine],
        *,
        mode: str,
        slot_bytes: int | None,
        api_key: str | None,
        deadline: float,
    ) -> None:
        self._shares = shares
        self._clients = [
            WeightClient(
                _Discovered(engines[share.engine], api_key, deadline),
                mode,
                ranks=list(share.ranks),
                slots=_SLOTS,
                slot_bytes=slot_bytes,
                deadline=deadline,
            )
            for share in shares
        ]
        self._open = contextlib.ExitStack()
        self._sessions: list[Session] = []

    def open(self, version: str, session_id: str) -> None:
        """Open all sessions. Every train rank does so in the order of engines, else two could wait for each other."""
        for client, share in zip(self._clients, self._shares, strict=True):
            session = client.open(version, session_id=session_id, coordinator=share.coordinator)
            self._sessions.append(self._open.enter_context(session))

    def send(self, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Send a bucket to every engine; its memory may be used again when this returns."""
        for session in self._sessions:
            session.send(named_tensors)

    def pieces(self, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> list[list[tuple[str, torch.Tensor]]]:
        """The tensors in parts that each make one round of every session."""
        if not self._sessions:
            return []
        room = min(session.slot_bytes for session in self._sessions)
        found: list[list[tuple[str, torch.Tensor]]] = []
        used = room
        for name, tensor in named_tensors:
            size = manifest.align(tensor.nbytes)
            if used + size > room:  # a tensor above a slot is a part of its own, and a round of its own
                found.append([])
                used = 0
            found[-1].append((name, tensor))
            used += size
        return found

    def flush(self) -> dict[int, int]:
        """End the round of every session; how many there were, by engine."""
        return {share.engine: session.flush() for share, session in zip(self._shares, self._sessions, strict=True)}

    def pad(self, rounds: Mapping[int, int]) -> None:
        """Send empty rounds until there are as many as ``rounds`` says, by engine."""
        for share, session in zip(self._shares, self._sessions, strict=True):
            session.pad(rounds[share.engine])

    def finish(self) -> None:
        """Return once every rank of every engine has read everything."""
        for session in self._sessions:
            session.finish()

    def commit(self) -> list[UpdateReport]:
        """Commit what this rank coordinates, and wait for the others' commits of the rest."""
        return [session.commit() for session in self._sessions]

    def end(self) -> None:
        """Abort what was not committed."""
        self._sessions.clear()
        self._open.close()

    def close(self) -> None:
        """End sessions, and release the clients."""
        with contextlib.ExitStack() as undo:
            for client in self._clients:
                undo.callback(client.close)
            self.end()
