"""The command line: ``sglang-recv``. Each command is a module that this one imports when it is asked for."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from sglang_recv.errors import RecvError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 when it did what it should, 1 when it failed, 2 for a wrong call.

    When whoever reads its output has gone (``| head``), it ends without a word, with 1.
    """
    try:
        try:
            code = _run(arguments)
        except SystemExit:  # of --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # or Python would, at its end, where nobody can catch it
        return code
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        # Python flushes once more at its end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return 1


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe or a socket without a reader: sockets to an engine break in the same way."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    except (OSError, ValueError):  # it has no fd
        return False


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="sglang-recv", description="Weight updates for SGLang engines.")
    parser.add_argument("--version", action="version", version=f"sglang-recv {metadata.version('sglang-recv')}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="a weight update from start to end, on this machine")
    demo.add_argument("server_args", nargs="*", help="more arguments for SGLang's server, after --")
    bench = commands.add_parser("bench", help="how fast updates are here, beside SGLang's own ways")
    bench.add_argument(
        "--model", nargs="+", default=[], help="tiny, 0.6b, 8b, 30b; by default tiny on a CPU, else 0.6b 8b"
    )
    bench.add_argument("--laps", type=int, default=7, help="updates of each mode, in turn with stock")
    bench.add_argument("--slots", type=int, help="staging slots; by default WeightClient's own choice")
    bench.add_argument("--slot-mib", type=int, help="MiB of a staging slot; by default WeightClient's own choice")
    bench.add_argument("--no-saver", action="store_true", help="leave torch_memory_saver out")
    bench.add_argument("--seconds", type=float, help="end after so long, with what there is then")
    bench.add_argument("--out", metavar="DIR", type=Path, default=Path("out"), help="for bench.json and bench.png")
    bench.add_argument("--draw", metavar="REPORT", type=Path, help="time nothing: show and draw a bench.json again")
    bench.add_argument("server_args", nargs="*", help="more arguments for SGLang's server, after --")
    status = commands.add_parser("status", help="what the ranks of an engine report")
    status.add_argument("engine", help="base URL of an SGLang server")
    patch = commands.add_parser("patch", help="patches for slime: which one belongs to a checkout, and its text")
    act = patch.add_mutually_exclusive_group(required=True)
    act.add_argument("--check", metavar="DIR", type=Path, help="say which patch is applied to, or fits, a checkout")
    act.add_argument("--show", metavar="NAME", help="print a patch, to be piped into git apply")
    options = parser.parse_args(arguments)
    try:
        if options.command == "demo":
            from sglang_recv.cli import demo as command

            return command.run(options.server_args)
        if options.command == "bench":
            return _bench(options)
        if options.command == "patch":
            from sglang_recv.cli import patch as patches

            return patches.check(options.check) if options.check is not None else patches.show(options.show)
        from sglang_recv.client.client import WeightClient

        with WeightClient(options.engine) as client:
            for rank in client.status()[options.engine.rstrip("/")]:
                print(
                    f"rank {rank.rank}/{rank.ranks} on {rank.device}: weights {rank.weights_state} "
                    f"{rank.weights_reason} version {rank.weight_version!r}, mode {rank.mode} ({rank.memory_kind}), "
                    f"session {rank.session or 'none'}, released {list(rank.memory_saver.released)}"
                )
    except RecvError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _bench(options: argparse.Namespace) -> int:
    from sglang_recv.cli import bench

    if options.draw is not None:
        return bench.redraw(options.draw)
    wanted = bench.Options(
        models=tuple(options.model),
        laps=options.laps,
        slots=options.slots,
        slot_mib=options.slot_mib,
        saver=not options.no_saver,
        out=options.out,
        seconds=options.seconds,
        server_args=tuple(options.server_args),
    )
    return bench.run(wanted)
