"""The hook for slime's --custom-megatron-init-path, with slime's actor module stood in for."""

from __future__ import annotations

import sys
import types
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_recv.errors import UnsupportedError
from sglang_recv.integrations.slime import install

STAND_IN = Path(__file__).parents[1] / "slime" / "stand_in"
seen: list[Any] = []


def chained(args: Any) -> None:
    """A user's own hook."""
    seen.append(args)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """slime's actor module; what a test imports of the stand-ins is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(STAND_IN))
    seen.clear()
    import slime.backends.megatron_utils.actor as found

    yield found
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("ray", "slime") or name.startswith("sglang_recv.integrations.slime.updater"):
            del sys.modules[name]


def args(**kwargs: Any) -> Namespace:
    return Namespace(**{"colocate": True, "update_weight_transport": "nccl", **kwargs})


def test_the_updater_takes_the_place_of_slimes(actor: Any, caplog: pytest.LogCaptureFixture) -> None:
    stock = actor.UpdateWeightFromTensor
    install(args())
    assert actor.UpdateWeightFromTensor.__name__ == "UpdateWeightFromVmm"
    assert issubclass(actor.UpdateWeightFromTensor, stock)
    assert "NCCL refuses two ranks on one device" in caplog.text, "what was configured is not ignored silently"


def test_a_run_that_is_not_colocated_keeps_slimes_way_and_says_so(actor: Any, caplog: pytest.LogCaptureFixture) -> None:
    stock = actor.UpdateWeightFromTensor
    install(args(colocate=False))
    assert actor.UpdateWeightFromTensor is stock
    assert "not colocated" in caplog.text


def test_disk_and_the_hook_contradict_each_other(actor: Any) -> None:
    stock = actor.UpdateWeightFromTensor
    with pytest.raises(UnsupportedError, match="update-weight-transport disk"):
        install(args(update_weight_transport="disk"))
    assert actor.UpdateWeightFromTensor is stock


def test_a_users_own_hook_is_called_first(actor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("their_init")
    module.hook = chained  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_init", module)
    monkeypatch.setenv("SGLANG_RECV_CHAIN_INIT", "their_init.hook")
    given = args()
    install(given)
    assert seen == [given]
    assert actor.UpdateWeightFromTensor.__name__ == "UpdateWeightFromVmm"


@pytest.mark.parametrize("path", ["their_init", "their_init.none", "no_such_module_here.hook", "."])
def test_a_hook_that_cannot_be_found_is_named(actor: Any, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("SGLANG_RECV_CHAIN_INIT", path)
    with pytest.raises(UnsupportedError, match=r"SGLANG_RECV_CHAIN_INIT is") as caught:
        install(args())
    assert repr(path) in caught.value.message


def test_a_slime_without_the_class_is_refused(actor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(actor, "UpdateWeightFromTensor")
    with pytest.raises(UnsupportedError, match="has no UpdateWeightFromTensor") as caught:
        install(args())
    assert "patch --check" in caught.value.fix
