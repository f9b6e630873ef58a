"""Message types and the msgpack codec: version, limits, strict typing.

A message is one :class:`msgspec.Struct` with a tag. Bytes become Python values by the ``msgpack`` package with its
length limits set, and Python values become a struct by ``msgspec.convert`` in strict mode, so nothing is ever
constructed that the struct does not declare. Fields that a newer version adds are ignored; message types that this
version does not know are refused. docs/wire.md shows the bytes.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack
import msgspec

from sglang_recv.errors import BadMessageError, LimitError, ProtocolVersionError, RecvError, error_from_code

PROTOCOL_MAJOR: Final = 1
PROTOCOL_MINOR: Final = 1

#: Largest encoded message, in bytes. A manifest of 500,000 tensors is about 30 MiB.
MAX_MESSAGE_BYTES: Final = 64 << 20
MAX_NAME_CHARS: Final = 1024
MAX_VERSION_CHARS: Final = 256
MAX_TENSORS: Final = 1_000_000
MAX_DIMS: Final = 16
MAX_BUFFERS: Final = 1024
MAX_BUCKETS_PER_ROUND: Final = 256
#: Longest message of an error that goes out; what is cut is in the log of the side that raised it.
MAX_ERROR_CHARS: Final = 4096

#: Longest carrier; an abort carries an error with its details.
MAX_CARRIER_CHARS: Final = 2 << 20
#: Key of the rank table in ``/server_info``.
INFO_KEY: Final = "sglang_recv"
#: The single key of SGLang's ``zmq_handles`` under which a carrier travels.
CARRIER_KEY: Final = "sglang_recv"


# gc=False: a manifest of a large MoE has tens of thousands of these, and they can be in no cycle; what the collector
# does not count does not make it scan the whole heap of an engine in the middle of a session.
class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Name, dtype (torch's name without the prefix, e.g. ``bfloat16``) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One contiguous tensor inside a buffer, ``offset`` bytes from its start."""

    spec: TensorSpec
    buffer: int
    offset: int


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that one call of ``load_weights`` gets."""

    entries: tuple[Entry, ...]


class MemorySaver(msgspec.Struct, frozen=True):
    """What the engine's memory saver is doing."""

    enabled: bool
    released: tuple[str, ...]
    weights_cpu_backup: bool


class RankInfo(msgspec.Struct, frozen=True):
    """Where one rank is and how to reach it. The engine publishes one per rank in ``/server_info``."""

    rank: int
    device: str
    boot_id: str
    control: str
    fds: str
    visible_devices: str


class RankTable(msgspec.Struct, frozen=True):
    """All ranks of one engine."""

    protocol_major: int
    protocol_minor: int
    engine: str
    mode: str
    ranks: tuple[RankInfo, ...]


# --- sender to rank -------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag=True, frozen=True):
    """First message of a sender on a control connection."""

    protocol_major: int
    protocol_minor: int
    sender: str


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """Renews the lease of a sender on its session."""

    session: str
    sender: str


class Open(msgspec.Struct, tag=True, frozen=True):
    """Opens a session on one rank.

    ``manifest`` is None when the sender converts lazily. ``staging_bytes`` announces the peak of memory on the device
    that this sender will offer, in bytes; it binds with a manifest. ``recall`` is the token of a committed session that
    this one may repeat round by round.
    """

    session: str
    sender: str
    kind: str
    staging_bytes: int
    manifest: tuple[TensorSpec, ...] | None = None
    takeover: bool = False
    recall: str = ""


class Announce(msgspec.Struct, tag=True, frozen=True):
    """What :class:`Open` may have left out, before the first round: the whole manifest, and the peak of memory."""

    session: str
    staging_bytes: int
    manifest: tuple[TensorSpec, ...]


class Load(msgspec.Struct, tag=True, frozen=True):
    """The buckets of one round for one rank."""

    session: str
    round: int
    buckets: tuple[Bucket, ...]


class Repeat(msgspec.Struct, tag=True, frozen=True):
    """The round of this number is as it was in the recalled session.

    ``buffers`` are the ids of the buffers that it lies in, in the order in which the recalled session first used them
    in this round. Where the same tensors lie elsewhere, ``places`` has the id of a buffer and an offset for each of
    them in turn, and ``buffers`` is empty.
    """

    session: str
    round: int
    buffers: tuple[int, ...]
    places: tuple[int, ...] = ()


class ReleaseBuffer(msgspec.Struct, tag=True, frozen=True):
    """Asks the rank to unmap one buffer."""

    session: str
    buffer: int


class Finish(msgspec.Struct, tag=True, frozen=True):
    """No more rounds from this sender; ``rounds`` is how many it sent. Under the token ``remember``, when there is one,
    the rank keeps what came in this session, if it is committed."""

    session: str
    rounds: int
    remember: str = ""


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Ends the session without a commit."""

    session: str
    reason: str


class ChecksumRequest(msgspec.Struct, tag=True, frozen=True):
    """Asks for digests of everything the model of this engine holds; ``token`` comes back in the answer."""

    token: str


SenderMessage = Hello | Heartbeat | Open | Announce | Load | Repeat | ReleaseBuffer | Finish | Abort | ChecksumRequest


# --- rank to sender -------------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """Answer to :class:`Hello`: who this rank is, what it can do, and what state it is in."""

    protocol_major: int
    protocol_minor: int
    engine: str
    rank: int
    ranks: int
    device: str
    boot_id: str
    mode: str
    memory_kind: str
    alignment: int
    lease_seconds: float
    progress_seconds: float
    sglang_version: str
    model: str
    dtype: str
    weights_state: str
    weights_reason: str
    weight_version: str
    full_required: bool
    memory_saver: MemorySaver
    session: str
    groups: tuple[tuple[str, ...], ...]
    catalog_digest: str


class Alive(msgspec.Struct, tag=True, frozen=True):
    """Answer to :class:`Heartbeat`; ``activity`` says what the rank is doing, for error messages of the other side."""

    session: str
    activity: str


class Opened(msgspec.Struct, tag=True, frozen=True):
    """Every rank opened and voted for the session; ``recalled`` when this one remembers the session to recall."""

    session: str
    recalled: bool = False


class Ack(msgspec.Struct, tag=True, frozen=True):
    """The device of this rank has read all buckets of the round; ``seconds`` is the time spent applying it."""

    session: str
    round: int
    seconds: float


class Released(msgspec.Struct, tag=True, frozen=True):
    """The buffer is unmapped."""

    session: str
    buffer: int


class Prepared(msgspec.Struct, tag=True, frozen=True):
    """Every rank has finished and the update is complete: the commit may be posted."""

    session: str


class Kept(msgspec.Struct, frozen=True):
    """Tensors that stay with the model's loader for one reason: how many, and the names of a few."""

    reason: str
    count: int
    names: tuple[str, ...]


class PlanReport(msgspec.Struct, frozen=True):
    """How one rank loaded what it got in a session.

    ``state`` is ``proven``, ``recorded`` (the next full update will prove it), ``off``, or why the recording is not
    used. ``replayed`` and ``loaded`` count tensors.
    """

    state: str
    replayed: int
    loaded: int
    proof_seconds: float
    kept: tuple[Kept, ...]


class RankSeconds(msgspec.Struct, frozen=True):
    """Where the time of one rank went in a session, in seconds.

    ``map`` is spent importing and mapping buffers, ``load`` applying rounds, ``finalize`` on the check that nothing is
    missing and on the commit (the vote, the wait for the device, the switch), ``flush`` on dropping KV in it.
    """

    map: float = 0.0
    load: float = 0.0
    finalize: float = 0.0
    flush: float = 0.0


class Committed(msgspec.Struct, tag=True, frozen=True):
    """The engine serves the new weights; all buffers of the session are unmapped."""

    session: str
    version: str
    plan: PlanReport | None = None
    spent: RankSeconds | None = None


class Aborted(msgspec.Struct, tag=True, frozen=True):
    """The session is over without a commit; all its buffers are unmapped."""

    session: str
    reason: str
    weights_state: str


class Checksum(msgspec.Struct, tag=True, frozen=True):
    """Digest of each tensor of the model (parameters, buffers, tensors held as attributes) and of all of them."""

    token: str
    rank: int
    digest: str
    tensors: dict[str, str]
    weight_version: str


def printable(text: str) -> str:
    """``text`` in what a message may hold: cut, and without control characters and lone surrogates."""
    cut = text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 4] + " ..."
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in cut)


class Error(msgspec.Struct, tag=True, frozen=True):
    """An error of the tree in :mod:`sglang_recv.errors`. With a ``session``, that session is over."""

    error_code: str
    message: str
    fix: str
    details: tuple[str, ...] = ()
    session: str = ""
    weights_state: str = ""

    @classmethod
    def of(cls, error: RecvError, session: str = "", weights_state: str = "") -> Error:
        """The message for ``error``, in what a message may hold: other people's texts can be of any length and form."""
        details = tuple(printable(line) for line in error.details[:200])
        return cls(error.code, printable(error.message), printable(error.fix), details, session, weights_state)

    def exception(self) -> RecvError:
        """The error that the other side raised."""
        return error_from_code(self.error_code, self.message, fix=self.fix, details=self.details)


RankMessage = Welcome | Alive | Opened | Ack | Released | Prepared | Committed | Aborted | Checksum | Error


# --- the fd socket --------------------------------------------------------------------------------------------------


class Attach(msgspec.Struct, tag=True, frozen=True):
    """Binds a Unix connection to the lease of a sender."""

    session: str
    sender: str


class Attached(msgspec.Struct, tag=True, frozen=True):
    """Answer to :class:`Attach`."""

    session: str


class OfferBuffer(msgspec.Struct, tag=True, frozen=True):
    """Comes with one fd: a buffer of ``nbytes`` bytes that later messages call ``buffer``."""

    session: str
    buffer: int
    kind: str
    nbytes: int


class BufferMapped(msgspec.Struct, tag=True, frozen=True):
    """The rank has mapped the buffer."""

    session: str
    buffer: int


FdRequest = Attach | OfferBuffer
FdReply = Attached | BufferMapped | Error


# --- between the ranks of one engine --------------------------------------------------------------------------------


class RankOpened(msgspec.Struct, tag=True, frozen=True):
    """A sender opened the session on this rank."""

    session: str
    rank: int
    kind: str
    sender: str
    takeover: bool = False


class RankReady(msgspec.Struct, tag=True, frozen=True):
    """This rank holds all buckets of the round."""

    session: str
    rank: int
    round: int


class RankFinished(msgspec.Struct, tag=True, frozen=True):
    """The sender of this rank is done; with what nothing read (``unread``) and what nothing reached (``missing``)."""

    session: str
    rank: int
    rounds: int
    unread: tuple[str, ...]
    missing: tuple[str, ...]


class RankFailed(msgspec.Struct, tag=True, frozen=True):
    """This rank, its sender or its loader failed: the session must end."""

    session: str
    rank: int
    error: Error


class RankChecksum(msgspec.Struct, tag=True, frozen=True):
    """A sender asked this rank for digests."""

    rank: int
    token: str


class RankRead(msgspec.Struct, tag=True, frozen=True):
    """Which of the names that the leader asked for this rank has read."""

    session: str
    rank: int
    names: tuple[str, ...]


RankReport = RankOpened | RankReady | RankFinished | RankFailed | RankChecksum | RankRead


class LeaderPrepared(msgspec.Struct, tag=True, frozen=True):
    """All ranks have finished and the update is complete."""

    session: str


class LeaderEnd(msgspec.Struct, tag=True, frozen=True):
    """The session ended before the scheduler threads knew of it."""

    session: str
    error: Error


class LeaderAsk(msgspec.Struct, tag=True, frozen=True):
    """Some rank did not read these tensors: which of them did you read?"""

    session: str
    names: tuple[str, ...]


LeaderMessage = LeaderPrepared | LeaderEnd | LeaderAsk


# --- carriers -------------------------------------------------------------------------------------------------------


class OpenCarrier(msgspec.Struct, tag=True, frozen=True):
    """Vote on opening the session."""

    session: str
    kind: str


class LoadCarrier(msgspec.Struct, tag=True, frozen=True):
    """Apply one round."""

    session: str
    round: int


class CommitCarrier(msgspec.Struct, tag=True, frozen=True):
    """Finalise, flush, switch the version."""

    session: str
    version: str
    flush_cache: bool = True


class AbortCarrier(msgspec.Struct, tag=True, frozen=True):
    """End the session without a commit."""

    session: str
    error: Error


class ChecksumCarrier(msgspec.Struct, tag=True, frozen=True):
    """Digest the model on one rank."""

    token: str
    rank: int


Carrier = OpenCarrier | LoadCarrier | CommitCarrier | AbortCarrier | ChecksumCarrier


def encode(message: msgspec.Struct) -> bytes:
    """Bytes of one message.

    Raises
    ------
    LimitError
        When they are more than :data:`MAX_MESSAGE_BYTES`, or a field holds what msgpack cannot carry.
    """
    try:
        raw: bytes = msgpack.packb(msgspec.to_builtins(message), use_bin_type=True)
    except (OverflowError, UnicodeError, ValueError) as error:
        raise LimitError(
            f"a {type(message).__name__} message cannot be encoded: {error}",
            fix="integers have at most 64 bits, and texts are Unicode without lone surrogates",
        ) from error
    if len(raw) > MAX_MESSAGE_BYTES:
        raise LimitError(
            f"a {type(message).__name__} message of {len(raw)} bytes is over the limit of {MAX_MESSAGE_BYTES} bytes",
            fix="use smaller buckets (slot_bytes), so that one message names fewer tensors",
        )
    return raw


def decode(raw: bytes, kind: Any) -> Any:
    """The message in ``raw``, checked against ``kind`` (one of the unions of this module).

    Raises
    ------
    LimitError
        When ``raw`` is longer than :data:`MAX_MESSAGE_BYTES`.
    BadMessageError
        When it is not msgpack, not of a type in ``kind``, or a field has another type than declared.
    """
    if len(raw) > MAX_MESSAGE_BYTES:
        raise LimitError(
            f"a message of {len(raw)} bytes is over the limit of {MAX_MESSAGE_BYTES} bytes",
            fix="use smaller buckets (slot_bytes), so that one message names fewer tensors",
        )
    try:
        plain = msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            max_str_len=len(raw),
            max_bin_len=0,
            max_ext_len=0,
            # Each item takes a byte at least: a length that the message cannot hold must not reserve memory.
            max_array_len=min(MAX_TENSORS, len(raw)),
            max_map_len=min(MAX_TENSORS, len(raw)),
        )
        return msgspec.convert(plain, kind, strict=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException, msgspec.ValidationError) as error:
        raise BadMessageError(
            f"a message of {len(raw)} bytes could not be decoded: {error}",
            fix="both sides must run the same major version of sglang-recv; see docs/wire.md",
        ) from error


def encode_carrier(carrier: Carrier) -> dict[str, str]:
    """The ``zmq_handles`` of SGLang's request that carries ``carrier``: text, since SGLang types them as strings."""
    return {CARRIER_KEY: msgspec.json.encode(carrier).decode()}


def decode_carrier(handles: dict[str, str]) -> Carrier | None:
    """The carrier in ``handles``, or None when they belong to somebody else.

    Raises
    ------
    BadMessageError
        When our key is there, but what it holds is not a carrier.
    """
    text: object = handles.get(CARRIER_KEY)
    if text is None:
        return None
    try:
        if not isinstance(text, str) or len(text) > MAX_CARRIER_CHARS:
            raise ValueError(f"not a text of at most {MAX_CARRIER_CHARS} characters")
        carrier: Carrier = msgspec.json.decode(text, type=Carrier)
        return carrier
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise BadMessageError(
            f"the {CARRIER_KEY!r} entry of zmq_handles is not a carrier: {error}",
            fix="send it with WeightClient; docs/wire.md has the format",
        ) from error


def check_major(major: int, minor: int, who: str) -> None:
    """Refuse a peer of another major version.

    Raises
    ------
    ProtocolVersionError
        Naming both versions.
    """
    if major != PROTOCOL_MAJOR:
        raise ProtocolVersionError(
            f"{who} speaks protocol {major}.{minor}, this side speaks {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}",
            fix="install versions of sglang-recv with the same protocol major in the trainer and in the engine",
        )
