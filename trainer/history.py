"""What a run has recorded about its versions: the tree, the steps between them, the checkpoints.

Everything here is read from the ledger's events; nothing needs a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ledger.encode import events_of
from ledger.errors import NotFound, explain
from ledger.events import CheckpointSaved, StepCommitted, WeightsPublished
from ledger.store import Ledger

__all__ = ["History", "read_history"]


@dataclass(frozen=True, slots=True)
class History:
    """The recorded past of one run, across its branches."""

    run_id: str
    weights: Mapping[int, WeightsPublished]
    """By weight version."""
    steps: Mapping[int, StepCommitted]
    """By the weight version that the step made."""
    checkpoints: Mapping[int, CheckpointSaved]
    """By weight version; the last one recorded where there are several."""
    branch_of: Mapping[int, str]
    """The branch on which each version was made."""
    seq_of: Mapping[int, int]
    """The sequence number of each version's weights_published."""
    head_seq: int
    """Events up to this one were looked at."""

    def path(self, version: int) -> list[int]:
        """Versions from the run's first to `version`, along the parents."""
        chain = [version]
        while (parent := self.weights[chain[-1]].parent_version) is not None:
            chain.append(parent)
        return chain[::-1]

    def from_checkpoint(self, version: int, ignore: int | None = None) -> list[int]:
        """Versions from the nearest checkpoint at or before `version` to `version`.

        Checkpoints of the version `ignore` and of those after it are passed over. Raises NotFound
        where no version on the way has a checkpoint.
        """
        path = self.path(version)
        end = path.index(ignore) if ignore in path else len(path)
        for place in range(end - 1, -1, -1):
            if path[place] in self.checkpoints:
                return path[place:]
        raise NotFound(
            explain(
                "looking for a checkpoint to start from",
                on=f"run {self.run_id!r}, version {version}",
                expected=f"a checkpoint of one of the versions {path[0]}..{path[-1]}",
                found="none recorded",
                do="a run saves its first version: leave out --ignore-checkpoint, or restore the "
                "ledger from a copy",
            )
        )

    def head(self, branch: str, fork_version: int | None) -> int:
        """The newest version of a branch; the version it forked from where it has made none."""
        made = [v for v, name in self.branch_of.items() if name == branch]
        if made:
            return max(made)
        if fork_version is None:
            raise NotFound(
                explain(
                    "looking for the newest version of a branch",
                    on=f"run {self.run_id!r}, branch {branch!r}",
                    expected="a published version",
                    found="none",
                )
            )
        return fork_version

    def recorded_after(self, version: int) -> list[StepCommitted]:
        """The steps recorded after `version` on the branch that made it, in order.

        A branch forked at `version` can train on the same samples again.
        """
        branch = self.branch_of[version]
        following: list[StepCommitted] = []
        at = version
        while True:
            made = [
                v
                for v, step in self.steps.items()
                if step.weight_version_in == at and self.branch_of[v] == branch
            ]
            if not made:
                return following
            (at,) = made
            following.append(self.steps[at])


def read_history(ledger: Ledger, run_id: str, *, as_of: int | None = None) -> History:
    """Read the recorded past of a run, up to now or up to the event numbered `as_of`.

    The tables are memory-mapped; their hashes are checked.
    """
    head_seq = ledger.run(run_id).head_seq if as_of is None else as_of
    reader = ledger.reader(run_id, branch=None, as_of=head_seq)
    weights: dict[int, WeightsPublished] = {}
    branch_of: dict[int, str] = {}
    seq_of: dict[int, int] = {}
    table = reader.table("weights_published")
    for event, branch, seq in zip(
        events_of(table, WeightsPublished),
        table["branch"].to_pylist(),
        table["seq"].to_pylist(),
        strict=True,
    ):
        weights[event.weight_version] = event
        branch_of[event.weight_version] = branch
        seq_of[event.weight_version] = seq
    steps = {
        e.weight_version_out: e for e in events_of(reader.table("step_committed"), StepCommitted)
    }
    checkpoints = {
        e.weight_version: e for e in events_of(reader.table("checkpoint_saved"), CheckpointSaved)
    }
    return History(
        run_id=run_id,
        weights=weights,
        steps=steps,
        checkpoints=checkpoints,
        branch_of=branch_of,
        seq_of=seq_of,
        head_seq=head_seq,
    )
