"""Making the data buffer from the ledger: once, when a process begins.

What is decided is looked at by its small columns alone; tokens are read of open samples only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ledger.encode import events_of
from ledger.events import PromptIssued
from rollout.buffer import (
    FINAL,
    BufferedGroup,
    BufferedSample,
    DataBuffer,
    Orphan,
    group_decision,
)
from rollout.history import next_numbers
from rollout.trajectory import Observation, Piece, Segment, Trajectory, trajectory_of

if TYPE_CHECKING:
    from ledger.reader import Reader
    from ledger.store import Ledger

__all__ = ["read_buffer", "read_trajectories"]

_SEGMENT = (
    "index",
    "segment",
    "turn",
    "start",
    "tokens",
    "rollout_log_probs",
    "finish_reason",
    "span_versions",
    "seq",
)
_OBSERVATION = ("index", "turn", "start", "tokens", "source", "text", "seq")


def read_buffer(ledger: Ledger, run_id: str, branch: str, source: str) -> DataBuffer:
    """The buffer of a branch as it stands now; `source` names the prompts whose rows are counted.

    Nobody else may be writing rollouts to the branch: begin a writer's epoch first. Raises what
    reading raises: Corrupt, IncompatibleFormat, NotFound.
    """
    reader = ledger.reader(run_id, branch)
    following = next_numbers(reader, ledger.reader(run_id, None), source)
    buffer = DataBuffer(
        branch_number=ledger.branch_number(run_id, branch),
        source=source,
        row=following.row,
        group=following.group,
        index=following.index,
    )
    last = _last_decisions(reader)
    prompts = reader.table(
        "prompt_issued",
        ["group_index", "indices", "source", "source_row", "retry_of", "parent_index", "branch"],
    )
    groups_P = prompts["group_index"].to_numpy()
    samples_S = pc.list_flatten(prompts["indices"]).to_numpy()
    owners_S = groups_P[pc.list_parent_indices(prompts["indices"]).to_numpy()]
    open_S = np.array([last.get(index, (0, ""))[1] not in FINAL for index in samples_S.tolist()])
    unfinished = set(owners_S[open_S.astype(bool)].tolist())
    own_P = pc.equal(prompts["branch"], branch).to_numpy(zero_copy_only=False)
    mine = set(groups_P[own_P].tolist())
    replaced = set(prompts["retry_of"].drop_null().to_pylist())
    _read_decided(buffer, samples_S, owners_S, unfinished, last)
    _read_failures(buffer, prompts)
    for group, row, of, parent in zip(
        groups_P.tolist(),
        prompts["source_row"].to_pylist(),
        prompts["source"].to_pylist(),
        prompts["parent_index"].to_pylist(),
        strict=True,
    ):
        is_orphan = group in unfinished and group not in mine and group not in replaced
        if is_orphan and parent is None and of == source:
            buffer.orphans.append(Orphan(group_index=group, source_row=row))
    _read_open(buffer, reader, unfinished & mine, last)
    return buffer


def _last_decisions(reader: Reader) -> dict[int, tuple[int, str]]:
    """Sample → rollout step and decision of its last decision."""
    table = reader.table("sample_decided", ["index", "rollout_step", "decision"])
    columns = (table[name].to_pylist() for name in ("index", "rollout_step", "decision"))
    return {index: (step, decision) for index, step, decision in zip(*columns, strict=True)}


def _read_decided(
    buffer: DataBuffer,
    samples_S: npt.NDArray[np.int64],
    owners_S: npt.NDArray[np.int64],
    unfinished: set[int],
    last: Mapping[int, tuple[int, str]],
) -> None:
    by_group: dict[int, list[tuple[int, str]]] = {}
    for index, group in zip(samples_S.tolist(), owners_S.tolist(), strict=True):
        if group not in unfinished:
            by_group.setdefault(group, []).append(last[index])
    for group, decisions in by_group.items():
        step = max(step for step, _ in decisions)
        decision = group_decision(decision for _, decision in decisions)
        buffer.decided.setdefault(step, {})[group] = decision


def _read_failures(buffer: DataBuffer, prompts: pa.Table) -> None:
    """How often a prompt failed, along the groups that were issued in each other's place."""
    decided = {
        group: decision
        for of_step in buffer.decided.values()
        for group, decision in of_step.items()
    }
    before = dict(
        zip(prompts["group_index"].to_pylist(), prompts["retry_of"].to_pylist(), strict=True)
    )
    for group in sorted(decided):
        at: int | None = group
        count = 0
        # An ancestor of the branch may have left one undecided: the count begins behind it.
        while at is not None and at in decided:
            count += decided[at] == "failed"
            at = before.get(at)
        if count:
            buffer.failures[group] = count


def _read_open(
    buffer: DataBuffer,
    reader: Reader,
    groups: set[int],
    last: Mapping[int, tuple[int, str]],
) -> None:
    if not groups:
        return
    table = reader.table("prompt_issued", where={"group_index": (min(groups), max(groups))})
    table = table.filter(pc.is_in(table["group_index"], pa.array(sorted(groups))))
    prompts = sorted(
        events_of(table, PromptIssued),
        key=lambda event: (event.parent_index is not None, event.group_index, event.indices[0]),
    )
    trajectories: list[Trajectory] = []
    for event in prompts:
        if event.parent_index is None:
            buffer.groups[event.group_index] = BufferedGroup(
                group_index=event.group_index,
                rollout_step=event.rollout_step,
                round=event.round,
                source=event.source,
                source_row=event.source_row,
                retry_of=event.retry_of,
                failures=0 if event.retry_of is None else buffer.failures.get(event.retry_of, 0),
            )
        group = buffer.groups[event.group_index]
        for position, index in enumerate(event.indices.tolist()):
            trajectory = trajectory_of(event, position)
            trajectories.append(trajectory)
            buffer.add_sample(
                group,
                BufferedSample(
                    trajectory=trajectory, decision=last[index][1] if index in last else None
                ),
            )
    read_trajectories(reader, trajectories)
    _read_rewards(buffer, reader)


def _read_rewards(buffer: DataBuffer, reader: Reader) -> None:
    indices = [index for group in buffer.groups.values() for index in group.samples]
    table = _rows_of(reader, "sample_scored", ("index", "raw_reward"), indices)
    for index, reward in zip(
        table["index"].to_pylist(), table["raw_reward"].to_pylist(), strict=True
    ):
        buffer.score(index, reward)


def read_trajectories(reader: Reader, trajectories: Iterable[Trajectory]) -> None:
    """Give samples the pieces that are recorded of them, and how much of their routing is.

    They must have none yet.
    """
    by_index = {one.index: one for one in trajectories}
    pieces: dict[int, list[tuple[int, int, Piece]]] = {index: [] for index in by_index}
    segments = _rows_of(reader, "segment_generated", _SEGMENT, by_index)
    for row, tokens, log_probs, versions in zip(
        segments.drop_columns(["tokens", "rollout_log_probs", "span_versions"]).to_pylist(),
        _arrays(segments["tokens"]),
        _arrays(segments["rollout_log_probs"]),
        _arrays(segments["span_versions"]),
        strict=True,
    ):
        piece = Segment(
            segment=row["segment"],
            turn=row["turn"],
            start=row["start"],
            tokens=tokens,
            log_probs=log_probs,
            finish_reason=row["finish_reason"],
            span_versions=versions,
        )
        pieces[row["index"]].append((row["start"], row["seq"], piece))
    observations = _rows_of(reader, "observation_appended", _OBSERVATION, by_index)
    for row, tokens in zip(
        observations.drop_columns(["tokens"]).to_pylist(),
        _arrays(observations["tokens"]),
        strict=True,
    ):
        observation = Observation(
            turn=row["turn"],
            start=row["start"],
            tokens=tokens,
            source=row["source"],
            text=row["text"],
        )
        pieces[row["index"]].append((row["start"], row["seq"], observation))
    for index, found in pieces.items():
        # An empty piece begins where the next one does: the older one is first.
        by_index[index].pieces = [piece for _, _, piece in sorted(found, key=lambda one: one[:2])]
    for kind in ("routing_recorded", "indexer_recorded"):
        table = _rows_of(reader, kind, ("index", "segment", "start", "rows"), by_index)
        for row in table.to_pylist():
            if row["segment"] >= 0:  # below: the trainer's own policy, not the engine
                at = by_index[row["index"]]
                at.routing_rows = max(at.routing_rows, row["start"] + row["rows"])


def _rows_of(reader: Reader, kind: str, columns: Iterable[str], indices: Iterable[int]) -> pa.Table:
    """The rows of some samples, in the order in which they were recorded."""
    wanted = sorted(indices)
    bounds = (wanted[0], wanted[-1]) if wanted else (0, -1)
    table = reader.table(kind, list(columns), where={"index": bounds})
    return table.filter(pc.is_in(table["index"], pa.array(wanted, pa.int64())))


def _arrays(column: Any) -> Iterable[Any]:
    """The entries of a list column as numpy arrays, without Python numbers in between."""
    return (scalar.values.to_numpy(zero_copy_only=False) for scalar in column)
