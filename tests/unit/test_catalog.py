"""The catalog: headers of real safetensors files, damaged ones, and what may be said about a manifest."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sglang_recv import manifest
from sglang_recv.receiver.catalog import LOADED_TOGETHER, Catalog, read_headers, skipped_by_design
from sglang_recv.wire import TensorSpec

TENSORS = {
    "model.embed_tokens.weight": torch.zeros(32, 8, dtype=torch.bfloat16),
    "model.layers.0.norm.weight": torch.zeros(8, dtype=torch.float32),
    "model.layers.0.mlp.weight": torch.zeros(8, 8, dtype=torch.float8_e4m3fn),
    "model.layers.1.mlp.bias": torch.zeros((), dtype=torch.int64),
    "model.layers.1.mask": torch.zeros(0, 4, dtype=torch.bool),
    "lm_head.weight": torch.zeros(32, 8, dtype=torch.bfloat16),
}
SPECS = {name: manifest.spec_of(name, tensor) for name, tensor in TENSORS.items()}


def catalog(specs: dict[str, TensorSpec] = SPECS, tied: bool = False, layers: int | None = 2) -> Catalog:
    return Catalog(specs, model_dtype="bfloat16", tied_embeddings=tied, num_layers=layers)


def raw_file(path: Path, header: object, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text)


def test_headers_of_real_shards_are_the_tensors(tmp_path: Path) -> None:
    names = sorted(TENSORS)
    save_file({name: TENSORS[name] for name in names[:2]}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({name: TENSORS[name] for name in names[2:]}, tmp_path / "model-2.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert read_headers(tmp_path) == SPECS


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8",
                                  "int16", "int32", "int64", "uint8", "bool"])  # fmt: skip
def test_every_dtype_is_named_as_torch_does(name: str, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(3, dtype=getattr(torch, name))}, tmp_path / "model.safetensors")
    assert read_headers(tmp_path) == {"w": TensorSpec("w", name, (3,))}


def test_only_headers_are_read(tmp_path: Path) -> None:
    """A file of a terabyte that holds nothing but its header."""
    path = tmp_path / "model.safetensors"
    raw_file(path, {"w": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}})
    with path.open("r+b") as stream:
        stream.truncate(1 << 40)
    assert read_headers(tmp_path) == {"w": TensorSpec("w", "float32", (1 << 38,))}


def test_no_files_mean_no_catalog(tmp_path: Path) -> None:
    assert read_headers(tmp_path) == {}
    assert read_headers(tmp_path / "absent") == {}
    assert read_headers(Path("Qwen/Qwen3-0.6B")) == {}


GOOD: dict[str, Any] = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
DAMAGED = {
    "empty": b"",
    "short length": b"\x10\x00",
    "short header": struct.pack("<Q", 1000) + b'{"w":',
    "huge length": struct.pack("<Q", 1 << 63) + b"{}",
    "above the limit": struct.pack("<Q", (100 << 20) + 1) + b"{}",
    "no json": struct.pack("<Q", 4) + b"\xff\xfe{}",
    "pickle": b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00",
}


@pytest.mark.parametrize("how", sorted(DAMAGED))
def test_one_damaged_file_means_no_catalog(how: str, tmp_path: Path) -> None:
    raw_file(tmp_path / "a.safetensors", GOOD)
    assert set(read_headers(tmp_path)) == {"w"}
    (tmp_path / "b.safetensors").write_bytes(DAMAGED[how])
    assert read_headers(tmp_path) == {}


def test_unknown_dtypes_mean_no_catalog(tmp_path: Path) -> None:
    raw_file(tmp_path / "a.safetensors", {**GOOD, "v": {"dtype": "F4_E2M1", "shape": [2], "data_offsets": [8, 9]}})
    assert read_headers(tmp_path) == {}


ODD: dict[str, object] = {
    "list": [1],
    "number": 5,
    "entry is a string": {"w": "F32"},
    "no shape": {"w": {"dtype": "F32"}},
    "shape is a number": {"w": {"dtype": "F32", "shape": 3}},
    "shape of strings": {"w": {"dtype": "F32", "shape": ["3"]}},
    "shape of fractions": {"w": {"dtype": "F32", "shape": [3.7]}},
    "negative shape": {"w": {"dtype": "F32", "shape": [-3]}},
    "no name": {"": {"dtype": "F32", "shape": [3]}},
    "dtype is a list": {"w": {"dtype": ["F32"], "shape": [3]}},
    "deep": b'{"w":' + b"[" * 100_000,
}


@pytest.mark.parametrize(
    "how",
    sorted(ODD),
)
def test_headers_of_another_form_mean_no_catalog(how: str, tmp_path: Path) -> None:
    raw_file(tmp_path / "a.safetensors", ODD[how])
    assert read_headers(tmp_path) == {}


def test_cut_and_flipped_headers_never_add_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    for cut in range(0, 8 + length, 7):
        path.write_bytes(whole[:cut])
        # The header ends in spaces that make it a multiple of 8 long: without them it is still whole.
        assert read_headers(tmp_path) == ({} if whole[cut : 8 + length].strip() else SPECS), cut
    chance = random.Random(7)
    for _ in range(50):
        changed = bytearray(whole)
        changed[chance.randrange(8)] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(changed))
        assert read_headers(tmp_path) in ({}, SPECS), "a header of another length"


def test_files_that_the_index_does_not_name_are_left_out(tmp_path: Path) -> None:
    """As in Mistral's repositories; SGLang loads what model.safetensors.index.json names."""
    save_file({"model.embed_tokens.weight": torch.zeros(4, 2)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"tok_embeddings.weight": torch.zeros(4, 2)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(read_headers(tmp_path)) == {"model.embed_tokens.weight"}


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {"w": 5}}, {"weight_map": {"w": "no"}}])
def test_an_index_that_cannot_be_used_means_no_catalog(index: object, tmp_path: Path) -> None:
    raw_file(tmp_path / "a.safetensors", GOOD)
    assert read_headers(tmp_path) != {}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_headers(tmp_path) == {}


# --- what is skipped ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tied", "layers", "skipped"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", False, 2, True),
        ("model.rotary_emb.cos_cached", False, None, True),
        ("model.rotary_emb.inv_freq.weight", False, 2, False),
        ("mtp.layers.0.weight", False, None, True),
        ("model.mtp.weight", False, None, False),
        ("lm_head.weight", True, 2, True),
        ("lm_head.weight", False, 2, False),
        ("lm_head.bias", True, 2, False),
        ("model.layers.1.mlp.weight", False, 2, False),
        ("model.layers.2.mlp.weight", False, 2, True),
        ("layers.61.eh_proj.weight", False, 61, True),
        ("model.layers.10.mlp.weight", False, 2, True),
        ("model.layers.2.mlp.weight", False, None, False),
        ("model.sublayers.2.weight", False, 2, False),
        ("model.layers.2", False, 2, False),
    ],
)
def test_what_loaders_skip(name: str, tied: bool, layers: int | None, skipped: bool) -> None:
    assert skipped_by_design(name, tied_embeddings=tied, num_layers=layers) is skipped
    assert catalog(tied=tied, layers=layers).skipped(name) is skipped


def test_groups_are_last_parts_of_names() -> None:
    assert all(len(group) > 1 and all("." not in part for part in group) for group in LOADED_TOGETHER)
    assert ("q_a_proj", "kv_a_proj_with_mqa") in LOADED_TOGETHER


# --- what is said about a manifest ----------------------------------------------------------------------------------


def test_the_checkpoint_itself_is_accepted() -> None:
    assert catalog().problems(SPECS.values()) == []
    assert catalog().missing(SPECS) == []


def test_everything_wrong_is_reported_in_order() -> None:
    sent = [
        TensorSpec("model.embed_tokens.weight", "bfloat16", (8, 32)),
        TensorSpec("model.wrong.weight", "bfloat16", (1,)),
        TensorSpec("model.layers.0.norm.weight", "float16", (9,)),
        TensorSpec("model.layers.0.mlp.weight", "bfloat16", (8, 8)),
    ]
    assert catalog().problems(sent) == [
        "model.embed_tokens.weight: shape [8, 32], the engine expects [32, 8]",
        "model.wrong.weight: the engine's model has no tensor of this name",
        "model.layers.0.norm.weight: shape [9], the engine expects [8]",
        "model.layers.0.norm.weight: dtype float16, the engine expects bfloat16 or float32",
        "model.layers.0.mlp.weight: dtype bfloat16, the engine expects float8_e4m3fn",
    ]
    assert catalog().missing(spec.name for spec in sent) == [
        "model.layers.1.mlp.bias: missing",
        "model.layers.1.mask: missing",
        "lm_head.weight: missing",
    ]


def test_the_dtype_the_engine_runs_in_is_accepted_for_floats_alone() -> None:
    known = {"f": TensorSpec("f", "float32", (1,)), "i": TensorSpec("i", "int64", (1,))}
    sent = [TensorSpec("f", "bfloat16", (1,)), TensorSpec("i", "bfloat16", (1,))]
    assert catalog(known).problems(sent) == ["i: dtype bfloat16, the engine expects int64"]


def test_what_loaders_skip_may_be_sent_or_left_out() -> None:
    tied = catalog(tied=True)
    assert tied.missing(set(SPECS) - {"lm_head.weight"}) == []
    assert tied.problems(SPECS.values()) == []
    short = catalog({name: spec for name, spec in SPECS.items() if name != "lm_head.weight"}, tied=True, layers=1)
    assert short.missing({"model.embed_tokens.weight", "model.layers.0.norm.weight", "model.layers.0.mlp.weight"}) == []
    assert short.problems([SPECS["lm_head.weight"], TensorSpec("model.layers.7.x", "int8", (1,))]) == []


def test_an_empty_catalog_says_nothing() -> None:
    empty = catalog({})
    assert empty.digest == ""
    assert empty.problems([TensorSpec("anything", "int8", (1,))]) == []
    assert empty.missing([]) == []


def test_a_committed_update_is_the_new_catalog() -> None:
    sent = [TensorSpec("model.embed_tokens.weight", "float32", (32, 8)), TensorSpec("model.layers.0.x", "int8", (1,))]
    learned = catalog(tied=True).learn(sent)
    assert learned.digest == manifest.digest(sent)
    assert learned.digest != catalog().digest == manifest.digest(SPECS.values())
    assert learned.problems(sent) == []
    assert learned.problems([SPECS["model.embed_tokens.weight"]]) == [], "the engine's own dtype stays acceptable"
    assert learned.problems([SPECS["model.layers.0.norm.weight"]]) == [
        "model.layers.0.norm.weight: the engine's model has no tensor of this name"
    ]
    assert learned.missing([]) == ["model.embed_tokens.weight: missing", "model.layers.0.x: missing"]
    assert learned.skipped("lm_head.weight"), "facts about the model are kept"
    assert learned.learn(reversed(sent)) is learned, "nothing new was learned"
