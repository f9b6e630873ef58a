"""Build the engine environments that tests, demo and bench run in: ``.venv/sglang-<version>``, one per lock file.

Run with any Python 3.11 or newer; nothing but the standard library is needed. An environment whose lock files have not
changed is left as it is, so a second call takes a moment. pip's own configuration (index, constraints, cache) is
honoured: nothing here names an index.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
DEV_LOCK = REQUIREMENTS / "dev.txt"
DEFAULT_HOME = ROOT / ".venv"

# What SGLang 0.5.23 itself asks for.
MINIMUM_PYTHON = (3, 11)


@dataclass(frozen=True)
class Environment:
    """One environment: its name, its lock file, where it goes."""

    name: str
    lock: Path
    path: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    @property
    def log(self) -> Path:
        """What pip said while it was built."""
        return self.path.with_suffix(f"{self.path.suffix}.log")


def environments(home: Path) -> list[Environment]:
    """Every environment that has a lock file, newest SGLang first."""
    locks = sorted(REQUIREMENTS.glob("sglang-*-cpu.txt"), key=_version, reverse=True)
    return [Environment(name, lock, home / name) for lock in locks if (name := lock.stem.removesuffix("-cpu"))]


def _version(lock: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", lock.stem))


def _digest(*parts: str | Path) -> str:
    """Hash of texts and of files' contents."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.read_bytes() if isinstance(part, Path) else part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _stamp_is(stamp: Path, value: str) -> bool:
    return stamp.is_file() and stamp.read_text() == value


def _say(text: str) -> None:
    print(f"environments: {text}", flush=True)


def _run(environment: Environment, *command: str | Path) -> None:
    """Run a command with its output in the environment's log; a failure shows the log's end."""
    with environment.log.open("a") as log:
        print("$", *command, file=log, flush=True)
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        tail = "\n".join(environment.log.read_text(errors="replace").splitlines()[-25:])
        said = f"'{Path(command[0]).name}' exited {done.returncode}; all it said is in {environment.log}"
        raise SystemExit(f"{tail}\nenvironments: {environment.name}: {said}")


def build(environment: Environment) -> str:
    """Bring one environment up to date; returns what was done."""
    begun = time.monotonic()
    done: list[str] = []
    pip: list[str | Path] = [environment.python, "-m", "pip", "install", "--no-input", "--no-deps"]

    # The interpreter is in the stamp since a venv of another Python, or of a folder that has moved, doesn't work.
    packages = _digest(environment.lock, DEV_LOCK, sys.version, str(environment.path))
    packages_stamp = environment.path / ".packages.sha256"
    if not _stamp_is(packages_stamp, packages) or not environment.python.exists():
        _say(f"{environment.name}: installing its packages (about 1.7 GB, a minute or two)")
        # From scratch: an upgrade in place would keep packages that left the lock.
        shutil.rmtree(environment.path, ignore_errors=True)
        environment.path.parent.mkdir(parents=True, exist_ok=True)
        environment.log.unlink(missing_ok=True)
        _run(environment, sys.executable, "-m", "venv", environment.path)
        _run(environment, *pip, "-r", environment.lock, "-r", DEV_LOCK)
        packages_stamp.write_text(packages)
        done.append("packages")

    # Apart from the packages: a new entry point or version must not cost a reinstall of everything.
    package = _digest(ROOT / "pyproject.toml")
    package_stamp = environment.path / ".package.sha256"
    if not _stamp_is(package_stamp, package):
        _say(f"{environment.name}: installing sglang_recv (editable)")
        _run(environment, *pip, "--no-build-isolation", "--editable", ROOT)
        package_stamp.write_text(package)
        done.append("sglang_recv")

    if not done:
        return f"{environment.name}: up to date"
    return f"{environment.name}: {' and '.join(done)} installed in {time.monotonic() - begun:.0f} s"


def main() -> int:
    """Command line: build what is missing or stale."""
    parser = argparse.ArgumentParser(description="Build .venv/sglang-<version> from requirements/ where it is stale.")
    parser.add_argument("names", nargs="*", help="which ones (default: all that have a lock file)")
    home = Path(os.environ.get("SGLANG_RECV_VENVS") or DEFAULT_HOME)
    parser.add_argument("--home", type=Path, default=home, help="where (default: %(default)s)")
    arguments = parser.parse_args()
    if sys.version_info < MINIMUM_PYTHON:
        needed = ".".join(map(str, MINIMUM_PYTHON))
        parser.error(f"Python {needed} or newer is needed, this is {sys.version.split()[0]}")

    known = environments(arguments.home.resolve())
    unknown = set(arguments.names) - {environment.name for environment in known}
    if unknown:
        parser.error(f"no lock file for {', '.join(sorted(unknown))}; there is {', '.join(e.name for e in known)}")
    wanted = [environment for environment in known if not arguments.names or environment.name in arguments.names]

    arguments.home.mkdir(parents=True, exist_ok=True)
    with (arguments.home / ".lock").open("w") as lock:
        # Two calls at once, as by `make demo` beside `make test`, must not build in one folder: the second one waits.
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Side by side: while one environment unpacks, the other waits for the index.
        with ThreadPoolExecutor(len(wanted)) as pool:
            for line in pool.map(build, wanted):
                _say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
