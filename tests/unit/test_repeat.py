"""Sessions that repeat an earlier one: the same bytes arrive, by a message of some bytes per round; and where something
is different, nothing is taken for what it was."""

from __future__ import annotations

import ctypes
import functools
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from sglang_recv import Session, WeightClient, manifest, wire
from sglang_recv.client import staging as staging_module
from sglang_recv.client.layout import Sizes
from sglang_recv.client.link import RankLink
from sglang_recv.client.pack import Packer, Prepared, Tables
from sglang_recv.copies import Places
from sglang_recv.errors import ManifestError, RecvError, StagingMemoryError
from sglang_recv.manifest import Views
from sglang_recv.receiver import session as session_module
from sglang_recv.receiver.catalog import Catalog
from sglang_recv.receiver.fences import Fences
from sglang_recv.receiver.mailbox import RoundDone
from sglang_recv.receiver.remembered import Memory
from sglang_recv.wire import Announce, Load, Open, Repeat
from support.rank import PATIENCE, Engine, weights

Q_A, KV_A = "attn.q_a_proj.weight", "attn.kv_a_proj_with_mqa.weight"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything that clients send from here on."""
    messages: list[Any] = []
    send = RankLink.send

    def recorded(link: RankLink, message: Any) -> None:
        messages.append(message)
        send(link, message)

    monkeypatch.setattr(RankLink, "send", recorded)
    return messages


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(2) as made:
        yield made


@pytest.fixture(autouse=True)
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots smaller than a page, so that a tiny model has several rounds."""

    def sizes(sender: WeightClient, *_: object) -> Sizes:
        assert sender._slots is not None
        assert sender._slot_bytes is not None
        return Sizes(sender._slots, sender._slot_bytes, 1 << 20)

    monkeypatch.setattr(WeightClient, "_sizes", sizes)


def client(engine: Engine, slot_bytes: int = 256, slots: int = 2) -> WeightClient:
    """Slots of 256 bytes hold one tensor of the test model each; a group of two needs a buffer of its own."""
    return WeightClient([engine], slots=slots, slot_bytes=slot_bytes, deadline=PATIENCE)


def rounds_of(sent: list[Any]) -> list[type]:
    """Kinds of the messages that carried rounds since the last call, for one of the two ranks."""
    found = [type(message) for message in sent if isinstance(message, (Load, Repeat, Announce))]
    sent.clear()
    assert found[::2] == found[1::2]
    return found[::2]


def check(engine: Engine, value: float, version: str) -> None:
    """Both ranks hold ``weights(value)``."""
    assert engine.states() == {("ready", version)}
    wanted = weights(value)
    for rank, held in enumerate(engine.parameters()):
        assert torch.equal(held["embed"], wanted["embed"][4 * rank : 4 * rank + 4])
        assert torch.equal(held["norm"], wanted["norm"])
        assert torch.equal(held["fused"], torch.cat([wanted[Q_A], wanted[KV_A]]))


def in_calls(sender: WeightClient, pairs: list[tuple[str, torch.Tensor]], version: str) -> None:
    """Two calls, of which the first ends inside a bucket when a slot holds all tensors."""
    with sender.open(version) as session:
        session.send(pairs[:1])
        session.send(pairs[1:])
        session.commit()


WAYS: dict[str, Callable[[WeightClient, dict[str, torch.Tensor], str], object]] = {
    "mapping": lambda sender, tensors, version: sender.update(tensors, version),
    "list": lambda sender, tensors, version: sender.update(list(tensors.items()), version),
    "lazy": lambda sender, tensors, version: sender.update(iter(tensors.items()), version),
    "calls": lambda sender, tensors, version: in_calls(sender, list(tensors.items()), version),
}


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("slot_bytes", [256, 4096])
@pytest.mark.parametrize("way", WAYS)
def test_an_update_like_the_last_one_is_repeated(
    engine: Engine, sent: list[Any], way: str, slot_bytes: int, slots: int
) -> None:
    with client(engine, slot_bytes, slots) as sender:
        for number in range(1, 4):
            WAYS[way](sender, weights(float(number)), f"v{number}")
            check(engine, float(number), f"v{number}")
            assert rounds_of(sent) == [Load if number == 1 else Repeat] * (3 if slot_bytes == 256 else 1)


@pytest.mark.parametrize("way", WAYS)
def test_groups_whose_halves_come_apart(engine: Engine, sent: list[Any], way: str) -> None:
    """A group is held back until it is complete. Only what is given as a whole can be put into the order of then."""
    with client(engine) as sender:
        for number in range(1, 4):
            tensors = weights(float(number))
            apart = {name: tensors[name] for name in (KV_A, "embed", Q_A, "norm")}
            WAYS[way](sender, apart, f"v{number}")
            check(engine, float(number), f"v{number}")
            assert rounds_of(sent) == [Repeat if number > 1 and way in ("mapping", "list") else Load] * 3


#: After updates of all four tensors, in this order: what comes then, which is not the group that was due.
OTHERWISE: dict[str, tuple[str, ...]] = {
    "something between its halves": ("embed", Q_A, "norm", KV_A),
    "the other half first": ("embed", "norm", KV_A, Q_A),
    "the group first": (Q_A, KV_A, "embed", "norm"),
}


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("slot_bytes", [256, 4096])
@pytest.mark.parametrize("case", OTHERWISE)
def test_a_source_that_ends_a_repetition_around_a_group(engine: Engine, case: str, slot_bytes: int, slots: int) -> None:
    """Halves that were held back go another way with the rest: nothing is lost, and none comes twice."""
    with client(engine, slot_bytes, slots) as sender:
        for number in range(1, 3):
            sender.update(iter(weights(float(number)).items()), f"v{number}")
        for number in range(3, 6):
            tensors = weights(float(number))
            sender.update(_reusing([(name, tensors[name]) for name in OTHERWISE[case]]), f"v{number}")
            check(engine, float(number), f"v{number}")
        sender.update(iter(weights(6.0).items()), "v6")
        check(engine, 6.0, "v6")


def test_half_a_group_at_the_end_of_a_lazy_source(engine: Engine) -> None:
    """It waits for the next call, as in an update that repeats nothing."""
    with client(engine) as sender:
        for number in range(1, 5):
            tensors = list(weights(float(number)).items())
            with sender.open(f"v{number}") as session:
                session.send(_reusing(tensors[:3]))
                session.send(_reusing(tensors[3:]))
                session.commit()
            check(engine, float(number), f"v{number}")


def test_a_lazy_source_may_write_each_tensor_over_the_one_before(engine: Engine, sent: list[Any]) -> None:
    with client(engine) as sender:
        for number in range(1, 4):
            sender.update(_reusing(list(weights(float(number)).items())), f"v{number}")
            check(engine, float(number), f"v{number}")
            assert rounds_of(sent) == [Load if number == 1 else Repeat] * 3


@pytest.mark.parametrize("kind", ["full", "partial"])
def test_a_lazy_source_that_ends_a_round_inside_a_group(engine: Engine, kind: str) -> None:
    """What was held back of the group is not lost with the rounds that the source asks for."""
    with client(engine) as sender:
        for number in range(1, 5):
            tensors = weights(float(number))
            with sender.open(f"v{number}", kind=kind if number > 1 else "full") as session:

                def source(
                    session: Session = session,
                    tensors: dict[str, torch.Tensor] = tensors,
                    pads: bool = number > 2,
                ) -> Iterator[tuple[str, torch.Tensor]]:
                    for name, tensor in tensors.items():
                        yield name, tensor
                        if name == Q_A and pads:
                            session.pad(session.flush() + 1)

                session.send(source())
                session.commit()
            check(engine, float(number), f"v{number}")


def test_a_slot_that_a_rank_cannot_map_costs_no_weights(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with client(engine, 256, 3) as sender:
        for number in (1, 2):
            sender.update(weights(float(number)), f"v{number}")
        real, mapped = session_module.import_buffer, list[int]()

        def third_fails(device: Any, fd: Any, nbytes: int) -> Any:
            mapped.append(nbytes)
            if len(mapped) > 4:
                raise RuntimeError("no more of it")
            return real(device, fd, nbytes)

        monkeypatch.setattr(session_module, "import_buffer", third_fails)
        with pytest.raises(RecvError, match="no more of it"):
            sender.update(weights(3.0), "v3")
        monkeypatch.undo()
        check(engine, 2.0, "v2")
        sender.update(weights(4.0), "v4")
        check(engine, 4.0, "v4")


def test_a_commit_where_no_thread_can_be_started(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the interpreter, and at a limit of processes: staging is given back all the same."""
    with client(engine) as sender:
        closed: list[staging_module.Staging] = []
        close = staging_module.Staging.close
        monkeypatch.setattr(
            staging_module.Staging, "close", lambda staging: (closed.append(staging), close(staging))[1]
        )
        start = threading.Thread.start

        def refused(thread: threading.Thread) -> None:
            if thread.name == "sglang-recv-close":
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refused)
        sender.update(weights(1.0), "v1")
        check(engine, 1.0, "v1")
        (staging,) = closed
        assert not staging.slots
        assert not staging._buffers


def test_staging_that_cannot_be_freed_does_not_hide_a_commit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with client(engine, 256, 3) as sender:
        real, tried = staging_module.Buffer.close, list[int]()

        def fails(buffer: staging_module.Buffer) -> None:
            tried.append(buffer.number)
            real(buffer)
            if buffer.number == 1:
                raise StagingMemoryError("the driver says no", fix="restart")

        monkeypatch.setattr(staging_module.Buffer, "close", fails)
        report = sender.update(weights(1.0), "v1")
        assert report.version == "v1"
        assert sorted(tried) == [0, 1, 2, 3], "one that fails must not keep the others"
        assert "the driver says no" in caplog.text
        check(engine, 1.0, "v1")


def _reusing(pairs: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """All of them in the same memory, which the next one overwrites."""
    memory = torch.empty(max(tensor.nbytes for _, tensor in pairs), dtype=torch.uint8)
    for name, tensor in pairs:
        place = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        yield name, place.copy_(tensor)
        memory.fill_(0xFF)


@pytest.mark.parametrize("way", WAYS)
def test_tensors_without_groups_are_repeated_however_they_come(
    engine: Engine, sent: list[Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in engine.rank:
        monkeypatch.setattr(rank.host.model(), "load_weights", _ungrouped(rank.host.model()))
    with client(engine) as sender:
        for number in range(1, 4):
            tensors = {name: tensor for name, tensor in weights(float(number)).items() if name in ("embed", "norm")}
            tensors["fused"] = torch.full((6, 4), float(number))
            WAYS[way](sender, tensors, f"v{number}")
            assert rounds_of(sent) == [Load if number == 1 else Repeat] * 3
            assert engine.states() == {("ready", f"v{number}")}
            for held in engine.parameters():
                assert torch.equal(held["fused"], tensors["fused"])
                assert torch.equal(held["norm"], tensors["norm"])


def _ungrouped(model: Any) -> Callable[[Any], None]:
    load = model.load_weights

    def loads(pairs: list[tuple[str, torch.Tensor]]) -> None:
        load(pairs)
        for name, tensor in pairs:
            if name == "fused":
                model.fused.data.copy_(tensor)

    return loads


@pytest.mark.parametrize("slot_bytes", [256, 4096])
@pytest.mark.parametrize("between", ["flush", "pad", "another tensor"])
def test_a_group_whose_halves_come_apart_only_now(engine: Engine, slot_bytes: int, between: str) -> None:
    """Half of a group that was packed where it was then could not wait for its other half."""
    with client(engine, slot_bytes) as sender:
        for number in range(1, 4):
            tensors = weights(float(number))
            pairs = [(name, tensors[name]) for name in ("embed", Q_A, KV_A, "norm")]
            with sender.open(f"v{number}") as session:
                if number == 1:
                    session.send(pairs)
                elif between == "another tensor":
                    session.send(pair for pair in (*pairs[:2], pairs[3], pairs[2]))
                else:
                    session.send(pairs[:2])
                    session.flush() if between == "flush" else session.pad(session.flush() + 1)
                    session.send(pairs[2:])
                session.commit()
            check(engine, float(number), f"v{number}")


@pytest.mark.parametrize("way", WAYS)
def test_less_memory_than_then_makes_other_slots(
    engine: Engine, sent: list[Any], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    allocate = staging_module.allocate
    asked: list[int] = []

    def little(device: torch.device, nbytes: int) -> Any:
        asked.append(nbytes)
        if nbytes > 512:  # what the group needs
            raise StagingMemoryError("no room", fix="free some")
        return allocate(device, nbytes)

    with client(engine, 4096) as sender:
        WAYS[way](sender, weights(1.0), "v1")
        sent.clear()
        sender._slot_bytes = 256
        with monkeypatch.context() as patch:
            patch.setattr(staging_module, "allocate", little)
            WAYS[way](sender, weights(2.0), "v2")
        check(engine, 2.0, "v2")
        assert asked[0] == 4096
        assert set(asked[1:]) == {256, 512}
        assert Repeat not in rounds_of(sent)
        WAYS[way](sender, weights(3.0), "v3")
        check(engine, 3.0, "v3")
        assert Repeat in rounds_of(sent)


def test_a_lazy_source_has_slots_for_more_than_came_then(engine: Engine) -> None:
    with client(engine, 256) as sender:
        sender.update({"norm": weights(1.0)["norm"]}, "v1", kind="partial")
        sender._slot_bytes = 4096
        pairs = [(name, tensor) for name, tensor in weights(2.0).items() if name in ("embed", "norm")]
        assert sender.update(iter(pairs), "v2", kind="partial").rounds == 1


def test_a_message_of_a_repeated_round_is_small(engine: Engine, sent: list[Any]) -> None:
    with client(engine, 4096) as sender:
        sender.update(weights(1.0), "v1")
        sent.clear()
        sender.update(weights(2.0), "v2")
    assert {type(m) for m in sent if isinstance(m, (Load, Repeat))} == {Repeat}
    assert max(len(wire.encode(m)) for m in sent) < 300, "nothing of this session names a tensor"


def test_other_tensors_are_announced_and_checked_before_anything_is_written(engine: Engine, sent: list[Any]) -> None:
    with client(engine) as sender:
        sender.update(weights(1.0), "v1")
        sent.clear()
        wrong = weights(2.0) | {"embed": torch.zeros(8, 5)}
        with pytest.raises(ManifestError, match="do not fit") as caught:
            sender.update(wrong, "v2")
        assert any("embed: shape [8, 5]" in line for line in caught.value.details)
        assert rounds_of(sent) == [Announce]
        check(engine, 1.0, "v1")
        sender.update(weights(3.0), "v3")
        check(engine, 3.0, "v3")
        assert rounds_of(sent) == [Repeat] * 3, "the refused one has taught nobody anything"


def test_an_aborted_session_is_not_remembered(engine: Engine, sent: list[Any]) -> None:
    with client(engine) as sender:
        for _ in range(2):
            with sender.open("v1", kind="partial") as session:
                session.send([("embed", weights(1.0)["embed"])])
                session.finish()  # the rank has the token now
                session.abort()
            assert rounds_of(sent) == [Load]
            sender.update(weights(2.0), "v2")  # repairs
            sent.clear()


def test_a_lazy_session_that_deviates_is_right_and_remembered(engine: Engine, sent: list[Any]) -> None:
    def pairs(value: float, dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
        return [("embed", weights(value)["embed"]), ("norm", torch.full((5,), value, dtype=dtype))]

    with client(engine) as sender:
        wanted = [[Load, Load], [Repeat, Load], [Repeat, Repeat], [Repeat, Load]]
        for number, kinds in enumerate(wanted):
            value, dtype = float(number), torch.float32 if number in (1, 2) else torch.bfloat16
            sender.update(iter(pairs(value, dtype)), f"v{number}", kind="partial")
            assert rounds_of(sent) == kinds
            for rank, held in enumerate(engine.parameters()):
                assert torch.equal(held["norm"], torch.full((5,), value, dtype=torch.bfloat16))
                assert torch.equal(held["embed"], weights(value)["embed"][4 * rank : 4 * rank + 4])


def test_fewer_tensors_than_then_are_not_complete(engine: Engine) -> None:
    with client(engine) as sender:
        sender.update(iter(weights(1.0).items()), "v1")
        with pytest.raises(ManifestError, match="not complete"):
            sender.update(iter(list(weights(2.0).items())[:2]), "v2")
        assert {state for state, _ in engine.states()} == {"poisoned"}
        sender.update(weights(3.0), "v3")
        check(engine, 3.0, "v3")


def test_an_engine_that_was_restarted_is_told_everything(sent: list[Any]) -> None:
    with Engine(2) as engine, client(engine) as sender:
        sender.update(weights(1.0), "v1")
        for rank in engine.rank:  # what a rank remembers is lost with its process
            rank.service._session._memory = Memory()
        sent.clear()
        sender.update(weights(2.0), "v2")
        check(engine, 2.0, "v2")
        assert rounds_of(sent) == [Announce, *[Load] * 3]
        for rank in engine.rank[:1]:  # one of two is as bad
            rank.service._session._memory = Memory()
        sender.update(weights(3.0), "v3")
        check(engine, 3.0, "v3")
        assert rounds_of(sent) == [Announce, *[Load] * 3]


def padded(sender: WeightClient, tensors: dict[str, torch.Tensor], version: str) -> None:
    """A round per tensor or group, and some without tensors before, between and behind them."""
    with sender.open(version) as session:
        session.pad(1)
        session.send([("embed", tensors["embed"])])
        assert session.flush() == 2
        session.pad(4)
        session.send([(name, tensor) for name, tensor in tensors.items() if name != "embed"])
        session.pad(session.flush() + 1)
        session.commit()


def test_padding_is_repeated(engine: Engine, sent: list[Any]) -> None:
    with client(engine) as sender:
        for number in range(1, 4):
            padded(sender, weights(float(number)), f"v{number}")
            check(engine, float(number), f"v{number}")
            assert rounds_of(sent) == [Load if number == 1 else Repeat] * 7
        with sender.open("v4") as session:  # one round less between the tensors
            tensors = weights(4.0)
            session.pad(1)
            session.send([("embed", tensors.pop("embed"))])
            session.pad(3)
            session.send(tensors)
            session.commit()
        assert rounds_of(sent) == [Repeat] * 3 + [Load] * 2
        check(engine, 4.0, "v4")


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("way", ["mapping", "list"])
def test_tensors_at_hand_repeat_padding_too(engine: Engine, sent: list[Any], way: str, slots: int) -> None:
    with client(engine, slots=slots) as sender:
        padded(sender, weights(1.0), "v1")
        for number in range(2, 4):
            sent.clear()
            WAYS[way](sender, weights(float(number)), f"v{number}")
            check(engine, float(number), f"v{number}")
            assert rounds_of(sent) == [Repeat] * 7


@pytest.mark.parametrize("order", [("embed", "norm", Q_A, KV_A), (Q_A, KV_A, "norm", "embed")], ids=["grows", "fits"])
@pytest.mark.parametrize("way", WAYS)
def test_rounds_above_a_slot_are_repeated_one_after_the_other(
    engine: Engine, sent: list[Any], way: str, order: tuple[str, ...]
) -> None:
    """They share a buffer, which the round before must have left; one that is too small is exchanged."""
    with client(engine) as sender:
        sender._slot_bytes = 128  # less than any tensor needs
        for number in range(1, 4):
            tensors = weights(float(number))
            WAYS[way](sender, {name: tensors[name] for name in order}, f"v{number}")
            check(engine, float(number), f"v{number}")
            kinds = rounds_of(sent)
            if way in ("mapping", "list"):
                assert kinds == [Load if number == 1 else Repeat] * 3


class LateDevice:
    """Does what it is told no sooner than somebody waits for it. Stands in for a GPU's stream and kernels.

    Parameters
    ----------
    kernels
        True when it packs known rounds by addresses alone.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, kernels: bool) -> None:
        self._started: list[Callable[[], object]] = []
        self._pack = Packer.pack
        #: How many kernels were run.
        self.runs = 0
        monkeypatch.setattr(Packer, "pack", lambda *args: self._later(*args))
        monkeypatch.setattr(Packer, "event", lambda _: self._event())
        if kernels:
            monkeypatch.setattr(Packer, "prepare", lambda _, *args: self._prepare(*args))

    def _later(self, packer: Packer, buffer: Views, tensors: Sequence[tuple[int, torch.Tensor]]) -> Any:
        given = list(tensors)
        self._started.append(lambda: self._pack(packer, buffer, given))
        return self._event()

    def _prepare(
        self, tables: Tables, first: int, tensors: Sequence[torch.Tensor], addresses: np.ndarray | None = None
    ) -> Prepared:
        sizes = [tensor.nbytes for tensor in tensors]

        def run(sources: Places, targets: Places, upload: object) -> None:
            pairs = zip(targets.addresses.tolist(), sources.addresses.tolist(), sizes, strict=True)
            self._started += [functools.partial(ctypes.memmove, *pair) for pair in pairs]
            self.runs += 1

        kernel: Any = SimpleNamespace(run=run)
        return Prepared(kernel, np.array([tensor.data_ptr() for tensor in tensors], np.int64))

    def _event(self) -> Any:
        work, self._started = self._started, []

        def synchronize() -> None:
            while work:
                work.pop(0)()

        return SimpleNamespace(synchronize=synchronize)


@pytest.mark.parametrize("kernels", [False, True], ids=["copies", "kernels"])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("slot_bytes", [256, 4096])
@pytest.mark.parametrize("way", WAYS)
def test_a_round_is_sent_when_the_device_has_packed_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, way: str, slot_bytes: int, slots: int, kernels: bool
) -> None:
    device = LateDevice(monkeypatch, kernels=kernels)
    with client(engine, slot_bytes, slots) as sender:
        for number in range(1, 4):
            WAYS[way](sender, weights(float(number)), f"v{number}")
            check(engine, float(number), f"v{number}")
    assert (device.runs > 0) == kernels


def test_clients_that_take_turns_teach_the_engine_what_each_sends(engine: Engine, sent: list[Any]) -> None:
    """What an engine knows of a model is what the last full update sent, though it was only repeated."""

    def known() -> set[str]:
        return {rank.service._session.catalog.digest for rank in engine.rank}

    def given(value: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return weights(value) | {"norm": torch.full((5,), value, dtype=dtype)}

    with client(engine) as one, client(engine) as other:
        for number, sender in enumerate((one, one, other, one, other, one)):
            dtype = torch.bfloat16 if sender is one else torch.float32
            tensors = given(float(number), dtype)
            sender.update(tensors, f"v{number}")
            assert rounds_of(sent) == [Load if number in (0, 2) else Repeat] * 3
            assert known() == {manifest.digest([manifest.spec_of(*pair) for pair in tensors.items()])}
            check(engine, float(number), f"v{number}")
    with client(engine) as another:
        another.update(given(7.0, torch.bfloat16), "v7")  # refused where float32 is expected
    check(engine, 7.0, "v7")


@pytest.mark.parametrize("between", [False, True], ids=["alone", "after another client"])
def test_what_is_only_repeated_is_not_learned_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, between: bool
) -> None:
    with client(engine) as sender, client(engine) as other:
        for one in (sender, other, sender) if between else (sender,):
            one.update(weights(1.0), "v1")
        learned = mock.Mock()
        monkeypatch.setattr(Catalog, "learn", learned)
        for number in range(2, 5):
            sender.update({"norm": weights(0.0)["norm"]}, "partial", kind="partial")
            sender.update(weights(float(number)), f"v{number}")
            check(engine, float(number), f"v{number}")
    assert not learned.called


def test_an_engine_of_protocol_1_0_gets_what_it_knows(
    engine: Engine, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PROTOCOL_MINOR", 0)
    with client(engine) as sender:
        for number in (1.0, 2.0):
            sender.update(weights(number), f"v{number}")
            assert {message.recall for message in sent if isinstance(message, Open)} == {""}
            assert rounds_of(sent) == [Load] * 3
            check(engine, number, f"v{number}")


# --- fences ---------------------------------------------------------------------------------------------------------


class Fence:
    """Reached when the test says so."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def synchronize(self) -> None:
        """Wait for it."""
        assert self.reached.wait(PATIENCE)


def test_a_thread_waits_for_fences_in_order() -> None:
    fences = Fences(torch.device("meta"))
    events = [RoundDone("s", number, Fence(), 0.0, None) for number in range(2)]
    try:
        for event in events:
            fences.put(event)
        events[1].fence.reached.set()
        assert fences.take() == [], "the first is not reached"
        events[0].fence.reached.set()
        found: list[Any] = []
        while len(found) < 2:
            assert select.select([fences.wakeup.fileno()], [], [], PATIENCE)[0], "it wakes who polls"
            found += [reached.event for reached in fences.take()]
        assert found == events
    finally:
        fences.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "sglang-recv-fences"]


def test_updates_that_alternate_are_repeated(engine: Engine, sent: list[Any]) -> None:
    """Two partial updates of one tensor each, in turn: neither hides the other."""
    with client(engine) as sender:
        sender.update(weights(0.0), "v0")
        sent.clear()
        for number in range(1, 7):
            name = ("embed", "norm")[number % 2]
            sender.update({name: weights(float(number))[name]}, f"v{number}", kind="partial")
            assert rounds_of(sent) == [Load if number <= 2 else Repeat]
        for rank, held in enumerate(engine.parameters()):
            assert torch.equal(held["embed"], weights(6.0)["embed"][4 * rank : 4 * rank + 4])
            assert torch.equal(held["norm"], weights(5.0)["norm"])
