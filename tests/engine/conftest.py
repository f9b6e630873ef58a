"""For tests that talk to a real SGLang server."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from support.pool import EnginePool

_pool = pytest.StashKey[EnginePool]()


@pytest.fixture(scope="session")
def engines(
    request: pytest.FixtureRequest, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[EnginePool, None, None]:
    """Running servers, shared between modules: ``engines(version, kind, tp=1, receiver="vmm", ...)``."""
    pool = EnginePool(checkpoints, tmp_path_factory.mktemp("servers"))
    request.config.stash[_pool] = pool
    yield pool
    pool.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what the servers said: the reason is usually there."""
    report = yield
    if report.failed and (pool := item.config.stash.get(_pool, None)):
        for server in pool.live:
            report.sections.append((f"log of {server}", server.tail()))
    return report
