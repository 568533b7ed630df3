"""Options of model folders and checkpoints."""

from __future__ import annotations

from trainer.options.option import COUNT, Option, place

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    place(
        "hf_checkpoint",
        "checkpoint",
        str,
        None,
        "folder of a Hugging Face model to start from (weights, configuration, tokenizer)",
    ),
    place(
        "save_interval",
        "checkpoint",
        int,
        4,
        "rollout steps between checkpoints; the first and the last version are always saved",
        within=COUNT,
    ),
    Option(
        "ckpt_format",
        "checkpoint",
        str,
        None,
        "format of checkpoints: 'hf' (canonical names, one writer) or 'torch_dist' (Megatron's "
        "shards, one writer a rank); default: hf on one rank, torch_dist on several. Each can be "
        "gone on from in any layout; the first version is always hf",
        content=False,
        choices=("hf", "torch_dist"),
    ),
    Option(
        "async_save",
        "checkpoint",
        bool,
        False,
        "write checkpoints while the training goes on; needs --ckpt-format torch_dist",
        content=False,
    ),
    place("save", "checkpoint", str, None, "folder of checkpoints; default: inside the ledger"),
    place(
        "ref_load",
        "checkpoint",
        str,
        None,
        "folder of the reference model of the KL; default: the run's first version",
    ),
    place(
        "opd_teacher_load",
        "checkpoint",
        str,
        None,
        "folder of the teacher of on-policy distillation; it has the policy's vocabulary",
    ),
    place(
        "critic_load",
        "checkpoint",
        str,
        None,
        "folder of a model or critic that the critic begins as; default: the run's first version "
        "with a new value head",
    ),
)
