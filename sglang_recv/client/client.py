"""The trainer's entry point: one object per set of engines."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch
import zmq

from sglang_recv import identity, manifest
from sglang_recv.client.choice import WEIGHTS_TAG, Situation, choose
from sglang_recv.client.layout import Layouts, Sizes, choose_sizes
from sglang_recv.client.link import Heart, RankLink, greet, wait
from sglang_recv.client.rounds import Clock, Progress
from sglang_recv.client.select import Ranks, Sender, pair
from sglang_recv.client.session import NamedTensors, Session, UpdateReport
from sglang_recv.client.source import AtHand, Described, Source, Unknown
from sglang_recv.client.target import HttpTarget, Target
from sglang_recv.errors import (
    DeadlineError,
    EngineLostError,
    RecvError,
    SessionStateError,
)
from sglang_recv.memory import granularity
from sglang_recv.wire import MAX_VERSION_CHARS, Checksum, ChecksumRequest, Open, RankTable, TensorSpec, Welcome

logger = logging.getLogger(__name__)

#: Bytes of all slots on one device when nothing is said.
STAGING_BYTES: Final = {"cuda": 4 << 30, "cpu": 192 << 20}
MAX_SLOTS: Final = 64
PAUSES: Final = ("caller", "abort", "retract", "in_place")


def new_session_id() -> str:
    """128 random bits in hex: what the coordinating sender makes and hands to the other senders."""
    return secrets.token_hex(16)


class WeightClient:
    """Updates the weights of one or several SGLang engines.

    Parameters
    ----------
    engines
        Base URLs of SGLang servers, or :class:`~sglang_recv.client.target.Target` objects.
    mode
        ``auto`` or ``vmm``. A mode that cannot be had is an error; nothing is exchanged for it.
    ranks
        Which engine ranks this process feeds: ``all`` (one sender for everything), ``local`` (those on the current CUDA
        device: one sender process per GPU), or a list.
    slots, slot_bytes
        How many staging slots per device, of how many bytes. By default 3 that have together at most 4 GiB of a GPU, at
        most a quarter of what is free on it, 192 MiB on a CPU, and what the update needs where that is known; fewer
        and larger ones where that holds its largest tensor.
    deadline
        Seconds that any single wait may take.
    api_key
        SGLang's admin or API key, when the servers have one.
    """

    def __init__(
        self,
        engines: str | Target | Sequence[str | Target],
        mode: str = "auto",
        *,
        ranks: Ranks = "all",
        slots: int | None = None,
        slot_bytes: int | None = None,
        deadline: float = 120.0,
        api_key: str | None = None,
    ) -> None:
        listed = [engines] if isinstance(engines, str) or not isinstance(engines, Sequence) else list(engines)
        count = MAX_SLOTS if slots is None else slots
        bytes_ = manifest.ALIGNMENT if slot_bytes is None else slot_bytes
        whole = all(isinstance(size, int) for size in (count, bytes_))
        fits = whole and 1 <= count <= MAX_SLOTS and bytes_ >= manifest.ALIGNMENT
        if not (listed and fits and 0 < deadline <= 1e6):
            raise SessionStateError(
                f"{len(listed)} engines, {slots} slots of {slot_bytes} bytes, a deadline of {deadline} s",
                fix=f"name an engine, 1 to {MAX_SLOTS} slots of {manifest.ALIGNMENT} bytes or more, and a deadline of "
                "up to 1,000,000 s",
            )
        self._targets: list[Target] = [
            HttpTarget(engine, api_key, deadline) if isinstance(engine, str) else engine for engine in listed
        ]
        self._mode = mode
        self._ranks: Ranks = ranks
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._deadline = deadline
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._tables: dict[str, RankTable] = {}
        self._pid = os.getpid()
        self._session: Session | None = None
        self._layouts = Layouts()
        self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"

    # --- public ------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, list[Welcome]]:
        """State of every rank of every engine, by engine. Needs no pairing, but the engines' sockets."""
        with self._links("all") as links:
            found: dict[str, list[Welcome]] = {}
            for link in links:
                assert link.welcome is not None
                found.setdefault(link.engine, []).append(link.welcome)
            return found

    def checksum(self) -> dict[str, list[Checksum]]:
        """Digests of what every rank of every engine really holds, by engine."""
        with self._links("all") as links:
            for link in links:
                link.send(ChecksumRequest(secrets.token_hex(8)))
            wait(links, lambda link: link.checksum is not None, "checksum", self._deadline)
            found: dict[str, list[Checksum]] = {}
            for link in links:
                assert link.checksum is not None
                found.setdefault(link.engine, []).append(link.checksum)
            return found

    def update(
        self,
        named_tensors: NamedTensors,
        version: str,
        *,
        kind: str = "full",
        pause: str = "caller",
        resume_weights: bool = False,
        flush_cache: bool = True,
        takeover: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> UpdateReport:
        """Send all of ``named_tensors`` and commit them as ``version``.

        Parameters
        ----------
        named_tensors
            A mapping or a list of (name, tensor) is checked as a whole before a byte moves. Any other iterable is
            consumed lazily (see :meth:`Session.send`).
        version
            What SGLang reports as ``weight_version`` afterwards.
        kind
            ``full``: every parameter must be reached. ``partial``: only these tensors.
        pause
            ``caller``: the engines are idle or paused already. ``abort``, ``retract``, ``in_place``: pause them with
            SGLang's mode of that name, and continue them afterwards, whatever happens.
        resume_weights
            Where the memory saver has released the weights, resume them first (by SGLang's call, with the tag
            ``weights``) instead of failing with WEIGHTS_RELEASED. They stay resumed.
        flush_cache
            Drop KV that the old weights computed.
        takeover
            End another sender's live session instead of failing with BUSY.
        on_progress
            Called on this thread after each round.

        Raises
        ------
        RecvError
            See :mod:`sglang_recv.errors`.
        """
        at_hand = isinstance(named_tensors, (Mapping, list, tuple))
        source = AtHand(named_tensors) if isinstance(named_tensors, (Mapping, list, tuple)) else Unknown()
        with self._open(
            version,
            source,
            kind=kind,
            pause=pause,
            resume_weights=resume_weights,
            flush_cache=flush_cache,
            takeover=takeover,
            on_progress=on_progress,
        ) as session:
            if at_hand:
                session.send_source()
            else:
                session.send(named_tensors)
            return session.commit()

    @contextlib.contextmanager
    def open(
        self,
        version: str,
        *,
        kind: str = "full",
        specs: Sequence[TensorSpec] | None = None,
        session_id: str | None = None,
        coordinator: bool = True,
        pause: str = "caller",
        resume_weights: bool = False,
        flush_cache: bool = True,
        takeover: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Iterator[Session]:
        """A session in steps: ``send`` any number of times, then ``commit``. Leaving without a commit aborts.

        Parameters
        ----------
        specs
            The whole manifest, when it is known: it is checked before a byte moves.
        session_id, coordinator
            With several senders, one makes the id by :func:`new_session_id` and is the coordinator; the others pass the
            same id and ``coordinator=False``. Every rank must be fed by exactly one sender.
            Only the coordinator resumes weights, before the others may open.
        """
        with self._open(
            version,
            Unknown() if specs is None else Described(specs),
            kind=kind,
            session_id=session_id,
            coordinator=coordinator,
            pause=pause,
            resume_weights=resume_weights,
            flush_cache=flush_cache,
            takeover=takeover,
            on_progress=on_progress,
        ) as session:
            # What the caller does between its calls of the session; those count by themselves.
            with session.between_calls():
                yield session

    @contextlib.contextmanager
    def _open(
        self,
        version: str,
        source: Source,
        *,
        kind: str,
        session_id: str | None = None,
        coordinator: bool = True,
        pause: str,
        resume_weights: bool,
        flush_cache: bool,
        takeover: bool,
        on_progress: Callable[[Progress], None] | None,
    ) -> Iterator[Session]:
        self._check_usable()
        # isprintable is False for a lone surrogate, which no message can carry.
        text: object = version
        if not isinstance(text, str) or not text.isprintable() or not 1 <= len(text) <= MAX_VERSION_CHARS:
            raise SessionStateError(
                f"a weight version of type {type(text).__name__}: {str(text)[:80]!r}",
                fix=f"use a text of 1 to {MAX_VERSION_CHARS} printable characters",
            )
        if pause not in PAUSES:
            raise SessionStateError(f"pause {pause!r}", fix=f"use one of {', '.join(PAUSES)}")
        resume: list[Target] = []
        clock = Clock()
        with contextlib.ExitStack() as undo:
            undo.push(functools.partial(self._resume, resume))
            with clock.phase("connect"):
                links = undo.enter_context(self._links(self._ranks, kind, resume=resume_weights and coordinator))
            welcomes = [link.welcome for link in links if link.welcome is not None]
            lease = min(welcome.lease_seconds for welcome in welcomes)
            groups = welcomes[0].groups
            request = Open(session_id or new_session_id(), self._name, kind, staging_bytes=0, takeover=takeover)
            session = Session(
                self._targets,
                links,
                Heart(self._context, links, request.session, self._name, lease / 5),
                request,
                source,
                version=version,
                mode="vmm",
                sizes=lambda specs: self._sizes(torch.device(links[0].device), specs, groups),
                layouts=self._layouts,
                deadline=self._deadline,
                lease=lease,
                flush_cache=flush_cache,
                coordinator=coordinator,
                # Several senders send in step: none may wait until what it lends is read, before it goes on.
                alone=self._ranks == "all" and session_id is None,
                groups=groups,
                clock=clock,
                on_progress=on_progress,
            )
            undo.enter_context(session)
            self._session = session
            undo.callback(setattr, self, "_session", None)
            if pause != "caller" and coordinator:
                # After the session is open: an update that is refused, because the engine is busy or a tensor is wrong,
                # must neither abort requests nor continue what another trainer has paused.
                for target in self._targets:
                    try:
                        target.pause(pause, self._deadline)
                    except DeadlineError:
                        resume.append(target)  # it may pause yet
                        raise
                    resume.append(target)
            yield session

    def close(self) -> None:
        """Abort what is open and release the ZMQ context."""
        if os.getpid() != self._pid:
            return  # a forked child: all of it is its parent's
        if self._session is not None:
            self._session.abort("the client was closed")
        self._context.destroy(linger=0)

    def __enter__(self) -> WeightClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._context.closed or os.getpid() != self._pid:
            raise SessionStateError(
                "this WeightClient is closed, or was made by the process that forked this one",
                fix="make a new WeightClient here",
            )

    def _resume(self, paused: list[Target], kind: type[BaseException] | None, *_: object) -> None:
        """Continue generation where this call has paused it, without hiding an error that is on its way."""
        for target in paused:
            try:
                target.resume(self._deadline)
            except RecvError as error:
                if kind is None:
                    raise
                logger.warning("generation could not be continued: %s", error)

    @contextlib.contextmanager
    def _links(self, ranks: Ranks, kind: str | None = None, *, resume: bool = False) -> Iterator[list[RankLink]]:
        """Discover, pair, connect and greet; with ``kind``, refuse engines that cannot take such an update."""
        self._check_usable()
        links = self._connect(ranks)
        try:
            if kind is not None:
                asleep = self._check(links, kind, resume)
                for target in self._targets:
                    if target.name in asleep:
                        target.resume_memory((WEIGHTS_TAG,), self._deadline)
                if asleep:
                    for link in links:
                        link.close()
                    links = self._connect(ranks)
                    self._check(links, kind, False)
            yield links
        finally:
            for link in links:
                link.close()

    def _check(self, links: Sequence[RankLink], kind: str, resume: bool) -> set[str]:
        """Refuse what the ranks' states forbid, all at once; the engines whose weights are to be resumed first."""
        asleep, problems = set(), []
        for link in links:
            welcome = link.welcome
            assert welcome is not None
            situation = Situation(
                self._mode,
                welcome.mode,
                "same device",
                torch.device(link.device).type,
                kind,
                released=welcome.memory_saver.released,
                cpu_backup=welcome.memory_saver.weights_cpu_backup,
                full_required=welcome.full_required,
                state=f"{welcome.weights_state}: {welcome.weights_reason}" if welcome.full_required else "",
                resume=resume,
                engine_saver=welcome.memory_saver.enabled,
                trainer_saver=os.environ.get("TMS_INIT_ENABLE") == "1",  # as slime starts train ranks
            )
            try:
                if choose(situation, link.name).resume_first:
                    asleep.add(link.engine)
            except RecvError as error:
                problems.append(error)
        _raise_all(problems)
        return asleep

    def _connect(self, ranks: Ranks) -> list[RankLink]:
        """Links to all wanted ranks. An engine that was restarted since the last time is discovered again."""
        sender = _sender()
        links: list[RankLink] = []
        problems: list[RecvError] = []
        for target in self._targets:
            known = target.name in self._tables
            try:
                try:
                    links += self._connect_one(target, sender, ranks)
                except EngineLostError:
                    if not known:
                        raise
                    del self._tables[target.name]
                    links += self._connect_one(target, sender, ranks)
            except RecvError as error:
                problems.append(error)
        if problems:
            for link in links:
                link.close()
        _raise_all(problems)
        return links

    def _connect_one(self, target: Target, sender: Sender, ranks: Ranks) -> list[RankLink]:
        table = self._tables.get(target.name)
        if table is None:
            table = self._tables[target.name] = target.rank_table()
        links = []
        try:
            for found in pair(self._mode, target.name, table, sender, ranks):
                links.append(RankLink(self._context, target.name, found))
                links[-1].connect(self._deadline)
            greet(links, table.engine, self._name, self._deadline)
        except BaseException:
            for link in links:
                link.close()
            raise
        return links

    def _sizes(
        self, device: torch.device, specs: Sequence[TensorSpec] | None, groups: Sequence[Sequence[str]]
    ) -> Sizes:
        """Staging on ``device``."""
        together: dict[tuple[str, ...], int] = {}
        for spec in specs or ():
            key = manifest.group_of(spec.name, groups) or (spec.name,)
            together[key] = together.get(key, 0) + manifest.align(manifest.nbytes(spec))
        largest, total = max(together.values(), default=0), None if specs is None else sum(together.values())
        bound = STAGING_BYTES[device.type]
        if device.type == "cuda":
            bound = min(bound, torch.cuda.mem_get_info(device)[0] // 4)
        return choose_sizes(self._slots, self._slot_bytes, bound, total, largest, granularity(device))


def _sender() -> Sender:
    devices = {}
    current = "cpu"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            devices[identity.device_id(torch.device("cuda", index))] = f"cuda:{index}"
        current = identity.device_id(torch.device("cuda", torch.cuda.current_device()))
    return Sender(identity.boot_id(), devices, current, os.environ.get("CUDA_VISIBLE_DEVICES", ""))


def _raise_all(problems: Sequence[RecvError]) -> None:
    """Raise what is wrong: one error, with all others as its details."""
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    first = problems[0]
    details = [line for problem in problems for line in (f"[{problem.code}] {problem.message}", *problem.details)]
    raise type(first)(
        f"{len(problems)} problems, the first: {first.message}", fix=first.fix, details=tuple(dict.fromkeys(details))
    )
