"""The demo's tiny checkpoints are the tests' as well."""

from sglang_recv.cli.models import KINDS, Shape, checkpoint, config, names, random_tensors, tensors

__all__ = ["KINDS", "Shape", "checkpoint", "config", "names", "random_tensors", "tensors"]
