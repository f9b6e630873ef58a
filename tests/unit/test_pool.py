"""Tensors in an exportable pool are read where they are: not copied, not read after they may change, and no others."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from sglang_recv import ExportablePool, Session, WeightClient, exportable_pool, new_session_id
from sglang_recv.client.layout import Sizes
from sglang_recv.client.link import RankLink
from sglang_recv.client.pool import Pools, pools_on
from sglang_recv.client.staging import Staging
from sglang_recv.errors import SessionStateError, StagingMemoryError, UnsupportedError
from sglang_recv.wire import Announce, Load, OfferBuffer, Repeat
from support.rank import PATIENCE, Engine, weights

Q_A, KV_A = "attn.q_a_proj.weight", "attn.kv_a_proj_with_mqa.weight"
SLOT = 4096


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Messages with rounds, and buffers that were offered, to the first of two ranks."""
    messages: list[Any] = []
    send, offer = RankLink.send, RankLink.offer

    def recorded(link: RankLink, message: Any) -> None:
        if link.info.rank == 0 and isinstance(message, (Load, Repeat, Announce)):
            messages.append(message)
        send(link, message)

    def offered(link: RankLink, message: OfferBuffer, fd: int, timeout: float) -> None:
        if link.info.rank == 0:
            messages.append(message)
        offer(link, message, fd, timeout)

    monkeypatch.setattr(RankLink, "send", recorded)
    monkeypatch.setattr(RankLink, "offer", offered)
    return messages


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every tensor that is packed."""
    found: list[torch.Tensor] = []
    pack, pack_one = Staging.pack, Staging.pack_one

    def recorded(staging: Staging, buffer: Any, tensors: Any) -> None:
        found.extend(tensor for _, tensor in tensors)
        pack(staging, buffer, tensors)

    def recorded_one(staging: Staging, buffer: Any, offset: int, tensor: torch.Tensor) -> None:
        found.append(tensor)
        pack_one(staging, buffer, offset, tensor)

    monkeypatch.setattr(Staging, "pack", recorded)
    monkeypatch.setattr(Staging, "pack_one", recorded_one)
    return found


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(2) as made:
        yield made


@pytest.fixture(autouse=True)
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots smaller than a page."""

    def sizes(sender: WeightClient, *_: object) -> Sizes:
        assert sender._slot_bytes is not None
        return Sizes(2, sender._slot_bytes, 1 << 20)

    monkeypatch.setattr(WeightClient, "_sizes", sizes)


@pytest.fixture
def pool() -> Iterator[ExportablePool]:
    with exportable_pool(1 << 16, "cpu") as made:
        yield made


@pytest.fixture
def sender(engine: Engine) -> Iterator[WeightClient]:
    with WeightClient([engine], slot_bytes=SLOT, deadline=PATIENCE) as made:
        yield made


def into(pool: ExportablePool, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors in new memory of the pool."""
    return {name: pool.empty(tensor.shape, tensor.dtype).copy_(tensor) for name, tensor in tensors.items()}


def kinds(sent: list[Any]) -> list[type]:
    """Of the rounds since the last call."""
    found = [type(message) for message in sent if not isinstance(message, OfferBuffer)]
    sent.clear()
    return found


def check(engine: Engine, value: float, version: str) -> None:
    """Both ranks hold ``weights(value)``."""
    assert engine.states() == {("ready", version)}
    wanted = weights(value)
    for rank, held in enumerate(engine.parameters()):
        assert torch.equal(held["embed"], wanted["embed"][4 * rank : 4 * rank + 4])
        assert torch.equal(held["norm"], wanted["norm"])
        assert torch.equal(held["fused"], torch.cat([wanted[Q_A], wanted[KV_A]]))


WAYS: dict[str, Callable[[WeightClient, dict[str, torch.Tensor], str], object]] = {
    "mapping": lambda sender, tensors, version: sender.update(tensors, version),
    "list": lambda sender, tensors, version: sender.update(list(tensors.items()), version),
    "lazy": lambda sender, tensors, version: sender.update(iter(tensors.items()), version),
}


@pytest.mark.parametrize("way", ["mapping", "list"])
def test_what_is_in_a_pool_is_not_packed(
    engine: Engine,
    sender: WeightClient,
    pool: ExportablePool,
    sent: list[Any],
    packed: list[torch.Tensor],
    way: str,
) -> None:
    tensors = into(pool, weights(0.0))
    for number in range(1, 4):
        for name, tensor in weights(float(number)).items():
            tensors[name].copy_(tensor)
        WAYS[way](sender, tensors, f"v{number}")
        check(engine, float(number), f"v{number}")
        assert not packed
        offered = [message.nbytes for message in sent if isinstance(message, OfferBuffer)]
        assert offered.count(pool.nbytes) == 1
        repeats = [message for message in sent if isinstance(message, Repeat)]
        assert bool(repeats) == (number > 1)
        assert not any(message.places for message in repeats)
        sent.clear()


@pytest.mark.parametrize("way", ["mapping", "list"])
def test_tensors_that_move_inside_of_a_pool(
    engine: Engine, sender: WeightClient, pool: ExportablePool, sent: list[Any], way: str
) -> None:
    for number in range(1, 5):
        if number != 4:
            tensors = into(pool, weights(float(number)))
        WAYS[way](sender, tensors, f"v{number}")
        check(engine, float(min(number, 3)), f"v{number}")
        first = next(message for message in sent if isinstance(message, (Load, Repeat)))
        assert isinstance(first, Repeat) == (number > 1)
        # Told once: the fourth session repeats the third, whose places the ranks know.
        assert isinstance(first, Load) or bool(first.places) == (number in (2, 3))
        sent.clear()


def test_a_lazy_source_repeats_from_a_pool(
    engine: Engine, sender: WeightClient, pool: ExportablePool, sent: list[Any], packed: list[torch.Tensor]
) -> None:
    sender.update(weights(0.0), "v0")
    packed.clear()
    sent.clear()
    tensors: dict[str, torch.Tensor] = {}
    for number in range(1, 6):
        value = float(number)
        if number in (1, 3):
            tensors = into(pool, {name: weights(0.0)[name] for name in ("embed", "norm")})
        for name, tensor in tensors.items():
            tensor.copy_(weights(value)[name])
        sender.update(iter(tensors.items()), f"v{number}", kind="partial")
        assert engine.states() == {("ready", f"v{number}")}
        for rank, held in enumerate(engine.parameters()):
            assert torch.equal(held["embed"], weights(value)["embed"][4 * rank : 4 * rank + 4])
            assert torch.equal(held["norm"], weights(value)["norm"])
        assert not packed
        (message,) = (message for message in sent if not isinstance(message, OfferBuffer))
        assert isinstance(message, Load if number == 1 else Repeat)
        assert number == 1 or bool(message.places) == (number == 3)
        sent.clear()


@pytest.mark.parametrize("way", WAYS)
def test_tensors_that_come_and_go(
    engine: Engine, sender: WeightClient, pool: ExportablePool, packed: list[torch.Tensor], way: str
) -> None:
    """In a pool, outside, half and half: never the bytes of then."""
    turns = ({"embed", "norm"}, set[str](), {"norm"}, {"embed"}, {"embed", "norm"})
    for number, inside in enumerate(turns, 1):
        tensors = weights(float(number))
        tensors |= into(pool, {name: tensors[name] for name in sorted(inside)})
        packed.clear()
        WAYS[way](sender, tensors, f"v{number}")
        check(engine, float(number), f"v{number}")
        assert {tensor.shape for tensor in packed} == {tensors[name].shape for name in tensors.keys() - inside}


def test_what_ranks_cannot_read_in_place_is_packed(pool: ExportablePool) -> None:
    pools = Pools([pool])
    whole = pool.empty((64, 64), torch.float32)
    again = [whole, whole[:1], whole[1:], whole[0, 1:], whole.t(), whole[:, :1], whole[:0], torch.zeros(3), whole[5]]
    _, homes, offsets = pools.look(again)
    start = whole.data_ptr() - pool.start
    assert homes.tolist() == [pool.number if fits else 0 for fits in (1, 1, 1, 0, 0, 0, 0, 0, 1)]
    assert offsets.tolist() == [start, start, start + 256, 0, 0, 0, 0, 0, start + 5 * 256]
    assert [place or (0, 0) for place in map(pools.find, again)] == list(zip(homes, offsets, strict=True))
    negative = torch.view_as_complex(pool.empty((64, 2), torch.float32)).conj()
    assert pools.find(negative) is None
    assert pools.find(negative.imag) is None
    assert not pools.look([negative, negative.imag]).pools.any()


@pytest.mark.parametrize("in_one_list", [True, False])
def test_send_returns_once_all_is_read(
    engine: Engine, sender: WeightClient, pool: ExportablePool, in_one_list: bool
) -> None:
    """The caller may write its tensors again: while a rank stands still, ``send`` does not return."""

    def send(session: Session, tensors: dict[str, torch.Tensor], returned: threading.Event) -> None:
        session.send(list(tensors.items()) if in_one_list else iter(tensors.items()))
        returned.set()

    for number in (1, 2, 3):  # the later ones repeat
        tensors = into(pool, weights(float(number)))
        with sender.open(f"v{number}") as session:
            returned = threading.Event()
            thread = threading.Thread(target=send, args=(session, tensors, returned))
            with engine.stalled(1):
                thread.start()
                assert not returned.wait(0.2)
            thread.join(PATIENCE)
            assert returned.is_set()
            for tensor in tensors.values():
                tensor.fill_(99)
            session.commit()
        check(engine, float(number), f"v{number}")


def test_a_lazy_source_gets_its_pool_back(engine: Engine, sender: WeightClient, pool: ExportablePool) -> None:
    """Of what it has given, at most half of the pool waits to be read, and the rest may be used again."""
    size = 2048
    names = [f"layers.{number}.rotary_emb.inv_freq" for number in range(64)]  # may be sent, and are not loaded
    spare = [pool.empty((size,), torch.uint8) for _ in range(pool.nbytes // size)]
    given: list[weakref.ref[torch.Tensor]] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(1.0).items()
        for number, name in enumerate(names):
            assert sum(size for held in given if held() is not None) <= pool.nbytes // 2
            tensor = spare[number % len(spare)][:]
            given.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    for number in (1, 2):
        sender.update(source(), f"v{number}")
        check(engine, 1.0, f"v{number}")
        assert len(given) == len(names) * number
    spare.clear()


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture(engine: Engine, sender: WeightClient, seed: int) -> None:
    """Sessions of any way with tensors in one of two pools, or in none, at the same places as before or elsewhere."""
    choice = random.Random(seed)
    with exportable_pool(1 << 16, "cpu") as one, exportable_pool(1 << 16, "cpu") as two:
        kept: dict[str, torch.Tensor] = {}
        for number in range(1, 9):
            value = float(number)
            tensors = weights(value)
            for name, tensor in tensors.items():
                if name in kept and choice.random() < 0.5:
                    tensors[name] = kept[name].copy_(tensor)
                elif choice.random() < 0.7:
                    tensors[name] = into(choice.choice([one, two]), {name: tensor})[name]
            kept = dict(tensors)
            WAYS[choice.choice(list(WAYS))](sender, tensors, f"v{number}")
            check(engine, value, f"v{number}")
        kept.clear()
        del tensors, tensor


def test_a_pool_that_is_full(pool: ExportablePool) -> None:
    pool.empty((pool.nbytes - 256,), torch.uint8)
    pool.empty((256,), torch.uint8)
    with pytest.raises(StagingMemoryError, match=f"1 bytes do not fit: {pool.nbytes} of this pool's {pool.nbytes}"):
        pool.empty((1,), torch.uint8)


def test_torch_has_no_pools_on_a_cpu(pool: ExportablePool) -> None:
    with pytest.raises(UnsupportedError, match=r"pool\.empty"), pool.use():
        pass


def test_a_closed_pool_is_not_used(engine: Engine, sender: WeightClient, sent: list[Any]) -> None:
    made = exportable_pool(1 << 16, "cpu")
    made.close()
    made.close()
    sender.update(weights(1.0), "v1")
    check(engine, 1.0, "v1")
    assert made.nbytes not in [message.nbytes for message in sent if isinstance(message, OfferBuffer)]


# --- pools that end, and several senders ------------------------------------------------------------------------------


def test_a_pool_that_a_session_has_lent_is_not_closed(engine: Engine, sender: WeightClient, sent: list[Any]) -> None:
    """Its addresses would be anybody's, while the ranks still read the old memory there."""
    pool = exportable_pool(1 << 16, "cpu")
    tensors = into(pool, weights(1.0))
    with sender.open("v1") as session:
        session.send([("embed", tensors["embed"])])
        with pytest.raises(SessionStateError, match="a session has sent tensors of this pool"):
            pool.close()
        session.send([pair for pair in tensors.items() if pair[0] != "embed"])
        session.commit()
    check(engine, 1.0, "v1")
    del tensors
    pool.close()
    assert pool.closed


def test_memory_where_a_closed_pool_was_is_packed(engine: Engine, sender: WeightClient, sent: list[Any]) -> None:
    pool = exportable_pool(1 << 16, "cpu")
    start, number, nbytes = pool.start, pool.number, pool.nbytes
    with sender.open("v1") as session:
        pool.close()
        again = exportable_pool(1 << 16, "cpu")
        assert (again.start, again.number) != (start, number)
        assert again.start == start, "this test needs the same address, which the system gave so far"
        tensors = into(again, weights(1.0))
        session.send(list(tensors.items()))
        session.commit()
    check(engine, 1.0, "v1")
    assert nbytes not in [message.nbytes for message in sent if isinstance(message, OfferBuffer)]
    del tensors
    again.close()


def test_several_senders_pack_what_is_in_pools(engine: Engine, pool: ExportablePool) -> None:
    """They flush, agree and pad: none may wait until what it has lent is read, before the others go on."""
    session_id, step, rounds = new_session_id(), threading.Barrier(2), dict[int, int]()

    def feed(rank: int, sender: WeightClient) -> None:
        tensors = weights(1.0)
        if rank == 0:
            tensors |= {"norm": pool.empty((5,), torch.bfloat16).copy_(tensors["norm"])}
            tensors |= {f"{number}.rotary_emb.inv_freq": torch.zeros(1000) for number in range(2)}
        with sender.open("v1", session_id=session_id, coordinator=rank == 0) as session:
            session.send(list(tensors.items()))
            rounds[rank] = session.flush()
            step.wait(PATIENCE)
            session.pad(max(rounds.values()))
            session.finish()
            step.wait(PATIENCE)
            session.commit()

    with contextlib.ExitStack() as stack:
        senders = [
            stack.enter_context(WeightClient([engine], slot_bytes=SLOT, deadline=PATIENCE, ranks=[rank]))
            for rank in range(2)
        ]
        threads = stack.enter_context(ThreadPoolExecutor(2))
        for done in [threads.submit(feed, *pair) for pair in enumerate(senders)]:
            done.result(PATIENCE)
    assert rounds == {0: 3, 1: 1}
    check(engine, 1.0, "v1")


def test_a_lazy_source_does_not_repeat_rounds_that_hold_more_than_its_share(
    engine: Engine, sender: WeightClient, pool: ExportablePool
) -> None:
    """A list of tensors that are all there may lie in one round; a lazy source may need them back before it is over."""
    names = [f"{number}.rotary_emb.inv_freq" for number in range(24)]
    spare = [pool.empty((2048,), torch.uint8) for _ in names]
    sender.update([*zip(names, spare, strict=True), *weights(1.0).items()], "v1")
    given: list[weakref.ref[torch.Tensor]] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, memory in zip(names, spare, strict=True):
            assert sum(2048 for held in given if held() is not None) <= pool.nbytes // 2
            tensor = memory[:]
            given.append(weakref.ref(tensor))
            yield name, tensor
            del tensor
        yield from weights(2.0).items()

    for number in (2, 3):
        sender.update(source(), f"v{number}")
        check(engine, 2.0, f"v{number}")
    spare.clear()


def test_nothing_is_held_after_an_abort(engine: Engine, sender: WeightClient, pool: ExportablePool) -> None:
    for number in (1, 2):  # the second one repeats
        tensors = {name: tensor for name, tensor in into(pool, weights(1.0)).items() if name in ("embed", "norm")}
        held = [weakref.ref(tensor) for tensor in tensors.values()]
        sender.update(weights(1.0), f"v{number}")
        if number == 1:
            sender.update(iter(tensors.items()), "partial", kind="partial")

        def source(tensors: dict[str, torch.Tensor] = tensors) -> Iterator[tuple[str, torch.Tensor]]:
            yield "embed", tensors.pop("embed")
            raise ValueError("no more")

        with sender.open("v", kind="partial") as session:
            with pytest.raises(ValueError, match="no more") as caught:
                session.send(source())
            caught.value.__traceback__ = None
            del caught
            tensors.clear()
            gc.collect()
            assert [reference() for reference in held] == [None, None]


def test_more_pools_than_ranks_answer_at_once(engine: Engine, sender: WeightClient) -> None:
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(exportable_pool(4096, "cpu")) for _ in range(300)]
        tensors = weights(1.0)
        tensors |= {f"{n}.rotary_emb.inv_freq": pool.empty((4,), torch.float32) for n, pool in enumerate(pools)}
        sender.update(tensors, "v1")
        check(engine, 1.0, "v1")
        tensors.clear()


def test_a_small_pool_that_is_not_used_changes_nothing(engine: Engine, sender: WeightClient, sent: list[Any]) -> None:
    with exportable_pool(4096, "cpu"), exportable_pool(1 << 16, "cpu") as pool:
        tensors = into(pool, weights(1.0))
        sender.update(iter(tensors.items()), "v1")
        check(engine, 1.0, "v1")
        assert kinds(sent) == [Load]
        tensors.clear()


def test_a_pool_that_was_dropped_keeps_its_tensors(
    engine: Engine, sender: WeightClient, packed: list[torch.Tensor]
) -> None:
    made = exportable_pool(1 << 16, "cpu")
    number, tensors = made.number, into(made, weights(1.0))
    del made
    gc.collect()
    (left,) = (pool for pool in pools_on(torch.device("cpu")) if pool.number == number)
    with left:
        sender.update(tensors, "v1")
        check(engine, 1.0, "v1")
        assert not packed
        tensors.clear()


def test_shapes_that_are_none_and_closed_pools_are_refused() -> None:
    made = exportable_pool(1 << 16, "cpu")
    with pytest.raises(RuntimeError, match="negative dimension"):
        made.empty((-1,), torch.uint8)
    made.close()
    with pytest.raises(SessionStateError, match="this pool is closed"):
        made.empty((1,), torch.uint8)
    with pytest.raises(SessionStateError, match="this pool is closed"), made.use():
        pass


def test_an_error_is_not_hidden_by_a_pool_that_cannot_be_closed(
    pool: ExportablePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.lend()
    try:
        with pytest.raises(ValueError, match="first"), pool:
            raise ValueError("first")
        assert "a pool stays open, since an error came first" in caplog.text
    finally:
        pool.give_back()
