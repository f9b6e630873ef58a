"""Stand-ins that let the real SGLang run on a CPU; Python imports this at start where the folder is on PYTHONPATH.

SGLang's modules import ``sgl_kernel``, ``torchvision`` and ``triton`` at their top, though a CPU server calls none of
them, and a CPU machine has none of them. Here each import is answered with a hollow module: any attribute exists, so
definitions at module level go through, and *calling* one raises. So nothing that a server really runs can be replaced
unseen. The one exception is what runs while a module is imported: triton's decorators hand back the function as it was
(launching it, ``kernel[grid](...)``, raises, because a plain function cannot be subscripted), its constants the value.

A package that is really installed always wins. Only server processes get this folder; the tests' own process does not.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Package -> the version that its stand-in claims: transformers looks at torchvision's, SGLang and torch at triton's.
HOLLOW = {"sgl_kernel": "0.0.0", "torchvision": "0.28.0", "triton": "3.0.0"}

# What SGLang asks importlib about before it takes a CUDA or AMX path: the honest answer here is "not there".
PROBED = "sgl_kernel"

# What of triton is called while a module is imported: decorators, the wrapper of a constant, the options of a kernel.
DECORATORS = frozenset({"autotune", "constexpr_function", "heuristics", "jit"})
CONSTANT = "constexpr"
OPTIONS = "Config"

# Modules that callers do without where they are missing, and call into where they are there.
ABSENT = frozenset({"triton.knobs"})


class CalledOnCpuError(NotImplementedError):
    """A stand-in was called: this code path needs the real package and a GPU."""


def _refuse(name: str) -> CalledOnCpuError:
    return CalledOnCpuError(f"{name} was called, but it is only a stand-in for importing SGLang on a CPU")


def _decorator(name: str) -> Callable[..., Any]:
    """Serve ``@jit`` and ``@jit(...)`` alike: pass the function through."""

    def decorate(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and (isinstance(args[0], (types.FunctionType, type))):
            return args[0]
        return lambda function: function

    decorate.__name__ = name
    return decorate


def _constant(value: Any) -> Any:
    """Serve ``constexpr(8)``; as an annotation it is only named."""
    return value


class _HollowType(type):
    """A class whose attributes all exist too, as in an enum that is named in a default argument."""

    def __getattr__(cls, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        return Hollow(f"{cls.__module__}.{cls.__qualname__}.{name}")


class Hollow(types.ModuleType):
    """A module, or a thing in one, that has every attribute and does nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "A stand-in; see sitecustomize.")
        self.__path__: Sequence[str] = []
        self.__version__ = HOLLOW[name.partition(".")[0]]

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if _is_special(name) or full in ABSENT:
            # Python itself looks for the special ones and takes their presence for a promise.
            raise AttributeError(full)
        value: Any
        if full.startswith("triton.") and name in DECORATORS:
            value = _decorator(name)
        elif full.startswith("triton.") and name == CONSTANT:
            value = _constant
        elif name[0].isupper():
            # Likely a class: it must serve as a base class, in isinstance and in annotations such as ``A | None``.
            init = _accept if full == f"triton.{OPTIONS}" else _refusing_init(full)
            value = _HollowType(name, (), {"__module__": self.__name__, "__init__": init})
        else:
            value = Hollow(full)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _refuse(self.__name__)

    def __iter__(self) -> Iterator[Any]:
        # Else __getattr__ would leave Python trying __getitem__.
        raise _refuse(self.__name__)


def _accept(self: Any, *args: Any, **kwargs: Any) -> None:
    """Options are only kept for a launch that never comes."""


def _refusing_init(name: str) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise _refuse(name)

    return __init__


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last on ``sys.meta_path``, so it only hears of what nothing else could find."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in HOLLOW or fullname in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Hollow(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: attributes appear when they are asked for."""


def _install() -> None:
    sys.meta_path.append(_Finder())
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        return None if name.partition(".")[0] == PROBED else real(name, package)

    importlib.util.find_spec = find_spec


_install()
