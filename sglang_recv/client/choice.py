"""The choice of mode: a pure function of what both sides report and the user asked for. docs/modes.md has its table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from sglang_recv.errors import (
    REPAIR,
    DeviceMismatchError,
    FullUpdateRequiredError,
    ManifestError,
    ReceiverOffError,
    UnsupportedError,
    WeightsReleasedError,
)
from sglang_recv.manifest import KINDS

MODES: Final = ("auto", "vmm", "nccl")

#: Where an engine rank is, as seen from the process that is to feed it.
Place = Literal["same device", "same host", "other host"]

#: The memory saver's tag for weights; those for the KV cache and CUDA graphs do not matter to an update.
WEIGHTS_TAG: Final = "weights"


@dataclass(frozen=True)
class Situation:
    """One engine rank and one sender.

    Parameters
    ----------
    asked
        The user's mode.
    offered
        The mode of the engine's receiver.
    place
        Where the rank is.
    device_kind
        ``cuda`` or ``cpu``; on a CPU every rank of this host is on the same device.
    kind
        ``full`` or ``partial``.
    released
        Tags that the engine's memory saver has released; empty where it is off.
    cpu_backup
        The engine's memory saver keeps released weights in host memory.
    full_required, state
        The engine's weights are not whole, and what it says of them.
    resume
        The caller wants released weights to be resumed first.
    engine_saver, trainer_saver
        A memory saver is on. Neither changes the answer: staging is made outside of both.
    """

    asked: str
    offered: str
    place: Place
    device_kind: str
    kind: str = "full"
    released: tuple[str, ...] = ()
    cpu_backup: bool = False
    full_required: bool = False
    state: str = ""
    resume: bool = False
    engine_saver: bool = False
    trainer_saver: bool = False


@dataclass(frozen=True)
class Choice:
    """How the rank gets its weights, and whether they are to be resumed before."""

    mode: Literal["vmm"]
    resume_first: bool = False


def choose(situation: Situation, who: str = "the rank") -> Choice:
    """The mode, or the reason why there is none. Nothing is exchanged for what was asked for.

    Parameters
    ----------
    who
        What to call the rank in an error.

    Raises
    ------
    ReceiverOffError, UnsupportedError
        For a mode that this engine, or this version, does not have.
    DeviceMismatchError
        When the rank is elsewhere.
    WeightsReleasedError, FullUpdateRequiredError, ManifestError
        For an update that the rank cannot take in its state.
    """
    _check_mode(situation, who)
    if situation.place != "same device":
        where = {"same host": "another GPU of this host", "other host": "another host"}[situation.place]
        raise DeviceMismatchError(
            f"{who} is on {where}: an fd cannot bring it weights",
            fix="run the sender on the rank's own GPU, or use SGLang's own update_weights_from_distributed",
        )
    if situation.kind not in KINDS:
        raise ManifestError(f"{who}: kind {situation.kind!r}", fix=f"use one of {', '.join(KINDS)}")
    resume_first = WEIGHTS_TAG in situation.released
    if resume_first and not situation.resume:
        raise WeightsReleasedError(
            f"{who}: the memory saver has released its weights",
            fix="resume them first: POST /resume_memory_occupation with tags ['weights'], or pass resume_weights=True",
        )
    undefined = situation.full_required or (resume_first and not situation.cpu_backup)
    if undefined and situation.kind != "full":
        state = situation.state or "undefined once they are resumed, since they have no CPU backup"
        raise FullUpdateRequiredError(f"{who}: weights are {state}", fix=REPAIR)
    return Choice("vmm", resume_first)


def _check_mode(situation: Situation, who: str) -> None:
    if situation.asked not in MODES:
        raise UnsupportedError(f"{who}: mode {situation.asked!r}", fix=f"use one of {', '.join(MODES)}")
    if situation.offered == "off":
        raise ReceiverOffError(f"{who}: the receiver is off", fix="start the engine with --weight-receiver vmm")
    if situation.asked == "nccl":
        if situation.place == "same device" and situation.device_kind == "cuda":
            raise UnsupportedError(
                f"mode 'nccl': NCCL refuses two ranks on one device ('Duplicate GPU detected'), and {who} is on the "
                "sender's own GPU",
                fix="use mode 'vmm' or 'auto' for engines that share a GPU with the trainer",
            )
        raise UnsupportedError(
            f"mode 'nccl' for {who}: sending by broadcast is not built yet",
            fix="use mode 'vmm' on the engine's own GPU, SGLang's own update_weights_from_distributed elsewhere",
        )
    if situation.offered != "vmm":
        raise UnsupportedError(
            f"{who} offers {situation.offered!r}, not 'vmm'", fix="start it with --weight-receiver vmm"
        )
