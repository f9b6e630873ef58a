"""An engine as the client reaches it: its rank table, the commit, pause and continue."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from sglang_recv import wire
from sglang_recv.errors import (
    BadMessageError,
    CommitError,
    DeadlineError,
    EngineLostError,
    PluginMissingError,
    ReceiverOffError,
    RecvError,
)
from sglang_recv.wire import CommitCarrier, RankTable


class Target(Protocol):
    """One engine. Implement it to reach an engine in another way than HTTP."""

    name: str

    def rank_table(self) -> RankTable:
        """Who the engine's ranks are.

        Raises
        ------
        PluginMissingError
            When the engine answers, but has no receiver.
        EngineLostError
            When it does not answer.
        """

    def commit(self, carrier: CommitCarrier, timeout: float) -> None:
        """Send the commit; returns once every rank has switched the version.

        Raises
        ------
        CommitError
            When it did not happen.
        """

    def pause(self, how: str, timeout: float) -> None:
        """SGLang's pause_generation with mode ``abort``, ``retract`` or ``in_place``."""

    def resume(self, timeout: float) -> None:
        """SGLang's continue_generation."""

    def resume_memory(self, tags: Sequence[str], timeout: float) -> None:
        """SGLang's resume_memory_occupation."""


def table_of(info: dict[str, Any], name: str) -> RankTable:
    """The rank table in an engine's server info.

    Raises
    ------
    PluginMissingError, BadMessageError, ProtocolVersionError
        When there is none, or none that this side understands.
    """
    found = info.get(wire.INFO_KEY)
    if found is None:
        raise PluginMissingError(
            f"engine {name} (SGLang {info.get('version', 'of unknown version')}) runs without a weight receiver",
            fix="install sglang-recv into the engine's environment and start it with --weight-receiver vmm (or set "
            "SGLANG_RECV_WEIGHT_RECEIVER=vmm); if it is started so, its log says why the plugin did not load, or "
            "SGLANG_PLUGINS leaves it out",
        )
    try:
        # The engine's JSON: sequences may be lists, numbers are numbers.
        table = msgspec.convert(found, RankTable, strict=True)
    except msgspec.ValidationError as error:
        raise BadMessageError(
            f"the rank table of engine {name} cannot be read: {error}",
            fix="install the same major version of sglang-recv on both sides",
        ) from error
    wire.check_major(table.protocol_major, table.protocol_minor, f"engine {name}")
    if table.mode == "off":
        raise ReceiverOffError(f"the receiver of engine {name} is off", fix="start it with --weight-receiver vmm")
    return table


class HttpTarget:
    """An SGLang server at a URL.

    Parameters
    ----------
    url
        Base address, e.g. ``http://127.0.0.1:30000``.
    api_key
        SGLang's ``--admin-api-key`` or ``--api-key``, when it has one.
    timeout
        Seconds for calls that do not take a timeout of their own.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 60.0) -> None:
        self.name = url.rstrip("/")
        self._key = api_key
        self._timeout = timeout

    def rank_table(self) -> RankTable:
        """See :class:`Target`."""
        status, body = self._call("/server_info", None, self._timeout)
        if status != 200 or not isinstance(body, dict):
            raise EngineLostError(
                f"engine {self.name} answered {status} to /server_info: {str(body)[:200]}",
                fix="check the address, and the api_key if the engine has one",
            )
        return table_of(body, self.name)

    def commit(self, carrier: CommitCarrier, timeout: float) -> None:
        """See :class:`Target`."""
        request = {
            "zmq_handles": wire.encode_carrier(carrier),
            "weight_version": carrier.version,
            "flush_cache": carrier.flush_cache,
        }
        status, body = self._call("/update_weights_from_ipc", request, timeout)
        if status != 200 or not (isinstance(body, dict) and body.get("success")):
            message = body.get("message", body) if isinstance(body, dict) else body
            raise CommitError(
                f"engine {self.name} refused the commit ({status}): {str(message)[:2000]}",
                fix="see the error inside; a full update repairs the engine",
            )

    def pause(self, how: str, timeout: float) -> None:
        """See :class:`Target`."""
        self._must("/pause_generation", {"mode": how}, timeout)

    def resume(self, timeout: float) -> None:
        """See :class:`Target`."""
        self._must("/continue_generation", {}, timeout)

    def resume_memory(self, tags: Sequence[str], timeout: float) -> None:
        """See :class:`Target`."""
        self._must("/resume_memory_occupation", {"tags": list(tags)}, timeout)

    def set_version(self, version: str, timeout: float) -> None:
        """Let the engine report another weight version, whatever its weights are. Requests go on."""
        self._must("/update_weight_version", {"new_version": version, "abort_all_requests": False}, timeout)

    def _must(self, path: str, body: dict[str, Any], timeout: float) -> None:
        status, answer = self._call(path, body, timeout)
        if status != 200:
            raise EngineLostError(
                f"engine {self.name} answered {status} to {path}: {str(answer)[:200]}",
                fix="check the engine's log and the api_key",
            )

    def _call(self, path: str, body: dict[str, Any] | None, timeout: float) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.name + path, data=data, headers={"Content-Type": "application/json"})
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            with _DIRECT.open(request, timeout=timeout) as response:
                return response.status, _json(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _json(error.read())
        except TimeoutError as error:
            raise DeadlineError(
                f"engine {self.name} did not answer {path} within {timeout:.0f} s", fix="raise the deadline"
            ) from error
        except OSError as error:  # URLError is one
            raise EngineLostError(
                f"engine {self.name} cannot be reached: {error}", fix="check the address, and that the engine runs"
            ) from error


#: Engines are this job's own: whatever proxy the environment names is for the world outside.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


class EngineTarget:
    """A ``sglang.Engine`` in this process.

    Parameters
    ----------
    engine
        The engine; anything with its ``get_server_info``, ``update_weights_from_ipc`` and pause calls.
    """

    def __init__(self, engine: Any) -> None:
        self.name = f"Engine@{id(engine):x}"
        self._engine = engine

    def rank_table(self) -> RankTable:
        """See :class:`Target`."""
        return table_of(self._engine.get_server_info(), self.name)

    def commit(self, carrier: CommitCarrier, timeout: float) -> None:
        """See :class:`Target`. ``timeout`` is not kept: Engine's calls have none."""
        success, message = self._engine.update_weights_from_ipc(
            wire.encode_carrier(carrier), flush_cache=carrier.flush_cache
        )
        if not success:
            raise CommitError(f"{self.name} refused the commit: {message}", fix="see the error inside")

    def pause(self, how: str, timeout: float) -> None:
        """See :class:`Target`."""
        raise _no_pause(self.name)

    def resume(self, timeout: float) -> None:
        """See :class:`Target`."""
        raise _no_pause(self.name)

    def resume_memory(self, tags: Sequence[str], timeout: float) -> None:
        """See :class:`Target`."""
        self._engine.resume_memory_occupation(tags=list(tags))


def _no_pause(name: str) -> RecvError:
    return CommitError(
        f"{name}: sglang.Engine has no call to pause", fix="call update() with pause='caller' when nothing generates"
    )
