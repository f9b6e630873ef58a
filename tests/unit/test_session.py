"""One rank's service thread without sockets: what it refuses and why, what it keeps mapped, and when it lets go."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from sglang_recv.errors import (
    ApplyError,
    CommitError,
    NotPausedError,
    RecvError,
    SessionAbortedError,
    SessionStateError,
)
from sglang_recv.fds import OwnedFd
from sglang_recv.memory import MemoryKind, allocate
from sglang_recv.receiver import apply as apply_module
from sglang_recv.receiver import session as session_module
from sglang_recv.receiver.apply import ModelApplier, Observations
from sglang_recv.receiver.catalog import LOADED_TOGETHER, Catalog
from sglang_recv.receiver.mailbox import Mailbox, OpenVoted, RoundDone, SessionEnded, WeightsStatus
from sglang_recv.receiver.replicated import _detached
from sglang_recv.receiver.session import RankSession
from sglang_recv.wire import (
    Abort,
    Aborted,
    Ack,
    Bucket,
    Committed,
    Entry,
    Error,
    Finish,
    Load,
    OfferBuffer,
    Open,
    Opened,
    Prepared,
    RankFailed,
    RankFinished,
    RankOpened,
    RankRead,
    RankReady,
    ReleaseBuffer,
    Released,
    TensorSpec,
)

CPU = torch.device("cpu")
A, B, C = "a" * 32, "b" * 32, "c" * 32
PEER, OTHER, THIRD = b"peer", b"other", b"third"
PAGE = allocate(CPU, 1)
SIZE = PAGE.nbytes
PAGE.close()

W = TensorSpec("w", "float32", (4, 2))
V = TensorSpec("v", "bfloat16", (3,))
SPECS = {spec.name: spec for spec in (W, V, TensorSpec("lm_head.weight", "float32", (2,)))}


def mapped() -> int:
    """How many mappings of staging memory this process has, the exporter's own among them."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:sglang_recv")


class Outbox:
    """Everything that a session sends, in order, with the number of mappings at that time."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any, Any]] = []
        self.mapped: list[int] = []

    def _add(self, where: str, whom: Any, what: Any) -> None:
        if isinstance(what, Committed):
            # Its times are never the same twice; the last ones stay here.
            self.spent = what.spent
            what = msgspec.structs.replace(what, spent=None)
        self.sent.append((where, whom, what))
        self.mapped.append(mapped())

    def to_sender(self, peer: bytes, message: Any) -> None:
        self._add("sender", peer, message)

    def to_leader(self, report: Any) -> None:
        self._add("leader", None, report)

    def over(self, session: str) -> None:
        self._add("over", session, None)

    def take(self) -> list[tuple[str, Any, Any]]:
        """What was sent since the last call."""
        found, self.sent, self.mapped = self.sent, [], []
        return found


def answer(message: Any, peer: bytes = PEER) -> tuple[str, bytes, Any]:
    return ("sender", peer, message)


def report(message: Any) -> tuple[str, None, Any]:
    return ("leader", None, message)


def over(session: str = A) -> tuple[str, str, None]:
    return ("over", session, None)


class FakeApplier:
    """Says what the scheduler thread would have recorded."""

    def __init__(self, unread: Sequence[str] = (), missing: Sequence[str] = ()) -> None:
        self._unread, self._missing = tuple(unread), tuple(missing)

    def apply(self, tensors: object) -> None:
        raise AssertionError("the service thread applies nothing")

    def unread(self) -> tuple[str, ...]:
        return self._unread

    def report(self) -> None:
        """A rank need not say how it loaded."""

    def missing(self) -> tuple[str, ...]:
        return self._missing


class Rank:
    """A session with its surroundings, and short ways through its states."""

    def __init__(
        self,
        specs: dict[str, TensorSpec],
        monkeypatch: pytest.MonkeyPatch,
        groups: Sequence[Sequence[str]] = LOADED_TOGETHER,
    ) -> None:
        self.now = 100.0
        # The module's own name for it alone: everything else in this process keeps the real clock.
        monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.box = Mailbox()
        self.out = Outbox()
        self.catalogs = 0
        self._specs = specs
        self.session = RankSession(
            3, CPU, MemoryKind.MEMFD, self.box, self._catalog, self.out,
            groups=groups, lease_seconds=15.0, progress_seconds=600.0,
        )  # fmt: skip
        self.buffers: dict[int, Any] = {}

    def _catalog(self) -> Catalog:
        self.catalogs += 1
        return Catalog(self._specs, model_dtype="bfloat16", tied_embeddings=True, num_layers=None)

    def close(self) -> None:
        live = self.session.live
        if live:
            self.session.ended(SessionEnded(live, "", SessionAbortedError("test over", fix=""), False, None))
        self.box.drop_rounds()
        self.box.wakeup.close()
        for buffer in self.buffers.values():
            buffer.close()

    def open(self, session: str = A, kind: str = "full", peer: bytes = PEER, **kwargs: Any) -> None:
        self.session.open(peer, Open(session, "t0", kind, 1 << 20, **kwargs))

    def voted(self, applier: Any = None, session: str = A) -> None:
        self.session.open_voted(OpenVoted(session, None, applier or FakeApplier()))

    def opened(self, applier: Any = None, **kwargs: Any) -> None:
        self.open(**kwargs)
        self.voted(applier)
        self.out.take()

    def buffer(self, number: int) -> Any:
        """The sender's side of a buffer."""
        if number not in self.buffers:
            self.buffers[number] = allocate(CPU, SIZE)
        return self.buffers[number]

    def offer(self, number: int = 0, nbytes: int = SIZE, **kwargs: Any) -> OwnedFd:
        fd: OwnedFd = self.buffer(number).export_fd()
        fields: dict[str, Any] = {"session": A, "buffer": number, "kind": "memfd", "nbytes": nbytes} | kwargs
        self.session.offer("t0", OfferBuffer(**fields), fd)
        return fd

    def load(self, number: int, *entries: Entry, session: str = A) -> None:
        self.session.load(PEER, Load(session, number, (Bucket(entries),)))

    def done(self, number: int, error: RecvError | None = None, seconds: float = 0.5) -> None:
        self.box.take_round(A, number)
        self.session.round_done(RoundDone(A, number, None, seconds, error))

    def ended(self, error: RecvError | None, version: str = "", session: str = A) -> None:
        self.session.ended(SessionEnded(session, version, error, True, None, finalize=0.25, flush=0.125))

    def refuses(self, step: Callable[[], object], code: str, *parts: str) -> RecvError:
        """``step`` raises an error that says what and how to mend it, and sends nothing."""
        self.out.take()
        error: RecvError | None = None
        try:
            step()
        except RecvError as raised:
            error = raised.with_traceback(None)  # its frames hold views of the buffers
        assert error is not None, f"no {code}"
        assert error.code == code
        text = " | ".join((error.message, *error.details))
        assert all(part in text for part in parts), text
        assert error.fix
        assert self.out.take() == []
        return error


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    made = Rank(SPECS, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """A rank that knows nothing of its model's tensors."""
    made = Rank({}, monkeypatch)
    yield made
    made.close()


# --- open -----------------------------------------------------------------------------------------------------------


def test_open_tells_the_leader_and_waits_for_the_vote(rank: Rank) -> None:
    rank.open()
    assert rank.session.live == A
    assert rank.out.take() == [report(RankOpened(A, 3, "full", "t0"))]
    rank.voted()
    assert rank.out.take() == [answer(Opened(A))]


def test_a_vote_against_it_frees_the_rank(rank: Rank) -> None:
    rank.box.status = WeightsStatus("poisoned", "why")
    rank.open()
    rank.out.take()
    refused = NotPausedError("the engine is running requests", fix="pause it", details=("line",))
    rank.session.open_voted(OpenVoted(A, refused))
    assert rank.out.take() == [answer(Error.of(refused, A, "poisoned")), over()]
    assert rank.session.live == ""
    rank.open(B)
    assert rank.session.live == B


@pytest.mark.parametrize("length", [16, 32, 64])
def test_session_ids_within_the_limits(rank: Rank, length: int) -> None:
    rank.open("s" * length)
    assert rank.session.live == "s" * length


@pytest.mark.parametrize("length", [0, 15, 65])
def test_session_ids_outside_the_limits_are_refused(rank: Rank, length: int) -> None:
    rank.refuses(lambda: rank.open("s" * length), "BAD_MESSAGE", f"a session id of {length} and")
    assert rank.session.live == ""


@pytest.mark.parametrize("kind", ["", "Full", "delta"])
def test_unknown_kinds_are_refused(rank: Rank, kind: str) -> None:
    rank.refuses(lambda: rank.open(kind=kind), "BAD_MESSAGE", repr(kind), "full", "partial")
    assert rank.session.live == ""


def test_a_busy_rank_names_its_holder(rank: Rank) -> None:
    rank.open()
    error = rank.refuses(lambda: rank.open(B), "BUSY", "session aaaaaaaa of sender t0 holds this rank")
    assert "takeover" in error.fix
    assert rank.session.live == A


def test_an_announced_manifest_is_checked_whole(rank: Rank) -> None:
    wrong = (TensorSpec("w", "float32", (2, 4)), TensorSpec("x", "int8", (1,)))
    error = rank.refuses(lambda: rank.open(manifest=wrong), "MANIFEST", "3 problem(s)")
    assert error.details == (
        "w: shape [2, 4], the engine expects [4, 2]",
        "x: the engine's model has no tensor of this name",
        "v: missing",
    )
    double = (W, W, TensorSpec("", "bf16", ()))
    rank.refuses(lambda: rank.open(manifest=double), "MANIFEST", "w: sent twice", "a name of 0", "'bf16'", "v: missing")
    assert rank.session.live == ""
    rank.open(manifest=(W, V))
    assert rank.session.live == A


def test_a_partial_manifest_needs_not_be_whole(rank: Rank) -> None:
    rank.open(kind="partial", manifest=(V,))
    assert rank.out.take() == [report(RankOpened(A, 3, "partial", "t0"))]


def test_without_a_catalog_any_names_may_be_announced(bare: Rank) -> None:
    bare.open(manifest=(TensorSpec("anything", "int8", (1,)),))
    assert bare.session.live == A


def test_the_catalog_is_made_once_and_only_when_needed(rank: Rank) -> None:
    rank.refuses(lambda: rank.open("s"), "BAD_MESSAGE")
    assert rank.catalogs == 0
    rank.open(manifest=(W, V))
    assert rank.session.catalog.problems([W]) == []
    assert rank.catalogs == 1


# --- buffers --------------------------------------------------------------------------------------------------------


def test_buffers_are_mapped_and_their_fds_closed(rank: Rank) -> None:
    before = mapped()
    rank.open()
    fd = rank.buffer(7).export_fd()
    offer = OfferBuffer(A, 7, "memfd", SIZE)
    rank.refuses(lambda: rank.session.offer("t0", offer, fd), "SESSION_STATE", "is opening", "open or receiving")
    assert fd.closed
    assert mapped() == before + 1
    rank.voted()
    assert rank.offer(7).closed
    assert mapped() == before + 2, "the exporter's mapping and the rank's"


def test_each_bad_offer_is_refused_and_its_fd_closed(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.opened()
    rank.offer(0)
    before = mapped()
    fds: list[OwnedFd] = []
    original = RankSession.offer

    def spy(self: RankSession, sender: str, message: OfferBuffer, fd: OwnedFd) -> None:
        fds.append(fd)
        original(self, sender, message, fd)

    monkeypatch.setattr(RankSession, "offer", spy)
    rank.refuses(lambda: rank.offer(0), "BUFFER", "buffer 0 is mapped already")
    rank.buffers[1] = rank.buffers[0]
    rank.refuses(lambda: rank.offer(1, kind="cuda_vmm"), "BUFFER", "'cuda_vmm'", "'memfd'")
    rank.refuses(lambda: rank.offer(1, nbytes=2 * SIZE), "BUFFER", f"{2 * SIZE} bytes was announced", f"has {SIZE}")
    rank.refuses(lambda: rank.offer(1, nbytes=SIZE - 1), "BUFFER", f"{SIZE - 1} bytes was announced")
    rank.refuses(lambda: rank.offer(1, nbytes=-SIZE), "BUFFER", f"{-SIZE} bytes")
    rank.refuses(lambda: rank.offer(1, session=B), "SESSION_STATE", "session bbbbbbbb is not open on rank 3")
    monkeypatch.setattr(session_module, "MAX_BUFFERS", 1)
    rank.refuses(lambda: rank.offer(1), "BUFFER", "1 buffers are mapped, which is the limit")
    assert len(fds) == 7
    assert all(fd.closed for fd in fds)
    assert mapped() == before
    del rank.buffers[1]


def test_an_fd_that_is_no_memfd_is_refused(rank: Rank, tmp_path: Path) -> None:
    rank.opened()
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(SIZE)
        fd = OwnedFd(os.dup(file.fileno()))
        rank.refuses(lambda: rank.session.offer("t0", OfferBuffer(A, 0, "memfd", SIZE), fd), "BUFFER", "a regular file")
    assert fd.closed


def test_a_buffer_is_released_after_the_rounds_that_use_it(rank: Rank) -> None:
    rank.opened()
    rank.offer(0)
    rank.offer(1)
    before = mapped()
    rank.load(0, Entry(W, 0, 0))
    rank.load(1, Entry(V, 0, 0))
    rank.refuses(lambda: rank.session.release(PEER, ReleaseBuffer(A, 0)), "BUFFER", "buffer 0 is used by rounds [0, 1]")
    rank.done(0)
    rank.refuses(lambda: rank.session.release(PEER, ReleaseBuffer(A, 0)), "BUFFER", "buffer 0 is used by rounds [1]")
    rank.done(1)
    rank.out.take()
    rank.session.release(PEER, ReleaseBuffer(A, 0))
    assert rank.out.take() == [answer(Released(A, 0))]
    assert mapped() == before - 1
    rank.refuses(lambda: rank.session.release(PEER, ReleaseBuffer(A, 0)), "BUFFER", "buffer 0 is not mapped")
    rank.refuses(lambda: rank.load(2, Entry(TensorSpec("lm_head.weight", "float32", (2,)), 0, 0)), "BUFFER", "buffer 0")
    rank.offer(0)  # the number may be given again
    assert mapped() == before


# --- load -----------------------------------------------------------------------------------------------------------


def test_a_round_is_the_senders_bytes_in_place(rank: Rank) -> None:
    rank.opened()
    rank.offer(0)
    rank.offer(1)
    weights = torch.arange(8.0).view(4, 2)
    other = torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16)
    rank.buffers[0].tensor()[512 : 512 + 32].copy_(weights.view(torch.uint8).reshape(-1))
    rank.buffers[1].tensor()[SIZE - 256 : SIZE - 250].copy_(other.view(torch.uint8))
    rank.session.load(PEER, Load(A, 0, (Bucket((Entry(W, 0, 512), Entry(V, 1, SIZE - 256))), Bucket(()))))
    assert rank.out.take() == [report(RankReady(A, 3, 0))]
    buckets = rank.box.take_round(A, 0)
    (first, second), empty = (bucket.tensors() for bucket in buckets)
    assert (first[0], second[0], list(empty)) == ("w", "v", [])
    assert torch.equal(first[1], weights)
    assert torch.equal(second[1], other)
    rank.buffers[0].tensor()[512:516].zero_()
    assert float(first[1][0, 0]) == 0, "a view of shared memory, not a copy"


def test_tensors_without_bytes_need_no_buffer(bare: Rank) -> None:
    bare.opened()
    bare.load(0, Entry(TensorSpec("none", "int64", (0, 5)), 99, 7))
    buckets = bare.box.take_round(A, 0)
    ((name, tensor),) = buckets[0].tensors()
    assert (name, tensor.dtype, tuple(tensor.shape)) == ("none", torch.int64, (0, 5))


LIMIT = SIZE - 256
BAD_ENTRIES = {
    "buffer not mapped": (Entry(W, 5, 0), "BUFFER", ("w: bytes 0 to 32 of buffer 5", "has 0 mapped bytes")),
    "behind the end": (Entry(W, 0, SIZE), "BUFFER", (f"w: bytes {SIZE} to {SIZE + 32} of buffer 0", f"has {SIZE}")),
    "over the end": (Entry(TensorSpec("w", "int8", (257,)), 0, LIMIT), "BUFFER", (f"{LIMIT} to {LIMIT + 257}",)),
    "negative": (Entry(W, 0, -256), "BUFFER", ("w: bytes -256 to -224",)),
    "misaligned": (Entry(W, 0, 128), "BUFFER", ("w: bytes 128 to 160", "multiples of 256")),
    "huge offset": (Entry(W, 0, 1 << 63), "BUFFER", (f"w: bytes {1 << 63} to",)),
    "huge shape": (Entry(TensorSpec("w", "float32", (1 << 62, 1 << 62)), 0, 0), "MANIFEST", ("w: shape",)),
    "dtype": (Entry(TensorSpec("w", "bf16", (4,)), 0, 0), "MANIFEST", ("w: 'bf16' is not a torch dtype",)),
    "negative shape": (Entry(TensorSpec("w", "float32", (-4,)), 0, 0), "MANIFEST", ("w: shape [-4]",)),
}


@pytest.mark.parametrize("what", sorted(BAD_ENTRIES))
def test_each_bad_entry_is_refused_with_its_value(bare: Rank, what: str) -> None:
    entry, code, parts = BAD_ENTRIES[what]
    bare.opened()
    bare.offer(0)
    bare.refuses(lambda: bare.load(0, Entry(V, 0, 0), entry), code, *parts)
    assert bare.box.take_round(A, 0) == []
    bare.load(0, Entry(V, 0, 0), Entry(W, 0, LIMIT))
    assert bare.out.take() == [report(RankReady(A, 3, 0))], "a refused round leaves no trace"


@pytest.mark.parametrize(
    "spec",
    [TensorSpec("w", "float32", (0, 1 << 63)), TensorSpec("w", "float32", (0, 1 << 62, 1 << 62))],
    ids=["size", "numel"],
)
def test_empty_shapes_that_torch_cannot_make_are_refused(bare: Rank, spec: TensorSpec) -> None:
    bare.opened()
    bare.refuses(lambda: bare.load(0, Entry(spec, 0, 0)), "MANIFEST", "w")


def test_what_a_lazy_sender_sends_is_checked_against_the_catalog(rank: Rank) -> None:
    rank.opened()
    rank.offer(0)
    wrong = TensorSpec("v", "float32", (3,))
    rank.refuses(
        lambda: rank.load(0, Entry(wrong, 0, 0), Entry(TensorSpec("x", "int8", (1,)), 0, 256)),
        "MANIFEST", "round 0 does not fit", "v: dtype float32, the engine expects bfloat16", "x: the engine",
    )  # fmt: skip
    rank.load(0, Entry(W, 0, 0))
    rank.refuses(lambda: rank.load(1, Entry(V, 0, 0), Entry(W, 0, 256)), "MANIFEST", "w: sent twice")
    rank.refuses(lambda: rank.load(1, Entry(V, 0, 0), Entry(V, 0, 256)), "MANIFEST", "v: sent twice")


Q_A, KV_A = (f"model.layers.3.self_attn.{part}.weight" for part in ("q_a_proj", "kv_a_proj_with_mqa"))


def test_what_is_loaded_together_must_be_in_one_bucket(bare: Rank) -> None:
    first, second = TensorSpec(Q_A, "float32", (2,)), TensorSpec(KV_A, "float32", (2,))
    bare.opened(kind="partial")
    bare.offer(0)
    split = (Bucket((Entry(first, 0, 0),)), Bucket((Entry(second, 0, 256),)))
    error = bare.refuses(lambda: bare.session.load(PEER, Load(A, 0, split)), "MANIFEST", "2 problem(s)")
    assert error.details == (f"{Q_A}: needs {KV_A} in the same bucket", f"{KV_A}: needs {Q_A} in the same bucket")
    bare.refuses(lambda: bare.load(0, Entry(first, 0, 0)), "MANIFEST", KV_A)
    bare.load(0, Entry(second, 0, 0), Entry(first, 0, 256))
    assert bare.out.take() == [report(RankReady(A, 3, 0))]


def test_a_half_whose_mate_the_model_does_not_have_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models without q_lora_rank (DeepSeek-V2-Lite, Moonlight) have no q_a_proj; their engines name no group."""
    spec = TensorSpec(KV_A, "float32", (2,))
    rank = Rank({KV_A: spec}, monkeypatch, groups=())
    try:
        rank.opened(manifest=(spec,))
        rank.offer(0)
        rank.load(0, Entry(spec, 0, 0))
        assert rank.out.take() == [report(RankReady(A, 3, 0))]
    finally:
        rank.close()


def test_what_was_announced_is_what_may_come(bare: Rank) -> None:
    bare.opened(kind="partial", manifest=(W, V))
    bare.offer(0)
    changed, stray = TensorSpec("w", "float32", (8,)), TensorSpec("x", "int8", (1,))
    error = bare.refuses(lambda: bare.load(0, Entry(changed, 0, 0), Entry(stray, 0, 256)), "MANIFEST", "2 problem(s)")
    assert error.details == ("w: float32[8] is not what was announced", "x: int8[1] is not what was announced")
    bare.load(0, Entry(W, 0, 0))


def test_who_announced_nothing_may_send_nothing(bare: Rank) -> None:
    bare.opened(kind="partial", manifest=())
    bare.offer(0)
    bare.refuses(lambda: bare.load(0, Entry(W, 0, 0)), "MANIFEST", "w: float32[4, 2] is not what was announced")


@pytest.mark.parametrize("number", [-1, 1, 7])
def test_rounds_come_in_order(rank: Rank, number: int) -> None:
    rank.opened()
    rank.refuses(lambda: rank.load(number), "SESSION_STATE", f"round {number} came, round 0 was due")
    rank.load(0)
    rank.refuses(lambda: rank.load(0), "SESSION_STATE", "round 0 came, round 1 was due")


def test_too_many_buckets_are_a_limit(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_BUCKETS_PER_ROUND", 2)
    rank.opened()
    rank.refuses(
        lambda: rank.session.load(PEER, Load(A, 0, (Bucket(()),) * 3)),
        "LIMIT",
        "3 buckets in one round, the limit is 2",
    )
    rank.session.load(PEER, Load(A, 0, (Bucket(()),) * 2))


def test_acks_follow_the_device_and_later_rounds_of_others_are_not_ours(rank: Rank) -> None:
    rank.opened()
    rank.offer(0)
    rank.load(0, Entry(W, 0, 0))
    rank.out.take()
    rank.done(0, seconds=0.25)
    assert rank.out.take() == [answer(Ack(A, 0, 0.25))]
    rank.done(1)
    rank.session.round_done(RoundDone(B, 0, None, 0.1, None))
    assert rank.out.take() == []


# --- which message in which state -----------------------------------------------------------------------------------


def messages(session: str) -> dict[str, Callable[[Rank], object]]:
    return {
        "load": lambda r: r.session.load(PEER, Load(session, 0, ())),
        "release": lambda r: r.session.release(PEER, ReleaseBuffer(session, 0)),
        "finish": lambda r: r.session.finish(PEER, Finish(session, 0)),
    }


@pytest.mark.parametrize("message", sorted(messages(A)))
def test_nothing_is_taken_before_every_rank_opened(rank: Rank, message: str) -> None:
    rank.open()
    rank.refuses(lambda: messages(A)[message](rank), "SESSION_STATE", "is opening, this message needs open")


@pytest.mark.parametrize("message", ["load", "finish"])
@pytest.mark.parametrize("state", ["finished", "prepared"])
def test_nothing_more_is_taken_after_finish(rank: Rank, message: str, state: str) -> None:
    rank.opened(kind="partial")
    rank.session.finish(PEER, Finish(A, 0))
    if state == "prepared":
        rank.session.prepared(A)
    rank.refuses(lambda: messages(A)[message](rank), "SESSION_STATE", f"session aaaaaaaa is {state}")


@pytest.mark.parametrize("message", [*sorted(messages(A)), "abort"])
def test_other_sessions_are_not_open(rank: Rank, message: str) -> None:
    steps: dict[str, Callable[[Rank], object]] = {
        **messages(B),
        "abort": lambda r: r.session.abort(OTHER, Abort(B, "why")),
    }
    rank.refuses(lambda: steps[message](rank), "SESSION_STATE", "session bbbbbbbb is not open on rank 3")
    rank.opened()
    rank.refuses(lambda: steps[message](rank), "SESSION_STATE", "session bbbbbbbb is not open on rank 3")


@pytest.mark.parametrize("message", [*sorted(messages(A)), "abort"])
def test_a_session_that_is_ending_takes_nothing(rank: Rank, message: str) -> None:
    steps: dict[str, Callable[[Rank], object]] = {
        **messages(A),
        "abort": lambda r: r.session.abort(PEER, Abort(A, "again")),
    }
    rank.opened()
    rank.session.abort(PEER, Abort(A, "why"))
    rank.refuses(lambda: steps[message](rank), "SESSION_STATE", "session aaaaaaaa is ending")


# --- finish and commit ----------------------------------------------------------------------------------------------


def test_finish_waits_for_the_last_round(rank: Rank) -> None:
    rank.opened(FakeApplier(["v", "lm_head.weight"], ["w: 4 of 32 bytes were not written"]))
    rank.offer(0)
    rank.load(0, Entry(W, 0, 0))
    rank.load(1, Entry(V, 0, 256))
    rank.done(0)
    rank.out.take()
    rank.session.finish(PEER, Finish(A, 2))
    assert rank.out.take() == []
    rank.done(1)
    # The tied lm_head is skipped by design, so that it was not read says nothing.
    finished = RankFinished(A, 3, 2, ("v",), ("w: 4 of 32 bytes were not written",))
    assert rank.out.take() == [answer(Ack(A, 1, 0.5)), report(finished)]
    rank.done(2)
    assert rank.out.take() == [], "once is enough"


def test_a_partial_update_misses_nothing(rank: Rank) -> None:
    rank.opened(FakeApplier(["v"], ["w: 32 of 32 bytes were not written"]), kind="partial")
    rank.session.finish(PEER, Finish(A, 0))
    assert rank.out.take() == [report(RankFinished(A, 3, 0, ("v",), ()))]


@pytest.mark.parametrize("rounds", [0, 2, -1])
def test_finish_must_know_the_number_of_rounds(rank: Rank, rounds: int) -> None:
    rank.opened()
    rank.load(0)
    rank.refuses(
        lambda: rank.session.finish(PEER, Finish(A, rounds)),
        "SESSION_STATE",
        f"finished {rounds} rounds, this rank got 1",
    )


@pytest.mark.parametrize("kind", ["full", "partial"])
def test_what_was_announced_must_have_been_sent(rank: Rank, kind: str) -> None:
    rank.opened(kind=kind, manifest=(W, V))
    rank.offer(0)
    rank.load(0, Entry(V, 0, 0))
    rank.refuses(lambda: rank.session.finish(PEER, Finish(A, 1)), "MANIFEST", "w: announced, but not sent")


def test_the_leader_asks_what_was_read(rank: Rank) -> None:
    rank.opened(FakeApplier(["v"]))
    rank.offer(0)
    rank.load(0, Entry(W, 0, 0), Entry(V, 0, 256))
    rank.done(0)
    rank.out.take()
    rank.session.asked(A, ["x", "w", "v"])
    assert rank.out.take() == [report(RankRead(A, 3, ("w",)))], "not the unread one, and not the one never sent here"
    rank.session.asked(B, ["w"])
    assert rank.out.take() == []


def commit(rank: Rank, *specs: TensorSpec, session: str = A, kind: str = "full", manifest: Any = None) -> None:
    """A whole session of one round."""
    rank.open(session, kind, manifest=manifest)
    rank.voted(session=session)
    rank.session.offer("t0", OfferBuffer(session, 0, "memfd", SIZE), rank.buffer(0).export_fd())
    rank.load(0, *(Entry(spec, 0, 256 * i) for i, spec in enumerate(specs)), session=session)
    rank.box.take_round(session, 0)
    rank.session.round_done(RoundDone(session, 0, None, 0.1, None))
    rank.session.finish(PEER, Finish(session, 1))
    rank.session.prepared(session)
    rank.out.take()
    rank.ended(None, "v1", session)


def test_committed_is_told_after_everything_is_unmapped(rank: Rank) -> None:
    before = mapped()
    rank.opened()
    rank.offer(0)
    rank.offer(1)
    rank.load(0, Entry(W, 0, 0))
    rank.load(1, Entry(V, 1, 0))
    rank.done(0)  # round 1 stays where it is: it is dropped with the session
    rank.session.prepared(A)
    assert rank.out.take()[-1] == answer(Prepared(A))
    rank.ended(None, "v1")
    assert rank.out.mapped == [before + 2, before + 2], "only the exporter's two mappings are left"
    assert rank.out.take() == [answer(Committed(A, "v1")), over()]
    spent = rank.out.spent
    assert spent is not None
    assert (spent.load, spent.flush) == (0.5, 0.125), "one round, and what the scheduler thread said of the commit"
    assert spent.finalize >= 0.25, "that thread's part of it, and the check of this one"
    assert rank.session.live == ""
    assert rank.box.take_round(A, 1) == [], "dropped with the session, not lost in it"


def test_the_catalog_is_what_the_last_full_commit_sent(rank: Rank) -> None:
    first = rank.session.catalog.digest
    commit(rank, W, kind="partial")
    assert rank.session.catalog.digest == first
    commit(rank, W, V, session="c" * 32)
    assert rank.session.catalog.digest != first
    missing = rank.session.catalog.missing([])
    assert missing == ["w: missing", "v: missing"]


def test_an_id_is_used_once(rank: Rank) -> None:
    commit(rank, W)
    with pytest.raises(SessionStateError, match="was used before"):
        rank.open(A)


def test_a_failed_commit_teaches_nothing(rank: Rank) -> None:
    digest = rank.session.catalog.digest
    rank.opened()
    rank.offer(0)
    rank.load(0, Entry(W, 0, 0))
    rank.done(0)
    rank.out.take()
    error = CommitError("no flush", fix="pause")
    rank.box.status = WeightsStatus("poisoned", "why")
    rank.ended(error)
    assert rank.out.take() == [answer(Error.of(error, A, "poisoned")), over()]
    assert rank.session.catalog.digest == digest


# --- ends -----------------------------------------------------------------------------------------------------------


def test_an_abort_goes_to_the_leader_and_is_answered_at_the_end(rank: Rank) -> None:
    before = mapped()
    rank.opened()
    rank.offer(0)
    rank.load(0, Entry(W, 0, 0))
    rank.out.take()
    rank.session.abort(PEER, Abort(A, "had enough"))
    (sent,) = rank.out.take()
    assert isinstance(sent[2], RankFailed)
    assert (sent[2].session, sent[2].rank, sent[2].error.error_code) == (A, 3, "ABORTED")
    assert sent[2].error.message == "aborted by its sender: had enough"
    assert rank.session.live == A
    rank.box.status = WeightsStatus("poisoned", "why")
    rank.ended(sent[2].error.exception())
    assert rank.out.mapped == [before + 1, before + 1]
    assert rank.out.take() == [answer(Aborted(A, "aborted by its sender: had enough", "poisoned")), over()]


def test_an_abort_before_the_scheduler_knew_is_answered_too(rank: Rank) -> None:
    rank.open()
    rank.session.abort(PEER, Abort(A, "why"))
    rank.out.take()
    rank.session.ended_by_leader(A, Error("ABORTED", "aborted by its sender: why", "open a new session"))
    assert rank.out.take() == [answer(Aborted(A, "aborted by its sender: why", "ready")), over()]


def test_a_commit_that_was_faster_than_the_abort_is_a_commit(rank: Rank) -> None:
    rank.opened()
    rank.session.abort(PEER, Abort(A, "why"))
    rank.out.take()
    rank.ended(None, "v1")
    assert rank.out.take() == [answer(Committed(A, "v1")), over()]


def test_an_error_of_the_loader_ends_the_session(rank: Rank) -> None:
    rank.opened()
    rank.load(0)
    rank.out.take()
    error = ApplyError("boom", fix="report it")
    rank.done(0, error)
    assert rank.out.take() == [report(RankFailed(A, 3, Error.of(error)))]
    rank.done(1, ApplyError("again", fix=""))
    assert rank.out.take() == [], "the first error is the one that counts"


def test_an_error_in_a_message_ends_the_live_session_only(rank: Rank) -> None:
    error = ApplyError("boom", fix="f")
    assert not rank.session.error(error, A)
    rank.open()
    rank.out.take()
    assert not rank.session.error(error, B)
    assert not rank.session.error(error, "")
    assert rank.out.take() == []
    assert rank.session.error(error, A)
    assert rank.out.take() == [report(RankFailed(A, 3, Error.of(error)))]
    assert rank.session.error(error, A)
    assert rank.out.take() == []


def test_the_end_by_the_leader_keeps_its_error(rank: Rank) -> None:
    rank.open()
    rank.out.take()
    busy = Error("BUSY", "session x holds this engine", "wait", ("line",))
    rank.session.ended_by_leader(B, busy)
    assert rank.out.take() == []
    rank.session.ended_by_leader(A, busy)
    assert rank.out.take() == [answer(Error("BUSY", busy.message, "wait", ("line",), A, "ready")), over()]
    assert rank.session.live == ""


def test_the_leader_does_not_unmap_what_the_scheduler_may_read(rank: Rank) -> None:
    """Rank 0 ran the abort and the leader closed its book; this rank is still in load_weights when its sender goes:
    RankFailed of a session that the leader has forgotten is answered by LeaderEnd."""
    rank.opened()
    rank.offer(0)
    rank.load(0, Entry(W, 0, 0))
    rank.box.take_round(A, 0)  # the scheduler thread is loading it
    before = mapped()
    rank.session.lost(A, "t0", "its Unix socket closed")
    rank.out.take()
    rank.session.ended_by_leader(A, Error("LEASE_LOST", "gone", "f"))
    assert mapped() == before
    assert rank.out.take() == []
    rank.ended(SessionAbortedError("the abort carrier came", fix=""))
    assert mapped() == before - 1
    assert rank.session.live == ""


def test_events_of_other_sessions_change_nothing(rank: Rank) -> None:
    rank.open()
    rank.out.take()
    rank.voted(session=B)
    rank.ended(None, "v1", B)
    rank.session.prepared(B)
    rank.session.lost(B, "t0", "gone")
    assert rank.out.take() == []
    assert rank.session.live == A


def test_a_buffer_that_cannot_be_freed_does_not_hold_the_session(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.opened()
    rank.offer(0)

    def fail(self: Any) -> None:
        original(self)
        raise CommitError("cuMemUnmap failed", fix="report it")

    kind = type(next(iter(rank.session._live.buffers.values())))  # type: ignore[union-attr]
    original = kind.close
    with monkeypatch.context() as patch:
        patch.setattr(kind, "close", fail)
        rank.ended(None, "v1")
    assert rank.out.take() == [answer(Committed(A, "v1")), over()]


class Failing(torch.nn.Module):
    """A loader that fails with a tensor in its hands."""

    def load_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            raise ValueError(f"{name}: no room for {tuple(tensor.shape)}")


def test_an_error_of_the_loader_does_not_keep_views_of_unmapped_memory(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the scheduler thread hands it over: latched when the round failed, and told when the session ends."""
    # pytest keeps the tracebacks that it logs, and with them the loader's frames; a handler that writes does not.
    monkeypatch.setattr(apply_module.logger, "exception", lambda *_: None)
    model = Failing()
    applier = ModelApplier(model, Observations(model))
    rank.opened(applier)
    rank.offer(0)
    rank.load(0, Entry(W, 0, 0))
    buckets = rank.box.take_round(A, 0)
    try:
        applier.apply(buckets[0])
    except ApplyError as raised:
        latched = _detached(raised)
    del buckets
    rank.out.take()
    before = mapped()
    rank.ended(latched)
    assert rank.out.take() == [answer(Error.of(latched, A, "ready")), over()]
    assert mapped() == before - 1
    assert "could not be unmapped" not in caplog.text, "closed while a view of it is alive"


def test_a_sender_that_lives_and_does_nothing_is_ended(rank: Rank) -> None:
    rank.opened()
    for _ in range(60):
        rank.now += 10.0
        rank.session.heard(A, "t0")
        rank.session.tick()
    assert rank.out.take() == [], "exactly at the limit"
    rank.load(0)
    rank.out.take()
    rank.done(0)
    rank.out.take()
    for _ in range(60):
        rank.now += 10.0
        rank.session.heard(A, "t0")
    rank.now += 1.0
    rank.session.tick()
    (sent,) = rank.out.take()
    assert sent[2].error.error_code == "DEADLINE"
    assert "alive, but has done nothing for 601 s (the limit is 600 s)" in sent[2].error.message
    assert "rank 3 is receiving after 1 rounds" in sent[2].error.message


# --- whose session it is --------------------------------------------------------------------------------------------


def test_messages_of_another_connection_are_refused_and_end_nothing(rank: Rank) -> None:
    rank.opened()
    rank.offer(0)
    steps: list[Callable[[], object]] = [
        lambda: rank.session.load(OTHER, Load(A, 0, ())),
        lambda: rank.session.release(OTHER, ReleaseBuffer(A, 0)),
        lambda: rank.session.finish(OTHER, Finish(A, 0)),
        lambda: rank.session.abort(OTHER, Abort(A, "why")),
    ]
    for step in steps:
        error = rank.refuses(step, "SESSION_STATE", "session aaaaaaaa is not open on rank 3")
        assert not rank.session.error(error, A, OTHER)
    fd = rank.buffer(1).export_fd()
    offer = OfferBuffer(A, 1, "memfd", SIZE)
    rank.refuses(lambda: rank.session.offer("somebody", offer, fd), "SESSION_STATE", "is not open")
    assert fd.closed
    rank.session.lost(A, "somebody", "its Unix socket closed")
    assert rank.out.take() == []
    rank.load(0, Entry(W, 0, 0))
    assert rank.session.error(ApplyError("boom", fix="f"), A, PEER)


def test_a_takeover_is_given_up_by_its_own_sender_only(rank: Rank) -> None:
    rank.opened()
    rank.session.open(OTHER, Open(B, "t1", "full", 0, takeover=True))
    rank.out.take()
    rank.session.lost(B, "t0", "its Unix socket closed")
    rank.refuses(lambda: rank.session.abort(PEER, Abort(B, "why")), "SESSION_STATE")
    rank.ended(SessionAbortedError("taken over", fix=""))
    assert rank.out.take()[-1] == report(RankOpened(B, 3, "full", "t1", True))


def test_staging_above_what_was_announced_is_refused(rank: Rank) -> None:
    rank.session.open(PEER, Open(A, "t0", "full", 2 * SIZE, (W, V)))
    rank.voted()
    rank.offer(0)
    rank.offer(1)
    rank.refuses(lambda: rank.offer(2), "BUFFER", f"brings staging to {3 * SIZE} bytes, {2 * SIZE} were announced")
    rank.session.release(PEER, ReleaseBuffer(A, 0))
    rank.offer(2)


# --- lease ----------------------------------------------------------------------------------------------------------


def lost(rank: Rank) -> str:
    """The LEASE_LOST that the leader was told, if it was."""
    return "; ".join(
        message.error.message
        for _, _, message in rank.out.take()
        if isinstance(message, RankFailed) and message.error.error_code == "LEASE_LOST"
    )


def test_silence_ends_the_session_once(rank: Rank) -> None:
    rank.session.tick()
    rank.open()
    rank.now += 15.0
    rank.session.tick()
    assert lost(rank) == ""
    rank.now += 0.1
    rank.session.tick()
    assert lost(rank) == "sender t0 of session aaaaaaaa is gone: silent for 15.1 s, the lease is 15.0 s"
    rank.session.tick()
    assert rank.out.take() == []


def test_heartbeats_of_the_owner_keep_it(rank: Rank) -> None:
    rank.open()
    for _ in range(10):
        rank.now += 14.0
        rank.session.heard(A, "t0")
        rank.session.tick()
    assert lost(rank) == ""
    rank.now += 14.0
    for session, sender in itertools.product((A, B), ("t0", "t1")):
        if (session, sender) != (A, "t0"):
            rank.session.heard(session, sender)
    rank.now += 1.1
    rank.session.tick()
    assert "silent for 15.1 s" in lost(rank)
    rank.session.heard(A, "t0")
    rank.session.tick()
    assert rank.out.take() == [], "what is lost stays lost"


def test_messages_keep_it_as_well(rank: Rank) -> None:
    rank.opened(kind="partial")
    for number in range(4):
        rank.now += 14.0
        rank.load(number)
        rank.session.tick()
    rank.now += 14.0
    rank.session.finish(PEER, Finish(A, 4))
    rank.now += 14.0
    rank.session.tick()
    assert lost(rank) == ""


def test_a_lost_connection_ends_it(rank: Rank) -> None:
    rank.opened()
    rank.session.lost(A, "t0", "its Unix socket closed (EOFError)")
    assert lost(rank) == "sender t0 of session aaaaaaaa is gone: its Unix socket closed (EOFError)"
    rank.session.lost(A, "t0", "again")
    assert rank.out.take() == []


# --- takeover -------------------------------------------------------------------------------------------------------


def test_takeover_ends_the_live_session_and_opens_after_it(rank: Rank) -> None:
    before = mapped()
    rank.opened()
    rank.offer(0)
    rank.open(B, "partial", OTHER, takeover=True)
    (sent,) = rank.out.take()
    assert isinstance(sent[2], RankFailed)
    assert (sent[2].session, sent[2].error.message) == (A, "taken over by sender t0")
    assert rank.session.live == A
    taken = sent[2].error.exception()
    rank.ended(taken)
    assert mapped() == before + 1
    assert rank.out.take() == [
        answer(Error.of(taken, A, "ready")),
        over(),
        report(RankOpened(B, 3, "partial", "t0", True)),
    ]
    rank.session.open_voted(OpenVoted(B, None, FakeApplier()))
    assert rank.out.take() == [answer(Opened(B), OTHER)]


def test_takeover_of_a_free_rank_is_an_open(rank: Rank) -> None:
    rank.open(takeover=True)
    assert rank.out.take() == [report(RankOpened(A, 3, "full", "t0", True))]


def test_takeover_of_a_session_that_commits_first_opens_after_the_commit(rank: Rank) -> None:
    rank.opened()
    rank.session.prepared(A)
    rank.open(B, peer=OTHER, takeover=True)
    rank.out.take()
    rank.ended(None, "v1")
    assert rank.out.take() == [answer(Committed(A, "v1")), over(), report(RankOpened(B, 3, "full", "t0", True))]


def test_a_bad_takeover_leaves_the_live_session_alone(rank: Rank) -> None:
    rank.opened()
    with pytest.raises(RecvError):
        rank.open(B, "delta", OTHER, takeover=True)
    assert rank.out.take() == []


def test_a_takeover_that_is_refused_in_the_end_is_answered(rank: Rank) -> None:
    rank.opened()
    try:
        rank.open(B, "full", OTHER, manifest=(TensorSpec("x", "int8", (1,)),), takeover=True)
    except RecvError:
        return  # better still: refused at once
    rank.out.take()
    rank.ended(SessionAbortedError("taken over", fix=""))
    _, _, (_, peer, message) = rank.out.take()
    assert (peer, message.error_code, message.session) == (OTHER, "MANIFEST", B)
    assert rank.session.live == ""


def test_two_waiting_takeovers_are_both_answered(rank: Rank) -> None:
    rank.opened()
    answered = []
    for session, peer in ((B, OTHER), (C, THIRD)):
        try:
            rank.open(session, peer=peer, takeover=True)
        except RecvError:
            answered.append(session)
    rank.ended(SessionAbortedError("taken over", fix=""))
    answered += [m.session for where, peer, m in rank.out.take() if isinstance(m, (Error, RankOpened))]
    assert {B, C} <= set(answered)


@pytest.mark.parametrize("how", ["abort", "connection"])
def test_a_waiting_takeover_can_be_given_up(rank: Rank, how: str) -> None:
    rank.opened()
    rank.open(B, peer=OTHER, takeover=True)
    if how == "abort":
        try:
            rank.session.abort(OTHER, Abort(B, "too slow"))
        except RecvError:
            pass  # that it isn't open is as good an answer; what counts is what happens next
    else:
        rank.session.lost(B, "t0", "its Unix socket closed")
    rank.ended(SessionAbortedError("taken over", fix=""))
    assert rank.session.live == ""
