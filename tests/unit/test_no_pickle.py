"""What no module of the package may use, and which way imports may point: read from the source of all of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "sglang_recv"
MODULES = sorted(ROOT.rglob("*.py"))

BANNED_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "copyreg"}
BANNED_NAMES = {
    "ForkingPickler", "send_pyobj", "recv_pyobj", "pidfd_getfd",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "reduce_tensor", "rebuild_cuda_tensor", "_share_cuda_", "_new_shared_cuda", "allow_pickle",
    "MultiprocessingSerializer",
}  # fmt: skip
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
#: (module, attribute) that may not be called, however the module was imported.
BANNED_ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("numpy", "load"), ("yaml", "load")}

#: The bench's drivers of the ways that others go: SGLang's own is a pickle, made by SGLang's own functions.
OTHER_WAYS = "cli.bench_others"
ALLOWED_THERE = {"MultiprocessingSerializer"}

#: What each folder or module may import of this package: imports point inwards.
LAYERS = {
    "errors": set(),
    "fds": {"errors"},
    "identity": {"errors"},
    "collective": set(),
    "copies": {"copies_triton"},
    "copies_triton": {"copies"},
    "wire": {"errors"},
    "manifest": {"errors", "wire"},
    "fdpass": {"errors", "fds"},
    "memory": {"errors", "fds", "memory"},
    "channel": {"errors", "wire", "fdpass"},
    "receiver": {"errors", "fds", "identity", "wire", "manifest", "fdpass", "memory", "channel", "copies", "receiver"},
    "client": {"errors", "fds", "identity", "wire", "manifest", "fdpass", "memory", "channel", "copies", "client"},
}  # fmt: skip
FOREIGN_TO_ALL_BUT_INTEGRATIONS = {"sglang", "megatron", "slime", "ray", "transformers"}


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything that a module imports, at any depth of its code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they point"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def findings(tree: ast.AST) -> list[str]:
    """Uses of what is banned, as `line: what`."""
    found = []
    aliases = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            found += [f"{line}: import {a.name}" for a in node.names if a.name.split(".")[0] in BANNED_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in BANNED_MODULES:
                found.append(f"{line}: from {node.module}")
            for alias in node.names:
                if alias.name in BANNED_NAMES or (node.module, alias.name) in BANNED_ATTRIBUTES:
                    found.append(f"{line}: from {node.module} import {alias.name}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
            found.append(f"{line}: {node.func.id}()")
        elif isinstance(node, ast.Attribute):
            if node.attr in BANNED_NAMES:
                found.append(f"{line}: .{node.attr}")
            if isinstance(node.value, ast.Name):
                owner = aliases.get(node.value.id, node.value.id)
                if (owner, node.attr) in BANNED_ATTRIBUTES or (owner == "builtins" and node.attr in BANNED_CALLS):
                    found.append(f"{line}: {owner}.{node.attr}")
        elif (isinstance(node, ast.Name) and node.id in BANNED_NAMES) or (
            isinstance(node, ast.keyword) and node.arg in BANNED_NAMES
        ):
            found.append(f"{line}: {node.id if isinstance(node, ast.Name) else node.arg}")
        elif isinstance(node, ast.Constant) and node.value in BANNED_MODULES | BANNED_NAMES:
            found.append(f"{line}: {node.value!r}")  # getattr and import_module take them as text
    return found


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_the_walk_sees_the_package() -> None:
    names = {name_of(path) for path in MODULES}
    assert {"wire", "receiver.session", "client.client", "integrations.sglang.scheduler", "memory.memfd"} <= names


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_unpickles_or_evaluates(path: Path) -> None:
    allowed = ALLOWED_THERE if name_of(path) == OTHER_WAYS else set()
    found = findings(ast.parse(path.read_text(encoding="utf-8")))
    assert [line for line in found if not any(line.endswith(name) for name in allowed)] == []


def test_only_the_bench_goes_other_ways() -> None:
    importing = {
        name_of(path)
        for path in MODULES
        for imported in imports(ast.parse(path.read_text(encoding="utf-8")))
        if imported.startswith(f"sglang_recv.{OTHER_WAYS}")
    }
    assert importing == {"cli.bench", "cli.bench_trainer"}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "import pickle as p", "from pickle import loads", "import cloudpickle.x", "import marshal",
        "from multiprocessing.reduction import ForkingPickler", "socket.recv_pyobj()", "x.send_pyobj(1)", "eval('1')",
        "exec(a)", "import builtins\nbuiltins.eval('1')", "import torch\ntorch.load(p)", "import torch as t\nt.load(p)",
        "from torch import load", "dist.all_gather_object(a, b)", "torch.distributed.broadcast_object_list(a)",
        "importlib.import_module('pickle')", "getattr(socket, 'recv_pyobj')", "import numpy as np\nnp.load(f)",
        "f(allow_pickle=True)", "def f():\n    import dill", "s._share_cuda_()",
    ],
)  # fmt: skip
def test_the_walk_finds_each_of_them(source: str) -> None:
    assert findings(ast.parse(source))


def test_the_walk_lets_ordinary_code_pass() -> None:
    source = "import json, torch\njson.load(f)\nmodel.load_weights(w)\nself.load(x)\nmodel.eval()\nre.compile('a')"
    assert findings(ast.parse(source)) == []


def layer_of(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize("path", [p for p in MODULES if layer_of(name_of(p)) in LAYERS], ids=name_of)
def test_imports_point_inwards(path: Path) -> None:
    layer = layer_of(name_of(path))
    for imported in imports(ast.parse(path.read_text(encoding="utf-8"))):
        top, _, rest = imported.partition(".")
        assert top not in FOREIGN_TO_ALL_BUT_INTEGRATIONS, imported
        if top == "sglang_recv":
            assert layer_of(rest) in LAYERS[layer], f"{layer} imports {imported}"


def test_every_module_has_a_place() -> None:
    outer = {"__init__", "integrations", "cli"}
    assert {layer_of(name_of(path)) for path in MODULES} <= set(LAYERS) | outer


def test_only_the_sglang_integration_and_the_bench_import_sglang() -> None:
    importing = {
        name_of(path)
        for path in MODULES
        if any(name.split(".")[0] == "sglang" for name in imports(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert OTHER_WAYS in importing
    assert all(name.startswith("integrations.sglang.") for name in importing - {OTHER_WAYS})


def test_the_public_api_is_the_trainers_side() -> None:
    """A trainer imports the package without an engine: neither receiver nor integration comes along."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    for imported in imports(tree):
        assert imported.split(".")[:2] in (["sglang_recv", "client"], ["sglang_recv", "errors"]), imported
