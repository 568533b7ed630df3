"""Options that say which ledger, run, branch and data."""

from __future__ import annotations

from trainer.options.option import Option, place
from trainer.ranges import at_least

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    place("ledger", "ledger", str, "ledger-data", "where the ledger is"),
    place("run_id", "ledger", str, None, "name of the run; needed when the ledger has several"),
    place("branch", "ledger", str, None, "branch to train on, or name of the one to fork"),
    place(
        "from_version",
        "ledger",
        int,
        None,
        "fork a branch at this weight version and re-train it; other options default to the run's",
        within=at_least(0, 2**63 - 1),
    ),
    place(
        "ignore_checkpoint",
        "ledger",
        int,
        None,
        "pass over the checkpoints of this version and later ones, and run the steps again instead",
        within=at_least(0, 2**63 - 1),
    ),
    Option(
        "data",
        "ledger",
        str,
        "fresh",
        "trajectories to train on: 'fresh' rollouts, or those 'recorded' after --from-version "
        "(the default there)",
        choices=("fresh", "recorded"),
    ),
)
