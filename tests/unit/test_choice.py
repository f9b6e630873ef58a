"""The choice of mode: every situation against the table in docs/modes.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_recv.client.choice import MODES, Choice, Place, Situation, choose
from sglang_recv.errors import RecvError
from sglang_recv.manifest import KINDS

TABLE = Path(__file__).parents[2] / "docs" / "modes.md"
Row = dict[str, str]


def rows() -> list[Row]:
    """The rows of the table, by column."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("|")]
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(head, cells, strict=True)) for cells in body]


PLACES: tuple[Place, ...] = ("same device", "same host", "other host")
RELEASED = {"no": ((), False), "with backup": (("weights",), True), "without backup": (("kv_cache", "weights"), False)}


def situations() -> Iterator[tuple[Situation, Row]]:
    """Every situation, with what the table calls it."""
    for asked, offered, place, device, kind, whole, released, resume, saver, trainer_saver in itertools.product(
        (*MODES, "ipc"),
        ("vmm", "nccl", "off"),
        PLACES,
        ("cuda", "cpu"),
        (*KINDS, "delta"),
        ("yes", "no"),
        (*RELEASED, "kv only"),
        ("yes", "no"),
        (True, False),
        (True, False),
    ):
        tags, backup = RELEASED.get(released, (("cuda_graph", "kv_cache"), False))
        yield (
            Situation(
                asked,
                offered,
                place,
                device,
                kind,
                released=tags,
                cpu_backup=backup,
                full_required=whole == "no",
                resume=resume == "yes",
                engine_saver=saver,
                trainer_saver=trainer_saver,
            ),
            {
                "asked": asked if asked in MODES else "another word",
                "engine offers": offered,
                "where the rank is": place,
                "device": device,
                "update": kind if kind in KINDS else "another word",
                "weights whole": whole,
                "released": released if released in RELEASED else "no",
                "resume_weights": resume,
            },
        )


def answer(situation: Situation) -> str:
    """What the function says, in the table's words."""
    try:
        choice = choose(situation)
    except RecvError as error:
        return f"`{error.code}`"
    return f"{choice.mode}, after resuming the weights" if choice.resume_first else choice.mode


def fits(row: Row, words: Row) -> bool:
    """Whether a row speaks of a situation."""
    return all(row[column] == "any" or word in row[column].split(", ") for column, word in words.items())


def test_the_table_says_what_the_function_does() -> None:
    table = rows()
    used = set()
    for situation, words in situations():
        index = next(index for index, row in enumerate(table) if fits(row, words))
        assert answer(situation) == table[index]["answer"].partition(":")[0], (situation, table[index])
        used.add(index)
    assert used == set(range(len(table))), "each row is the answer to something"


def test_nccl_on_the_own_gpu_says_why_and_what_instead() -> None:
    with pytest.raises(RecvError, match="Duplicate GPU detected") as caught:
        choose(Situation("nccl", "vmm", "same device", "cuda"), "engine e rank 3")
    assert "engine e rank 3 is on the sender's own GPU" in caught.value.message
    assert "'vmm' or 'auto'" in caught.value.fix


def test_errors_name_the_rank_and_its_state() -> None:
    broken = Situation("auto", "vmm", "same device", "cuda", "partial", full_required=True, state="poisoned: a test")
    with pytest.raises(RecvError, match="engine e rank 1: weights are poisoned: a test"):
        choose(broken, "engine e rank 1")


def test_the_choice_for_whole_weights_resumes_nothing() -> None:
    assert choose(Situation("auto", "vmm", "same device", "cpu")) == Choice("vmm")
