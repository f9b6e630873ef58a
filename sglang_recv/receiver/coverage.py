"""Which bytes of the parameters did a load reach, and which tensors did it read?

Success of ``load_weights`` says little: SGLang's loaders skip names that they do not know, and nothing tells whether
every parameter got its bytes. So loads are watched. A parameter is covered when writes reached all of its bytes; a
tensor was read when an operation other than a view took it (or a view of it). There are two ways to watch:

- :class:`CopyMode` sees the calls that Python code makes of torch. It understands ``copy_``, ``fill_``, ``item``
  and what only looks at tensors, and says when it saw anything else. Most loaders do nothing else, and it costs less.
- :class:`CoverageMode` sees each operation of torch, whoever asked for it, and understands them all. ``tolist`` and
  ``numpy`` are none: :class:`ValueMode` beside it sees those.

torch keeps modes per thread. :func:`watching` hands them on to thread pools; work on other threads is invisible.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_recv.errors import ApplyError
from sglang_recv.receiver.recording import Recorder


def runs(tensor: torch.Tensor) -> tuple[np.ndarray, int]:
    """Addresses of the contiguous runs of ``tensor`` and the bytes of each run."""
    item = tensor.element_size()
    if tensor.numel() == 0:
        return np.empty(0, np.int64), 0
    start = tensor.data_ptr()
    dims = sorted(((s * item, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1), reverse=True)
    length = item
    while dims and dims[-1][0] == length:
        length *= dims.pop()[1]
    starts = np.array([start], np.int64)
    for stride, count in dims:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    return starts, length


def _union(starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same bytes as disjoint ranges in order."""
    if not len(starts):
        return starts, stops
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(stops[order])
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    return starts[first], reach[np.concatenate([first[1:], [True]])]


class Ranges:
    """A set of address ranges, merged when asked for."""

    def __init__(self) -> None:
        self._starts: list[np.ndarray] = []
        self._stops: list[np.ndarray] = []
        self._plain: list[int] = []  # start, stop, start, stop, ... of contiguous tensors: most of them
        self._merged: tuple[np.ndarray, np.ndarray] | None = None

    def add(self, tensor: torch.Tensor) -> None:
        """Add every byte of ``tensor``."""
        if tensor.is_contiguous():
            start = tensor.data_ptr()
            self._plain += (start, start + tensor.nbytes)
            self._merged = None
            return
        starts, length = runs(tensor)
        self._put(starts, starts + length)

    def update(self, other: Ranges) -> None:
        """Add everything that ``other`` holds."""
        self._put(*other.merged())

    def add_spans(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Add ranges of addresses."""
        self._put(starts, stops)

    def add_masked(self, tensor: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the items of ``tensor`` where ``mask``, of the same shape, is True."""
        if mask.all():
            self.add(tensor)
            return
        item = tensor.element_size()
        strides = np.array(tensor.stride(), np.int64) * item
        starts = tensor.data_ptr() + mask.nonzero().cpu().numpy() @ strides
        self._put(starts, starts + item)

    def _put(self, starts: np.ndarray, stops: np.ndarray) -> None:
        if len(starts):
            self._starts.append(starts)
            self._stops.append(stops)
            self._merged = None

    def merged(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts and stops of the disjoint union, in order."""
        if self._merged is None:
            plain = np.array(self._plain, np.int64).reshape(-1, 2)
            plain = plain[plain[:, 0] < plain[:, 1]]
            self._merged = _union(
                np.concatenate([plain[:, 0], *self._starts]), np.concatenate([plain[:, 1], *self._stops])
            )
            self._plain = []
            self._starts, self._stops = [self._merged[0]], [self._merged[1]]
        return self._merged

    def __contains__(self, address: int) -> bool:
        starts, stops = self.merged()
        place = int(np.searchsorted(starts, address, side="right")) - 1
        return place >= 0 and address < int(stops[place])

    def missing_bytes(self, tensor: torch.Tensor) -> int:
        """How many bytes of ``tensor`` lie outside this set."""
        starts, stops = self.merged()
        if tensor.is_contiguous():  # nearly every parameter is, and nearly always it was reached as a whole
            place = int(np.searchsorted(starts, tensor.data_ptr(), side="right")) - 1
            if place >= 0 and tensor.data_ptr() + tensor.nbytes <= stops[place]:
                return 0
        wanted, length = runs(tensor)
        if not length:
            return 0
        if not len(starts):
            return len(wanted) * length
        # Bytes of the set below an address, by which the covered bytes of any run are a difference.
        below = np.concatenate([[0], np.cumsum(stops - starts)])

        def covered_below(address: np.ndarray) -> np.ndarray:
            index = np.searchsorted(starts, address, side="right")
            inside = np.where(index > 0, np.minimum(address, stops[index - 1]) - starts[index - 1], 0)
            return np.where(index > 0, below[index - 1] + np.maximum(inside, 0), 0)

        covered = covered_below(wanted + length) - covered_below(wanted)
        return int(len(wanted) * length - covered.sum())


#: Writes through an index name all of their first argument, but reach only what their index says.
_INDEXED = re.compile(r"::(_?index_|masked_|scatter|put_|_?unsafe_index_put|_index_put_impl_)")


def _reached(func: Any, args: Sequence[Any]) -> torch.Tensor | None:
    """A mask of what an indexed write reaches in its first argument; None when this module cannot tell.

    The same index is used to write True into a mask, so that torch's own rules of indexing apply.
    """
    mask = torch.zeros_like(args[0], dtype=torch.bool)
    match func._schema.name.removeprefix("aten::"), args:
        case (("index_put_" | "_index_put_impl_" | "_unsafe_index_put"), (_, indices, *_)):
            torch.ops.aten.index_put_(mask, indices, torch.ones((), dtype=torch.bool, device=mask.device))
        case (("index_copy_" | "index_fill_"), (_, dim, index, *_)):
            mask.index_fill_(dim, index, True)
        case "masked_fill_", (_, chosen, *_):
            mask.masked_fill_(chosen, True)
        case "scatter_", (_, dim, index, *_):
            mask.scatter_(dim, index, True)
        case _:
            return None
    return mask


class _Role(NamedTuple):
    """What an operation does with its arguments."""

    view: bool
    #: Positions and names of arguments that it writes.
    written: frozenset[int | str]
    #: True for a write that reaches what an index says.
    indexed: bool


@cache
def _role(func: Any) -> _Role:
    schema = func._schema
    written: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {position, argument.name}
    view = not written and any(r.alias_info is not None for r in schema.returns)
    return _Role(view, frozenset(written), _INDEXED.search(schema.name) is not None)


class Staged:
    """Where the tensors of a bucket lie in staging.

    Parameters
    ----------
    tensors
        Names and tensors, each contiguous and not empty.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        places = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in tensors)
        self._starts = [start for start, _, _ in places]
        self._stops = [stop for _, stop, _ in places]
        self._names = [name for _, _, name in places]

    def __len__(self) -> int:
        return len(self._names)

    def find(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Name and address of the tensor that ``tensor`` begins in, or None."""
        address = tensor.data_ptr()
        index = bisect_right(self._starts, address) - 1
        return (self._names[index], self._starts[index]) if index >= 0 and address < self._stops[index] else None


def _changed(name: str, func: Any) -> ApplyError:
    return ApplyError(
        f"the loader changes its input {name!r} in place ({func}), which other ranks also read",
        fix="report the model; until then update it with SGLang's own endpoints",
    )


#: Methods that only look at a tensor, make a view of it, or a copy that is none of ours.
_LOOKING_METHODS: Final = (
    *("__getitem__", "__len__", "__hash__", "size", "dim", "numel", "nelement", "element_size", "stride", "data_ptr"),
    *("storage_offset", "is_contiguous", "is_floating_point", "get_device", "narrow", "select", "unbind", "split"),
    *("chunk", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "transpose", "t", "permute"),
    *("movedim", "squeeze", "unsqueeze", "expand", "expand_as", "detach", "contiguous", "to", "cpu", "cuda", "type"),
)
#: Those of them that make a copy when they must.
_MAY_COPY: Final = frozenset(
    getattr(torch.Tensor, name)
    for name in ("__getitem__", "reshape", "reshape_as", "flatten", "contiguous", "to", "cpu", "cuda", "type")
)
_LOOKING_PROPERTIES: Final = (
    *("data", "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad"),
    *("is_cuda", "is_cpu", "is_meta", "T", "mT"),
)
_LOOKS: Final = frozenset(
    [getattr(torch.Tensor, name) for name in _LOOKING_METHODS]
    + [getattr(torch.Tensor, name).__get__ for name in _LOOKING_PROPERTIES]
)
_COPY: Final = torch.Tensor.copy_
_GET_ITEM: Final = torch.Tensor.__getitem__
_FILLS: Final = frozenset((torch.Tensor.fill_, torch.Tensor.zero_))
_VALUES: Final = frozenset(
    getattr(torch.Tensor, name) for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")
)
#: Writes that are no operation of torch: they call Python for each item.
_PYTHON_WRITES: Final = frozenset(getattr(torch.Tensor, name) for name in ("apply_", "map_", "map2_"))
#: In-place methods of tensors: ``add_``, ``__iadd__``, ``__setitem__``.
_IN_PLACE: Final = re.compile(r"[^_]_$|^__i\w+__$|^__setitem__$")


#: Answers that tell about a tensor, and not what it holds.
_FACTS: Final = (bool, int, torch.Size, torch.dtype, torch.device, torch.layout)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested arguments, as far as they have an address."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _holds_nothing_new(result: Any, storages: set[int]) -> bool:
    """True for views of what is in ``storages``, and facts: whoever has them still has to ask torch for the values."""
    if result is None or isinstance(result, _FACTS):
        return True
    if isinstance(result, torch.Tensor):
        return result.layout is torch.strided and _storage(result) in storages
    return isinstance(result, (list, tuple)) and all(_holds_nothing_new(item, storages) for item in result)


class _CallMode(TorchFunctionMode):
    """Sees the calls that Python code makes of torch."""

    def __init__(self, staged: Staged, recorder: Recorder) -> None:
        super().__init__()
        self._staged = staged
        self._recorder = recorder
        self.read: set[str] = set()

    def _taken(self, func: Any, given: Sequence[torch.Tensor], result: Any) -> None:
        """Note what a call that nobody understands took: a plan could not give it that again.

        ``given`` are its arguments from before the call: ``deepcopy`` puts its result into one.
        """
        if func not in _PYTHON_WRITES and _holds_nothing_new(result, {_storage(tensor) for tensor in given}):
            return
        for tensor in given:
            self._value(tensor, f"read by {_name(func)}()")

    def _value(self, tensor: torch.Tensor, reason: str = "read as a number") -> None:
        place = self._staged.find(tensor)
        if place is None:
            self._recorder.touch(tensor, reason)
        else:
            self.read.add(place[0])
            self._recorder.unplanned(place[0], reason)

    def _refuse_staged(self, func: Any, tensor: torch.Tensor) -> None:
        changed = self._staged.find(tensor)
        if changed is not None:
            raise _changed(changed[0], func)


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", repr(func))
    return name


class CopyMode(_CallMode):
    """Records copies and fills while active, and whether there was anything else.

    Parameters
    ----------
    written
        Gets the bytes that copies wrote.
    staged
        The bucket.
    recorder
        Gets what can be repeated.
    """

    def __init__(self, written: Ranges, staged: Staged, recorder: Recorder) -> None:
        super().__init__(staged, recorder)
        self._written = written
        #: Functions that this mode does not understand.
        self.others: set[str] = set()

    def twin(self) -> CopyMode:
        """One for another thread, with the same records."""
        other = CopyMode(self._written, self._staged, self._recorder)
        other.read, other.others = self.read, self.others
        return other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS:
            result = func(*args, **kwargs) if kwargs else func(*args)
            if func in _MAY_COPY and isinstance(result, torch.Tensor):
                self._made(func, args, result)
            return result
        if func is _COPY and len(args) == 2 and not kwargs:
            target, source = args
            self._write(func, target)
            place = self._staged.find(source)
            if place is not None:
                self.read.add(place[0])
            self._recorder.copied(target, source, place)
        elif func in _FILLS and not kwargs and not any(isinstance(value, torch.Tensor) for value in args[1:]):
            self._write(func, args[0])
            self._recorder.touch(args[0], "filled")
        elif func in _VALUES:
            self._value(args[0])
        else:
            name = _name(func)
            self.others.add(name)
            if args and isinstance(args[0], torch.Tensor) and _IN_PLACE.search(name):
                self._refuse_staged(func, args[0])
            given = list(_tensors((args, kwargs)))
            result = func(*args, **(kwargs or {}))
            self._taken(func, given, result)
            return result
        return func(*args, **(kwargs or {}))

    def _made(self, func: Any, args: Any, result: torch.Tensor) -> None:
        """A copy that a loader keeps would not be made by a plan. One that is only on its way to a parameter comes back
        as the source of ``copy_``, from outside of the bucket."""
        if _storage(result) == _storage(args[0]):
            return
        # An index is read too. What other methods get beside their tensor only lends its dtype or shape.
        for tensor in _tensors(args if func is _GET_ITEM else args[:1]):
            place = self._staged.find(tensor)
            if place is None:
                self._recorder.touch(tensor, f"copied by {func.__name__}()")
            else:
                self._recorder.unplanned(place[0], f"copied by {func.__name__}()")

    def _write(self, func: Any, tensor: torch.Tensor) -> None:
        self._refuse_staged(func, tensor)
        self._written.add(tensor)


class ValueMode(_CallMode):
    """Records what leaves torch without an operation, as by ``tolist``. A :class:`CoverageMode` makes it."""

    def twin(self) -> ValueMode:
        """One for another thread, with the same records."""
        other = ValueMode(self._staged, self._recorder)
        other.read = self.read
        return other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func in _PYTHON_WRITES:
            self._refuse_staged(func, args[0])
        given = list(_tensors((args, kwargs)))
        # The operations behind a call are noted before it: their reasons say more, and the first one counts.
        result = func(*args, **(kwargs or {}))
        if func in _VALUES:
            self._value(args[0])
        else:
            self._taken(func, given, result)
        return result


_COPY_OPERATION: Final = torch.ops.aten.copy_.default


class CoverageMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records all writes and reads while active.

    Parameters
    ----------
    written
        Gets the bytes that operations wrote.
    staged
        The bucket.
    recorder
        Gets what can be repeated.
    """

    def __init__(self, written: Ranges, staged: Staged, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written = written
        self._staged = staged
        self._recorder = recorder
        self.read: set[str] = set()

    def twin(self) -> CoverageMode:
        """One for another thread, with the same records."""
        other = CoverageMode(self._written, self._staged, self._recorder)
        other.read = self.read
        return other

    def values(self) -> ValueMode:
        """The mode to watch with beside this one, with the same records."""
        other = ValueMode(self._staged, self._recorder)
        other.read = self.read
        return other

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch before it wraps ``__torch_dispatch__``; nothing here is compiled, a wrap costs 1 us a call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A load is some 100,000 operations, most of them views: those pass first.
        role = _role(func)
        if role.view:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func is _COPY_OPERATION:
            target, source = args[:2]
            self._note_copy(func, target, source)
            return func(*args, **(kwargs or {}))
        for place, value in enumerate(args):
            self._note(func, role, place, value)
        for name, value in (kwargs or {}).items():
            self._note(func, role, name, value)
        if role.indexed and role.written:
            mask = _reached(func, args)
            if mask is not None:
                self._written.add_masked(args[0], mask)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, role: _Role, place: int | str, value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                self._note(func, role, place, item)
            return
        if not isinstance(value, torch.Tensor):
            return
        found = self._staged.find(value)
        if place not in role.written:
            if found is not None:
                self.read.add(found[0])
                self._recorder.unplanned(found[0], f"read by {func}")
            else:
                self._recorder.touch(value, f"read by {func}")
            return
        if found is not None:
            raise _changed(found[0], func)
        self._recorder.touch(value, f"written by {func}")
        if not role.indexed:
            self._written.add(value)

    def _note_copy(self, func: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        changed = self._staged.find(target)
        if changed is not None:
            raise _changed(changed[0], func)
        self._written.add(target)
        found = self._staged.find(source)
        if found is not None:
            self.read.add(found[0])
        self._recorder.copied(target, source, found)


Mode = CopyMode | CoverageMode | ValueMode


class _Pools:
    """``ThreadPoolExecutor.submit`` while anybody watches: tasks of a thread that watches take its modes along.

    Each one is for one patch of the class. Another library may have wrapped it by the end, and goes on to call it: with
    nobody left in ``_modes`` it hands everything on.
    """

    def __init__(self) -> None:
        self.users = 0
        self._modes: dict[int, Sequence[Mode]] = {}
        self._original: Final = ThreadPoolExecutor.submit

        def submit(pool: ThreadPoolExecutor, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            modes = self._modes.get(threading.get_ident())
            if modes is None:
                return self._original(pool, task, *args, **kwargs)

            def under_modes(*args: Any, **kwargs: Any) -> Any:
                with self.watch([mode.twin() for mode in modes]):
                    return task(*args, **kwargs)

            return self._original(pool, under_modes, *args, **kwargs)

        self._submit: Final = submit
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign, assignment]

    @contextmanager
    def watch(self, modes: Sequence[Mode]) -> Iterator[None]:
        """Enter the modes on this thread, and note them for what it submits."""
        me = threading.get_ident()
        before = self._modes.get(me)
        self._modes[me] = modes
        try:
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                yield
        finally:
            if before is None:
                del self._modes[me]
            else:
                self._modes[me] = before

    def remove(self) -> None:
        """Give the class back what it had, unless somebody else has changed it since."""
        if ThreadPoolExecutor.submit is self._submit:
            ThreadPoolExecutor.submit = self._original  # type: ignore[method-assign]


_lock: Final = threading.Lock()
_pools: _Pools | None = None


@contextmanager
def watching(*modes: Mode) -> Iterator[None]:
    """Watch this thread, and what it gives to thread pools, where SGLang's DeepSeek loaders copy tensors of a CPU.

    torch's modes hold for one thread, so a task takes its own along, and the tasks that it submits in turn. The pool's
    class is changed while anybody watches; what other threads submit is left alone.
    """
    global _pools
    with _lock:
        pools = _pools = _pools or _Pools()
        pools.users += 1
    try:
        with pools.watch(modes):
            yield
    finally:
        with _lock:
            pools.users -= 1
            if not pools.users:
                pools.remove()
                _pools = None


def warm_up() -> None:
    """Pay for the first use of a dispatch mode in this process: torch imports for about a second then."""
    with CoverageMode(Ranges(), Staged(()), Recorder()):
        torch.zeros(1).add_(1)
