"""Every combination of slime's transport, mode and placement has one outcome: a transport, or a reason and a fix."""

from __future__ import annotations

import argparse
import itertools

import pytest

from sglang_recv.errors import UnsupportedError
from sglang_recv.integrations.slime.transport import TRANSPORTS, resolve_transport

APART, SHARED = False, True
OUTCOMES = {
    ("auto", APART, "full"): "nccl",
    ("nccl", APART, "full"): "nccl",
    ("vmm", APART, "full"): None,
    ("ipc", APART, "full"): None,
    ("disk", APART, "full"): "disk",
    ("auto", SHARED, "full"): "vmm",
    ("nccl", SHARED, "full"): None,
    ("vmm", SHARED, "full"): "vmm",
    ("ipc", SHARED, "full"): "ipc",
    ("disk", SHARED, "full"): "disk",
    ("auto", APART, "delta"): "nccl",
    ("nccl", APART, "delta"): "nccl",
    ("vmm", APART, "delta"): None,
    ("ipc", APART, "delta"): None,
    ("disk", APART, "delta"): "disk",
    ("auto", SHARED, "delta"): "nccl",
    ("nccl", SHARED, "delta"): "nccl",
    ("vmm", SHARED, "delta"): None,
    ("ipc", SHARED, "delta"): None,
    ("disk", SHARED, "delta"): "disk",
}
RESOLVED = [pytest.param(*key, value, id="-".join(map(str, key))) for key, value in OUTCOMES.items() if value]
REFUSED = [pytest.param(*key, id="-".join(map(str, key))) for key, value in OUTCOMES.items() if not value]


def arguments(transport: str, colocate: bool, mode: str) -> argparse.Namespace:
    return argparse.Namespace(update_weight_transport=transport, colocate=colocate, update_weight_mode=mode)


def refusal(transport: str, colocate: bool, mode: str) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        resolve_transport(arguments(transport, colocate, mode))
    return caught.value


def test_the_table_is_complete() -> None:
    assert set(OUTCOMES) == set(itertools.product(TRANSPORTS, (APART, SHARED), ("full", "delta")))


@pytest.mark.parametrize(("transport", "colocate", "mode", "expected"), RESOLVED)
def test_resolves(transport: str, colocate: bool, mode: str, expected: str) -> None:
    args = arguments(transport, colocate, mode)
    before = dict(vars(args))
    assert resolve_transport(args) == expected
    assert vars(args) == before


@pytest.mark.parametrize(("transport", "colocate", "mode", "expected"), RESOLVED)
def test_a_resolved_transport_stays(transport: str, colocate: bool, mode: str, expected: str) -> None:
    assert resolve_transport(arguments(expected, colocate, mode)) == expected


@pytest.mark.parametrize(("transport", "colocate", "mode"), REFUSED)
def test_refuses_by_naming_the_value(transport: str, colocate: bool, mode: str) -> None:
    assert refusal(transport, colocate, mode).message.startswith(f"--update-weight-transport {transport} ")


def test_nccl_beside_the_trainer_says_what_nccl_says() -> None:
    error = refusal("nccl", SHARED, "full")
    assert "Duplicate GPU detected" in error.message
    assert all(word in error.fix for word in ("vmm", "auto", "disk", "remote engines"))


def test_vmm_apart_from_the_trainer_says_what_fds_reach() -> None:
    error = refusal("vmm", APART, "full")
    assert "file descriptors" in error.message
    assert all(word in error.fix for word in ("nccl", "auto", "disk"))


@pytest.mark.parametrize("colocate", [APART, SHARED])
def test_vmm_in_delta_mode_names_the_mode(colocate: bool) -> None:
    error = refusal("vmm", colocate, "delta")
    assert "delta" in error.message
    assert "--update-weight-mode full" in error.fix


@pytest.mark.parametrize("value", ["", "NCCL", "tensor", "nixl"])
@pytest.mark.parametrize("mode", ["full", "delta"])
def test_an_unknown_value_is_named_with_the_choices(value: str, mode: str) -> None:
    error = refusal(value, SHARED, mode)
    assert repr(value) in error.message
    assert all(choice in error.message for choice in TRANSPORTS)
