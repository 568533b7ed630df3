"""Everything this package takes from Megatron-Core, behind the CPU shim.

Import Megatron's names from here, so that the shim is installed first and one glance shows what we
depend on.
"""

# ruff: noqa: E402 - the shim must be installed before these imports.
from __future__ import annotations

import warnings
from typing import Any

from trainer import cpu_shim

cpu_shim.install()
# Its warnings are about its own defaults, old names and coming signatures; nobody here can act on
# them.
warnings.filterwarnings("ignore", module=r"megatron\.")
# torch tells Megatron, at every collective of a distributed optimizer, of new names for it.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")

from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, LayerType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

__all__ = [
    "AttnBackend",
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DotProductAttention",
    "Float16Module",
    "GPTModel",
    "LayerType",
    "MLASelfAttention",
    "MLATransformerConfig",
    "ModuleSpec",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "PackedSeqParams",
    "RouterReplay",
    "RouterReplayAction",
    "RowParallelLinear",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "VocabParallelEmbedding",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_bias_dropout_add",
    "get_cuda_rng_tracker",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "get_standard_config_overrides",
    "get_transformer_layer_offset",
    "megatron_version",
    "model_parallel_cuda_manual_seed",
    "parallel_state",
    "scatter_to_sequence_parallel_region",
    "set_tensor_model_parallel_attributes",
    "unwrap",
]


def unwrap(model: Any) -> GPTModel:
    """The GPTModel inside Megatron's wrappers (DistributedDataParallel and its like)."""
    while not isinstance(model, GPTModel):
        model = model.module
    return model
