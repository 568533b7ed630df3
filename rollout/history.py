"""What the ledger already holds of a rollout step, as the worker goes on from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ledger.numbering import SAMPLE_SPAN

if TYPE_CHECKING:
    from ledger.reader import Reader

__all__ = [
    "Generated",
    "IssuedGroup",
    "NextNumbers",
    "RolloutHistory",
    "next_numbers",
    "read_history",
]

_SCALARS = ["round", "group_index", "text", "label", "metadata", "branch"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IssuedGroup:
    """A prompt that was given out; G is the number of its samples, P that of its tokens."""

    round: int
    group_index: int
    indices: npt.NDArray[np.int64]
    """[G]"""
    rollout_ids: npt.NDArray[np.int64]
    """[G]"""
    tokens: npt.NDArray[np.int32]
    """[P]"""
    text: str
    label: str | None
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generated:
    """The response of a sample."""

    tokens: npt.NDArray[np.int32]
    """[R]"""
    finish_reason: str
    time_s: float


@dataclass(slots=True)
class RolloutHistory:
    """One rollout step: what was issued, and by sample what was generated, scored and decided."""

    rollout_step: int
    groups: list[IssuedGroup] = field(default_factory=list)
    """In the order of (round, group_index)."""
    generated: dict[int, Generated] = field(default_factory=dict)
    rewards: dict[int, float] = field(default_factory=dict)
    """Raw rewards; the last score counts."""
    decisions: dict[int, str] = field(default_factory=dict)
    """The last decision counts."""

    def round(self, number: int) -> list[IssuedGroup]:
        """The groups of a round, in order; empty where it was not issued."""
        return [group for group in self.groups if group.round == number]

    def kept_groups(self) -> int:
        """Groups that are kept: a group is decided as a whole, less its greedy baseline."""
        return sum(
            all(int(i) in self.decisions for i in group.indices)
            and any(self.decisions[int(i)] == "kept" for i in group.indices)
            for group in self.groups
        )


@dataclass(frozen=True, slots=True)
class NextNumbers:
    """Where a branch goes on: a row of the source, and local numbers (`ledger.numbering`)."""

    row: int
    group: int
    index: int


def next_numbers(lineage: Reader, everything: Reader, source: str) -> NextNumbers:
    """What no prompt has taken that the branch saw, or whose samples it was trained on.

    `lineage` reads the branch, `everything` all branches of the run: a branch that was trained on
    recorded trajectories has used prompts that its parent issued after the fork.
    """
    columns = ["source", "data_cursor", "group_index", "indices", "seq"]
    prompts = everything.table("prompt_issued", columns)
    seen_P = np.isin(
        prompts["seq"].to_numpy(), lineage.table("prompt_issued", ["seq"])["seq"].to_numpy()
    )
    trained = pc.list_flatten(lineage.table("step_committed", ["indices"])["indices"]).to_numpy()
    samples_S = pc.list_flatten(prompts["indices"]).to_numpy()
    prompt_S = pc.list_parent_indices(prompts["indices"]).to_numpy()
    seen_P[prompt_S[np.isin(samples_S, trained)]] = True
    if not seen_P.any():
        return NextNumbers(0, 0, 0)
    groups = prompts["group_index"].to_numpy()[seen_P]
    rows = prompts.filter(seen_P)
    cursor = pc.max(rows.filter(pc.equal(rows["source"], source))["data_cursor"]).as_py()
    return NextNumbers(
        row=0 if cursor is None else int(cursor),
        group=int((groups % SAMPLE_SPAN).max()) + 1,
        index=int((samples_S[seen_P[prompt_S]] % SAMPLE_SPAN).max()) + 1,
    )


def _rows(reader: Reader, kind: str, columns: list[str], rollout_step: int) -> Any:
    table = reader.table(
        kind, [*columns, "rollout_step"], where={"rollout_step": (rollout_step, rollout_step)}
    )
    return table.filter(pc.equal(table["rollout_step"], rollout_step))


def _arrays(column: Any) -> Iterable[Any]:
    """The entries of a list column as numpy arrays, without Python numbers in between."""
    return (scalar.values.to_numpy(zero_copy_only=False) for scalar in column)


def read_history(reader: Reader, rollout_step: int) -> RolloutHistory:
    """Read a rollout step along the lineage of the reader's branch.

    A group that an ancestor issued but had not decided when the branch left it belongs to the
    ancestor alone, and is left out.
    """
    history = RolloutHistory(rollout_step)
    decided = _rows(reader, "sample_decided", ["index", "decision"], rollout_step)
    history.decisions = dict(
        zip(decided["index"].to_pylist(), decided["decision"].to_pylist(), strict=True)
    )
    issued = _rows(
        reader,
        "prompt_issued",
        [*_SCALARS, "indices", "rollout_ids", "tokens"],
        rollout_step,
    )
    scalars = issued.select(_SCALARS)
    for row, indices, rollout_ids, tokens in zip(
        scalars.to_pylist(),
        _arrays(issued["indices"]),
        _arrays(issued["rollout_ids"]),
        _arrays(issued["tokens"]),
        strict=True,
    ):
        foreign = row.pop("branch") != reader.branch
        if foreign and not all(int(i) in history.decisions for i in indices):
            continue
        metadata = json.loads(row.pop("metadata") or "{}")
        history.groups.append(
            IssuedGroup(
                **row, metadata=metadata, indices=indices, rollout_ids=rollout_ids, tokens=tokens
            )
        )
    history.groups.sort(key=lambda group: (group.round, group.group_index))
    generated = _rows(
        reader,
        "segment_generated",
        ["index", "finish_reason", "generation_time_s", "tokens"],
        rollout_step,
    )
    for index, reason, time_s, tokens in zip(
        generated["index"].to_pylist(),
        generated["finish_reason"].to_pylist(),
        generated["generation_time_s"].to_pylist(),
        _arrays(generated["tokens"]),
        strict=True,
    ):
        history.generated[index] = Generated(
            tokens=tokens, finish_reason=reason, time_s=time_s or 0.0
        )
    if history.groups:
        _read_rewards(reader, history)
    return history


def _read_rewards(reader: Reader, history: RolloutHistory) -> None:
    """Scores do not carry the rollout step: find them by sample."""
    indices = np.concatenate([group.indices for group in history.groups])
    table = reader.table(
        "sample_scored",
        ["index", "raw_reward"],
        where={"index": (int(indices.min()), int(indices.max()))},
    )
    wanted = np.isin(table["index"].to_numpy(), indices)
    found = table.filter(wanted)
    history.rewards = dict(
        zip(found["index"].to_pylist(), found["raw_reward"].to_pylist(), strict=True)
    )
