"""The rollout side of a trainer whose rollouts another process makes.

The two meet in the ledger and nowhere else: what the other decided to keep is what a rollout step
trains on, and a version that the trainer publishes lies in a folder which its event names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ledger.decisions import Decisions
from ledger.evaluations import Evaluation
from ledger.events import EvalScored
from ledger.reader import Reader
from ledger.store import Ledger
from ledger.waiting import wait_for
from ledger.weights import TensorRecord
from trainer.weights.versions import VersionFolders

__all__ = ["Landed", "RolloutsElsewhere"]

# The last score of a sample counts.
_REWARDS = """
select avg(raw_reward) as mean_reward from (
    select arg_max(raw_reward, seq) as raw_reward from sample_scored
    where index in (select index from sample_decided where rollout_step = $rollout_step)
    group by index
)
"""
_TOKENS = """
select coalesce(sum(len(tokens)), 0) as tokens from segment_generated
where index in (select index from sample_decided where rollout_step = $rollout_step)
"""


@dataclass(frozen=True, slots=True)
class Landed:
    """A rollout step that somebody else made."""

    mean_reward: float
    """Mean raw reward of all samples that were scored, dropped ones included; NaN without any."""
    tokens: int
    """Response tokens of all samples that were decided on."""


def landed(reader: Reader, rollout_step: int) -> Landed:
    """What came of a rollout step; `reader` is of the branch."""
    given = {"rollout_step": rollout_step}
    ((mean,),) = (row.values() for row in reader.sql(_REWARDS, given).to_pylist())
    ((tokens,),) = (row.values() for row in reader.sql(_TOKENS, given).to_pylist())
    return Landed(float("nan") if mean is None else float(mean), int(tokens))


class RolloutsElsewhere:
    """A `trainer.loop.RolloutSide` that waits for what `ledger-rollout` makes of each step."""

    name = "ledger-rollout"
    transport = "disk"
    evaluates = False
    """Whoever has the engine evaluates."""

    def __init__(
        self,
        ledger: Ledger,
        run_id: str,
        branch: str,
        folders: VersionFolders,
        *,
        rollouts: int,
        timeout_s: float | None,
        tell: Callable[[str], None],
    ) -> None:
        """`rollouts` are kept in a complete rollout step; `tell` hears what is waited for, and
        `timeout_s` is as in `ledger.waiting.wait_for`."""
        self._ledger, self._run_id, self._branch = ledger, run_id, branch
        self._folders, self._rollouts = folders, rollouts
        self._timeout_s, self._tell = timeout_s, tell
        self._decisions = Decisions(ledger, run_id, branch)

    @property
    def acknowledged_by(self) -> list[str]:
        """Nobody yet: engines that load the folder say so in `weights_loaded`."""
        return []

    def location(self, version: int) -> str:
        """The folder in which a version is."""
        return str(self._folders.folder(version))

    def rollout(self, rollout_step: int, consumer_version: int) -> Landed:
        """Wait until a rollout step is complete; who makes it knows what consumes it.

        Raises NotFound as `wait_for`.
        """
        decisions = self._decisions
        decisions.forget_before(rollout_step)

        def look() -> Landed | None:
            decisions.read()
            if decisions.kept(rollout_step) < self._rollouts:
                return None
            return landed(self._ledger.reader(self._run_id, self._branch), rollout_step)

        def standing() -> str:
            return (
                f"{decisions.kept(rollout_step)} of {self._rollouts} rollouts kept, "
                f"{decisions.decided(rollout_step)} samples decided"
            )

        return wait_for(
            self._ledger,
            self._run_id,
            look,
            what=f"rollout step {rollout_step}",
            timeout_s=self._timeout_s,
            standing=standing,
            do="start `ledger-rollout` for this ledger and branch, or look at what it says; the "
            "same command goes on here",
            tell=self._tell,
        )

    @property
    def evaluations(self) -> list[Evaluation]:
        """None here."""
        return []

    def evaluate(self, version: int, name: str) -> EvalScored:
        """Not to be asked: this side does not evaluate."""
        raise RuntimeError("rollouts made elsewhere are evaluated there")

    def load_weights(self, version: int, named: Iterable[tuple[str, Any]]) -> list[TensorRecord]:
        """Put a version where engines load it from; records of the files as they were read."""
        return self._folders.write(version, named)

    def release(self, version: int) -> None:
        """The version is published: those that are no longer needed go."""
        self._folders.remove_old()

    def close(self) -> None:
        """Nothing is held."""
