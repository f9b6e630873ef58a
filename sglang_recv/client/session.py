"""One weight update from the sender's side: fill slots, send rounds, finish, commit; or abort."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import msgspec
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from sglang_recv.client.fill import Filler
from sglang_recv.client.follow import Follower
from sglang_recv.client.layout import Layout, Layouts, Sizes, new_token
from sglang_recv.client.link import Heart, RankLink, combined, wait
from sglang_recv.client.rounds import Clock, Progress, Rounds
from sglang_recv.client.source import AtHand, Source, Unknown
from sglang_recv.client.staging import Staging
from sglang_recv.client.target import Target
from sglang_recv.errors import (
    CommitError,
    RecvError,
    SessionAbortedError,
    SessionStateError,
    StagingMemoryError,
    UnsupportedError,
)
from sglang_recv.wire import Abort, Announce, CommitCarrier, Finish, Open, PlanReport, TensorSpec

logger = logging.getLogger(__name__)

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class UpdateReport:
    """What an update did.

    ``phases`` holds seconds of this side by phase: ``connect``, ``compare`` (with what was sent before), ``open``,
    ``allocate`` and ``map`` (staging on this side and on the ranks'), ``source`` (what tensors took to come, and the
    caller's time between calls), ``fill`` (checking tensors and choosing their places), ``pack``, ``wait`` (for a free
    slot), ``finish`` (until every rank has read everything), ``commit``, ``close``. No time counts twice, and what
    ``seconds`` has beside them is a pause of the engine. And ``load``, the longest that any rank spent applying, which
    overlaps the others. ``rank_phases`` has the seconds of each rank that this side fed, by ``engine <id> rank
    <number>``: ``map``, ``load``, ``finalize``, ``flush``, see :class:`sglang_recv.wire.RankSeconds`.
    ``staging_bytes`` is the peak of staging memory on all devices together. ``plans`` says of each rank how it loaded:
    by a proven load plan or by the model's loader.
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
    rank_phases: dict[str, dict[str, float]]


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
        source: Source,
        *,
        version: str,
        mode: str,
        sizes: Callable[[Sequence[TensorSpec] | None], Sizes],
        layouts: Layouts,
        deadline: float,
        lease: float,
        flush_cache: bool,
        coordinator: bool,
        alone: bool,
        groups: Sequence[Sequence[str]],
        clock: Clock,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.id = request.session
        self._kind = request.kind
        self._targets = targets
        self._links = links
        self._heart = heart
        self._version = version
        self._mode = mode
        self._deadline = deadline
        self._lease = lease
        self._flush = flush_cache
        self._coordinator = coordinator
        self._layouts = layouts
        self._groups = groups
        self._clock = clock
        staging = Staging(links, self.id, deadline, lends=alone)
        self._rounds = Rounds(links, staging, self.id, deadline, lease, self._clock, on_progress)
        self._filler = Filler(self._rounds, self.id, groups)
        self._follower: Follower | None = None
        self._source: Source = source
        self._layout: Layout | None = None
        self._finished = False
        self._closed = False
        self._pid = os.getpid()
        self.report: UpdateReport | None = None
        try:
            self._open(request, source, sizes)
        except BaseException:
            self.abort("open failed")
            raise

    def _open(self, request: Open, source: Source, sizes: Callable[[Sequence[TensorSpec] | None], Sizes]) -> None:
        """Open on every rank, and allocate."""
        staging = self._rounds.staging
        source.begin(staging.pools)
        guess = self._guess(source)
        specs = self._specs(source) if guess is None else None
        chosen = sizes(source.packed(specs)) if guess is None else guess.sizes
        if guess is not None and source.names is None:
            # What comes may be far more than what came then: slots must not be smaller than they would be without it.
            chosen = max(chosen, sizes(None), key=lambda size: size.slot_bytes)
        request = msgspec.structs.replace(
            request,
            staging_bytes=chosen.peak + staging.pools.nbytes,
            manifest=None if specs is None else tuple(specs),
            recall="" if guess is None else guess.token,
        )
        with self._clock.phase("open"):
            for link in self._links:
                link.attach(request.session, request.sender, self._deadline)
                link.send(request)
        if not request.takeover:  # else the sender before this one still has its own
            try:
                self._allocate(chosen)
            except StagingMemoryError:
                if guess is None:
                    raise
                # There was more memory then.
                specs, guess = self._specs(source), None
                chosen = sizes(source.packed(specs))
                self._allocate(chosen)
        with self._clock.phase("open"):
            self._rounds.wait(lambda link: link.opened, "open")
        if request.takeover:
            self._allocate(chosen)
        with self._clock.phase("map"):
            staging.offer()
            for pool in guess.lends if guess is not None else source.lends:
                staging.lend(pool)
        if guess is not None:
            # While the ranks map the slots; they learn what is sent instead before anything is.
            with self._clock.phase("compare"):
                if not source.fits(guess) or not all(link.recalled for link in self._links):
                    specs, guess = self._specs(source), None
        if specs is not None and request.manifest is None:
            # The slots are what they are.
            peak = sizes(source.packed(specs)).peak + chosen.peak + staging.pools.nbytes
            self._announce(specs, peak)
        if guess is not None:
            self._follower = Follower(self._rounds, self.id, guess)
        self._sizes = chosen
        if specs is not None:
            self._filler.announced = {spec.name: spec for spec in specs}

    def _specs(self, source: Source) -> Sequence[TensorSpec] | None:
        with self._clock.phase("fill"):
            return source.specs()

    def between_calls(self) -> contextlib.AbstractContextManager[None]:
        """Counts the time inside as ``source``, except what calls of this session count otherwise."""
        return self._clock.phase("source")

    def _guess(self, source: Source) -> Layout | None:
        """What this session may repeat. Engines before protocol 1.1 must be told everything."""
        if not source.repeats or any(link.welcome is None or link.welcome.protocol_minor < 1 for link in self._links):
            return None
        guess = self._layouts.guess(self._kind, source.names)
        pools = self._rounds.staging.pools.by_number
        return guess if guess is not None and pools.keys() >= set(guess.lends) else None

    def _announce(self, specs: Sequence[TensorSpec], peak: int) -> None:
        with self._clock.phase("open"):
            for link in self._links:
                link.opened = False
                link.send(Announce(self.id, peak, tuple(specs)))
            self._rounds.wait(lambda link: link.opened, "announcement")

    @property
    def slot_bytes(self) -> int:
        """Bytes of a staging slot: what one round holds, unless it is a single tensor that is larger."""
        return self._rounds.staging.slot_bytes

    # --- public ------------------------------------------------------------------------------------------------------

    def send(self, named_tensors: NamedTensors) -> None:
        """Send tensors. May be called many times; buckets fill across calls.

        Parameters
        ----------
        named_tensors
            Hugging Face names and full (unsharded) tensors on any device, in any strides. An iterable is consumed
            lazily: each tensor is copied out before the next one is asked for, so nothing but the slots is held, except
            tensors of a group that SGLang loads only together, which are cloned until the group is complete. What lies
            in an :func:`sglang_recv.exportable_pool` is not copied, and must not change before this returns.

        Raises
        ------
        RecvError
            When a rank refuses or fails; the session is over then.
        """
        self._check_sendable()
        kept = self._rounds.kept = isinstance(named_tensors, (Mapping, list, tuple))
        with self._ends("sending"), self._clock.phase("fill"):
            pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
            if not kept:
                pairs = self._clock.drawn(pairs)
            if self._follower is not None:
                pairs = self._followed(list(pairs)) if kept else self._followed_lazily(pairs)
            for name, tensor in pairs:
                self._filler.add(name, tensor)
            if self._follower is not None and self._follower.lends:
                self._leave()
            self._filler.let_go()

    def send_source(self) -> None:
        """As :meth:`send`, with the tensors that this session was opened for."""
        source = self._source
        assert isinstance(source, AtHand)
        if self._follower is None:  # nothing like it was sent before
            self.send(source.pairs)
            return
        self._check_sendable()
        with self._ends("sending"), self._clock.phase("fill"):
            self._rounds.kept = True
            self._follower.take_all(source.tensors, source.look)

    def _followed(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> Sequence[tuple[str, torch.Tensor]]:
        """Send what was sent before as it was; the rest, which must go another way."""
        follower = self._follower
        assert follower is not None
        taken = follower.take(pairs)
        if taken < len(pairs):
            self._leave()
        return pairs[taken:]

    def _followed_lazily(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in pairs:
            if self._follower is None:
                yield pair
            elif not self._follower.take_lazily(*pair):
                self._leave()
                yield pair
        if self._follower is not None and self._follower.held:
            self._leave()
        if self._follower is not None:
            self._follower.let_go()

    def _leave(self) -> None:
        """This session is not a repetition any more."""
        if self._follower is not None:
            follower, self._follower = self._follower, None
            self._filler.adopt(follower.left())
            for name, tensor in follower.held:
                self._filler.add(name, tensor)

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
        with self._ends("flushing"), self._clock.phase("fill"):
            if self._follower is not None and not self._follower.between_rounds:
                self._leave()
            self._filler.flush()
        return self._rounds.sent

    def pad(self, rounds: int) -> None:
        """Send rounds without tensors until this sender has sent ``rounds``; see :meth:`flush`."""
        self._check_open()
        with self._ends("padding"), self._clock.phase("fill"):
            while self._rounds.sent < rounds:
                if self._follower is None or not self._follower.pad():
                    self._leave()
                    self._filler.pad()

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
        with self._ends("finishing"), self._clock.phase("finish"):
            if self._follower is not None and not self._follower.complete:
                self._leave()
            self._filler.finish()
            self._layout = self._as_sent()
            repeated = self._follower is not None and not self._follower.moved
            remember = "" if repeated else self._layout.token
            self._rounds.staging.wait_mapped()
            for link in self._links:
                link.send(Finish(self.id, self._rounds.sent, remember))
            self._rounds.wait(lambda link: link.prepared or link.committed, "finish")
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
        with self._ends("committing"):
            # Every rank has read everything: giving memory back takes no longer than the engines' answers.
            aside = threading.Thread(target=self._give_back, name="sglang-recv-close")
            with contextlib.suppress(RuntimeError):  # where no thread can be started any more, _close does it
                aside.start()
            with self._clock.phase("commit"):
                self._commit_all()
        assert self._layout is not None
        self._layouts.keep(self._layout)
        with self._clock.phase("close"):
            self._close()
        phases = self._clock.phases | {"load": max(link.load_seconds for link in self._links)}
        self.report = UpdateReport(
            version=self._version,
            mode=self._mode,
            engines=tuple(target.name for target in self._targets),
            tensors=self._rounds.tensors,
            nbytes=self._rounds.nbytes,
            rounds=self._rounds.sent,
            seconds=time.monotonic() - self._clock.started,
            phases={name: round(seconds, 6) for name, seconds in phases.items()},
            staging_bytes=self._rounds.staging.peak_bytes,
            plans={link.name: link.plan for link in self._links if link.plan is not None},
            rank_phases={link.name: msgspec.to_builtins(link.spent) for link in self._links if link.spent is not None},
        )
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

    def _allocate(self, sizes: Sizes) -> None:
        try:
            with self._clock.phase("allocate"):
                self._rounds.staging.allocate(sizes.slots, sizes.slot_bytes)
        except RecvError:
            self._rounds.wait(lambda link: link.opened, "open")  # why it is refused says more than that memory is short
            raise

    def _as_sent(self) -> Layout:
        """What this session was, for the next one."""
        if self._follower is not None:
            return self._follower.layout
        order = tuple(self._filler.order)
        groups = tuple(map(tuple, self._groups))
        return Layout(new_token(), self._kind, self._sizes, tuple(self._filler.history), order, groups)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _commit_all(self) -> None:
        if not self._coordinator:
            self._rounds.wait(lambda link: link.committed, "commit by the coordinator")
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
        self._rounds.wait(lambda link: link.committed, "commit")

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

    @contextlib.contextmanager
    def _ends(self, what: str) -> Iterator[None]:
        """An error of this step ends the session."""
        try:
            yield
        except BaseException as error:
            self.abort(f"{type(error).__name__} while {what}")
            raise

    def _check_sendable(self) -> None:
        self._check_open()
        if self._finished:
            raise SessionStateError(f"session {self.id[:8]} is finished", fix="send everything before finish()")
        mode = _get_current_dispatch_mode()
        if mode is not None:
            raise UnsupportedError(
                f"tensors are sent under {type(mode).__name__}, which may replace their bytes",
                fix="call send() outside of torch dispatch modes such as FakeTensorMode",
            )

    def _check_open(self) -> None:
        if self._closed or os.getpid() != self._pid:
            raise SessionStateError(f"session {self.id[:8]} is over, or another process has it", fix="open a new one")

    def _close(self) -> None:
        self._closed = True
        # A session may be kept for long; the tensors are the caller's.
        self._follower = None
        self._source = Unknown()
        self._filler.clear()
        self._rounds.clear()
        self._heart.stop()
        for link in self._links:
            link.close()
        self._give_back()

    def _give_back(self) -> None:
        """Free staging on this side. A failure is in the log: it must not hide how the session ended."""
        try:
            self._rounds.staging.close()
        except Exception:
            logger.exception("session %s: staging memory could not be freed", self.id[:8])


def _outcome(target: Target, carrier: CommitCarrier, deadline: float) -> RecvError | None:
    try:
        target.commit(carrier, deadline)
    except RecvError as error:
        return error
    except Exception as error:  # of a Target that is not ours, or of the HTTP library half-way
        return CommitError(f"{target.name}: {type(error).__name__}: {error}", fix="look at the engine's log")
    return None
