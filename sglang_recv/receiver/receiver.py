"""One receiver per engine rank: puts the two threads together."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sglang_recv import copies, identity, wire
from sglang_recv.errors import StagingMemoryError
from sglang_recv.fdpass import make_private_dir
from sglang_recv.memory import MemoryKind, probe
from sglang_recv.receiver.apply import ModelApplier, Observations
from sglang_recv.receiver.catalog import Catalog, read_headers
from sglang_recv.receiver.coverage import warm_up
from sglang_recv.receiver.host import Host
from sglang_recv.receiver.mailbox import Mailbox
from sglang_recv.receiver.replicated import Replicated
from sglang_recv.receiver.service import Facts, Service, Sources
from sglang_recv.wire import RankInfo, RankTable

logger = logging.getLogger(__name__)

ENV_DIR: Final = "SGLANG_RECV_DIR"
_REAP_SECONDS: Final = 600.0


def socket_root() -> Path:
    """Where socket directories are made: ``SGLANG_RECV_DIR``, or a folder of this user in the temporary directory."""
    configured = os.environ.get(ENV_DIR)
    return Path(configured) if configured else Path(tempfile.gettempdir()) / f"sglang-recv-{os.geteuid()}"


class Receiver:
    """Owns the service thread and the replicated state of one rank.

    Parameters
    ----------
    host
        The engine rank.
    mode
        ``vmm``.
    share
        A collective over the ranks of the engine: gives every rank the bytes of all ranks, in order.
    plans
        False to call the model's loader for every update.

    Raises
    ------
    StagingMemoryError
        When this rank cannot import exportable memory.
    LimitError, PeerDeniedError, UnsupportedError
        When the socket directory cannot be used.
    """

    def __init__(self, host: Host, mode: str, share: Callable[[bytes], list[bytes]], *, plans: bool) -> None:
        reason = probe(host.device)
        if reason is not None:
            raise StagingMemoryError(
                f"--weight-receiver {mode} needs exportable memory on {host.device}: {reason}",
                fix="start the engine with --weight-receiver off, or fix what the message names",
            )
        warm_up()
        if plans:
            copies.warm_up(host.device)
        self.mailbox = Mailbox()
        observations = Observations(host.model(), plans=plans, filled=host.filled)
        self.replicated = Replicated(
            host, self.mailbox, lambda kind: ModelApplier(host.model(), observations, full=kind == "full")
        )
        engine = share(secrets.token_hex(8).encode())[0].decode()
        self._folder = socket_root() / engine
        make_private_dir(socket_root())
        make_private_dir(self._folder)
        if host.rank == 0:
            _reap(socket_root())
        facts = Facts(
            engine=engine,
            rank=host.rank,
            ranks=host.ranks,
            device=host.device,
            device_id=identity.device_id(host.device, host.rank),
            boot_id=identity.boot_id(),
            mode=mode,
            memory_kind=MemoryKind.CUDA_VMM if host.device.type == "cuda" else MemoryKind.MEMFD,
            sglang_version=host.sglang_version,
            model=host.model_path,
            dtype=host.dtype,
            groups=host.groups,
        )
        sources = Sources(host.memory_saver, host.weight_version, lambda: _catalog(host), host.inject)
        self._service = Service(facts, sources, self.mailbox, self._folder)
        info = RankInfo(
            rank=host.rank,
            device=facts.device_id,
            boot_id=facts.boot_id,
            control=self._service.control_url,
            fds=str(self._service.fds_path),
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        )
        ranks = tuple(wire.decode(raw, RankInfo) for raw in share(wire.encode(info)))
        #: What the engine publishes in /server_info.
        self.table = RankTable(wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, engine, mode, ranks)
        self._service.start()
        atexit.register(self.close)
        logger.info("weight receiver %s of rank %d listens in %s", mode, host.rank, self._folder)

    def close(self) -> None:
        """Stop the thread and remove the sockets."""
        self._service.close()
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # the last rank to go removes it


def _reap(root: Path) -> None:
    """Remove socket directories that killed engines left behind: those where nobody listens any more."""
    for folder in root.iterdir():
        if folder.is_dir() and not folder.is_symlink() and not any(_listens(path) for path in folder.glob("*.fds")):
            age = time.time() - folder.stat().st_mtime
            if age > _REAP_SECONDS:  # a younger one may be about to bind
                shutil.rmtree(folder, ignore_errors=True)


def _listens(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.settimeout(1.0)
            probe.connect(os.fspath(path))
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        pass  # whatever it is, it is not ours to remove
    return True


def _catalog(host: Host) -> Catalog:
    return Catalog(
        read_headers(Path(host.model_path)),
        model_dtype=host.dtype,
        tied_embeddings=host.tied_embeddings,
        num_layers=host.num_layers,
    )
