"""What a test says about an engine's weights: digests of what it holds, and the state it reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang_recv import WeightClient
from sglang_recv.wire import Welcome
from support.server import EngineServer


@contextmanager
def client(*servers: EngineServer, slot_bytes: int | None = None, deadline: float = 30.0) -> Iterator[WeightClient]:
    """A client of some servers, closed at the end."""
    found = WeightClient([server.url for server in servers], slot_bytes=slot_bytes, deadline=deadline)
    try:
        yield found
    finally:
        found.close()


def digests(server: EngineServer) -> dict[int, dict[str, str]]:
    """Digest of every tensor that each rank holds."""
    with client(server) as one:
        return {found.rank: found.tensors for found in one.checksum()[server.url]}


def states(server: EngineServer) -> list[Welcome]:
    """What each rank reports."""
    with client(server) as one:
        return one.status()[server.url]


def version(server: EngineServer) -> str:
    """The weight version that SGLang itself reports."""
    found = server.get("/model_info")["weight_version"]
    assert isinstance(found, str)
    return found
