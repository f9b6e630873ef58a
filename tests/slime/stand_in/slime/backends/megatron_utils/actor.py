"""Where slime looks its updater up."""

from .update_weight.update_weight_from_tensor import UpdateWeightFromTensor  # noqa: F401
