"""The service thread of a rank: real sockets, real shared memory, and a scheduler that the test plays."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import msgspec
import pytest
import zmq

from sglang_recv import identity, wire
from sglang_recv.channel import Dealer
from sglang_recv.errors import ApplyError, NotPausedError, RecvError, SessionAbortedError
from sglang_recv.fdpass import MAX_MESSAGE, FdConnection, make_private_dir
from sglang_recv.fds import OwnedFd
from sglang_recv.memory import ExportableBuffer, allocate
from sglang_recv.memory.memfd import MemfdBuffer
from sglang_recv.receiver import service as service_module
from sglang_recv.receiver import session as session_module
from sglang_recv.receiver.catalog import Catalog
from sglang_recv.receiver.mailbox import ChecksumDone, Mailbox, OpenVoted, RoundDone, SessionEnded, WeightsStatus
from sglang_recv.receiver.service import Service, Sources
from sglang_recv.wire import (
    Abort,
    AbortCarrier,
    Aborted,
    Ack,
    Alive,
    Attach,
    Attached,
    Bucket,
    BufferMapped,
    Carrier,
    Checksum,
    ChecksumCarrier,
    ChecksumRequest,
    Committed,
    Entry,
    Error,
    Finish,
    Heartbeat,
    Hello,
    LeaderEnd,
    Load,
    LoadCarrier,
    MemorySaver,
    OfferBuffer,
    Open,
    OpenCarrier,
    Opened,
    Prepared,
    RankFailed,
    ReleaseBuffer,
    Released,
    TensorSpec,
    Welcome,
)
from support.rank import CPU, PATIENCE, NoFence, facts_of
from support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
A, B = "a" * 32, "b" * 32
W = TensorSpec("w", "float32", (4, 2))
T = TypeVar("T")


class FakeApplier:
    """Everything was read and reached."""

    def apply(self, tensors: object) -> None:
        raise AssertionError("the test applies nothing")

    def unread(self) -> tuple[str, ...]:
        return ()

    def report(self) -> None:
        """A rank need not say how it loaded."""

    def missing(self) -> tuple[str, ...]:
        return ()


class Broken:
    """A fence on a device that failed."""

    def synchronize(self) -> None:
        raise RuntimeError("illegal memory access")


class Served:
    """One rank's service, with what it injects."""

    def __init__(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        self.folder = folder
        self.number = rank
        self.mailbox = Mailbox()
        self.carriers: queue.SimpleQueue[Carrier] = queue.SimpleQueue()
        catalog = Catalog({}, model_dtype="float32", tied_embeddings=False, num_layers=None)
        sources = Sources(
            lambda: MemorySaver(True, ("kv_cache",), False), lambda: "v0", lambda: catalog, self.carriers.put
        )
        self.service = Service(facts_of("engine", rank, ranks), sources, self.mailbox, folder)

    @property
    def thread(self) -> threading.Thread:
        return self.service._thread

    @property
    def connections(self) -> int:
        return len(self.service._connections)

    def carrier(self, kind: type[T]) -> T:
        """The next carrier that was injected."""
        found = self.carriers.get(timeout=PATIENCE)
        assert isinstance(found, kind), found
        return found

    def voted(self, error: RecvError | None = None, session: str = A) -> None:
        self.mailbox.post(OpenVoted(session, error, None if error else FakeApplier()))

    def done(self, number: int, error: RecvError | None = None, session: str = A, fence: Any = None) -> None:
        """A load carrier ran."""
        self.mailbox.post(RoundDone(session, number, fence or NoFence(), 0.25, error))

    def ended(self, error: RecvError | None = None, version: str = "", session: str = A, fence: Any = None) -> None:
        self.mailbox.post(SessionEnded(session, version, error, True, fence or NoFence()))

    def check_alive(self) -> None:
        """It still answers a newcomer."""
        with Sender(self) as other:
            assert isinstance(other.ask(Hello(wire.PROTOCOL_MAJOR, 0, "newcomer")), Welcome)
        assert self.mailbox.broken == ""


class Sender:
    """A sender's two connections to one rank."""

    def __init__(self, served: Served, session: str = A, name: str = "t0") -> None:
        self.session, self.name = session, name
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dealer = Dealer(self._context, served.service.control_url)
        self.fds = FdConnection.connect(served.service.fds_path, PATIENCE)
        self.buffers: list[ExportableBuffer] = []

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.fds.close()
        self.dealer.close()
        self._context.term()
        for buffer in self.buffers:
            buffer.close()

    def say(self, message: msgspec.Struct | bytes) -> None:
        self.dealer.send(message if isinstance(message, bytes) else wire.encode(message))

    def hear(self) -> Any:
        assert self.dealer.socket.poll(int(PATIENCE * 1000)), "no answer"
        raw = self.dealer.receive()
        assert raw is not None
        message = wire.decode(raw, wire.RankMessage)
        if isinstance(message, Committed):
            # Its times are never the same twice; the last ones stay here.
            self.spent = message.spent
            message = msgspec.structs.replace(message, spent=None)
        return message

    def ask(self, message: msgspec.Struct | bytes) -> Any:
        self.say(message)
        return self.hear()

    def tell_fds(self, message: msgspec.Struct | bytes, fd: int | None = None) -> Any:
        """What is answered on the fd socket."""
        self.fds.send(message if isinstance(message, bytes) else wire.encode(message), fd, PATIENCE)
        raw, stray = self.fds.recv(PATIENCE)
        assert stray is None
        return wire.decode(raw, wire.FdReply)

    def attach(self) -> None:
        assert self.tell_fds(Attach(self.session, self.name)) == Attached(self.session)

    def open(self, served: Served, kind: str = "partial", **kwargs: Any) -> None:
        """A session on the only rank, up to ``Opened``."""
        self.attach()
        self.say(Open(self.session, self.name, kind, 4096, **kwargs))
        assert served.carrier(OpenCarrier) == OpenCarrier(self.session, kind)
        served.voted(session=self.session)
        assert self.hear() == Opened(self.session)

    def offer(self, number: int = 0) -> Any:
        """Give a buffer away; what is answered."""
        buffer = allocate(CPU, 4096)
        self.buffers.append(buffer)
        with buffer.export_fd() as fd:
            return self.tell_fds(OfferBuffer(self.session, number, "memfd", buffer.nbytes), fd.fileno())

    def eof(self) -> None:
        """The rank closes the fd connection, after whatever it still has to say."""
        with pytest.raises(EOFError):
            self._read_all()

    def connected(self) -> None:
        """The rank has not closed the fd connection, and has nothing more to say on it."""
        with pytest.raises(BlockingIOError):
            self.fds.recv(timeout=0)

    def _read_all(self) -> None:
        while True:
            self.fds.recv(PATIENCE)

    def write_forever(self, message: msgspec.Struct) -> None:
        raw = wire.encode(message)
        while True:
            self.fds.send(raw, timeout=PATIENCE)


@pytest.fixture(autouse=True)
def usual() -> Iterator[float]:
    """The switch interval: a service takes the one at its making for the usual one, and other tests made some."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield 0.005
    sys.setswitchinterval(before)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a short path: that of a Unix socket has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="recv") as root:
        made = Path(root) / "e"
        make_private_dir(made)
        yield made


@contextlib.contextmanager
def serving(folder: Path, rank: int = 0, ranks: int = 1) -> Iterator[Served]:
    made = Served(folder, rank, ranks)
    made.service.start()
    try:
        yield made
    finally:
        made.service.close()
        assert not made.thread.is_alive()


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with serving(folder) as made:
        yield made


def open_fds() -> set[str]:
    """The fds of this process, each with what it is."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        # The one that listed the folder is gone.
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{name}: {os.readlink(f'/proc/self/fd/{name}')}")
    return found


def mapped() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:sglang_recv")


# --- handshake ------------------------------------------------------------------------------------------------------


def test_welcome_says_what_the_rank_is(served: Served) -> None:
    served.mailbox.status = WeightsStatus("poisoned", "session x ended half-way")
    with Sender(served) as sender:
        assert sender.ask(Hello(wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR + 1, "t0")) == Welcome(
            protocol_major=wire.PROTOCOL_MAJOR, protocol_minor=wire.PROTOCOL_MINOR,
            engine="engine", rank=0, ranks=1, device=identity.device_id(CPU, 0), boot_id=identity.boot_id(),
            mode="vmm", memory_kind="memfd", alignment=256, lease_seconds=15.0, progress_seconds=1800.0,
            sglang_version="test", model="test", dtype="float32",
            weights_state="poisoned", weights_reason="session x ended half-way", weight_version="v0",
            full_required=True, memory_saver=MemorySaver(True, ("kv_cache",), False), session="",
            groups=(("q_a_proj", "kv_a_proj_with_mqa"),), catalog_digest="",
        )  # fmt: skip
        sender.open(served, kind="full")
        assert sender.ask(Hello(wire.PROTOCOL_MAJOR, 0, "t0")).session == A


@pytest.mark.parametrize("major", [0, wire.PROTOCOL_MAJOR + 1])
def test_another_major_is_refused_and_ends_nothing(served: Served, major: int) -> None:
    with Sender(served) as sender, Sender(served) as other:
        sender.open(served)
        error = other.ask(Hello(major, 7, "old"))
        assert (error.error_code, error.session) == ("PROTOCOL_VERSION", "")
        assert f"sender old speaks protocol {major}.7, this side speaks 1.{wire.PROTOCOL_MINOR}" in error.message
        assert sender.ask(Heartbeat(A, "t0")) == Alive(A, "idle")


# --- junk -----------------------------------------------------------------------------------------------------------

JUNK = {
    "no msgpack": b"\xc1",
    "a number": b"\x05",
    "another direction": wire.encode(Opened(A)),
    "unknown type": b"\x82\xa4type\xa3New\xa7session\xd9\x20" + A.encode(),
    "empty": b"",
    "cut": wire.encode(Finish(A, 1))[:-1],
    "huge length": b"\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("what", sorted(JUNK))
def test_junk_on_the_control_endpoint_is_refused_and_ends_nothing(served: Served, what: str) -> None:
    with Sender(served) as sender, Sender(served) as other:
        sender.open(served)
        error = other.ask(JUNK[what])
        assert (error.error_code, error.session) == ("BAD_MESSAGE", "")
        assert sender.ask(JUNK[what]).error_code == "BAD_MESSAGE"
        assert sender.ask(Heartbeat(A, "t0")) == Alive(A, "idle")
        assert served.carriers.empty()


def test_other_framings_are_dropped(served: Served) -> None:
    with Sender(served) as sender:
        sender.dealer.socket.send_multipart([b"", wire.encode(Hello(wire.PROTOCOL_MAJOR, 0, "req"))])
        sender.dealer.socket.send_multipart([b"a", b"b", b"c"])
        assert sender.ask(Heartbeat(A, "t0")) == Alive("", "idle"), "the first answer is to the first whole message"


@pytest.mark.parametrize("what", sorted(set(JUNK) - {"empty"}))
def test_junk_on_the_fd_socket_is_refused_and_ends_nothing(served: Served, what: str) -> None:
    with Sender(served) as sender:
        sender.open(served)
        before = open_fds()
        read, write = os.pipe()
        try:
            for fd in (None, write):
                error = sender.tell_fds(JUNK[what], fd)
                assert (error.error_code, error.session) == ("BAD_MESSAGE", A)
        finally:
            os.close(write)
        # The rank's copy of the pipe is closed: nobody can write to it any more.
        assert select.select([read], [], [], PATIENCE)[0]
        assert os.read(read, 1) == b""
        os.close(read)
        assert open_fds() == before
        assert sender.offer() == BufferMapped(A, 0)
        assert sender.ask(Heartbeat(A, "t0")) == Alive(A, "idle")


def test_fds_come_with_offers_only(served: Served) -> None:
    with Sender(served) as sender, Sender(served) as stranger:
        sender.open(served)
        with OwnedFd(os.memfd_create("x", os.MFD_CLOEXEC)) as fd:
            assert "came with Attach" in sender.tell_fds(Attach(A, "t0"), fd.fileno()).message
            assert "without an fd" in sender.tell_fds(OfferBuffer(A, 0, "memfd", 4096)).message
            refused = stranger.tell_fds(OfferBuffer(A, 0, "memfd", 4096), fd.fileno())
            assert (refused.error_code, refused.session) == ("SESSION_STATE", "")
            assert "on a connection of no session" in refused.message
            refused = sender.tell_fds(OfferBuffer(A, 0, "memfd", 4096), fd.fileno())
            assert (refused.error_code, refused.session) == ("BUFFER", A)
        assert sender.ask(Heartbeat(A, "t0")) == Alive(A, "idle")


def test_a_packet_above_the_limit_is_refused(served: Served) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.settimeout(PATIENCE)
        raw.connect(str(served.service.fds_path))
        raw.send(b"\xc0" * (MAX_MESSAGE + 1))
        error = wire.decode(raw.recv(MAX_MESSAGE), wire.FdReply)
        assert error.error_code == "BAD_MESSAGE"
    served.check_alive()


@pytest.mark.parametrize(
    "raw",
    [b"\xc1", wire.encode(Hello(1, 0, "t")), wire.encode(RankFailed(A, 1, Error("APPLY", "x", "f")))[:-1]],
    ids=["no msgpack", "a sender's", "cut"],
)
def test_junk_on_the_link_does_not_end_the_thread(served: Served, raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Dealer(context, f"ipc://{served.folder / 'leader.link'}", b"1") as link:
        link.send(raw)
        wait_until(lambda: "a report of a rank failed" in caplog.text, PATIENCE, "the report was refused")
    context.term()
    with Sender(served) as sender:
        sender.open(served)


def test_a_long_text_goes_over_the_link_as_it_is(served: Served) -> None:
    error = Error("APPLY", "x" * 1_000_000, "f")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Dealer(context, f"ipc://{served.folder / 'leader.link'}", b"1") as link:
        link.send(wire.encode(RankFailed(A, 1, error)))
        assert link.socket.poll(int(PATIENCE * 1000)), "no answer"
        raw = link.receive()
        assert raw is not None
        assert wire.decode(raw, wire.LeaderMessage) == LeaderEnd(A, error)
    context.term()


# --- senders that go ------------------------------------------------------------------------------------------------


def test_senders_that_go_right_after_attach_leave_nothing(served: Served) -> None:
    served.check_alive()
    wait_until(lambda: served.connections == 0, PATIENCE, "the first connection is dropped")
    before = open_fds()
    for number in range(200):
        connection = FdConnection.connect(served.service.fds_path, PATIENCE)
        connection.send(wire.encode(Attach(A, f"t{number}")))
        connection.close()
    # Fewer may be left: ZMQ closes what belonged to the sender above when it gets to it.
    wait_until(lambda: served.connections == 0 and open_fds() <= before, PATIENCE, "all connections are dropped")
    served.check_alive()
    assert served.carriers.empty()


KILLED = """
import signal, sys
from pathlib import Path
from sglang_recv import wire
from sglang_recv.fdpass import FdConnection
connection = FdConnection.connect(Path(sys.argv[1]), 20)
connection.send(wire.encode(wire.Attach(sys.argv[2], "t0")))
print(connection.recv(20), flush=True)
signal.pause()
"""


def test_a_killed_sender_loses_its_session_at_once(served: Served) -> None:
    command = [sys.executable, "-c", KILLED, str(served.service.fds_path), A]
    with Sender(served, B) as sender:
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            sender.say(Open(A, "t0", "partial", 0))
            served.carrier(OpenCarrier)
            served.voted()
            assert sender.hear() == Opened(A)
            child.send_signal(signal.SIGKILL)
        abort = served.carrier(AbortCarrier)
        assert (abort.session, abort.error.error_code) == (A, "LEASE_LOST")
        assert "its Unix socket closed" in abort.error.message
        served.ended(abort.error.exception())
        assert sender.hear().error_code == "LEASE_LOST"
        sender.open(served)


def test_a_sender_that_never_reads_is_hung_up_on(served: Served) -> None:
    with Sender(served) as other, Sender(served, B) as deaf:
        deaf.open(served)
        with pytest.raises(EOFError):
            deaf.write_forever(Attach(B, "t0"))
        assert isinstance(other.ask(Hello(wire.PROTOCOL_MAJOR, 0, "other")), Welcome)
        abort = served.carrier(AbortCarrier)
        assert (abort.session, abort.error.error_code) == (B, "LEASE_LOST")
        assert "Attached could not be delivered" in abort.error.message
        served.ended(abort.error.exception(), session=B)
        assert deaf.hear().error_code == "LEASE_LOST"


def test_the_lease_ends_a_silent_session(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    # The module's own name for it alone: everything else in this process keeps the real clock.
    monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=lambda: now))
    with Sender(served) as sender:
        sender.open(served)
        now = 114.0
        sender.ask(Heartbeat(A, "t0"))
        now = 128.0
        assert sender.ask(Heartbeat(A, "somebody else")) == Alive(A, "idle"), "14 s after the last beat"
        now = 130.0
        abort = served.carrier(AbortCarrier)
        assert (abort.session, abort.error.error_code) == (A, "LEASE_LOST")
        assert "silent for 16.0 s, the lease is 15.0 s" in abort.error.message
        served.ended(abort.error.exception())
        assert sender.hear().error_code == "LEASE_LOST"
        sender.connected()


# --- limits ---------------------------------------------------------------------------------------------------------


def test_a_connection_too_many_is_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_MAX_PEERS", 3)
    with contextlib.ExitStack() as stack:
        senders = [stack.enter_context(Sender(served)) for _ in range(3)]
        for sender in senders:
            sender.attach()
        late = stack.enter_context(Sender(served))
        late.eof()
        for sender in senders:
            sender.attach()
        senders[0].fds.close()
        wait_until(lambda: served.connections == 2, PATIENCE, "the first connection is dropped")
        stack.enter_context(Sender(served)).attach()


OUT_OF_FDS = """
import logging, os, resource, socket, sys, tempfile
from pathlib import Path
sys.path.insert(0, "tests")
from sglang_recv import wire
from sglang_recv.fdpass import FdConnection, make_private_dir
from support.waiting import wait_until
from unit.test_service import PATIENCE, Sender, Served, A
refused = []
class Count(logging.Handler):
    def emit(self, record):
        refused.append(record.getMessage())
log = logging.getLogger("sglang_recv.receiver.service")
log.addHandler(Count())
log.propagate = False
with tempfile.TemporaryDirectory(prefix="recv") as root:
    folder = Path(root) / "e"
    make_private_dir(folder)
    served = Served(folder)
    served.service.start()
    with Sender(served) as sender:
        sender.open(served)
        late = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
        spare = []
        try:
            while True:
                spare.append(os.dup(0))
        except OSError:
            pass
        late.connect(str(served.service.fds_path))
        wait_until(lambda: refused, PATIENCE, "the connection was refused")
        for _ in range(20):
            assert sender.ask(wire.Heartbeat(A, "t0")) == wire.Alive(A, "idle")
        try:
            wait_until(lambda: len(refused) > 12, 1.0, "the thread spins")
        except TimeoutError:
            pass
        assert "Too many open files" in refused[0], refused[0]
        print(len(refused))
        for fd in spare:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        connection = FdConnection(late)
        connection.send(wire.encode(wire.Attach(A, "t0")))
        raw, _ = connection.recv(PATIENCE)
        assert wire.decode(raw, wire.FdReply) == wire.Attached(A)
        connection.close()
    served.service.close()
    assert not served.thread.is_alive() and served.mailbox.broken == ""
"""


def test_out_of_fds_only_the_new_connection_waits_and_the_thread_does_not_spin() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_FDS], cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert 1 <= int(done.stdout) <= 12, "once in 250 ms"


# --- buffers and rounds ---------------------------------------------------------------------------------------------


def test_a_session_from_open_to_commit(served: Served) -> None:
    before, fds = mapped(), open_fds()
    with Sender(served) as sender:
        sender.open(served)
        assert sender.offer(0) == BufferMapped(A, 0)
        assert sender.offer(1) == BufferMapped(A, 1)
        assert mapped() == before + 4
        sender.say(Load(A, 0, (Bucket((Entry(W, 0, 256),)),)))
        assert served.carrier(LoadCarrier) == LoadCarrier(A, 0)
        sender.buffers[0].tensor()[256:288].fill_(0x40)
        ((name, tensor),) = served.mailbox.take_round(A, 0)[0].tensors()
        assert (name, tensor.tolist()) == ("w", [[3.0039215087890625] * 2] * 4), "bytes of 0x40"
        del tensor
        served.done(0)
        assert sender.hear() == Ack(A, 0, 0.25)
        assert sender.ask(ReleaseBuffer(A, 1)) == Released(A, 1)
        assert mapped() == before + 3
        assert sender.ask(Finish(A, 1)) == Prepared(A)
        assert served.mailbox.is_prepared(A)
        served.ended(version="v1")
        assert sender.hear() == Committed(A, "v1")
        assert sender.spent is not None
        assert sender.spent.load == 0.25, "as in the Ack of its only round"
        assert sender.spent.map > 0
        assert mapped() == before + 2, "told after the rank has unmapped"
        sender.connected()
    assert served.carriers.empty()
    wait_until(lambda: open_fds() == fds, PATIENCE, "all fds are closed")


def test_a_buffer_offered_twice_is_refused_and_the_first_stays(served: Served) -> None:
    before = mapped()
    with Sender(served) as sender:
        sender.open(served)
        assert sender.offer(0) == BufferMapped(A, 0)
        fds = open_fds()
        error = sender.offer(0)
        assert (error.error_code, error.session) == ("BUFFER", A)
        assert "buffer 0 is mapped already" in error.message
        assert len(open_fds() - fds) == 2, "the test's own second buffer: its fd, and the one that mmap keeps"
        assert mapped() == before + 3
        sender.say(Load(A, 0, (Bucket((Entry(W, 0, 0),)),)))
        assert served.carrier(LoadCarrier) == LoadCarrier(A, 0), "an error on the fd socket does not end the session"
        served.done(0)
        assert sender.hear() == Ack(A, 0, 0.25)


def test_a_bad_message_ends_the_session_that_it_names(served: Served) -> None:
    with Sender(served) as sender, Sender(served, B) as other:
        sender.open(served)
        assert other.ask(Load(B, 0, ())).error_code == "SESSION_STATE"
        sender.say(Load(A, 5, ()))
        abort = served.carrier(AbortCarrier)
        assert (abort.session, abort.error.error_code) == (A, "SESSION_STATE")
        served.ended(abort.error.exception())
        answer = sender.hear()
        assert (answer.error_code, answer.session) == ("SESSION_STATE", A)
        assert "round 5 came, round 0 was due" in answer.message


def test_a_refused_open_ends_nothing(served: Served) -> None:
    with Sender(served) as sender, Sender(served, A, "t1") as same, Sender(served, B, "t1") as other:
        sender.open(served)
        for rival in (same, other):
            rival.attach()
            answer = rival.ask(Open(rival.session, "t1", "partial", 0))
            assert (answer.error_code, answer.session) == ("BUSY", rival.session)
        assert sender.ask(Heartbeat(A, "t0")) == Alive(A, "idle")
        assert served.carriers.empty()


def test_open_needs_a_connection_of_the_same_session_and_sender(served: Served) -> None:
    """Else nothing would tell the rank at once that the sender died."""
    with Sender(served) as sender, Sender(served, B, "t1") as other, Sender(served) as late:
        other.attach()  # of another session, and of another sender
        for opened in (Open(A, "t0", "partial", 0), Open(B, "t0", "partial", 0), Open(A, "t1", "partial", 0)):
            answer = sender.ask(opened)
            assert (answer.error_code, answer.session) == ("SESSION_STATE", opened.session)
            assert "without a connection" in answer.message
        sender.attach()
        sender.fds.close()
        wait_until(lambda: served.connections == 2, PATIENCE, "the connection is dropped")
        assert sender.ask(Open(A, "t0", "partial", 0)).error_code == "SESSION_STATE"
        late.open(served)
        assert sender.ask(Open(A, "t0", "partial", 0)).error_code == "BUSY"
        assert sender.ask(Open(B, "t0", "partial", 0)).error_code == "SESSION_STATE"
        assert late.ask(Heartbeat(A, "t0")) == Alive(A, "idle")
    assert served.carriers.empty() or isinstance(served.carriers.get(), AbortCarrier), "of the sender that left"


def test_a_session_id_is_used_once(served: Served) -> None:
    with Sender(served) as sender, Sender(served) as other:
        sender.open(served)
        served.ended(version="v1")
        assert sender.hear() == Committed(A, "v1")
        for again in (sender, other):
            again.attach()
            answer = again.ask(Open(A, "t0", "partial", 0))
            assert (answer.error_code, answer.session) == ("SESSION_STATE", A)
            assert "was used before" in answer.message
        served.check_alive()
    assert served.carriers.empty()


@pytest.mark.parametrize("where", ["import_buffer", "view"])
def test_a_buffer_that_cannot_be_mapped_for_whatever_reason_is_answered(
    where: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = mapped()

    def fail(*_: object) -> NoReturn:
        raise RuntimeError("a driver of another kind")

    with Sender(served) as sender:
        sender.open(served)
        with monkeypatch.context() as patched:
            if where == "view":
                patched.setattr(MemfdBuffer, "_view", fail)
            else:
                patched.setattr(session_module, "import_buffer", fail)
            refused = sender.offer()
        assert (refused.error_code, refused.session) == ("INTERNAL", A)
        assert "rank 0 cannot map a buffer: RuntimeError: a driver of another kind" in refused.message
        assert mapped() == before + 1, "the sender's own"
        assert sender.offer() == BufferMapped(A, 0), "the session goes on, and the id is free"
        assert served.carriers.empty()


def test_a_connection_outlives_its_session_and_belongs_to_none(served: Served) -> None:
    """Its end could overtake the last answer; so the sender closes it, and what it does then ends nobody's session."""
    with Sender(served) as sender, Sender(served, B, "t1") as other:
        sender.open(served)
        served.ended(version="v1")
        assert sender.hear() == Committed(A, "v1")
        other.open(served)
        refused = sender.offer()
        assert (refused.error_code, refused.session) == ("SESSION_STATE", "")
        assert "on a connection of no session" in refused.message
        sender.connected()
        sender.fds.close()
        wait_until(lambda: served.connections == 1, PATIENCE, "the connection is dropped")
        assert other.ask(Heartbeat(B, "t1")) == Alive(B, "idle")
        assert served.carriers.empty()


def test_one_connection_serves_session_after_session(served: Served) -> None:
    with Sender(served) as sender:
        for session in (A, B):
            sender.session = session
            sender.open(served)
            assert sender.offer() == BufferMapped(session, 0)
            served.ended(version="v1", session=session)
            assert sender.hear() == Committed(session, "v1")
        assert served.connections == 1


def test_an_abort_is_answered_when_the_scheduler_threads_know(served: Served) -> None:
    with Sender(served) as sender:
        sender.open(served)
        sender.say(Abort(A, "enough"))
        abort = served.carrier(AbortCarrier)
        served.mailbox.status = WeightsStatus("poisoned", "why")
        served.ended(abort.error.exception())
        assert sender.hear() == Aborted(A, "aborted by its sender: enough", "poisoned")


@pytest.mark.parametrize("token", ["t", ""])
def test_checksums_go_to_who_asked(served: Served, token: str) -> None:
    with Sender(served) as one, Sender(served) as two:
        one.say(ChecksumRequest(token))
        assert served.carrier(ChecksumCarrier) == ChecksumCarrier(token, 0)
        two.say(ChecksumRequest("other"))
        assert served.carrier(ChecksumCarrier) == ChecksumCarrier("other", 0)
        served.mailbox.post(ChecksumDone("nobody's", {}, None))
        served.mailbox.post(ChecksumDone("other", {}, ApplyError("no memory", fix="free some")))
        served.mailbox.post(ChecksumDone(token, {"w": "00"}, None))
        digest = one.hear()
        assert isinstance(digest, Checksum)
        assert (digest.token, digest.rank, digest.tensors, digest.weight_version) == (token, 0, {"w": "00"}, "v0")
        assert two.hear() == Error("APPLY", "no memory", "free some")


# --- errors of other people's making --------------------------------------------------------------------------------

TEXTS = {
    "long": "x" * 100_000,
    "surrogate": "file \udcff",
    "surrogates": "\ud800" * 10_000,
    "wide": "\U0001f600" * 9000,
}


@pytest.mark.parametrize("what", sorted(TEXTS))
def test_any_text_of_an_error_reaches_the_sender(served: Served, what: str) -> None:
    text = TEXTS[what]
    error = NotPausedError(text, fix=text, details=(text,) * 300)
    with Sender(served) as refused, Sender(served, B) as sender:
        refused.attach()
        refused.say(Open(A, "t0", "partial", 0))
        served.carrier(OpenCarrier)
        served.voted(error)
        answer = refused.hear()
        assert (answer.error_code, answer.session, len(answer.details)) == ("NOT_PAUSED", A, 200)
        assert answer.message.startswith(text[:10].encode(errors="replace").decode())
        assert {answer.message, answer.fix, *answer.details} == {wire.printable(text)}
        sender.open(served)
        sender.say(Load(B, 0, ()))
        served.carrier(LoadCarrier)
        served.done(0, ApplyError(text, fix=text), B)
        abort = served.carrier(AbortCarrier)
        assert abort.error.message == answer.message
        assert wire.decode_carrier(wire.encode_carrier(abort)) == abort
        served.ended(abort.error.exception(), session=B)
        assert sender.hear().error_code == "APPLY"


def test_an_unforeseen_exception_ends_the_session_and_not_the_thread(served: Served) -> None:
    with Sender(served) as sender:
        sender.open(served)
        sender.say(Load(A, 0, ()))
        served.carrier(LoadCarrier)
        served.done(0, fence=Broken())
        abort = served.carrier(AbortCarrier)
        assert (abort.session, abort.error.error_code) == (A, "INTERNAL")
        assert "work of the device failed on rank 0: RuntimeError: illegal memory access" in abort.error.message
        served.ended(abort.error.exception(), fence=Broken())
        assert sender.hear().error_code == "INTERNAL"
    with Sender(served, B) as sender:
        sender.open(served)


def test_an_unforeseen_exception_in_a_message_is_answered(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("unforeseen")

    with Sender(served) as sender:
        sender.open(served)
        with monkeypatch.context() as patch:
            patch.setattr(served.service._session, "finish", fail)
            answer = sender.ask(Finish(B, 0))
            assert (answer.error_code, answer.message, answer.session) == ("INTERNAL", "KeyError: 'unforeseen'", B)
            sender.say(Finish(A, 0))
            assert served.carrier(AbortCarrier).error.message == "KeyError: 'unforeseen'"


def test_an_unforeseen_exception_while_a_session_ends_does_not_hold_the_rank(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no memory for the catalog")

    before = mapped()
    with Sender(served) as sender, Sender(served, B, "t1") as other:
        sender.open(served, kind="full")
        sender.offer()
        sender.say(Load(A, 0, (Bucket((Entry(W, 0, 0),)),)))
        served.carrier(LoadCarrier)
        served.mailbox.take_round(A, 0)
        served.done(0)
        assert sender.hear() == Ack(A, 0, 0.25)
        assert sender.ask(Finish(A, 1)) == Prepared(A)
        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "learn", fail)
            served.ended(version="v1")
            assert sender.hear() == Committed(A, "v1"), "the scheduler has switched, whatever is learned of it"
            wait_until(lambda: "the committed manifest was not learned" in caplog.text, PATIENCE, "it failed")
        assert "no memory for the catalog" in caplog.text
        assert mapped() == before + 1, "the sender's own"
        other.open(served)
        assert other.ask(Heartbeat(B, "t1")) == Alive(B, "idle")
    assert served.mailbox.broken == ""


# --- the end --------------------------------------------------------------------------------------------------------


def test_while_a_sender_is_connected_threads_switch_more_often(served: Served, usual: float) -> None:
    with Sender(served) as first:
        wait_until(lambda: sys.getswitchinterval() < usual, PATIENCE, "the interval is short before Open")
        assert sys.getswitchinterval() == pytest.approx(0.0002)
        with Sender(served, B) as second:
            wait_until(lambda: served.connections == 2, PATIENCE, "both are connected")
            first.open(served)
            served.ended(SessionAbortedError("over", fix=""))
            first.hear()
            first.fds.close()
            wait_until(lambda: served.connections == 1, PATIENCE, "the first connection is dropped")
            assert isinstance(second.ask(Hello(wire.PROTOCOL_MAJOR, 0, "t0")), Welcome)
            assert sys.getswitchinterval() == pytest.approx(0.0002), "another one is connected"
    wait_until(lambda: sys.getswitchinterval() == usual, PATIENCE, "the interval is as before")


def test_the_death_of_the_thread_is_told_to_the_scheduler(
    folder: Path, monkeypatch: pytest.MonkeyPatch, usual: float
) -> None:
    fds, before = open_fds(), mapped()
    with serving(folder) as served, Sender(served) as sender:
        sender.open(served)
        wait_until(lambda: sys.getswitchinterval() < usual, PATIENCE, "the interval is short")

        def die() -> None:
            raise MemoryError("no more")

        assert sender.offer() == BufferMapped(A, 0)
        monkeypatch.setattr(served.service, "_from_link", die)
        sender.say(Heartbeat(A, "t0"))
        served.thread.join(PATIENCE)
        assert not served.thread.is_alive()
        assert served.mailbox.broken == "MemoryError: no more"
        assert mapped() == before + 1, "the sender's own"
        assert sys.getswitchinterval() == usual
        assert list(folder.iterdir()) == []
        sender.eof()
        served.voted()  # the scheduler thread may still be in a step
    assert open_fds() == fds


def test_close_leaves_no_file_fd_or_thread(folder: Path) -> None:
    fds, threads = open_fds(), set(threading.enumerate())
    with serving(folder) as served:
        assert {path.name for path in folder.iterdir()} == {"rank0.control", "rank0.fds", "leader.link"}
        with Sender(served) as sender, Sender(served):
            sender.open(served)
            served.service.close()
            assert not served.thread.is_alive()
            assert list(folder.iterdir()) == []
            sender.eof()
        served.service.close()
    assert served.mailbox.broken == ""
    assert set(threading.enumerate()) == threads
    assert open_fds() == fds


def test_close_unmaps_the_buffers_of_a_live_session(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = mapped()
    with serving(folder) as served, Sender(served) as sender:
        sender.open(served)
        assert sender.offer() == BufferMapped(A, 0)
        # A round that no scheduler has taken: its views must not keep the buffer.
        sender.say(Load(A, 0, (Bucket((Entry(W, 0, 0),)),)))
        served.carrier(LoadCarrier)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            served.service.close()
        assert [str(warning.message) for warning in caught] == [], "closed while a view of it is alive"
        assert "could not be unmapped" not in caplog.text
        assert mapped() == before + 1, "the sender's own"


def test_the_death_of_the_thread_does_not_unmap_what_the_scheduler_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = mapped()
    with serving(folder) as served, Sender(served) as sender:
        sender.open(served)
        assert sender.offer() == BufferMapped(A, 0)
        sender.say(Load(A, 0, (Bucket((Entry(W, 0, 0),)),)))
        served.carrier(LoadCarrier)
        views = served.mailbox.take_round(A, 0)  # and not done yet

        def die() -> None:
            raise MemoryError("no more")

        monkeypatch.setattr(served.service, "_from_link", die)
        sender.say(Heartbeat(A, "t0"))
        served.thread.join(PATIENCE)
        assert not served.thread.is_alive()
        assert len(views) == 1
        left = mapped() - before
    assert left == 2, "the sender's mapping and the rank's"
    live = served.service._session._live
    assert live is not None
    views.clear()
    live.views.clear()
    live.buffers[0].close()  # what the end of the process does otherwise
    assert mapped() == before


def test_close_of_a_service_that_never_started(folder: Path) -> None:
    """Another rank failed between binding and start."""
    fds = open_fds()
    served = Served(folder)
    for _ in range(2):
        served.service.close()
        assert list(folder.iterdir()) == []
        assert open_fds() == fds
    assert served.thread.ident is None


# --- two ranks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(folder: Path) -> Iterator[tuple[Served, Served]]:
    leader, other = Served(folder, 0, 2), Served(folder, 1, 2)
    leader.service.start()
    other.service.start()
    yield leader, other
    other.service.close()
    leader.service.close()


def test_ranks_work_through_their_leader(two: tuple[Served, Served]) -> None:
    leader, other = two
    with Sender(leader, name="t0") as first, Sender(other, name="t1") as second:
        for sender in (second, first):
            sender.attach()
            sender.say(Open(A, sender.name, "full", 0))
            assert sender.ask(Hello(wire.PROTOCOL_MAJOR, 0, sender.name)).session == A
        assert leader.carrier(OpenCarrier) == OpenCarrier(A, "full")
        for served in two:
            served.voted()
        assert (first.hear(), second.hear()) == (Opened(A), Opened(A))
        # Rank 1 has the only round; rank 0 has finished, which counts as ready.
        assert second.offer() == BufferMapped(A, 0)
        second.say(Load(A, 0, (Bucket((Entry(W, 0, 0),)),)))
        first.say(Finish(A, 0))
        assert leader.carrier(LoadCarrier) == LoadCarrier(A, 0)
        assert leader.mailbox.take_round(A, 0) == []
        for served in two:
            served.done(0)
        assert second.hear() == Ack(A, 0, 0.25)
        second.say(Finish(A, 1))
        assert (first.hear(), second.hear()) == (Prepared(A), Prepared(A))
        assert leader.mailbox.is_prepared(A)
        for served in two:
            served.ended(version="v1")
        assert (first.hear(), second.hear()) == (Committed(A, "v1"), Committed(A, "v1"))
    assert other.carriers.empty(), "only the leader injects"
    assert leader.carriers.empty()


def test_a_rank_that_fails_before_the_carrier_ends_all(two: tuple[Served, Served]) -> None:
    leader, other = two
    with Sender(leader, name="t0") as first:
        first.attach()
        first.say(Open(A, "t0", "full", 0))
        assert first.ask(Hello(wire.PROTOCOL_MAJOR, 0, "t0")).session == A, "the leader has it before the rival comes"
        with Sender(other, B, "t1") as rival:
            rival.attach()
            answer = rival.ask(Open(B, "t1", "full", 0))
            assert (answer.error_code, answer.session) == ("BUSY", B), "by the leader, over the link"
        with Sender(other, A, "t1") as second:
            second.attach()
            answer = second.ask(Open(A, "t1", "partial", 0))
            assert (answer.error_code, answer.session) == ("SESSION_STATE", A)
        assert first.hear().message == answer.message
    assert leader.carriers.empty()


def test_an_error_on_any_rank_is_an_abort_by_the_leader(two: tuple[Served, Served]) -> None:
    leader, other = two
    with Sender(leader, name="t0") as first, Sender(other, name="t1") as second:
        for sender in (first, second):
            sender.attach()
            sender.say(Open(A, sender.name, "full", 0))
        leader.carrier(OpenCarrier)
        for served in two:
            served.voted()
        assert (first.hear(), second.hear()) == (Opened(A), Opened(A))
        second.fds.close()
        abort = leader.carrier(AbortCarrier)
        assert (abort.session, abort.error.error_code) == (A, "LEASE_LOST")
        assert "sender t1" in abort.error.message
        for served in two:
            served.ended(abort.error.exception())
        assert [sender.hear().error_code for sender in (first, second)] == ["LEASE_LOST"] * 2


def test_both_ranks_answer_checksums(two: tuple[Served, Served]) -> None:
    leader, other = two
    with Sender(other) as sender:
        sender.say(ChecksumRequest("t"))
        assert leader.carrier(ChecksumCarrier) == ChecksumCarrier("t", 1)
        other.mailbox.post(ChecksumDone("t", {"w": "00"}, None))
        assert sender.hear().rank == 1
