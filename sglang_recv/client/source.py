"""What is known of the tensors of an update before it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from sglang_recv import manifest
from sglang_recv.client.fill import check_pair
from sglang_recv.client.layout import Layout
from sglang_recv.client.pool import Look, Pools
from sglang_recv.wire import TensorSpec


class Source(Protocol):
    """Where tensors come from."""

    #: True when a session may repeat an earlier one on trust: a source that turns out otherwise costs only time.
    repeats: bool

    @property
    def names(self) -> list[str] | None:
        """In the order in which they come, when all of them are at hand."""

    def specs(self) -> Sequence[TensorSpec] | None:
        """The whole manifest, or None.

        Raises
        ------
        ManifestError
            When it is wrong by itself.
        """

    def begin(self, pools: Pools) -> None:
        """Called before all else, with the pools in which tensors may lie."""

    @property
    def lends(self) -> list[int]:
        """The numbers of the pools that tensors lie in, as far as it is known."""

    def packed(self, specs: Sequence[TensorSpec] | None) -> Sequence[TensorSpec] | None:
        """Those of ``specs`` that need staging, as far as it is known."""

    def fits(self, layout: Layout) -> bool:
        """False when it is known that other tensors come than in the session of ``layout``."""


class AtHand:
    """Tensors that are all there."""

    repeats = True

    def __init__(self, named: Mapping[str, torch.Tensor] | Sequence[tuple[str, torch.Tensor]]) -> None:
        # Two lists of what there is: pairs would be tens of thousands of new objects for the garbage collector.
        self.names: list[str] = list(named) if isinstance(named, Mapping) else [name for name, _ in named]
        values = named.values() if isinstance(named, Mapping) else (tensor for _, tensor in named)
        self.tensors: list[torch.Tensor] = list(values)
        self._pools = Pools(())

    @property
    def pairs(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Names with their tensors."""
        return list(zip(self.names, self.tensors, strict=True))

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`Source.specs`."""
        specs = []
        for name, tensor in self.pairs:
            check_pair(name, tensor)
            specs.append(manifest.spec_of(name, tensor))
        findings = manifest.check_specs(specs)
        if findings:
            raise manifest.manifest_error(findings, "the tensors to send are not a manifest")
        return specs

    def begin(self, pools: Pools) -> None:
        """See :meth:`Source.begin`."""
        self._pools = pools

    @cached_property
    def look(self) -> Look:
        """At all tensors. It takes a while, and so is not done before it must be."""
        return self._pools.look(self.tensors)

    @property
    def lends(self) -> list[int]:
        """See :meth:`Source.lends`."""
        return [pool for pool in np.unique(self.look.pools).tolist() if pool]

    def packed(self, specs: Sequence[TensorSpec] | None) -> Sequence[TensorSpec] | None:
        """See :meth:`Source.packed`."""
        return None if specs is None else [s for s, pool in zip(specs, self.look.pools, strict=True) if not pool]

    def fits(self, layout: Layout) -> bool:
        """See :meth:`Source.fits`."""
        return layout.fits(self.names, self.tensors, self.look.pools)


class Described:
    """Tensors that come later, as a manifest says."""

    repeats = False
    names = None

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`Source.specs`."""
        return self._specs

    def begin(self, pools: Pools) -> None:
        """See :meth:`Source.begin`."""

    @property
    def lends(self) -> list[int]:
        """See :meth:`Source.lends`."""
        return []

    def packed(self, specs: Sequence[TensorSpec] | None) -> Sequence[TensorSpec] | None:
        """See :meth:`Source.packed`."""
        return specs

    def fits(self, layout: Layout) -> bool:
        """See :meth:`Source.fits`."""
        return False


class Unknown:
    """Tensors that come later, and nobody says which."""

    repeats = True
    names = None

    def specs(self) -> None:
        """See :meth:`Source.specs`."""

    def begin(self, pools: Pools) -> None:
        """See :meth:`Source.begin`."""

    @property
    def lends(self) -> list[int]:
        """See :meth:`Source.lends`."""
        return []

    def packed(self, specs: Sequence[TensorSpec] | None) -> Sequence[TensorSpec] | None:
        """See :meth:`Source.packed`."""
        return specs

    def fits(self, layout: Layout) -> bool:
        """See :meth:`Source.fits`."""
        return True
