"""What a rank knows of names, shapes and dtypes before a session, and the rules that come from the model."""

from __future__ import annotations

import json
import logging
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from sglang_recv import manifest
from sglang_recv.wire import TensorSpec

logger = logging.getLogger(__name__)

#: Parts of names that a loader fuses inside one call: SGLang's DeepSeek loaders keep the first half in a local
#: dict of the call (deepseek_weight_loader.py, ``cached_a_proj``), so halves in two buckets are silently not loaded.
LOADED_TOGETHER: Final[tuple[tuple[str, ...], ...]] = (("q_a_proj", "kv_a_proj_with_mqa"),)

#: safetensors' names of dtypes (its format page) and torch's.
_SAFETENSORS_DTYPES: Final = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "BOOL": "bool",
}
_MAX_HEADER_BYTES: Final = 100 << 20  # safetensors' own limit

_COMPUTED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
#: Layers of the text model alone: a vision tower counts its own.
_LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")


def skipped_by_design(name: str, *, tied_embeddings: bool, num_layers: int | None) -> bool:
    """True for tensors of a checkpoint that SGLang's loaders leave out on purpose (docs/limits.md lists them)."""
    if _COMPUTED.search(name) or name.startswith("mtp."):
        return True
    if tied_embeddings and (name == "lm_head.weight" or name.endswith(".lm_head.weight")):
        return True
    layer = _LAYER.search(name)
    return layer is not None and num_layers is not None and int(layer.group(1)) >= num_layers


def read_headers(folder: Path) -> dict[str, TensorSpec]:
    """Specs of all tensors in the checkpoint in ``folder``; empty when there is none or it cannot be understood.

    Only the headers are read: 8 bytes of length, then JSON (https://huggingface.co/docs/safetensors). Where an index
    lists the files, others beside them (Mistral's consolidated.safetensors) are not part of the checkpoint.
    """
    try:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = {folder / name for name in json.loads(index.read_bytes())["weight_map"].values()}
        else:
            files = set(folder.glob("*.safetensors"))
        specs: dict[str, TensorSpec] = {}
        for file in sorted(files):
            specs |= _header(file)
        return specs
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, struct.error) as error:
        logger.warning("the checkpoint in %s cannot be used to check updates: %s", folder, error)
        return {}


def _header(file: Path) -> dict[str, TensorSpec]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{file.name} has a header of {length} bytes")
        header = json.loads(stream.read(length))
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            shape = entry["shape"]
            if not isinstance(shape, list) or not all(type(size) is int for size in shape):
                raise ValueError(f"{name} has the shape {shape!r}")
            spec = TensorSpec(name, _SAFETENSORS_DTYPES[entry["dtype"]], tuple(shape))
            problems = manifest.problems_of(spec)
            if problems:
                raise ValueError(problems[0])
            found[name] = spec
    return found


class Catalog:
    """Known specs of one model, and what may be said about a manifest before it is loaded.

    Parameters
    ----------
    specs
        Names to specs, or empty when nothing is known.
    model_dtype
        The dtype that the engine runs the model in; accepted for any floating point tensor, since the engine casts to
        it on a load from disk as well.
    tied_embeddings, num_layers
        Facts about the model that :func:`skipped_by_design` needs.
    """

    def __init__(
        self,
        specs: dict[str, TensorSpec],
        *,
        model_dtype: str,
        tied_embeddings: bool,
        num_layers: int | None,
    ) -> None:
        self._specs = specs
        self._model_dtype = model_dtype
        self._tied = tied_embeddings
        self._layers = num_layers
        self.digest = manifest.digest(specs.values()) if specs else ""

    def learn(self, specs: Iterable[TensorSpec]) -> Catalog:
        """The catalog after a full update with ``specs`` was committed: they are what this model takes."""
        learned = {s.name: s for s in specs}
        if learned == self._specs:  # as after nearly every update; the digest is not free
            return self
        return Catalog(
            learned,
            model_dtype=self._model_dtype,
            tied_embeddings=self._tied,
            num_layers=self._layers,
        )

    def skipped(self, name: str) -> bool:
        """True for a tensor that the loaders leave out on purpose."""
        return skipped_by_design(name, tied_embeddings=self._tied, num_layers=self._layers)

    def problems(self, specs: Iterable[TensorSpec]) -> list[str]:
        """Unknown names, wrong shapes and wrong dtypes, one line each; nothing when the catalog is empty."""
        if not self._specs:
            return []
        found = []
        for spec in specs:
            known = self._specs.get(spec.name)
            if known is None:
                if not self.skipped(spec.name):
                    found.append(f"{spec.name}: the engine's model has no tensor of this name")
                continue
            if known.shape != spec.shape:
                found.append(f"{spec.name}: shape {list(spec.shape)}, the engine expects {list(known.shape)}")
            if spec.dtype not in self._dtypes(known):
                accepted = " or ".join(sorted(self._dtypes(known)))
                found.append(f"{spec.name}: dtype {spec.dtype}, the engine expects {accepted}")
        return found

    def missing(self, names: Iterable[str]) -> list[str]:
        """Names that a full update needs and ``names`` lacks, one line each; nothing when the catalog is empty."""
        sent = set(names)
        return [f"{name}: missing" for name in self._specs if name not in sent and not self.skipped(name)]

    def _dtypes(self, known: TensorSpec) -> set[str]:
        if manifest.dtype_of(known.dtype).is_floating_point and manifest.dtype_of(known.dtype).itemsize > 1:
            return {known.dtype, self._model_dtype}
        return {known.dtype}
