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
