"""``sglang-recv patch``: told apart are a checkout that has a patch, one that could take it, and any other.

Checkouts are built from what the patches themselves quote. Where ``SLIME_SRC`` names a real one, that is tested too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_recv.cli import main
from sglang_recv.cli.patch import find, shipped
from sglang_recv.errors import UnsupportedError

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

PATCHES = shipped()
FILES = {"slime/utils/arguments.py", "slime/backends/megatron_utils/actor.py", "slime/ray/rollout.py"}
HUNK = re.compile(r"@@ -(\d+)")


def quoted(text: str) -> dict[str, list[str]]:
    """The files that a patch changes, as far as it quotes them: each line at its own number, filler between."""
    files: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("--- a/"):
            lines = files.setdefault(line.removeprefix("--- a/"), [])
        elif match := HUNK.match(line):
            lines += [f"# line {number}" for number in range(len(lines) + 1, int(match[1]))]
        elif line.startswith((" ", "-")):
            lines.append(line[1:])
    return {name: [*lines, "# end"] for name, lines in files.items()}


def checkout(folder: Path, name: str) -> Path:
    for path, lines in quoted(PATCHES[name]).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("\n".join(lines) + "\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in (folder / "slime").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def states(folder: Path) -> dict[str, str]:
    return {finding.name: finding.state for finding in find(folder)}


def only(name: str, state: str) -> dict[str, str]:
    return {other: state if other == name else "neither" for other in PATCHES}


def git(folder: Path, *arguments: str, text: str = "") -> None:
    subprocess.run(["git", *arguments], cwd=folder, input=text, text=True, check=True, capture_output=True)


def advised(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Do what the check says about the only patch of this folder; our half of the pipe runs in this process."""
    assert main(["patch", "--check", str(folder)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if f", in {folder}: " in line]
    ours, _, theirs = line.split(f", in {folder}: ")[1].partition(" | ")
    program, *arguments = ours.split()
    assert program == "sglang-recv"
    assert main(arguments) == 0
    subprocess.run(["sh", "-c", theirs], cwd=folder, input=capsys.readouterr().out, text=True, check=True, timeout=50)


@pytest.fixture(params=["alone", "repository", "below-a-repository"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An empty folder that git does not know, that is a repository, or that lies in another project's."""
    place = tmp_path / "outer" / "third party" / "slime-src"
    place.mkdir(parents=True)
    if request.param != "alone":
        git(place if request.param == "repository" else tmp_path / "outer", "init", "-q")
    return place


def test_a_patch_for_each_version() -> None:
    assert set(PATCHES) == {"4c058f65", "624b824a"}


@pytest.mark.parametrize("name", PATCHES)
def test_patches_touch_three_files_and_are_ascii(name: str) -> None:
    assert set(quoted(PATCHES[name])) == FILES
    assert PATCHES[name].isascii()


@pytest.mark.parametrize("name", PATCHES)
def test_fits_then_is_applied_then_fits(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(checkout(folder, name))
    assert states(folder) == only(name, "fits")
    advised(capsys, folder)
    assert states(folder) == only(name, "applied")
    assert {path for path, content in contents(folder).items() if content != before[path]} == FILES
    advised(capsys, folder)
    assert contents(folder) == before


@pytest.mark.parametrize("name", PATCHES)
def test_checking_changes_nothing(name: str, folder: Path) -> None:
    before = contents(checkout(folder, name))
    find(folder)
    assert contents(folder) == before


@pytest.mark.parametrize("name", PATCHES)
def test_lines_may_have_moved(name: str, tmp_path: Path) -> None:
    for path in FILES:
        file = checkout(tmp_path, name) / path
        file.write_text("# one more\n" * 7 + file.read_text())
    assert states(tmp_path) == only(name, "fits")


@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.parametrize("path", sorted(FILES))
def test_half_a_patch_is_neither(name: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(checkout(tmp_path, name), "apply", f"--include={path}", "-", text=PATCHES[name])
    assert states(tmp_path) == dict.fromkeys(PATCHES, "neither")
    assert main(["patch", "--check", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert all(f"{other}: does not fit (" in shown.out for other in PATCHES)
    assert "no shipped patch goes with" in shown.err
    assert "half-applied" in shown.err


def test_another_slime_is_neither(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "slime").mkdir()
    assert states(folder) == dict.fromkeys(PATCHES, "neither")
    assert main(["patch", "--check", str(folder)]) == 1
    assert "--custom-megatron-init-path sglang_recv.integrations.slime.install" in capsys.readouterr().err


def test_a_repository_of_the_caller_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As inside a git hook, where git sets these."""
    name = next(iter(PATCHES))
    (tmp_path / "mine").mkdir()
    git(tmp_path / "mine", "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "mine" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    assert states(checkout(tmp_path / "src", name)) == only(name, "fits")


def test_several_that_fit_are_not_chosen_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, text = next(iter(PATCHES.items()))
    monkeypatch.setattr("sglang_recv.cli.patch.shipped", lambda: {name: text, "twin": text})
    assert main(["patch", "--check", str(checkout(tmp_path, name))]) == 1
    assert f"2 patches go with {tmp_path}: {name}, twin" in capsys.readouterr().err


@pytest.mark.parametrize(("made", "words"), [(False, "is not a folder"), (True, "contains no folder slime/")])
def test_a_wrong_folder_says_which_to_name(
    made: bool, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "elsewhere"
    if made:
        place.mkdir()
    assert main(["patch", "--check", str(place)]) == 1
    error = capsys.readouterr().err
    assert f"{place} {words}" in error
    assert "fix: name the folder" in error


def test_without_git_there_is_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="git is not on the PATH") as caught:
        find(tmp_path)
    assert "patch -p1" in caught.value.fix


@pytest.mark.parametrize("name", PATCHES)
def test_show_prints_the_patch_and_nothing_else(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "--show", name]) == 0
    assert capsys.readouterr() == (PATCHES[name], "")


def test_show_names_the_patches_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "--show", "main"]) == 1
    error = capsys.readouterr().err
    assert "'main'" in error
    assert all(name in error for name in PATCHES)


@pytest.mark.parametrize("call", [["patch"], ["patch", "--check", ".", "--show", "x"]])
def test_one_thing_at_a_time(call: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(call)


# A real checkout, named by the environment.
SOURCE = os.environ.get("SLIME_SRC", "")
real = pytest.mark.skipif(not SOURCE, reason="needs SLIME_SRC, the folder of a slime checkout")


@real
def test_one_patch_goes_with_the_real_checkout() -> None:
    assert main(["patch", "--check", SOURCE]) == 0
    assert len([state for state in states(Path(SOURCE)).values() if state != "neither"]) == 1


@real
def test_the_real_checkout_compiles_with_the_patch(tmp_path: Path) -> None:
    shutil.copytree(Path(SOURCE) / "slime", tmp_path / "slime", ignore=shutil.ignore_patterns("__pycache__"))
    before = contents(tmp_path)
    ((name, state),) = [(name, state) for name, state in states(tmp_path).items() if state != "neither"]
    if state == "fits":
        git(tmp_path, "apply", "-", text=PATCHES[name])
    assert states(tmp_path) == only(name, "applied")
    subprocess.run([sys.executable, "-m", "compileall", "-q", "slime"], cwd=tmp_path, check=True, timeout=50)
    if state == "fits":
        git(tmp_path, "apply", "-R", "-", text=PATCHES[name])
        assert contents(tmp_path) == before
