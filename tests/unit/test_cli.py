"""How ``sglang-recv`` ends when nobody reads what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_recv import cli
from sglang_recv.cli import patch

PATIENCE = 60.0  # seconds
NAME = next(Path(patch.__file__).resolve().parents[2].glob("patches/slime/*.patch")).stem


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [(["patch", "--show", NAME], ""), (["patch", "--show", NAME], "1"), (["--version"], "")],
    ids=["a command", "unbuffered", "argparse"],
)
def test_without_a_reader_it_ends_quietly(arguments: list[str], unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "sglang_recv.cli", *arguments],
            stdout=gone,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_another_broken_pipe_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def show(_name: str) -> int:
        raise BrokenPipeError("a socket of ours")

    monkeypatch.setattr(patch, "show", show)
    with pytest.raises(BrokenPipeError, match="a socket of ours"):
        cli.main(["patch", "--show", NAME])
