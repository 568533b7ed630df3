"""Options of process groups, threads and determinism."""

from __future__ import annotations

from trainer.options.option import COUNT, Option, place
from trainer.ranges import above, at_least

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    Option(
        "tensor_model_parallel_size", "parallelism", int, 1, "tensor parallel size", within=COUNT
    ),
    Option(
        "pipeline_model_parallel_size",
        "parallelism",
        int,
        1,
        "pipeline parallel size",
        within=COUNT,
    ),
    Option(
        "num_virtual_stages_per_pipeline_rank",
        "parallelism",
        int,
        None,
        "model chunks of each pipeline rank, for the interleaved schedule; default: one, without",
        within=COUNT,
    ),
    Option(
        "sequence_parallel",
        "parallelism",
        bool,
        False,
        "split norms and residuals of a tensor parallel group along the sequence",
    ),
    Option("context_parallel_size", "parallelism", int, 1, "context parallel size", within=COUNT),
    Option(
        "expert_model_parallel_size", "parallelism", int, 1, "expert parallel size", within=COUNT
    ),
    Option(
        "expert_tensor_parallel_size",
        "parallelism",
        int,
        None,
        "tensor parallel size inside experts",
        within=COUNT,
    ),
    Option(
        "moe_token_dispatcher_type",
        "parallelism",
        str,
        "allgather",
        "how tokens reach experts on other ranks",
        choices=("allgather", "alltoall", "flex"),
    ),
    Option(
        "make_vocab_size_divisible_by",
        "parallelism",
        int,
        1,
        "pad the vocabulary to a multiple of this times the tensor parallel size",
        within=COUNT,
    ),
    Option(
        "bf16",
        "parallelism",
        bool,
        False,
        "bfloat16 weights and activations, with float32 main weights in the optimizer",
    ),
    Option(
        "accumulate_allreduce_grads_in_fp32",
        "parallelism",
        bool,
        True,
        "with --bf16: sum and reduce gradients in float32",
    ),
    Option(
        "attention_backend",
        "parallelism",
        str,
        "auto",
        "flash and fused: torch's scaled_dot_product_attention, faster and smaller; the others: "
        "Megatron's own arithmetic, on a CPU that of Hugging Face's eager attention",
        choices=("auto", "flash", "fused", "unfused", "local"),
    ),
    Option(
        "recompute_granularity",
        "parallelism",
        str,
        None,
        "compute activations again in the backward: whole layers, or parts of them; default: keep",
        choices=("full", "selective"),
    ),
    Option(
        "recompute_method",
        "parallelism",
        str,
        None,
        "with 'full': all layers in groups of --recompute-num-layers, or that many of each stage",
        choices=("uniform", "block"),
    ),
    Option(
        "recompute_num_layers",
        "parallelism",
        int,
        None,
        "layers of a group, or of a stage",
        within=COUNT,
    ),
    Option(
        "data_parallel_size",
        "parallelism",
        int,
        None,
        "data parallel size; default: what the ranks leave beside the other sizes",
        within=COUNT,
    ),
    place(
        "actor_num_nodes",
        "parallelism",
        int,
        None,
        "hosts whose processes train; default: 1, or as torchrun says",
        within=COUNT,
    ),
    place(
        "actor_num_gpus_per_node",
        "parallelism",
        int,
        None,
        "ranks on each host, one a GPU (on CPUs one a process); default: what the layout needs, "
        "or as torchrun says",
        within=COUNT,
    ),
    Option(
        "launcher",
        "parallelism",
        str,
        "torchrun",
        "who starts several ranks where nobody has: torch's launcher in this command, on this "
        "host, or Ray, on a cluster (RAY_ADDRESS) or one of its own",
        content=False,
        choices=("torchrun", "ray"),
    ),
    place(
        "distributed_timeout_minutes",
        "parallelism",
        float,
        30.0,
        "how long a collective waits for a rank",
        within=above(0),
    ),
    Option(
        "num_threads",
        "parallelism",
        int,
        1,
        "CPU threads of an operation, pinned and recorded",
        within=at_least(1, 1024),
    ),
    Option(
        "deterministic_mode",
        "parallelism",
        bool,
        True,
        "bitwise repeatable operations; on by default",
    ),
)
