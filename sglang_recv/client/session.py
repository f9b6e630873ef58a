"""One weight update from the sender's side: fill slots, send rounds, finish, commit; or abort."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from sglang_recv import manifest
from sglang_recv.client.link import Heart, RankLink, combined, wait
from sglang_recv.client.staging import Buffer, Staging
from sglang_recv.client.target import Target
from sglang_recv.errors import CommitError, RecvError, SessionAbortedError, SessionStateError, UnsupportedError
from sglang_recv.wire import (
    Abort,
    Bucket,
    CommitCarrier,
    Entry,
    Finish,
    Load,
    Open,
    PlanReport,
    ReleaseBuffer,
    TensorSpec,
)

logger = logging.getLogger(__name__)

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Progress:
    """What ``on_progress`` gets after each round: tensors and bytes so far, and seconds since the session opened."""

    tensors: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class UpdateReport:
    """What an update did.

    ``phases`` holds seconds of this side by phase: ``open``, ``pack``, ``wait`` (for a free slot), ``finish`` (until
    every rank has read everything), ``commit``; and ``load``, the longest that any rank spent applying, which overlaps
    the others. ``staging_bytes`` is the peak of staging memory on all devices together. ``plans`` says of each rank
    that this side fed, by ``engine <id> rank <number>``, how it loaded: by a proven load plan or by the model's loader.
    """

    version: str
    mode: str
    engines: tuple[str, ...]
    tensors: int
    nbytes: int
    rounds: int
    seconds: float
    phases: dict[str, float]
    staging_bytes: int
    plans: dict[str, PlanReport]


@dataclass
class _Fill:
    """The bucket that is being filled."""

    buffer: Buffer
    entries: list[Entry] = field(default_factory=list)
    used: int = 0
    #: What is placed but not copied yet; only from sources that keep all their tensors anyway.
    waiting: list[tuple[int, torch.Tensor]] = field(default_factory=list)


class Session:
    """Returned by :meth:`sglang_recv.WeightClient.open`; a context manager that aborts unless it was committed.

    Not for several threads at once.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        links: Sequence[RankLink],
        heart: Heart,
        request: Open,
        *,
        version: str,
        mode: str,
        slots: int,
        slot_bytes: int,
        deadline: float,
        lease: float,
        flush_cache: bool,
        coordinator: bool,
        groups: Sequence[Sequence[str]],
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.id = request.session
        self._targets = targets
        self._links = links
        self._heart = heart
        self._version = version
        self._mode = mode
        self._deadline = deadline
        self._lease = lease
        self._flush = flush_cache
        self._coordinator = coordinator
        self._groups = groups
        self._on_progress = on_progress
        self._announced = None if request.manifest is None else {spec.name: spec for spec in request.manifest}
        self._started = time.monotonic()
        self._phases = dict.fromkeys(("open", "pack", "wait", "finish", "commit"), 0.0)
        self._staging: Staging | None = None
        self._fill: _Fill | None = None
        self._large: Buffer | None = None
        self._held: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}
        self._names: set[str] = set()
        self._kept = False
        self._slot = 0
        self._rounds = 0
        self._nbytes = 0
        self._sent = 0
        self._finished = False
        self._closed = False
        self._pid = os.getpid()
        self.report: UpdateReport | None = None
        try:
            with self._phase("open"):
                for link in links:
                    link.attach(request.session, request.sender, deadline)
                    link.send(request)
                self._staging = Staging(links, request.session, deadline)
                if not request.takeover:  # else the sender before this one still has its own
                    self._allocate(slots, slot_bytes)
                self._wait(lambda link: link.opened, "open")
                if request.takeover:
                    self._allocate(slots, slot_bytes)
                self._staging.offer()
        except BaseException:
            self.abort("open failed")
            raise

    @property
    def slot_bytes(self) -> int:
        """Bytes of a staging slot: what one round holds, unless it is a single tensor that is larger."""
        assert self._staging is not None
        return self._staging.slot_bytes

    # --- public ------------------------------------------------------------------------------------------------------

    def send(self, named_tensors: NamedTensors) -> None:
        """Send tensors. May be called many times; buckets fill across calls.

        Parameters
        ----------
        named_tensors
            Hugging Face names and full (unsharded) tensors on any device, in any strides. An iterable is consumed
            lazily: each tensor is copied out before the next one is asked for, so nothing but the slots is held, except
            tensors of a group that SGLang loads only together, which are cloned until the group is complete.

        Raises
        ------
        RecvError
            When a rank refuses or fails; the session is over then.
        """
        self._check_open()
        if self._finished:
            raise SessionStateError(f"session {self.id[:8]} is finished", fix="send everything before finish()")
        mode = _get_current_dispatch_mode()
        if mode is not None:
            raise UnsupportedError(
                f"tensors are sent under {type(mode).__name__}, which may replace their bytes",
                fix="call send() outside of torch dispatch modes such as FakeTensorMode",
            )
        self._kept = isinstance(named_tensors, (Mapping, list, tuple))
        with self._ends("sending"):
            pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
            for name, tensor in pairs:
                self._add(name, tensor)
            self._pack_waiting()

    def flush(self) -> int:
        """Send the bucket that is being filled as it is; how many rounds this sender has sent.

        For several senders of one engine that send different tensors and wait for each other between them: a round is
        loaded once every rank has it, so a sender far ahead would wait for one that waits for it. They flush, agree on
        the largest number, and :meth:`pad` to it.

        Raises
        ------
        RecvError
            When a rank refuses or fails; the session is over then.
        """
        self._check_open()
        with self._ends("flushing"):
            self._flush_bucket()
        return self._rounds

    def pad(self, rounds: int) -> None:
        """Send rounds without tensors until this sender has sent ``rounds``; see :meth:`flush`."""
        self._check_open()
        with self._ends("padding"):
            while self._rounds < rounds:
                self._send_load(())

    def finish(self) -> None:
        """Send what is still waiting, and return once every rank has read everything and the update is complete.

        :meth:`commit` does it where it was not called. Several senders call it to agree among themselves before one of
        them commits: until then leaving the session still aborts it.

        Raises
        ------
        ManifestError
            When the update is not complete.
        RecvError
            When a rank refuses or fails; the session is over then.
        """
        self._check_open()
        if self._finished:
            return
        with self._ends("finishing"), self._phase("finish"):
            for key in list(self._held):
                self._release_group(key)
            self._flush_bucket()
            for link in self._links:
                link.send(Finish(self.id, self._rounds))
            self._wait(lambda link: link.prepared or link.committed, "finish")
        self._finished = True

    def commit(self) -> UpdateReport:
        """Make the engines serve the new weights under the new version.

        Returns once every rank of every engine has switched. With several senders, each calls it; the coordinator
        posts.

        Raises
        ------
        ManifestError
            When the update is not complete.
        CommitError
            When an engine refused, with the outcome of each engine.
        """
        self.finish()
        with self._ends("committing"), self._phase("commit"):
            self._commit_all()
        assert self._staging is not None
        phases = self._phases | {"load": max(link.load_seconds for link in self._links)}
        self.report = UpdateReport(
            version=self._version,
            mode=self._mode,
            engines=tuple(target.name for target in self._targets),
            tensors=self._sent,
            nbytes=self._nbytes,
            rounds=self._rounds,
            seconds=time.monotonic() - self._started,
            phases={name: round(seconds, 6) for name, seconds in phases.items()},
            staging_bytes=self._staging.peak_bytes,
            plans={link.name: link.plan for link in self._links if link.plan is not None},
        )
        self._close()
        return self.report

    def abort(self, reason: str = "aborted by the caller") -> None:
        """End the session without a commit; does nothing when it is over.

        Before the first write the engines are as they were; after it they refuse to generate until a full update.
        """
        if self._closed:
            return
        if os.getpid() != self._pid:
            self._closed = True  # a forked child: connections, memory and session are its parent's
            return
        open_links = [link for link in self._links if not link.over]
        try:
            for link in open_links:
                with contextlib.suppress(RecvError):
                    link.send(Abort(self.id, reason[:500]))
            for link in open_links:
                # Each by itself: one that is gone must not hide how the others ended.
                with contextlib.suppress(RecvError):
                    wait([link], lambda link: link.over, "abort", min(self._deadline, self._lease), self._lease)
        finally:
            self._close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort("left without a commit" if kind is None else f"{kind.__name__} in the caller")

    def _allocate(self, slots: int, slot_bytes: int) -> None:
        assert self._staging is not None
        try:
            self._staging.allocate(slots, slot_bytes)
        except RecvError:
            self._wait(lambda link: link.opened, "open")  # why it is refused says more than that memory is short
            raise

    # --- filling -----------------------------------------------------------------------------------------------------

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        check_pair(name, tensor)
        spec = manifest.spec_of(name, tensor)
        findings = []
        if self._announced is None:
            findings += manifest.problems_of(spec)
        elif self._announced.get(name) != spec:
            findings.append(f"{name}: {spec.dtype}{list(spec.shape)} is not what was announced")
        if name in self._names:
            findings.append(f"{name}: sent twice")
        if hasattr(tensor, "full_tensor"):
            findings.append(f"{name}: a DTensor is one rank's shard; send tensor.full_tensor()")
        elif tensor.layout is not torch.strided or tensor.is_meta:
            findings.append(f"{name}: layout {tensor.layout} on {tensor.device} has no bytes to send")
        if findings:
            raise manifest.manifest_error(findings, "a tensor cannot be sent")
        self._names.add(name)
        names = manifest.group_of(name, self._groups)
        if names is None:
            self._place([(spec, tensor)])
            return
        group = self._held.setdefault(names, {})
        group[name] = tensor.detach().clone()
        if len(group) == len(names):
            self._release_group(names)

    def _release_group(self, key: tuple[str, ...]) -> None:
        group = self._held.pop(key)
        self._place([(manifest.spec_of(name, tensor), tensor) for name, tensor in group.items()])

    def _place(self, tensors: Sequence[tuple[TensorSpec, torch.Tensor]]) -> None:
        """Put tensors that belong together into one bucket."""
        assert self._staging is not None
        needed = sum(manifest.align(manifest.nbytes(spec)) for spec, _ in tensors)
        if needed > self._staging.slot_bytes:
            self._oversize(tensors, needed)
            return
        if self._fill is not None and self._fill.used + needed > self._staging.slot_bytes:
            self._flush_bucket()
        if self._fill is None:
            self._fill = _Fill(self._next_slot())
        self._copy(self._fill, tensors)

    def _copy(self, fill: _Fill, tensors: Sequence[tuple[TensorSpec, torch.Tensor]]) -> None:
        assert self._staging is not None
        for spec, tensor in tensors:
            size = manifest.nbytes(spec)
            fill.entries.append(Entry(spec, fill.buffer.number, fill.used))
            fill.waiting.append((fill.used, tensor))
            fill.used += manifest.align(size)
            self._nbytes += size
            self._sent += 1
        if not self._kept:
            self._pack(fill)

    def _pack(self, fill: _Fill) -> None:
        assert self._staging is not None
        with self._phase("pack"):
            self._staging.pack(fill.buffer, fill.waiting)
            fill.waiting.clear()

    def _pack_waiting(self) -> None:
        """Before a call returns, nothing of its tensors is needed any more."""
        if self._fill is not None:
            self._pack(self._fill)

    def _oversize(self, tensors: Sequence[tuple[TensorSpec, torch.Tensor]], needed: int) -> None:
        """Tensors that no slot can hold travel in a buffer of their own, which is kept for the next such ones."""
        assert self._staging is not None
        self._flush_bucket()
        buffer = self._large
        if buffer is not None:
            self._wait_acked(buffer.free_at)
            if buffer.nbytes < needed:
                self._release(buffer)
                buffer = None
        if buffer is None:
            buffer = self._large = self._staging.add(needed)
        fill = _Fill(buffer)
        self._copy(fill, tensors)
        self._send_round(fill)

    def _release(self, buffer: Buffer) -> None:
        assert self._staging is not None
        for link in self._links:
            link.send(ReleaseBuffer(self.id, buffer.number))
        self._wait(lambda link: buffer.number in link.released, f"release of buffer {buffer.number}")
        self._staging.drop(buffer)

    def _next_slot(self) -> Buffer:
        assert self._staging is not None
        buffer = self._staging.slots[self._slot]
        self._slot = (self._slot + 1) % len(self._staging.slots)
        self._wait_acked(buffer.free_at)
        return buffer

    def _wait_acked(self, rounds: int) -> None:
        with self._phase("wait"):
            self._wait(lambda link: link.acked >= rounds, f"acknowledgement of round {rounds - 1}")

    def _flush_bucket(self) -> None:
        fill, self._fill = self._fill, None
        if fill is not None and fill.entries:
            self._send_round(fill)

    def _send_round(self, fill: _Fill) -> None:
        assert self._staging is not None
        self._pack(fill)
        with self._phase("pack"):
            self._staging.wait_packed()
        self._send_load((Bucket(tuple(fill.entries)),))
        fill.buffer.free_at = self._rounds
        if self._on_progress is not None:
            self._on_progress(Progress(self._sent, self._nbytes, time.monotonic() - self._started))

    def _send_load(self, buckets: tuple[Bucket, ...]) -> None:
        message = Load(self.id, self._rounds, buckets)
        for link in self._links:
            link.send(message)
        self._rounds += 1
        for link in self._links:
            link.pump()
        failed = [link for link in self._links if link.error is not None]
        if failed:
            raise combined(failed)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _commit_all(self) -> None:
        if not self._coordinator:
            self._wait(lambda link: link.committed, "commit by the coordinator")
            return
        carrier = CommitCarrier(self.id, self._version, self._flush)
        if len(self._targets) == 1:
            outcomes = [_outcome(self._targets[0], carrier, self._deadline)]
        else:
            with ThreadPoolExecutor(len(self._targets), thread_name_prefix="sglang-recv-commit") as pool:
                outcomes = list(pool.map(lambda target: _outcome(target, carrier, self._deadline), self._targets))
        failed = {t.name: error for t, error in zip(self._targets, outcomes, strict=True) if error is not None}
        for name in list(failed):
            # The answer may have been lost on its way: the ranks themselves say what really happened.
            links = [link for link in self._links if link.engine == name]
            for link in links:
                with contextlib.suppress(RecvError):
                    link.send(Abort(self.id, "its commit failed"))  # ends it where the commit never arrived
                    wait([link], lambda link: link.over, "end of the session", self._lease, self._lease)
            if links and all(link.committed for link in links):
                del failed[name]
        if failed:
            raise self._commit_error(failed, [t.name for t in self._targets if t.name not in failed])
        self._wait(lambda link: link.committed, "commit")

    def _commit_error(self, failed: Mapping[str, RecvError], committed: Sequence[str]) -> RecvError:
        # A rank's own error says more than the HTTP answer.
        ended = [link for link in self._links if link.engine in failed and link.error is not None]
        causes = [link for link in ended if not isinstance(link.error, SessionAbortedError)]
        if len(self._targets) == 1 and causes:
            return combined(causes)
        if len(self._targets) == 1:
            return next(iter(failed.values()))
        return CommitError(
            f"{len(failed)} of {len(self._targets)} engines did not commit version {self._version!r}",
            fix="send the same full update again: it repairs the engines that failed",
            details=(
                *(f"{name}: {error}" for name, error in failed.items()),
                *(f"{name}: serves version {self._version!r}" for name in committed),
            ),
        )

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _wait(self, done: Callable[[RankLink], bool], phase: str) -> None:
        wait(self._links, done, f"session {self.id[:8]}, {phase}", self._deadline, self._lease)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._phases[name] += time.monotonic() - started

    @contextlib.contextmanager
    def _ends(self, what: str) -> Iterator[None]:
        """An error of this step ends the session."""
        try:
            yield
        except BaseException as error:
            self.abort(f"{type(error).__name__} while {what}")
            raise

    def _check_open(self) -> None:
        if self._closed or os.getpid() != self._pid:
            raise SessionStateError(f"session {self.id[:8]} is over, or another process has it", fix="open a new one")

    def _close(self) -> None:
        self._closed = True
        self._held.clear()
        self._heart.stop()
        for link in self._links:
            link.close()
        if self._staging is not None:
            self._staging.close()


def _outcome(target: Target, carrier: CommitCarrier, deadline: float) -> RecvError | None:
    try:
        target.commit(carrier, deadline)
    except RecvError as error:
        return error
    except Exception as error:  # of a Target that is not ours, or of the HTTP library half-way
        return CommitError(f"{target.name}: {type(error).__name__}: {error}", fix="look at the engine's log")
    return None


def check_pair(name: object, tensor: object) -> None:
    """Refuse what is not a name with a tensor.

    Raises
    ------
    ManifestError
        Naming both types.
    """
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise manifest.manifest_error(
            [f"{str(name)[:80]!r} ({type(name).__name__}) with a {type(tensor).__name__}"],
            "a source gives pairs of a name and a tensor",
        )
