"""For every test: markers by folder, and skipping what the machine can't run."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

# A folder of tests is a kind of test, so that no module can forget its marker.
FOLDER_MARKERS = {"engine": ("engine",), "faults": ("faults",), "gpu": ("gpu",)}


@functools.cache
def _no_gpu() -> str | None:
    """Why GPU tests can't run here, if they can't."""
    import torch

    return None if torch.cuda.is_available() else "needs an NVIDIA GPU (torch.cuda.is_available() is false)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
        for marker in FOLDER_MARKERS.get(folder, ()):
            item.add_marker(marker)
        if item.get_closest_marker("gpu") and (reason := _no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this session's tiny checkpoints: ``support.models.checkpoint(kind, seed, checkpoints)``."""
    return tmp_path_factory.mktemp("checkpoints")
