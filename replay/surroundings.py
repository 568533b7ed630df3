"""What a run was recorded with, and what is different here, of what can decide bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ledger.encode import events_of
from ledger.environment import describe_environment
from ledger.errors import InvalidArgument, explain
from ledger.events import BranchForked, RunStarted, TrainingStarted
from ledger.store import Ledger

__all__ = ["differences", "recorded_ranks", "recorded_surroundings"]

_PACKAGES = ("torch", "megatron-core", "numpy", "transformers", "transformer-engine", "triton")
_PLAIN = ("python", "machine", "cpu", "gpu_driver")


def recorded_surroundings(
    ledger: Ledger, run_id: str, branch: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings that a branch began with, and the environment that the run began in.

    The settings are those of its branch_forked event; of run_started for the run's first branch, or
    of the trainer that took the run up where rollouts had begun it alone.

    Raises:
        NotFound: no such run or branch.
        InvalidArgument: the run was not recorded by ledger-train, so nothing can be run again.
    """
    reader = ledger.reader(run_id, branch=branch)
    started = events_of(reader.table("run_started"), RunStarted)
    if not started:
        raise InvalidArgument(
            explain(
                "verifying a run",
                on=f"run {run_id!r}",
                expected="a run_started event",
                found="none",
                do="only runs recorded by ledger-train can be run again",
            )
        )
    settings, environment = started[0].settings, started[0].environment
    for taken_up in events_of(reader.table("training_started"), TrainingStarted):
        settings, environment = taken_up.settings, taken_up.environment
    for fork in events_of(reader.table("branch_forked"), BranchForked):
        if fork.branch == branch:
            settings = fork.settings
    return json.loads(settings), json.loads(environment)


def recorded_ranks(settings: Mapping[str, Any]) -> int:
    """How many ranks a branch was trained by, from the settings that it began with."""
    ranks = int(settings.get("data_parallel_size") or 1)
    for name in ("tensor_model", "pipeline_model", "context"):
        ranks *= int(settings[f"{name}_parallel_size"])
    return ranks


def differences(recorded: Mapping[str, Any]) -> list[str]:
    """One line for each difference between the recorded environment and this process's."""
    here = describe_environment()
    lines = [
        f"{name}: recorded with {recorded.get(name)!r}, here {here.get(name)!r}"
        for name in _PLAIN
        if recorded.get(name) != here.get(name)
    ]
    packages = recorded.get("packages", {})
    lines += [
        f"package {name}: recorded with {packages.get(name)}, here {here['packages'].get(name)}"
        for name in _PACKAGES
        if packages.get(name) != here["packages"].get(name)
    ]
    flags = recorded.get("flags", {})
    lines += [
        f"environment variable {name}: recorded with {flags.get(name)!r}, here "
        f"{here['flags'].get(name)!r}"
        for name in sorted({*flags, *here["flags"]})
        if flags.get(name) != here["flags"].get(name)
    ]
    return lines
