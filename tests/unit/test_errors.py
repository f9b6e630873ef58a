"""Errors keep what they say, whatever carries them."""

import copy
import pickle

import pytest

from sglang_recv.errors import DeviceMismatchError, InternalError, RecvError, error_from_code


@pytest.mark.parametrize("carry", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_survives_what_ray_and_multiprocessing_do_to_it(carry):
    error = DeviceMismatchError("rank 3 is elsewhere", fix="move it", details=("one", "two"))
    error.add_note("while updating")
    carried = carry(error)
    assert type(carried) is DeviceMismatchError
    assert str(carried) == str(error) == "[DEVICE_MISMATCH] rank 3 is elsewhere\n  - one\n  - two\n  fix: move it"
    assert (carried.message, carried.fix, carried.details, carried.args) == (
        error.message,
        error.fix,
        error.details,
        error.args,
    )
    assert carried.__notes__ == ["while updating"]


def test_every_code_comes_back_as_its_class():
    for kind in RecvError.__subclasses__():
        assert type(error_from_code(kind.code, "message", fix="fix")) is kind


def test_an_unknown_code_is_named():
    error = error_from_code("FROM_THE_FUTURE", "message", fix="fix", details=("line",))
    assert type(error) is InternalError
    assert "FROM_THE_FUTURE" in error.message
    assert error.details == ("line",)
