"""Options of metric sinks: where the metrics of committed events go besides the ledger."""

from __future__ import annotations

from trainer.options.option import Option, place

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    place("use_tensorboard", "tracking", bool, False, "send the metrics to TensorBoard"),
    place(
        "tensorboard_dir",
        "tracking",
        str,
        None,
        "folder of its files, one below it a branch; default: tensorboard, inside the ledger",
    ),
    place("use_wandb", "tracking", bool, False, "send the metrics to Weights & Biases"),
    place("wandb_project", "tracking", str, "trajectory-ledger", "its project"),
    place("wandb_group", "tracking", str, None, "its group; default: the run's name"),
    place("wandb_team", "tracking", str, None, "its entity; default: that of the account"),
    Option(
        "wandb_mode",
        "tracking",
        str,
        None,
        "'online' sends at once (default), 'offline' writes files for `wandb sync`",
        content=False,
        choices=("online", "offline", "disabled"),
    ),
    place("wandb_dir", "tracking", str, None, "folder of its files; default: inside the ledger"),
)
