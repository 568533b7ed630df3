"""The data buffer: prompts that were given out and are not finally decided, as the ledger has it.

It is a projection. `rollout.buffer_reading` makes it from the ledger, and while a process runs
every event that became durable is applied to it; both ways give the same buffer, so that a process
that was killed anywhere goes on with all that was recorded. Nothing is ever only here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ledger.errors import Conflict, explain
from ledger.events import (
    ObservationAppended,
    PromptIssued,
    SampleDecided,
    SampleScored,
    SegmentGenerated,
)
from ledger.fields import Event
from ledger.numbering import SAMPLE_SPAN, VERSION_SPAN, local_number, run_number
from rollout.trajectory import Trajectory, trajectory_of

__all__ = [
    "DROPPED",
    "FINAL",
    "BufferedGroup",
    "BufferedSample",
    "DataBuffer",
    "Orphan",
    "group_decision",
]

FINAL = frozenset({"kept", "filtered", "aborted", "surplus", "stale", "failed"})
"""Decisions after which a sample is not in the buffer any more; 'recycled' is the other one."""

DROPPED = frozenset({"filtered", "failed", "stale"})
"""Final decisions on groups that were made for a batch, and are in none."""

_OF_SAMPLES = (SegmentGenerated, ObservationAppended, SampleScored, SampleDecided)


@dataclass(slots=True, eq=False, kw_only=True)
class BufferedSample:
    """A sample that is not finally decided."""

    trajectory: Trajectory
    reward: float | None = None
    """Raw reward of its last score; None before it is scored."""
    decision: str | None = None
    """The last one: None, 'recycled', or a final one while others of its group have none."""

    def staleness(self, consumer_version: int) -> int | None:
        """Versions from the oldest one that sampled a token to the consumer's, by local numbers.

        0 where nothing was sampled yet; None where an engine did not say its version.
        """
        oldest = self.trajectory.oldest_version()
        if oldest is None:
            return None if self.trajectory.sampled_tokens else 0
        return _local(consumer_version) - _local(oldest)


@dataclass(slots=True, eq=False, kw_only=True)
class BufferedGroup:
    """A prompt that was given out, with its samples."""

    group_index: int
    rollout_step: int
    """The one that issued it."""
    round: int
    source: str
    source_row: int
    retry_of: int | None
    """The group in whose place it was issued."""
    failures: int
    """Groups before it, each in the place of the one before, that failed."""
    samples: dict[int, BufferedSample] = field(default_factory=dict)
    """By index, in order; the first ones are those of the prompt, siblings come after them."""
    completed: int | None = None
    """Place in the order in which groups had all their scores; None: they have not."""

    @property
    def is_scored(self) -> bool:
        """Whether every sample has a reward: nothing is left but to decide."""
        return all(sample.reward is not None for sample in self.samples.values())

    def staleness(self, consumer_version: int) -> int | None:
        """That of its oldest sample; None where an engine did not say a version."""
        ages = [sample.staleness(consumer_version) for sample in self.samples.values()]
        known = [age for age in ages if age is not None]
        return max(known, default=0) if len(known) == len(ages) else None


def _local(version: int) -> int:
    return local_number(version, VERSION_SPAN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A prompt that an ancestor of the branch had not decided when the branch left it.

    Its samples belong to the ancestor alone; the branch issues the prompt again.
    """

    group_index: int
    source_row: int


@dataclass(slots=True, eq=False, kw_only=True)
class DataBuffer:
    """What is open on one branch, and where its numbers go on. Used by one thread."""

    branch_number: int
    source: str
    """Name of the prompt source whose rows are counted."""
    row: int = 0
    """The next row of the source: what was given out counts, whether it was trained or not."""
    group: int = 0
    """The next group's local number."""
    index: int = 0
    """The next sample's local number."""
    groups: dict[int, BufferedGroup] = field(default_factory=dict)
    """The open ones, in the order of their numbers."""
    orphans: list[Orphan] = field(default_factory=list)
    """Oldest first."""
    decided: dict[int, dict[int, str]] = field(default_factory=dict)
    """Rollout step → group → its final decision, for groups that are decided whole."""
    failures: dict[int, int] = field(default_factory=dict)
    """Decided group → groups that failed with its prompt, where there are any: those before it,
    each in the place of the one before, and itself."""
    _owners: dict[int, BufferedGroup] = field(default_factory=dict)
    """Sample → its group, of open ones."""
    _completions: int = 0

    def take_row(self) -> int:
        """The next row of the source, given once."""
        self.row += 1
        return self.row - 1

    def take_group(self, n_samples: int) -> tuple[int, npt.NDArray[np.int64]]:
        """Numbers for a group and its samples, unique in the run, given once."""
        group = run_number(self.branch_number, self.group, SAMPLE_SPAN)
        first = run_number(self.branch_number, self.index, SAMPLE_SPAN)
        self.group += 1
        self.index += n_samples
        return group, np.arange(first, first + n_samples, dtype=np.int64)

    def take_index(self) -> int:
        """A number for one more sample, given once."""
        self.index += 1
        return run_number(self.branch_number, self.index - 1, SAMPLE_SPAN)

    def kept(self, rollout_step: int) -> list[int]:
        """The groups that a rollout step kept."""
        found = self.decided.get(rollout_step, {})
        return sorted(group for group, decision in found.items() if decision == "kept")

    def dropped(self, rollout_step: int) -> int:
        """The groups that a rollout step made and dropped."""
        return sum(one in DROPPED for one in self.decided.get(rollout_step, {}).values())

    def open_sample(self, index: int) -> BufferedSample | None:
        """A sample that is not finally decided; None for others."""
        group = self._owners.get(index)
        return None if group is None else group.samples.get(index)

    def refuse_late(self, events: Iterable[Event], *, deciding: Set[int] = frozenset()) -> None:
        """Refuse what cannot be of a sample as it stands: late pieces and decisions, and doubles.

        `deciding`: samples whose final decision is on its way to the ledger.

        Raises:
            Conflict: the sample is decided, or is not of this buffer; or the piece is stored.
        """
        for event in events:
            if not isinstance(event, _OF_SAMPLES):
                continue
            sample = self.open_sample(event.index)
            on = f"sample {event.index}"
            if sample is None or sample.decision in FINAL or event.index in deciding:
                raise Conflict(
                    explain(
                        f"an event was refused: {event.KIND} comes too late",
                        on=on,
                        expected="a sample that is not finally decided",
                        found="decided, or issued by somebody else",
                    )
                )
            if not isinstance(event, (SegmentGenerated, ObservationAppended)):
                continue
            at = sample.trajectory
            if isinstance(event, SegmentGenerated) and event.segment != at.next_segment:
                raise Conflict(
                    explain(
                        "an answer was refused: one for this engine call is stored",
                        on=f"{on}, segment {event.segment}",
                        expected=f"segment {at.next_segment}, the next one",
                        found=f"segment {event.segment} at response offset {event.start}",
                    )
                )
            if event.start != at.response_length:
                raise Conflict(
                    explain(
                        "a piece of a response was refused: it does not follow what is stored",
                        on=on,
                        expected=f"response offset {at.response_length}",
                        found=event.start,
                    )
                )

    def apply(self, events: Sequence[Event]) -> None:
        """Take events of this branch that are durable, in their order.

        The pieces of a response are not taken: whoever drives the sample adds them to its
        trajectory.
        """
        for event in events:
            if isinstance(event, PromptIssued):
                self._issued(event)
            elif isinstance(event, SampleScored):
                self.score(event.index, event.raw_reward)
            elif isinstance(event, SampleDecided):
                self._decided(event)

    def add_sample(self, group: BufferedGroup, sample: BufferedSample) -> None:
        """One more sample of an open group."""
        group.samples[sample.trajectory.index] = sample
        self._owners[sample.trajectory.index] = group

    def score(self, index: int, reward: float) -> None:
        """The raw reward of a sample; nothing where it is not open."""
        group = self._owners.get(index)
        if group is None:
            return
        group.samples[index].reward = reward
        if group.is_scored:
            self._completions += 1
            group.completed = self._completions

    def adopt(self, trajectory: Trajectory) -> None:
        """The trajectory of an open sample that somebody else has made and goes on with."""
        sample = self.open_sample(trajectory.index)
        if sample is not None:
            sample.trajectory = trajectory

    def _issued(self, event: PromptIssued) -> None:
        if event.parent_index is None:
            self.groups[event.group_index] = BufferedGroup(
                group_index=event.group_index,
                rollout_step=event.rollout_step,
                round=event.round,
                source=event.source,
                source_row=event.source_row,
                retry_of=event.retry_of,
                failures=0 if event.retry_of is None else self.failures.get(event.retry_of, 0),
            )
            if event.source == self.source:
                self.row = max(self.row, event.data_cursor)
            self.group = max(self.group, local_number(event.group_index, SAMPLE_SPAN) + 1)
            self.orphans = [one for one in self.orphans if one.group_index != event.retry_of]
        group = self.groups.get(event.group_index)
        if group is None:
            return
        for position, index in enumerate(event.indices.tolist()):
            self.add_sample(group, BufferedSample(trajectory=trajectory_of(event, position)))
            self.index = max(self.index, local_number(index, SAMPLE_SPAN) + 1)

    def _decided(self, event: SampleDecided) -> None:
        group = self._owners.get(event.index)
        if group is None:
            return
        group.samples[event.index].decision = event.decision
        if not all(sample.decision in FINAL for sample in group.samples.values()):
            return
        decision = group_decision(sample.decision for sample in group.samples.values())
        self.decided.setdefault(event.rollout_step, {})[group.group_index] = decision
        failures = group.failures + (decision == "failed")
        if failures:
            self.failures[group.group_index] = failures
        del self.groups[group.group_index]
        for index in group.samples:
            del self._owners[index]


def group_decision(decisions: Iterable[str | None]) -> str:
    """Of a whole group, from those on its samples: 'kept' where any is; a baseline, which is never
    trained on, is 'surplus' beside the others."""
    found = sorted({one for one in decisions if one is not None})
    return min(found, key=lambda one: (one != "kept", one == "surplus"))
