"""Options of weight updates: how engines of their own processes get what the trainer publishes."""

from __future__ import annotations

from trainer.options.option import COUNT, Option, place

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    Option(
        "update_weight_transport",
        "engine weights",
        str,
        "auto",
        "way of the weights to SGLang engines: 'disk', 'tensor' (shared memory of one host), "
        "'distributed' (a broadcast; slime's 'nccl'), 'checkpoint_engine' (CUDA IPC); 'auto': "
        "'tensor' for an engine on this host, 'disk' where a folder is named, else 'distributed'",
        content=False,
        choices=("auto", "disk", "tensor", "distributed", "nccl", "checkpoint_engine"),
    ),
    Option(
        "update_weight_mode",
        "engine weights",
        str,
        "full",
        "send all tensors ('full'), or those that are not the bits that the engine has ('delta')",
        content=False,
        choices=("full", "delta"),
    ),
    place(
        "update_weight_buffer_size",
        "engine weights",
        int,
        512 << 20,
        "bytes of weights in one request to an engine, or in one file",
        within=COUNT,
    ),
    place(
        "update_weight_disk_dir",
        "engine weights",
        str,
        None,
        "folder that weights are written to for engines, which see it under the same path; "
        "default: a temporary one, for engines on this host; with --rollout-by elsewhere inside "
        "the ledger",
    ),
    place(
        "update_weight_disk_keep_files",
        "engine weights",
        bool,
        False,
        "keep what was written for the engines",
    ),
    Option(
        "update_weight_check",
        "rollout",
        str,
        "parameters",
        "an engine's own checksums must be those that the published tensors give ('parameters'); "
        "'files' also takes engines for which that cannot be computed (quantised weights, pipeline "
        "stages, data-parallel attention): they read files that were read back, and must agree "
        "with each other",
        content=False,
        choices=("parameters", "files"),
    ),
    place(
        "offload_rollout",
        "engine weights",
        bool,
        False,
        "SGLang engines on the trainer's GPUs give their memory back while it computes, until they "
        "get the weights that it made (not run: needs GPUs)",
    ),
    Option(
        "pause_generation_mode",
        "engine weights",
        str,
        "retract",
        "running requests at a weight update: go on later with a cache that the new weights "
        "compute again ('retract'), end with what was sampled ('abort'), or go on with the cache "
        "of the old weights ('in_place'; engines then run with --disable-overlap-schedule)",
        choices=("retract", "abort", "in_place"),
    ),
)
