"""The main job on a GPU with a real engine. Its figures stand in docs/performance.md."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch_memory_saver", reason="needs torch_memory_saver")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    from gpu import main_job

    return main_job.run("0.6b", 256, saver_states=True)


def test_torch_cannot_share_these_tensors(report: dict[str, Any]) -> None:
    for where, answer in report["saver"]["stock_share"].items():
        assert "invalid argument" in answer, where


def test_ours_takes_them_and_weights_are_equal(report: dict[str, Any]) -> None:
    assert report["compare"]["success"], report["compare"]
    assert report["digests_equal_after_reset"]
    assert report["digests_equal_to_stock"]
    assert report["weight_version"] == "tms-streamed"


def test_released_weights_are_refused_and_repaired(report: dict[str, Any]) -> None:
    released = report["released"]
    assert "WEIGHTS_RELEASED" in released["update while released"]
    assert released["generate after resume"].startswith("503")
    assert "without a CPU backup" in released["generate after resume"]
    assert "FULL_REQUIRED" in released["partial update after resume"]
    assert released["full update makes them whole"]


def test_device_memory_is_back_to_its_baseline(report: dict[str, Any]) -> None:
    for run in report["saver"]["updates"] + report["plain"]["updates"]:
        assert run["device_bytes_after"] <= 2 << 20, run
        assert run["device_bytes_in_use_at_peak"] <= run["staging_bytes"] + (64 << 20), run
