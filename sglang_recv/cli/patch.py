"""``sglang-recv patch``: which of the shipped patches belongs to a slime checkout, and its text."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from sglang_recv.errors import UnsupportedError

State = Literal["applied", "fits", "neither"]

#: Keeps git from looking for a repository. Inside one, below its root, `git apply` skips every file without a word.
_NO_REPOSITORY = {"GIT_DIR": os.devnull}
_HOOK = "--custom-megatron-init-path sglang_recv.integrations.slime.install"


@dataclass(frozen=True)
class Finding:
    """How one patch stands to one checkout; ``reason`` is git's, for a patch that is neither applied nor applicable."""

    name: str
    state: State
    reason: str = ""


def shipped() -> dict[str, str]:
    """Return the text of every patch by its name, the slime commit that it was made for."""
    folder = resources.files("sglang_recv") / "patches" / "slime"
    files = {file.name: file for file in folder.iterdir() if file.name.endswith(".patch")}
    return {name.removesuffix(".patch"): files[name].read_text(encoding="utf-8") for name in sorted(files)}


def find(folder: Path) -> list[Finding]:
    """Compare every shipped patch with the files of ``folder``, which is a git repository, lies in one, or does not."""
    return [_compare(folder, name, text) for name, text in shipped().items()]


def check(folder: Path) -> int:
    """Print what applies to a slime checkout. 0 when that is one patch; an error says why it is none or several."""
    if not folder.is_dir():
        raise UnsupportedError(f"{folder} is not a folder", fix="name the folder of a slime checkout")
    if not (folder / "slime").is_dir():
        raise UnsupportedError(
            f"{folder} contains no folder slime/",
            fix="name the folder that contains the package slime: the root of a checkout, or site-packages",
        )
    found = find(folder)
    for finding in found:
        print(f"{finding.name}: {_describe(folder, finding)}")
    usable = [finding.name for finding in found if finding.state != "neither"]
    if len(usable) > 1:
        raise UnsupportedError(
            f"{len(usable)} patches go with {folder}: {', '.join(usable)}",
            fix="take the one whose name is the commit of the checkout",
        )
    if not usable:
        raise UnsupportedError(
            f"no shipped patch goes with {folder}: this slime is another version, or its files were edited",
            fix=f"undo a half-applied patch, check out {' or '.join(finding.name for finding in found)}, or use slime "
            f"unpatched with {_HOOK}",
        )
    return 0


def show(name: str) -> int:
    """Print a patch, and nothing else, for `git apply` to read."""
    patches = shipped()
    if name not in patches:
        raise UnsupportedError(f"there is no patch {name!r}", fix=f"name one of {', '.join(patches)}")
    sys.stdout.write(patches[name])
    return 0


def _compare(folder: Path, name: str, text: str) -> Finding:
    if not _refusal(folder, text, "--reverse"):
        return Finding(name, "applied")
    reason = _refusal(folder, text)
    return Finding(name, "neither", reason) if reason else Finding(name, "fits")


def _refusal(folder: Path, text: str, *options: str) -> str:
    """Return why git would not apply the patch; empty when it would."""
    try:
        done = subprocess.run(
            ["git", "apply", "--check", *options, "-"],
            cwd=folder,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=os.environ | _NO_REPOSITORY | {"LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        raise UnsupportedError(
            "git is not on the PATH",
            fix="install git, or apply a patch without a check: sglang-recv patch --show NAME | patch -p1",
        ) from error
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[0].removeprefix("error: ") if lines else f"git ended with {done.returncode}"


def _describe(folder: Path, finding: Finding) -> str:
    command = f"sglang-recv patch --show {finding.name} | {_git_apply(folder)}"
    if finding.state == "applied":
        return f"is applied; to undo it, in {folder}: {command} -R"
    if finding.state == "fits":
        return f"fits; to apply it, in {folder}: {command}"
    return f"does not fit ({finding.reason})"


def _git_apply(folder: Path) -> str:
    """Return the command that works in this folder."""
    place = folder.resolve()
    below = not (place / ".git").exists() and any((parent / ".git").exists() for parent in place.parents)
    return f"GIT_DIR={os.devnull} git apply" if below else "git apply"
