"""The surface of slime's updater for colocated engines."""

import torch.distributed as dist

from slime.utils.distributed_utils import get_gloo_group

from .hf_weight_iterator_base import HfWeightIteratorBase


def update_weights_from_distributed(group_name, group, weight_version, rollout_engines, converted_named_tensors):
    """Where slime broadcasts by NCCL: here each engine is only told."""
    names = [name for name, _ in converted_named_tensors]
    return [engine.update_weights_from_distributed.remote(names, str(weight_version)) for engine in rollout_engines]


class UpdateWeightFromTensor:
    """Constructor, layout of engines, and the attributes that a subclass uses."""

    def __init__(self, args, model, weights_getter, *, model_name, quantization_config):
        self.args = args
        self.model = model
        self.weights_getter = weights_getter
        self.model_name = model_name
        self.quantization_config = quantization_config
        self.weight_version = 0
        self.update_weight_metrics = {}
        self._hf_weight_iterator = HfWeightIteratorBase.create(
            args=args, model=model, model_name=model_name, quantization_config=quantization_config
        )
        self._model_update_groups = None
        self._full_param_info_buckets = None
        self._non_expert_param_info_buckets = None
        self._expert_transfer_plan = []

    def connect_rollout_engines(
        self, rollout_engines, rollout_engine_lock, engine_gpu_counts=None, engine_gpu_offsets=None
    ):
        """Engines that end beyond the trainer's GPUs are remote, and all after them."""
        counts = engine_gpu_counts or [self.args.rollout_num_gpus_per_engine] * len(rollout_engines)
        offsets = engine_gpu_offsets or [sum(counts[:i]) for i in range(len(counts))]
        gpus = self.args.actor_num_nodes * self.args.actor_num_gpus_per_node
        colocated = 0
        while colocated < len(counts) and offsets[colocated] + counts[colocated] <= gpus:
            colocated += 1
        self.rollout_engines = rollout_engines[:colocated]
        self.use_distribute = len(rollout_engines) > colocated
        if self.use_distribute:
            self.distributed_rollout_engines = rollout_engines[colocated:]
            self._is_distributed_src_rank = dist.get_rank() == 0
            self._group_name = "slime"

    def _update_expert_weights(self, megatron_local_weights):
        dist.barrier(group=get_gloo_group())
        for group in self._expert_transfer_plan:
            for batch in group:
                tensors = self._prepare_expert_weight_batch(batch, megatron_local_weights, {})
                self._send_hf_params(tensors)
                dist.barrier(group=get_gloo_group())

    def pop_metrics(self):
        """As slime's."""
        metrics, self.update_weight_metrics = self.update_weight_metrics, {}
        return metrics
