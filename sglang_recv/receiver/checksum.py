"""Digests of what a model really holds: raw bytes of parameters, buffers and tensors held as module attributes.

The digest is made for comparing engines, not against an attacker: each 8-byte word is mixed with its position by the
finaliser of SplitMix64 (Steele et al., 2014), and the sums of two such mixes modulo 2**64 are kept. It is integer
arithmetic in torch, so it gives the same value on every device and SGLang version, at memory speed on a GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Final

import torch

_CHUNK_WORDS: Final = 4 << 20  # 32 MiB at a time: temporaries stay small beside a model that fills the device


def _signed(value: int) -> int:
    """``value`` modulo 2**64 as torch's int64 holds it."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_GOLDEN: Final = _signed(0x9E3779B97F4A7C15)
_MIX1: Final = _signed(0xBF58476D1CE4E5B9)
_MIX2: Final = _signed(0x94D049BB133111EB)


def _shift(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right: torch's shift of int64 copies the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _mix(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ _shift(words, 30)) * _MIX1
    words = (words ^ _shift(words, 27)) * _MIX2
    return words ^ _shift(words, 31)


def digest(tensor: torch.Tensor) -> str:
    """Digest of the shape, dtype and bytes of ``tensor``: 32 hex digits."""
    whole = tensor.detach().contiguous()
    # Not reshape(-1): a tensor of one element is contiguous with any stride, and a view as bytes needs stride 1.
    flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
    words, tail = divmod(flat.numel(), 8)
    sums = [0, 0]
    if tail or flat.data_ptr() % 8:
        # A view as int64 needs a multiple of 8 bytes at a multiple of 8: only small or odd tensors pay for the copy.
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).clone()
        words = flat.numel() // 8
    body = flat.view(torch.int64) if words else flat.new_empty(0, dtype=torch.int64)
    for start in range(0, words, _CHUNK_WORDS):
        part = body[start : start + _CHUNK_WORDS]
        index = torch.arange(start + 1, start + 1 + part.numel(), device=part.device, dtype=torch.int64) * _GOLDEN
        mixed = _mix(part ^ index)
        sums[0] += int(mixed.sum().item())
        sums[1] += int(_mix(mixed + index).sum().item())
    head = f"{tensor.dtype}{list(tensor.shape)}{flat.numel()}"
    values = "".join(f"{s & ((1 << 64) - 1):016x}" for s in sums)
    return hashlib.blake2b((head + values).encode(), digest_size=16).hexdigest()


def _attributes(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                yield f"{name}.{index}", item
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, torch.Tensor):
                yield f"{name}.{key}", item


def held_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that the modules of ``model`` hold, by a name that is the same in every process."""
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, parameter in module.named_parameters(recurse=False):
            yield dot + name, parameter
        for name, buffer in module.named_buffers(recurse=False):
            yield dot + name, buffer
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _attributes(value, dot + name)


def digests(model: torch.nn.Module) -> dict[str, str]:
    """Digest of each tensor that ``model`` holds, by name."""
    with torch.no_grad():
        found = {name: digest(tensor) for name, tensor in held_tensors(model)}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the temporaries, so that a checksum leaves the device's memory as it was
    return found


def overall(tensors: dict[str, str]) -> str:
    """One digest over all of ``tensors``."""
    text = "\n".join(f"{name} {value}" for name, value in sorted(tensors.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
