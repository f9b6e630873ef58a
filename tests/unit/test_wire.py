"""The wire: docs/wire.md and the code say the same, and nothing that arrives can do more than be refused."""

from __future__ import annotations

import functools
import importlib
import json
import re
import tracemalloc
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_recv import errors, wire
from sglang_recv.errors import BadMessageError, InternalError, LimitError, ProtocolVersionError, RecvError
from sglang_recv.fdpass import MAX_MESSAGE
from sglang_recv.wire import (
    Ack,
    Bucket,
    Checksum,
    CommitCarrier,
    Entry,
    Error,
    Hello,
    Load,
    Opened,
    RankInfo,
    RankTable,
    ReleaseBuffer,
    TensorSpec,
)

DOC = (Path(__file__).resolve().parents[2] / "docs" / "wire.md").read_text(encoding="utf-8")

UNIONS: dict[str, Any] = {
    "SenderMessage": wire.SenderMessage,
    "RankMessage": wire.RankMessage,
    "FdRequest": wire.FdRequest,
    "FdReply": wire.FdReply,
    "RankReport": wire.RankReport,
    "LeaderMessage": wire.LeaderMessage,
    "Carrier": wire.Carrier,
}
PARTS: tuple[type[msgspec.Struct], ...] = (
    *(TensorSpec, Entry, Bucket, wire.MemorySaver, RankInfo, RankTable, wire.Kept, wire.PlanReport, wire.RankSeconds),
)
CARRIERS = frozenset(typing.get_args(wire.Carrier))
KINDS: dict[str, type[msgspec.Struct]] = {
    kind.__name__: kind for kind in (*PARTS, *(kind for union in UNIONS.values() for kind in typing.get_args(union)))
}

GOLDEN: dict[str, tuple[str, str]] = {}
for _name, _fields, _hex in re.findall(r"^```golden (\w+)\n(.+)\n([0-9a-f]+)\n```$", DOC, re.MULTILINE):
    assert _name not in GOLDEN, f"two golden blocks for {_name}"
    GOLDEN[_name] = (_fields, _hex)


def golden(name: str) -> tuple[Any, bytes]:
    """The message and the bytes of one block. The fields are read by msgspec, not by the decoder under test."""
    fields, text = GOLDEN[name]
    return msgspec.convert(tagged(name, json.loads(fields)), KINDS[name], strict=True), bytes.fromhex(text)


def tagged(name: str, fields: Any) -> Any:
    """``fields`` with the ``type`` that the struct asks for."""
    tag = KINDS[name].__struct_config__.tag
    return fields if tag is None else {"type": tag, **fields}


def rows(heading: str, columns: int) -> list[tuple[str, ...]]:
    """Cells of the first table below a heading, without backticks."""
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", DOC, re.MULTILINE | re.DOTALL)
    assert section is not None, f"docs/wire.md has no section {heading!r}"
    lines = [line for line in section.group(1).splitlines() if line.startswith("| ")]
    cells = [tuple(cell.strip().strip("`") for cell in line.strip("|").split(" |")) for line in lines[1:]]
    found = [row for row in cells if not set("".join(row)) <= {"-"}]
    assert all(len(row) == columns for row in found), found
    return found


# --- the page and the code ------------------------------------------------------------------------------------------


def test_every_message_has_a_golden_block() -> None:
    assert set(GOLDEN) == set(KINDS)


@pytest.mark.parametrize("name", sorted(set(KINDS) - {kind.__name__ for kind in CARRIERS}))
def test_golden_bytes(name: str) -> None:
    message, raw = golden(name)
    assert wire.encode(message) == raw
    assert wire.decode(raw, KINDS[name]) == message
    for union in (union for union in UNIONS.values() if KINDS[name] in typing.get_args(union)):
        decoded = wire.decode(raw, union)
        assert type(decoded) is KINDS[name]
        assert decoded == message


@pytest.mark.parametrize("name", sorted(kind.__name__ for kind in CARRIERS))
def test_golden_carriers(name: str) -> None:
    message, raw = golden(name)
    handles = wire.encode_carrier(message)
    assert handles == {"sglang_recv": raw.decode("utf-8")}
    assert wire.decode_carrier(handles) == message


def test_golden_bytes_hold_the_type_and_all_fields() -> None:
    """A block cannot pass by two equal mistakes in encoder and decoder: msgpack alone reads it."""
    for name in set(KINDS) - {kind.__name__ for kind in CARRIERS}:
        fields, text = GOLDEN[name]
        assert msgpack.unpackb(bytes.fromhex(text)) == tagged(name, json.loads(fields)), name


def type_text(kind: Any) -> str:
    """A type as the field tables write it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is type(None):
        return "nil"
    if origin is tuple:
        return f"[{type_text(arguments[0])}]"
    if origin is dict:
        return f"{{{type_text(arguments[0])}: {type_text(arguments[1])}}}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_text(argument) for argument in arguments)
    return str(kind.__name__)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_field_table_is_the_struct(name: str) -> None:
    kind = KINDS[name]
    hints = typing.get_type_hints(kind)
    expected = []
    for field in msgspec.structs.fields(kind):
        default = "" if field.required else json.dumps(msgspec.to_builtins(field.default)).replace("null", "nil")
        expected.append((field.name, type_text(hints[field.name]), default))
    assert [row[:3] for row in rows(name, 4)] == expected
    assert all(row[3] for row in rows(name, 4)), "a field without a meaning"


def error_classes(root: type[RecvError] = RecvError) -> Iterator[type[RecvError]]:
    yield root
    for child in root.__subclasses__():
        yield from error_classes(child)


def test_error_table_is_the_tree() -> None:
    expected = [
        (kind.code, kind.__name__, " ".join((kind.__doc__ or "").split("\n\n")[0].split())) for kind in error_classes()
    ]
    assert rows("Error codes", 3) == expected
    assert len({code for code, _, _ in expected}) == len(expected), "a code is used twice"
    assert {name for _, name, _ in expected} | {"error_from_code", "REPAIR"} == set(errors.__all__)


def test_limits_table_is_the_code() -> None:
    documented = {name: value for name, value, _ in rows("Limits", 3)}
    for dotted, value in documented.items():
        module, _, attribute = dotted.rpartition(".")
        assert getattr(importlib.import_module(f"sglang_recv.{module}"), attribute) == float(value), dotted
    constants = {f"wire.{name}" for name in vars(wire) if name.startswith("MAX_")}
    assert constants <= set(documented), "a limit of wire.py is not documented"


def test_page_names_this_protocol() -> None:
    assert f"protocol {wire.PROTOCOL_MAJOR}.{wire.PROTOCOL_MINOR}:" in DOC
    assert f"This page is {wire.PROTOCOL_MAJOR}.{wire.PROTOCOL_MINOR}." in DOC


# --- rules of the encoding ------------------------------------------------------------------------------------------


def packed(value: Any) -> bytes:
    raw: bytes = msgpack.packb(value)
    return raw


def refused(raw: bytes, kind: Any = wire.SenderMessage) -> str:
    with pytest.raises(BadMessageError) as caught:
        wire.decode(raw, kind)
    assert f"a message of {len(raw)} bytes" in caught.value.message
    assert caught.value.fix
    return caught.value.message


@pytest.mark.parametrize("name", sorted(set(KINDS) - {kind.__name__ for kind in CARRIERS}))
def test_unknown_fields_are_ignored(name: str) -> None:
    message, raw = golden(name)
    plain = msgpack.unpackb(raw)
    newer = [*plain, "new", 3] if isinstance(plain, list) else {"new": {"a": [1, None]}, **plain, "newer": 2.5}
    assert wire.decode(packed(newer), KINDS[name]) == message


def test_unknown_elements_of_nested_arrays_are_ignored() -> None:
    message, raw = golden("Load")
    plain = msgpack.unpackb(raw)
    for bucket in plain["buckets"]:
        for entry in bucket[0]:
            entry[0].append({"stride": [1]})
            entry.append("new")
        bucket.append(9)
    assert wire.decode(packed(plain), wire.SenderMessage) == message


@pytest.mark.parametrize("name", sorted(set(KINDS) - {kind.__name__ for kind in CARRIERS}))
def test_each_missing_field_is_refused_unless_it_has_a_default(name: str) -> None:
    kind = KINDS[name]
    message, raw = golden(name)
    plain = msgpack.unpackb(raw)
    for index, field in enumerate(msgspec.structs.fields(kind)):
        if isinstance(plain, list):
            refused(packed(plain[:index]), kind)
            continue
        rest = {key: value for key, value in plain.items() if key != field.name}
        if field.required:
            assert field.name in refused(packed(rest), kind)
        else:
            assert wire.decode(packed(rest), kind) == msgspec.structs.replace(message, **{field.name: field.default})


@pytest.mark.parametrize("union", sorted(set(UNIONS) - {"Carrier"}))
def test_types_of_other_unions_and_unknown_types_are_refused(union: str) -> None:
    members = typing.get_args(UNIONS[union])
    others = [kind for kind in KINDS.values() if kind not in members and kind not in CARRIERS and kind not in PARTS]
    assert len(others) > 10
    for kind in others:
        assert kind.__name__ in refused(golden(kind.__name__)[1], UNIONS[union])
    fields = msgpack.unpackb(golden(members[0].__name__)[1])
    for tag in ("NewMessage", "hello", "", None, 1, ["Hello"]):
        refused(packed({**fields, "type": tag}), UNIONS[union])
    del fields["type"]
    assert "type" in refused(packed(fields), UNIONS[union])


def wrong_values(hint: Any) -> list[Any]:
    """Values that are not of a type, among them those that lax decoders convert."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (argument for argument in typing.get_args(hint) if argument is not type(None))
        return [value for value in wrong_values(hint) if value is not None]
    text = type_text(hint)
    everything: dict[str, Any] = {"int": 1, "str": "1", "bool": True, "float": 1.5, "[]": [1], "{}": {"1": 1}}
    allowed = {"int": {"int"}, "str": {"str"}, "bool": {"bool"}, "float": {"float", "int"}}.get(text)
    if allowed is None:
        allowed = {"[]"} if text.startswith("[") else {"{}"}
    wrong = [value for key, value in everything.items() if key not in allowed]
    if text.startswith("["):
        wrong += [[value] for value in wrong_values(typing.get_args(hint)[0])]
    if text == "int":
        wrong += [1.0, "01"]
    return [*wrong, None]


@pytest.mark.parametrize("name", sorted(set(KINDS) - {kind.__name__ for kind in CARRIERS}))
def test_wrong_types_are_refused(name: str) -> None:
    kind = KINDS[name]
    plain = msgpack.unpackb(golden(name)[1])
    checked = 0
    for index, (field, hint) in enumerate(typing.get_type_hints(kind).items()):
        for value in wrong_values(hint):
            other: Any = [*plain] if isinstance(plain, list) else {**plain}
            other[index if isinstance(plain, list) else field] = value
            refused(packed(other), kind)
            checked += 1
    assert checked >= 5 * len(msgspec.structs.fields(kind))


def test_an_integer_is_a_float_where_one_is_due() -> None:
    raw = packed({"type": "Ack", "session": "s", "round": 1, "seconds": 2})
    assert wire.decode(raw, wire.RankMessage) == Ack("s", 1, 2.0)


def test_the_last_of_two_equal_keys_counts() -> None:
    first, second = packed({"type": "Opened", "session": "a"}), packed({"session": "b"})
    assert wire.decode(b"\x83" + first[1:] + second[1:], wire.RankMessage) == Opened("b")


def test_keys_may_come_in_any_order_and_integers_in_any_width() -> None:
    raw = (
        b"\x84" + packed("sender") + packed("s") + packed("protocol_minor") + b"\xcf" + bytes(8)
        + packed("protocol_major") + b"\xd3" + (1).to_bytes(8, "big") + packed("type") + packed("Hello")
    )  # fmt: skip
    assert wire.decode(raw, wire.SenderMessage) == Hello(1, 0, "s")


@pytest.mark.parametrize(
    "value",
    [b"\xc4\x01x", b"\xc7\x01\x05x", b"\xd4\x05x", b"\xd6\xff\0\0\0\0", b"\xc7\x0c\xff" + bytes(12), b"\xc1"],
    ids=["bin", "ext8", "fixext1", "timestamp32", "timestamp96", "reserved"],
)
def test_bin_and_ext_are_refused_even_where_nobody_looks(value: bytes) -> None:
    known = packed({"type": "Opened", "session": "s"})
    assert wire.decode(known, wire.RankMessage) == Opened("s")
    refused(b"\x83" + known[1:] + packed("unknown") + value, wire.RankMessage)
    refused(b"\x82" + packed("type") + packed("Opened") + packed("session") + value, wire.RankMessage)


@pytest.mark.parametrize("key", [b"\x01", b"\xc0", b"\xc3", b"\xcb" + bytes(8), b"\xc4\x00", b"\xc4\x01x", b"\x90"])
def test_keys_that_are_no_strings_are_refused(key: bytes) -> None:
    refused(b"\x83" + packed({"type": "Opened", "session": "s"})[1:] + key + b"\x01", wire.RankMessage)


@pytest.mark.parametrize(
    "text", [b"\xa1\xff", b"\xa3\xed\xa0\x80", b"\xa2\xc0\x80"], ids=["stray", "surrogate", "long"]
)
def test_text_that_is_not_utf8_is_refused(text: bytes) -> None:
    refused(b"\x82" + packed("type") + packed("Opened") + packed("session") + text, wire.RankMessage)


def test_trailing_bytes_are_refused() -> None:
    for name in ("Hello", "Load"):
        raw = golden(name)[1]
        refused(raw + b"\xc0")
        refused(raw + raw)


# --- limits ---------------------------------------------------------------------------------------------------------


def test_oversized_messages_meet_the_limit_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = golden("Load")[1]
    message = golden("Load")[0]
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", len(raw))
    assert wire.decode(wire.encode(message), wire.SenderMessage) == message
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", len(raw) - 1)
    with pytest.raises(LimitError, match=f"of {len(raw)} bytes is over the limit of {len(raw) - 1}") as caught:
        wire.encode(message)
    assert "slot_bytes" in caught.value.fix
    # Garbage above the limit is not even looked at.
    with pytest.raises(LimitError, match=f"of {len(raw)} bytes is over the limit of {len(raw) - 1}"):
        wire.decode(b"\xc1" * len(raw), wire.SenderMessage)


def test_the_real_limit_holds() -> None:
    with pytest.raises(LimitError, match=str(wire.MAX_MESSAGE_BYTES)):
        wire.decode(bytes(wire.MAX_MESSAGE_BYTES + 1), wire.SenderMessage)


def test_a_text_may_be_as_long_as_its_message() -> None:
    long = "é" * 100_000
    assert wire.decode(wire.encode(Opened(long)), wire.RankMessage) == Opened(long)


def traced(raw: bytes, kind: Any = wire.SenderMessage) -> int:
    """Bytes that Python allocated at most while refusing ``raw``."""
    tracemalloc.start()
    try:
        refused(raw, kind)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "prefix", [b"\xdb", b"\xdd", b"\xdf", b"\xc6", b"\xc9"], ids=["str", "array", "map", "bin", "ext"]
)
@pytest.mark.parametrize("length", [wire.MAX_TENSORS + 1, 1 << 31, (1 << 32) - 1])
def test_huge_declared_lengths_do_not_allocate(prefix: bytes, length: int) -> None:
    assert traced(prefix + length.to_bytes(4, "big") + b"\x05" * 16) < 1 << 20


def test_declared_lengths_within_the_limit_do_not_allocate_more_than_came() -> None:
    assert traced(b"\xdd" + wire.MAX_TENSORS.to_bytes(4, "big")) < 1 << 20
    assert traced((b"\xdd" + wire.MAX_TENSORS.to_bytes(4, "big")) * 100) < 1 << 20


@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa1x", b"\xdc\x00\x01"], ids=["array", "map", "array16"])
@pytest.mark.parametrize("depth", [500, 1100, 200_000])
def test_nested_bombs_are_refused(level: bytes, depth: int) -> None:
    refused(level * depth + b"\xc0")
    unknown = packed({"type": "Opened", "session": "s"})[1:] + packed("unknown") + level * depth
    if depth > 1024:  # msgpack's own limit of depth
        refused(b"\x83" + unknown + b"\xc0", wire.RankMessage)
    else:
        assert wire.decode(b"\x83" + unknown + b"\xc0", wire.RankMessage) == Opened("s")


# --- whatever arrives -----------------------------------------------------------------------------------------------


@functools.cache
def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Valid values of a field's type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**64 - 1),
        str: st.text(max_size=12),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
        type(None): st.none(),
    }
    if hint in plain:
        return plain[hint]
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(argument) for argument in arguments])
    fields = {name: values_of(kind) for name, kind in typing.get_type_hints(hint).items()}
    return st.builds(hint, **fields)


MESSAGES = st.one_of([values_of(kind) for kind in KINDS.values() if kind not in CARRIERS])


@settings(max_examples=300, deadline=None)
@given(MESSAGES)
def test_messages_round_trip(message: msgspec.Struct) -> None:
    assert wire.decode(wire.encode(message), type(message)) == message


def check_refused_or_valid(raw: bytes, kind: Any) -> None:
    try:
        message = wire.decode(raw, kind)
    except BadMessageError:
        return
    members = typing.get_args(kind) or (kind,)
    assert type(message) in members
    assert wire.decode(wire.encode(message), kind) == message


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(sorted(UNIONS)))
def test_random_bytes_are_refused(raw: bytes, union: str) -> None:
    check_refused_or_valid(raw, UNIONS[union])


ANY_VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.data(), ANY_VALUE)
def test_foreign_values_in_place_of_fields_are_refused(data: st.DataObject, value: Any) -> None:
    name = data.draw(st.sampled_from(sorted(set(GOLDEN) - {kind.__name__ for kind in (*CARRIERS, *PARTS)})))
    plain = msgpack.unpackb(golden(name)[1])
    plain[data.draw(st.sampled_from(sorted(plain)))] = value
    if data.draw(st.booleans()):
        plain[data.draw(st.text(max_size=8))] = value
    union = data.draw(st.sampled_from([u for u in sorted(UNIONS) if KINDS[name] in typing.get_args(UNIONS[u])]))
    check_refused_or_valid(packed(plain), UNIONS[union])


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_damaged_messages_are_refused_or_valid(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(set(GOLDEN) - {kind.__name__ for kind in CARRIERS})))
    raw = bytearray(golden(name)[1])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(raw)))
        how = data.draw(st.sampled_from(["set", "insert", "delete", "cut", "repeat"]))
        if how == "set" and place < len(raw):
            raw[place] = data.draw(st.integers(0, 255))
        elif how == "insert":
            raw[place:place] = data.draw(st.binary(min_size=1, max_size=6))
        elif how == "delete":
            del raw[place : place + data.draw(st.integers(1, 8))]
        elif how == "cut":
            del raw[place:]
        elif how == "repeat":
            raw += raw[place : place + 40]
    check_refused_or_valid(bytes(raw), KINDS[name])


@pytest.mark.parametrize("name", sorted(set(GOLDEN) - {kind.__name__ for kind in CARRIERS}))
def test_every_truncation_is_refused(name: str) -> None:
    raw = golden(name)[1]
    for length in range(len(raw)):
        refused(raw[:length], KINDS[name])


# --- what the encoder lets through ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [Opened("\ud800"), ReleaseBuffer("s", 2**64), ReleaseBuffer("s", -(2**63) - 1)],
    ids=["text", "big", "low"],
)
def test_encode_raises_our_errors_only(message: msgspec.Struct) -> None:
    with pytest.raises(RecvError):
        wire.encode(message)


# --- carriers -------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.one_of([values_of(kind) for kind in sorted(CARRIERS, key=lambda kind: kind.__name__)]))
def test_carriers_round_trip_through_sglangs_json(carrier: Any) -> None:
    handles = json.loads(json.dumps(wire.encode_carrier(carrier)))
    assert set(handles) == {"sglang_recv"}
    assert wire.decode_carrier(handles) == carrier


def test_other_handles_are_not_ours() -> None:
    assert wire.decode_carrier({}) is None
    assert wire.decode_carrier({"GPU-8f9c": "ipc:///tmp/checkpoint-engine"}) is None


@pytest.mark.parametrize(
    "text",
    ["", "{}", "null", "[1]", '{"type":"Hello","protocol_major":1,"protocol_minor":0,"sender":"s"}', "{" * 2000,
     '{"type":"LoadCarrier","session":"s","round":"1"}', '{"type":"LoadCarrier","session":"s","round":1.0}',
     '{"type":"LoadCarrier","session":"s"}', '{"type":"LoadCarrier","session":"s","round":1}x'],
)  # fmt: skip
def test_bad_carriers_are_refused(text: str) -> None:
    with pytest.raises(BadMessageError, match="'sglang_recv' entry of zmq_handles") as caught:
        wire.decode_carrier({"sglang_recv": text})
    assert "docs/wire.md" in caught.value.fix


@settings(max_examples=300, deadline=None)
@given(
    st.text(max_size=60) | st.sampled_from(sorted(kind.__name__ for kind in CARRIERS)),
    st.integers(0, 200),
    st.text(max_size=6),
)
def test_damaged_carriers_are_refused_or_valid(text: str, place: int, inserted: str) -> None:
    if text in {kind.__name__ for kind in CARRIERS}:  # drawn from the list, or by hypothesis from this file's words
        whole = bytes.fromhex(GOLDEN[text][1]).decode()
        text = whole[: place % len(whole)] + inserted + whole[place % len(whole) + len(inserted) :]
    try:
        carrier = wire.decode_carrier({"sglang_recv": text})
    except BadMessageError:
        return
    assert carrier is not None
    assert wire.decode_carrier(wire.encode_carrier(carrier)) == carrier


DEEP = '{"type":"OpenCarrier","session":"s","kind":"full","new":' + "[" * 100_000


@pytest.mark.parametrize("value", [DEEP, "\ud800", 5], ids=["nested", "surrogate", "int"])
def test_hostile_carriers_are_refused(value: Any) -> None:
    with pytest.raises(BadMessageError):
        wire.decode_carrier({"sglang_recv": value})


def test_carrier_fields_of_newer_versions_are_ignored() -> None:
    text = '{"new":{"a":[1]},"type":"CommitCarrier","session":"s","version":"v","newer":null}'
    assert wire.decode_carrier({"sglang_recv": text}) == CommitCarrier("s", "v", True)


# --- versions and errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("minor", [0, 1, 999])
def test_the_same_major_is_taken_whatever_the_minor(minor: int) -> None:
    wire.check_major(wire.PROTOCOL_MAJOR, minor, "the other side")


@pytest.mark.parametrize("major", [0, 2, -1])
def test_another_major_is_refused_with_both_versions(major: int) -> None:
    with pytest.raises(
        ProtocolVersionError,
        match=re.escape(f"sender x speaks protocol {major}.7, this side speaks 1.{wire.PROTOCOL_MINOR}"),
    ):
        wire.check_major(major, 7, "sender x")


@pytest.mark.parametrize("kind", list(error_classes()), ids=lambda kind: kind.code)
def test_errors_cross_the_wire_as_the_same_class(kind: type[RecvError]) -> None:
    raised = kind("the message", fix="the fix", details=("first", "second"))
    sent = wire.decode(wire.encode(Error.of(raised, "s", "ready")), wire.RankMessage)
    assert (sent.session, sent.weights_state) == ("s", "ready")
    back = sent.exception()
    assert type(back) is kind
    assert (back.message, back.fix, back.details) == ("the message", "the fix", ("first", "second"))
    assert str(back) == f"[{kind.code}] the message\n  - first\n  - second\n  fix: the fix"


HUGE = ["x" * 100_000, "\u20ac" * 100_000, "\U0001f600" * 5000, "lone \udcff", "\ud800" * 5000, ""]


@pytest.mark.parametrize("text", HUGE, ids=["ascii", "three bytes", "four bytes", "surrogate", "surrogates", "empty"])
def test_an_error_of_any_text_can_be_sent(text: str) -> None:
    """Texts of loaders, drivers and file names; on the fd socket, too, whose packets are small."""
    raised = RecvError(text, fix=text, details=(text,) * 300)
    sent = wire.decode(wire.encode(Error.of(raised, "s", "ready")), wire.RankMessage)
    whole = text.encode(errors="replace").decode()
    assert len(sent.message) <= wire.MAX_ERROR_CHARS
    assert sent.message == (whole if len(whole) <= wire.MAX_ERROR_CHARS else whole[: len(sent.message) - 4] + " ...")
    assert sent.fix == sent.message
    assert sent.details == (sent.message,) * 200
    assert len(wire.encode(Error.of(RecvError(text, fix=text)))) <= MAX_MESSAGE


@pytest.mark.parametrize("length", [wire.MAX_ERROR_CHARS, wire.MAX_ERROR_CHARS + 1])
def test_error_texts_are_cut_at_the_limit_and_not_before(length: int) -> None:
    text = "ab" * length
    sent = Error.of(RecvError(text[:length], fix="f")).message
    assert len(sent) == wire.MAX_ERROR_CHARS
    assert sent.endswith(" ...") == (length > wire.MAX_ERROR_CHARS)


@pytest.mark.parametrize(
    "character",
    ["x", '"', "\U0001f600", "\1"],
    ids=["plain", "quote", "wide", "control"],
)
def test_any_error_fits_into_an_abort_carrier(character: str) -> None:
    """The scheduler threads must be able to read it: a session whose abort they refuse never ends."""
    text = character * (2 * wire.MAX_ERROR_CHARS)
    carrier = wire.AbortCarrier("s" * 32, Error.of(RecvError(text, fix=text, details=(text,) * 200)))
    assert wire.decode_carrier(wire.encode_carrier(carrier)) == carrier


def test_carriers_above_the_limit_are_refused() -> None:
    handles = wire.encode_carrier(CommitCarrier("s", "v" * wire.MAX_CARRIER_CHARS))
    with pytest.raises(BadMessageError, match=str(wire.MAX_CARRIER_CHARS)):
        wire.decode_carrier(handles)


def test_an_error_code_of_a_newer_version_keeps_its_text() -> None:
    back = Error("NEW_CODE", "the message", "the fix", ("line",)).exception()
    assert type(back) is InternalError
    assert "the message" in back.message
    assert "'NEW_CODE'" in back.message
    assert (back.fix, back.details) == ("the fix", ("line",))


def test_a_large_manifest_fits() -> None:
    """The sizes that the limit is meant for: 20,000 tensors, and the digests of as many."""
    specs = tuple(
        TensorSpec(f"model.layers.{i // 400}.mlp.experts.{i % 400}.w", "bfloat16", (768, 2048)) for i in range(20_000)
    )
    load = Load("s", 0, tuple(Bucket(tuple(Entry(s, 0, 256 * i) for i, s in enumerate(specs[n::4]))) for n in range(4)))
    assert wire.decode(wire.encode(load), wire.SenderMessage) == load
    digests = Checksum("t", 0, "0" * 32, {spec.name: "0" * 32 for spec in specs}, "v")
    assert wire.decode(wire.encode(digests), wire.RankMessage) == digests
