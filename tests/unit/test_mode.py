"""Flags, keywords and environment variables of the receiver."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from sglang_recv.errors import UnsupportedError
from sglang_recv.integrations.sglang import mode

NAMES = {"mode": (mode.ENV, "--weight-receiver", "vmm"), "plan": (mode.ENV_PLAN, "--weight-receiver-plan", "off")}
DEFAULTS = {"mode": "off", "plan": "auto"}


def started(monkeypatch: pytest.MonkeyPatch, **variables: str) -> ModuleType:
    """The module in a process that was started with these variables only."""
    for which, (variable, _, _) in NAMES.items():
        if which in variables:
            monkeypatch.setenv(variable, variables[which])
        else:
            monkeypatch.setenv(variable, "")  # so that the end of the test takes back what is set in it
            monkeypatch.delenv(variable)
    spec = importlib.util.spec_from_file_location("mode_of_another_process", mode.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def choose(module: ModuleType, which: str, explicit: str | None) -> str:
    """What one engine is started with."""
    chosen: str = (module.choose if which == "mode" else module.choose_plan)(explicit)
    return chosen


def configured(module: ModuleType, which: str) -> str:
    """What the children of this process read."""
    found: str = (module.configured if which == "mode" else module.configured_plan)()
    return found


@pytest.mark.parametrize("which", NAMES)
def test_the_defaults(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = started(monkeypatch)
    assert configured(module, which) == DEFAULTS[which]
    assert choose(module, which, None) == DEFAULTS[which]


@pytest.mark.parametrize("which", NAMES)
def test_the_keyword_of_one_engine_is_not_for_the_next(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = started(monkeypatch)
    word = NAMES[which][2]
    assert choose(module, which, word) == word
    assert configured(module, which) == word
    assert choose(module, which, None) == DEFAULTS[which]
    assert configured(module, which) == DEFAULTS[which]


@pytest.mark.parametrize("which", NAMES)
def test_the_next_engine_gets_what_the_user_had_set(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    word = NAMES[which][2]
    module = started(monkeypatch, **{which: word})
    assert choose(module, which, DEFAULTS[which]) == DEFAULTS[which]
    assert choose(module, which, None) == word
    assert configured(module, which) == word


@pytest.mark.parametrize("which", NAMES)
def test_a_child_has_what_its_parent_chose(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    word = NAMES[which][2]
    choose(started(monkeypatch), which, word)
    child = started(monkeypatch, **{which: word})
    assert configured(child, which) == word
    assert choose(child, which, None) == word


@pytest.mark.parametrize("which", NAMES)
def test_another_word_is_refused_with_where_it_came_from(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable, flag, word = NAMES[which]
    module = started(monkeypatch)
    with pytest.raises(UnsupportedError, match=f"{flag} is 'perhaps'"):
        choose(module, which, "perhaps")
    module = started(monkeypatch, **{which: "perhaps"})
    with pytest.raises(UnsupportedError, match=f"{variable} is 'perhaps'"):
        choose(module, which, None)
    with pytest.raises(UnsupportedError, match=f"{variable} is 'perhaps'") as caught:
        configured(module, which)
    assert word in caught.value.fix
