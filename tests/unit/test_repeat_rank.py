"""A rank and a session that repeats another: what it takes, what it refuses, and what it keeps of sessions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import zmq

from sglang_recv import manifest
from sglang_recv.client.client import new_session_id
from sglang_recv.client.link import RankLink, greet, wait
from sglang_recv.client.select import Pair
from sglang_recv.errors import BadBufferError, RecvError, SessionStateError
from sglang_recv.memory import ExportableBuffer, allocate
from sglang_recv.receiver import remembered as remembered_module
from sglang_recv.receiver.remembered import MAX_REMEMBERED, Memory, round_of
from sglang_recv.wire import (
    Announce,
    Bucket,
    CommitCarrier,
    Entry,
    Finish,
    Load,
    OfferBuffer,
    Open,
    ReleaseBuffer,
    Repeat,
    TensorSpec,
)
from support.rank import CPU, PATIENCE, Engine, weights

TOKEN = "f" * 32
PAGE = 4096
NAMES = ("embed", "norm")
SPECS = {name: manifest.spec_of(name, tensor) for name, tensor in weights(0.0).items()}
#: Where the remembered session had its two tensors: in buffers of three pages and one.
PLACES = {"embed": (0, 2 * PAGE), "norm": (1, 256)}


class Sender:
    """Speaks to the only rank of an engine as a :class:`~sglang_recv.WeightClient` does not."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        info = engine.rank[0].info()
        self.link = RankLink(self._context, engine.name, Pair(info, "cpu"))
        self.link.connect(PATIENCE)
        self.session = new_session_id()
        self.buffers: dict[int, ExportableBuffer] = {}

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()
        self._context.term()
        for buffer in self.buffers.values():
            buffer.close()

    def wait(self, what: str) -> None:
        """Until the rank has said so; raises what it says instead."""
        wait([self.link], lambda link: bool(getattr(link, what)), what, PATIENCE)

    def open(self, specs: tuple[TensorSpec, ...] | None = None, recall: str = TOKEN) -> None:
        """Up to ``Opened``."""
        self.link.attach(self.session, "raw", PATIENCE)
        self.link.send(Open(self.session, "raw", "partial", 1 << 20, specs, recall=recall))
        self.wait("opened")

    def offer(self, number: int, pages: int) -> None:
        """A buffer, zeroed."""
        buffer = self.buffers[number] = allocate(CPU, pages * PAGE)
        with buffer.export_fd() as fd:
            self.link.offer(OfferBuffer(self.session, number, "memfd", buffer.nbytes), fd.fileno(), PATIENCE)
        self.link.mapped(PATIENCE)

    def write(self, value: float, places: dict[str, tuple[int, int]] = PLACES) -> None:
        """Put tensors of ``weights(value)`` to their places."""
        for name, (number, offset) in places.items():
            spec = SPECS[name]
            view = manifest.Views(self.buffers[number].tensor()).at(offset, manifest.dtype_of(spec.dtype), spec.shape)
            view.copy_(weights(value)[name])

    def load(self, number: int, name: str) -> None:
        """A round of one tensor."""
        self.link.send(Load(self.session, number, (Bucket((Entry(SPECS[name], *PLACES[name]),)),)))

    def repeat(self, number: int, *buffers: int, places: tuple[int, ...] = ()) -> None:
        """A round that was sent before."""
        self.link.send(Repeat(self.session, number, buffers, places))

    def taken(self, rounds: int) -> None:
        """The rank has read so many rounds."""
        wait([self.link], lambda link: link.acked >= rounds, "acknowledgement", PATIENCE)

    def heard(self) -> None:
        """The rank has dealt with everything that was sent."""
        self.link.welcome = None
        greet([self.link], self._engine.name, "raw", PATIENCE)

    def commit(self, version: str, rounds: int, remember: str = "") -> None:
        """To the end."""
        self.link.send(Finish(self.session, rounds, remember))
        self.wait("prepared")
        self._engine.commit(CommitCarrier(self.session, version), PATIENCE)
        self.wait("committed")


@pytest.fixture
def engine() -> Iterator[Engine]:
    """One rank, which remembers a session of two rounds: ``embed`` in a buffer of three pages, ``norm`` in another."""
    with Engine() as made:
        with Sender(made) as sender:
            sender.open(recall="")
            assert not sender.link.recalled
            prepare(sender)
            sender.write(1.0)
            for number, name in enumerate(NAMES):
                sender.load(number, name)
            sender.commit("v1", 2, TOKEN)
        check(made, 1.0, "v1")
        yield made


@pytest.fixture
def sender(engine: Engine) -> Iterator[Sender]:
    with Sender(engine) as made:
        yield made


def prepare(sender: Sender) -> None:
    """The buffers of then."""
    sender.offer(0, 3)
    sender.offer(1, 1)


def check(engine: Engine, value: float, version: str) -> None:
    """The rank holds the two tensors of ``weights(value)``."""
    held = engine.parameters()[0]
    assert engine.states() == {("ready", version)}
    assert all(torch.equal(held[name], weights(value)[name]) for name in NAMES)


def refused(sender: Sender, kind: type[RecvError], *parts: str) -> None:
    """The rank ended the session with this error."""
    with pytest.raises(kind) as caught:
        sender.wait("committed")
    text = " | ".join((caught.value.message, *caught.value.details))
    assert all(part in text for part in parts), text


def test_what_is_repeated_is_what_the_buffers_hold_now(engine: Engine, sender: Sender) -> None:
    sender.open()
    assert sender.link.recalled
    prepare(sender)
    moved = {"embed": (1, 512), "norm": (1, 0)}
    sender.write(2.0, {"embed": PLACES["embed"], "norm": moved["norm"]})
    sender.repeat(0, 0)
    sender.repeat(1, places=moved["norm"])
    sender.commit("v2", 2)
    check(engine, 2.0, "v2")


@pytest.mark.parametrize("places", [(), PLACES["embed"]], ids=["as then", "places"])
@pytest.mark.parametrize(("pages", "mapped"), [(2, 2 * PAGE), (0, 0)], ids=["too small", "not mapped"])
def test_a_repeated_round_must_lie_in_mapped_memory(
    engine: Engine, sender: Sender, pages: int, mapped: int, places: tuple[int, ...]
) -> None:
    sender.open()
    if pages:
        sender.offer(0, pages)
    sender.repeat(0, *(() if places else (0,)), places=places)
    refused(sender, BadBufferError, f"embed: bytes 8192 to 8320 of buffer 0, which has {mapped} mapped bytes")
    check(engine, 1.0, "v1")


def test_a_repeated_round_names_each_of_its_buffers(engine: Engine, sender: Sender) -> None:
    sender.open()
    prepare(sender)
    sender.repeat(0, 0, 1)
    refused(sender, BadBufferError, "round 0 lies in 1 buffers, 2 are named")
    check(engine, 1.0, "v1")


@pytest.mark.parametrize("how", ["Load", "Announce", "Open", "no recall", "forgotten", "the end"])
def test_nothing_else_can_be_repeated(engine: Engine, sender: Sender, how: str) -> None:
    """After another round or a manifest this is not the session of then, whose tensors nobody would check any more."""
    specs = tuple(SPECS[name] for name in NAMES)
    recall = {"no recall": "", "forgotten": "e" * 32}.get(how, TOKEN)
    sender.open(specs if how == "Open" else None, recall)
    assert sender.link.recalled == (how in ("Load", "Announce", "the end"))
    prepare(sender)
    sender.write(2.0)
    number, known = 0, "none"
    if how == "Load":
        sender.load(0, "embed")
        number = 1
    elif how == "Announce":
        sender.link.opened = False
        sender.link.send(Announce(sender.session, 1 << 20, specs))
        sender.wait("opened")
        assert not sender.link.recalled
    elif how == "the end":
        sender.repeat(0, 0)
        sender.repeat(1, 1)
        number, known = 2, "2"
    sender.taken(number)
    sender.repeat(number, 1 if number else 0)
    refused(sender, SessionStateError, f"round {number} repeats a recalled session, of which rank 0 has {known} rounds")


@pytest.mark.parametrize("announced", ["Open", "Announce"])
def test_whoever_announces_may_still_write_the_tensors_out(engine: Engine, sender: Sender, announced: str) -> None:
    specs = tuple(SPECS[name] for name in NAMES)
    sender.open(specs if announced == "Open" else None)
    if announced == "Announce":
        sender.link.opened = False
        sender.link.send(Announce(sender.session, 1 << 20, specs))
        sender.wait("opened")
    prepare(sender)
    sender.write(2.0)
    for number, name in enumerate(NAMES):
        sender.load(number, name)
    sender.commit("v2", 2)
    check(engine, 2.0, "v2")


@pytest.mark.parametrize("places", [(), PLACES["norm"]], ids=["as then", "places"])
def test_a_buffer_is_released_after_the_repeated_round_that_uses_it(
    engine: Engine, sender: Sender, places: tuple[int, ...]
) -> None:
    sender.open()
    prepare(sender)
    sender.write(2.0)
    sender.repeat(0, 0)
    sender.taken(1)
    with engine.stalled():
        sender.repeat(1, *(() if places else (1,)), places=places)
        sender.link.send(ReleaseBuffer(sender.session, 0))
        wait([sender.link], lambda link: 0 in link.released, "release", PATIENCE)
        sender.link.send(ReleaseBuffer(sender.session, 1))
        sender.heard()
        engine.rank[0].mailbox.drop_rounds()  # if it was unmapped all the same, this process must live to say so
    refused(sender, BadBufferError, "buffer 1 is used by rounds [1]")


# --- what a rank remembers ------------------------------------------------------------------------------------------

W, V = TensorSpec("w", "float32", (4, 2)), TensorSpec("v", "bfloat16", (3,))
EMPTY = TensorSpec("none", "float32", (0, 3))


def test_places_of_a_round_are_those_of_its_tensors() -> None:
    entries = (Entry(W, 7, 512), Entry(EMPTY, 99, 1), Entry(V, 3, 0))
    came, buffers = round_of([Bucket(entries), Bucket(())], {7: 1024, 3: 6})
    assert (buffers, came.ends) == ((7, 3), (544, 6))
    moved, where = came.moved((3, 256, 0, 0, 3, 0))
    assert (where, moved.ends) == ((3,), (288,)), "the empty tensor's buffer does not count"
    assert [part.tolist() for part in moved.offsets] == [[256, 0, 0], []]
    assert came.ends == (544, 6), "the remembered one is as it was"


@pytest.mark.parametrize(
    "places",
    [(3, 256), (3, 256, 3, 0, 3), (3, -256, 3, 0), (-1, 0, 3, 0), (3, 100, 3, 0), (3, 1 << 60, 3, 0), (3, 1 << 70,
     3, 0)],
    ids=["too few", "odd", "negative offset", "negative buffer", "misaligned", "far", "huge"],
)  # fmt: skip
def test_places_that_cannot_be_are_refused(places: tuple[int, ...]) -> None:
    came, _ = round_of([Bucket((Entry(W, 0, 0), Entry(V, 0, 256)))], {0: 1024})
    with pytest.raises(BadBufferError):
        came.moved(places)


def test_the_least_recently_used_session_is_forgotten() -> None:
    memory = Memory()
    rounds = [round_of([], {})[0]]
    for number in range(MAX_REMEMBERED):
        memory.put(f"token {number}", rounds)
    assert memory.get("token 0") is not None
    memory.put("one more", rounds)
    assert memory.get("token 1") is None
    assert memory.get("token 0") == tuple(rounds)


@pytest.mark.parametrize(
    ("rounds", "fit"),
    [([[]] * 5, True), ([[]] * 6, False), ([[Bucket(())] * 4], True), ([[Bucket(())] * 5], False)],
    ids=["rounds", "too many rounds", "buckets", "too many buckets"],
)
def test_what_is_empty_takes_memory_too(monkeypatch: pytest.MonkeyPatch, rounds: list[list[Bucket]], fit: bool) -> None:
    monkeypatch.setattr(remembered_module, "MAX_TENSORS", 10)
    memory = Memory()
    for token in ("first", "second"):
        memory.put(token, [round_of(buckets, {})[0] for buckets in rounds])
    assert (memory.get("first") is not None) == fit
    assert memory.get("second") is not None
