"""The exception tree of the package.

Every error says three things: what happened (with the value and the limit), a stable ``code`` that crosses the wire and
that programs may compare, and a ``fix``: what the reader can do about it. An error that one side raises reaches the
other side as the same class (see :func:`error_from_code`).
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ApplyError",
    "BadBufferError",
    "BadMessageError",
    "BusyError",
    "CommitError",
    "DeadlineError",
    "DeviceMismatchError",
    "EngineLostError",
    "FullUpdateRequiredError",
    "InternalError",
    "LeaseLostError",
    "LimitError",
    "ManifestError",
    "NotPausedError",
    "PeerDeniedError",
    "PluginMissingError",
    "ProtocolVersionError",
    "ReceiverOffError",
    "REPAIR",
    "RecvError",
    "SessionAbortedError",
    "SessionStateError",
    "StagingMemoryError",
    "UnsupportedError",
    "WeightsReleasedError",
    "error_from_code",
]


class RecvError(Exception):
    """Base of all errors of this package.

    Parameters
    ----------
    message
        One sentence: what happened, with the value and the limit.
    fix
        What the reader can do about it.
    details
        One line per finding, when several things are wrong at once.
    """

    code: ClassVar[str] = "ERROR"

    def __init__(self, message: str, fix: str, details: tuple[str, ...] = ()) -> None:
        # All of them in ``args``, from which pickle rebuilds an exception: Ray carries errors to the driver by it.
        super().__init__(message, fix, details)
        self.message = message
        self.fix = fix
        self.details = tuple(details)

    def __str__(self) -> str:
        lines = [f"[{self.code}] {self.message}", *(f"  - {line}" for line in self.details), f"  fix: {self.fix}"]
        return "\n".join(lines)


#: What makes weights whole again.
REPAIR = "send a full update, or reload with SGLang's /update_weights_from_disk"


class InternalError(RecvError):
    """Something this package did not foresee; the message carries the original exception."""

    code = "INTERNAL"


class ProtocolVersionError(RecvError):
    """The two sides speak different major versions of the protocol."""

    code = "PROTOCOL_VERSION"


class BadMessageError(RecvError):
    """A message that cannot be decoded, or that breaks the rules of docs/protocol.md."""

    code = "BAD_MESSAGE"


class LimitError(RecvError):
    """A size or a count above the limit that docs/wire.md states."""

    code = "LIMIT"


class PeerDeniedError(RecvError):
    """The process on the other end of a Unix socket runs as another user."""

    code = "PEER_DENIED"


class PluginMissingError(RecvError):
    """The engine answers, but none of our code is loaded in it."""

    code = "PLUGIN_MISSING"


class ReceiverOffError(RecvError):
    """Our code is loaded in the engine, but its receiver was not switched on."""

    code = "RECEIVER_OFF"


class DeviceMismatchError(RecvError):
    """No engine rank shares a device with this sender, or the pairing that was asked for is not possible."""

    code = "DEVICE_MISMATCH"


class UnsupportedError(RecvError):
    """A configuration that this version does not support, named."""

    code = "UNSUPPORTED"


class WeightsReleasedError(RecvError):
    """The engine's weights are released by the memory saver: there is nothing to write to."""

    code = "WEIGHTS_RELEASED"


class FullUpdateRequiredError(RecvError):
    """The engine's weights are not whole, so only a full update is accepted."""

    code = "FULL_REQUIRED"


class NotPausedError(RecvError):
    """The engine is running requests, so its weights may not be written."""

    code = "NOT_PAUSED"


class BusyError(RecvError):
    """Another live session holds the engine."""

    code = "BUSY"


class ManifestError(RecvError):
    """The tensors that were announced or sent do not fit the engine's model; ``details`` lists each of them."""

    code = "MANIFEST"


class SessionStateError(RecvError):
    """A message that does not belong to the state the session is in."""

    code = "SESSION_STATE"


class BadBufferError(RecvError):
    """An fd, a buffer id or a range in a buffer that cannot be used."""

    code = "BUFFER"


class StagingMemoryError(RecvError):
    """Staging memory could not be allocated, exported, imported or mapped."""

    code = "STAGING_MEMORY"


class ApplyError(RecvError):
    """The model's loader failed on tensors that had passed every check."""

    code = "APPLY"


class CommitError(RecvError):
    """The commit did not happen: weights are written, but not declared valid."""

    code = "COMMIT"


class DeadlineError(RecvError):
    """A wait ran out; the message names engine, rank, bucket and phase."""

    code = "DEADLINE"


class LeaseLostError(RecvError):
    """The engine heard nothing from the sender for longer than the lease."""

    code = "LEASE_LOST"


class EngineLostError(RecvError):
    """The engine closed its connection or stopped answering."""

    code = "ENGINE_LOST"


class SessionAbortedError(RecvError):
    """The session was ended by another participant."""

    code = "ABORTED"


def _tree(root: type[RecvError]) -> dict[str, type[RecvError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def error_from_code(code: str, message: str, *, fix: str, details: tuple[str, ...] = ()) -> RecvError:
    """Rebuild an error that came over the wire.

    A code that this version does not know becomes an :class:`InternalError` that names it, so nothing is lost when the
    other side is newer.
    """
    kind = _tree(RecvError).get(code)
    if kind is None:
        return InternalError(f"{message} (code {code!r} of a newer version)", fix=fix, details=details)
    return kind(message, fix=fix, details=details)
