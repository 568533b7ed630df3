"""A small ledger that has one of everything, for tests that read.

`story()` gives the commits, in order, as plain events; `write_story` appends them through the real
writer; `MemoryReader` serves tables that were never written, which is how a test forges what no
writer would accept.

Run "run": three groups of four in rollout step 0 (samples 0–11), two in rollout step 1 (12–19).

    group 0   rewards 1 0 0 0; one segment each
    group 1   rewards 0 0 0 0; filtered: zero variance
    group 2   two turns with a tool result between; samples 8 and 9 are siblings (rollout 8)
    group 3   sample 12 was sampled by versions 0 and 1
    group 4   surplus; sample 17 by a version that nobody named; 19 aborted and never scored

    version 0 ── step 0 (groups 0, 2) ── version 1 ── step 1 (group 3) ── version 2    main
                                              └────── step 1 (group 3) ── version 3    rloo
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3

from ledger import Ledger, open_ledger
from ledger.events import (
    EVENTS,
    BranchForked,
    CheckpointSaved,
    Event,
    ObservationAppended,
    PromptIssued,
    RoutingRecorded,
    RunStarted,
    SampleDecided,
    SampleScored,
    SegmentGenerated,
    SignalRecorded,
    StepCommitted,
    WeightsPublished,
)
from ledger.weights import TensorRecord, weights_root

RUN = "run"
CHECKPOINT = {"model.safetensors": b"weights".ljust(40)}
"""The files of every checkpoint of the story."""
SPECIAL = np.array([-0.0, -np.inf, np.nan], dtype=np.float32)
"""Log-probs of sample 1: each must come back with the same bits."""
REWARDS = {
    0: (1.0, 0.0, 0.0, 0.0),
    1: (0.0, 0.0, 0.0, 0.0),
    2: (1.0, 1.0, 0.0, 0.0),
    3: (1.0, 0.0, 1.0, 0.0),
    4: (0.5, 0.25, 0.0),
}


@dataclasses.dataclass(frozen=True)
class Commit:
    """Events that one append stores on one branch."""

    branch: str
    events: tuple[Event, ...]


class _Payload:
    """Unpickling one touches a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def pickle_that_touches(path: Path) -> bytes:
    """A pickle whose reading would make `path`: what must never be read as one."""
    return pickle.dumps(_Payload(path))


def digest(text: str) -> bytes:
    return blake3(text.encode()).digest()


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def longs(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def rollout_of(index: int) -> int:
    return 8 if index == 9 else index


def prompt(group: int, rollout_step: int) -> PromptIssued:
    tokens = ints(100 + group, 101, 102)
    indices = np.arange(4 * group, 4 * group + 4, dtype=np.int64)
    return PromptIssued(
        prompt_id=blake3(tokens.tobytes()).digest(),
        group_index=group,
        rollout_step=rollout_step,
        round=0,
        indices=indices,
        rollout_ids=np.array([rollout_of(int(i)) for i in indices], dtype=np.int64),
        tokens=tokens,
        text=f"prompt {group}",
        label=f"label {group}",
        source="task",
        source_row=group,
        data_cursor=group + 1,
    )


def segment(
    index: int,
    tokens: np.ndarray,
    *,
    rollout_step: int,
    segment: int = 0,
    turn: int = 0,
    start: int = 0,
    spans: Sequence[tuple[int, int]] = (),
    log_probs: np.ndarray | None = None,
    finish_reason: str = "stop",
) -> SegmentGenerated:
    """`spans` is (length, version) of each span; by default one of version `rollout_step`."""
    spans = spans or ((len(tokens), rollout_step),)
    ends = np.cumsum([length for length, _ in spans]).astype(np.int32)
    if log_probs is None:
        log_probs = -0.125 * (1 + np.arange(len(tokens), dtype=np.float32) + index % 4)
    return SegmentGenerated(
        index=index,
        rollout_id=rollout_of(index),
        group_index=index // 4,
        rollout_step=rollout_step,
        segment=segment,
        turn=turn,
        start=start,
        tokens=tokens,
        rollout_log_probs=log_probs.astype(np.float32),
        logprob_mode="full",
        logprob_temperature=1.0,
        span_starts=np.concatenate([[0], ends[:-1]]).astype(np.int32),
        span_ends=ends,
        span_versions=longs(*(version for _, version in spans)),
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_new_tokens=8,
        stop_token_ids=ints(2),
        sampling_seed=1000 + index,
        finish_reason=finish_reason,
        engine="scripted",
        engine_version="1",
        retokenization_drift=0,
        generation_time_s=0.5,
    )


def score(index: int, reward: float) -> SampleScored:
    return SampleScored(
        index=index,
        rollout_id=rollout_of(index),
        group_index=index // 4,
        raw_reward=reward,
        reward=reward,
        part_names=["exact"],
        part_values=np.array([reward]),
        verifier="exact",
        verifier_version="1",
        response_text=f"response {index}",
    )


def decide(
    index: int, decision: str, *, rollout_step: int, reason: str = "", rule: str = "all"
) -> SampleDecided:
    return SampleDecided(
        index=index,
        rollout_id=rollout_of(index),
        group_index=index // 4,
        rollout_step=rollout_step,
        decision=decision,
        reason=reason,
        rule=rule,
    )


def signal(index: int, step: int, mask: np.ndarray, log_probs: np.ndarray) -> SignalRecorded:
    """The trainer's log-probs differ from the engine's by index / 100."""
    mask = mask.astype(np.uint8)
    trainer = np.where(mask == 1, log_probs + np.float32(index / 100), np.float32(np.nan))
    return SignalRecorded(
        index=index,
        step=step,
        settings_id=digest("settings"),
        loss_mask=mask,
        log_probs=trainer.astype(np.float32),
        advantages=np.where(mask == 1, 0.5, 0.0).astype(np.float32),
    )


def step(
    number: int, indices: Sequence[int], *, rollout_step: int, version_in: int, version_out: int
) -> StepCommitted:
    half = len(indices) // 2
    return StepCommitted(
        step=number,
        rollout_step=rollout_step,
        step_in_rollout=0,
        weight_version_in=version_in,
        weight_version_out=version_out,
        indices=longs(*indices),
        micro_batch_offsets=ints(0, half, len(indices)),
        micro_batch_ranks=ints(0, 0),
        micro_batch_rows=half,
        micro_batch_width=16,
        settings_id=digest("settings"),
        settings='{"advantage_estimator":"grpo"}',
        layout="{}",
        learning_rate=1e-3,
        loss=0.25,
        grad_norm=1.5,
        metric_names=["entropy", "mismatch"],
        metric_values=np.array([2.0, 0.01]),
        batch_digest=digest("batch"),
        micro_batch_digests=[digest("m0"), digest("m1")],
        gradient_digest=digest("gradient"),
        optimizer_digest=digest(f"optimizer {version_out}"),
        random_state_digest=digest("random"),
        num_threads=1,
        trained_tokens=4 * len(indices),
    )


def tensors(version: int) -> list[TensorRecord]:
    return [
        TensorRecord("a", "float32", (2, 3), digest(f"a{version}")),
        TensorRecord("b", "float32", (4,), digest(f"b{version}")),
    ]


def weights(version: int, parent: int | None, made_by: int | None) -> WeightsPublished:
    records = tensors(version)
    return WeightsPublished(
        weight_version=version,
        parent_version=parent,
        step=made_by,
        tensor_names=[r.name for r in records],
        tensor_dtypes=[r.dtype for r in records],
        tensor_shapes=[longs(*r.shape) for r in records],
        tensor_checksums=[r.checksum for r in records],
        root=weights_root(records),
        size_bytes=40,
        transport="memory",
        acknowledged_by=["scripted"],
    )


def checkpoint(version: int, made_by: int | None) -> CheckpointSaved:
    return CheckpointSaved(
        weight_version=version,
        step=made_by,
        weights_root=weights_root(tensors(version)),
        optimizer_digest=digest(f"optimizer {version}"),
        random_state_digest=digest("random"),
        format="hf-safetensors-1",
        location=f"checkpoints/{version}",
        files=list(CHECKPOINT),
        file_hashes=[blake3(content).digest() for content in CHECKPOINT.values()],
        file_sizes=longs(*(len(content) for content in CHECKPOINT.values())),
    )


def started() -> RunStarted:
    return RunStarted(
        run_id=RUN,
        run_seed=1,
        settings="{}",
        places="{}",
        environment="{}",
        deterministic=True,
        num_threads=1,
        model_digest=digest("model"),
        tokenizer_digest=digest("tokenizer"),
    )


def two_turns(index: int) -> list[Event]:
    """Three sampled tokens, a tool result of two, two sampled tokens."""
    return [
        segment(index, ints(11, 12, 13), rollout_step=0),
        ObservationAppended(
            index=index,
            rollout_id=rollout_of(index),
            turn=0,
            start=3,
            tokens=ints(50, 51),
            source="tool",
            text="42",
        ),
        segment(index, ints(14, 2), rollout_step=0, segment=1, turn=1, start=5),
    ]


def responses(rollout_step: int) -> list[Event]:
    """Segments, observations and routing of a rollout step."""
    made: list[Event] = []
    if rollout_step == 0:
        for index in range(8):
            log_probs = SPECIAL if index == 1 else None
            made.append(segment(index, ints(11, 12, 2), rollout_step=0, log_probs=log_probs))
        for index in range(8, 12):
            made.extend(two_turns(index))
        made.append(
            RoutingRecorded(
                index=0,
                segment=0,
                start=0,
                rows=5,
                layers=1,
                topk=2,
                num_experts=4,
                dtype="uint8",
                expert_ids=bytes([0, 1] * 5),
            )
        )
        return made
    for index in range(12, 20):
        spans = {12: ((2, 0), (2, 1)), 17: ((4, -1),)}.get(index, ())
        finish = "abort" if index == 19 else "length"
        made.append(
            segment(index, ints(21, 22, 23, 24), rollout_step=1, spans=spans, finish_reason=finish)
        )
    return made


def trained(number: int, indices: Iterable[int]) -> list[Event]:
    """The signals of a step."""
    made: list[Event] = []
    for index in indices:
        if index in range(8, 12):
            mask = np.array([1, 1, 1, 0, 0, 1, 1])
            base = np.concatenate([np.arange(1, 4), [0, 0], np.arange(1, 3)]) + index % 4
            base = base * (mask == 1)
        else:
            mask = np.ones(3 if index < 12 else 4)
            base = np.arange(1, len(mask) + 1) + index % 4
        log_probs = SPECIAL if index == 1 else (-0.125 * base).astype(np.float32)
        made.append(signal(index, number, mask, log_probs))
    return made


def scores(groups: Iterable[int]) -> list[Event]:
    return [
        score(4 * group + place, reward)
        for group in groups
        for place, reward in enumerate(REWARDS[group])
    ]


def story() -> list[Commit]:
    """All commits of the run, in order."""
    first, second = [0, 1, 2, 3, 8, 9, 10, 11], [12, 13, 14, 15]
    zero = {"reason": "zero variance", "rule": "check_reward_nonzero_std"}
    on_main: list[list[Event]] = [
        [started()],
        [weights(0, None, None), checkpoint(0, None)],
        [prompt(group, 0) for group in range(3)],
        responses(0),
        # Sample 2 was first given the wrong score: the last one counts.
        [score(2, 1.0), *scores(range(3))],
        [decide(index, "kept", rollout_step=0) for index in first],
        [decide(index, "filtered", rollout_step=0, **zero) for index in range(4, 8)],
        [
            *trained(0, first),
            step(0, first, rollout_step=0, version_in=0, version_out=1),
            weights(1, 0, 0),
        ],
        [prompt(group, 1) for group in (3, 4)],
        responses(1),
        scores((3, 4)),
        [
            *(decide(index, "kept", rollout_step=1) for index in second),
            *(decide(i, "surplus", rollout_step=1, rule="over-sampling") for i in (16, 17, 18)),
            decide(19, "aborted", rollout_step=1, reason="engine paused", rule="partial"),
        ],
    ]
    last = [
        [
            *trained(1, second),
            step(1, second, rollout_step=1, version_in=1, version_out=version),
            weights(version, 1, 1),
            checkpoint(version, 1),
        ]
        for version in (2, 3)
    ]
    seen = sum(len(events) for events in on_main)
    fork = BranchForked(
        branch="rloo",
        parent_branch="main",
        fork_seq=seen,
        weight_version=1,
        settings='{"advantage_estimator":"rloo"}',
        data="recorded",
    )
    return (
        [Commit("main", tuple(events)) for events in on_main]
        + [Commit("main", tuple(last[0]))]
        + [Commit("rloo", (fork,)), Commit("rloo", tuple(last[1]))]
    )


def write_story(folder: Path) -> Ledger:
    """A ledger in `folder` with the whole story in it, open."""
    ledger = open_ledger(folder, create=True)
    ledger.create_run(RUN)
    commits = story()
    with ledger.writer(RUN, "main", producer="factory") as writer:
        for commit in commits:
            if commit.branch == "main":
                writer.append(commit.events)
    (fork,), later = (commit.events for commit in commits if commit.branch == "rloo")
    assert isinstance(fork, BranchForked)
    with ledger.fork(RUN, fork, producer="factory") as writer:
        writer.append(later)
    for event in (event for commit in commits for event in commit.events):
        if isinstance(event, CheckpointSaved):
            saved = folder / event.location
            saved.mkdir(parents=True)
            for name, content in CHECKPOINT.items():
                (saved / name).write_bytes(content)
    return ledger


class MemoryReader:
    """Tables in memory, served like a reader's."""

    def __init__(self, tables: Mapping[str, pa.Table]) -> None:
        self.tables = dict(tables)

    def table(self, kind: str, columns: Sequence[str] | None = None) -> pa.Table:
        found = self.tables.get(kind)
        if found is None:
            found = table_of(kind, [])
        return found if columns is None else found.select(list(columns))


def table_of(kind: str, rows: Sequence[tuple[str, int, Event]]) -> pa.Table:
    """A table like a reader's from (branch, seq, event)."""
    columns = [c for c in EVENTS[kind].COLUMNS if c.name not in ("run_id", "branch")]
    place = [("run_id", pa.string()), ("branch", pa.string()), ("seq", pa.int64())]
    schema = pa.schema(place + [(c.name, c.type) for c in columns])
    values: list[list[Any]] = [
        [RUN] * len(rows),
        [branch for branch, _, _ in rows],
        [seq for _, seq, _ in rows],
    ]
    for column in columns:
        values.append([getattr(event, column.name) for _, _, event in rows])
    arrays = [
        pa.array([_plain(v) for v in column], type=field.type)
        for column, field in zip(values, schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, list) else value


def story_tables(branch: str | None = None) -> dict[str, pa.Table]:
    """The story as tables in memory: what one branch sees, or (None) everything."""
    rows: dict[str, list[tuple[str, int, Event]]] = {}
    seq = 0
    fork_seq: int | None = None
    forks = [e for c in story() for e in c.events if isinstance(e, BranchForked)]
    if branch == forks[0].branch:
        fork_seq = forks[0].fork_seq
    for commit in story():
        # One append numbers its events kind by kind, in order of first appearance.
        kinds = list(dict.fromkeys(event.KIND for event in commit.events))
        for event in sorted(commit.events, key=lambda e: kinds.index(e.KIND)):
            seq += 1
            seen = (
                branch is None
                or commit.branch == branch
                or (fork_seq is not None and seq <= fork_seq)
            )
            if seen:
                rows.setdefault(event.KIND, []).append((commit.branch, seq, event))
    return {kind: table_of(kind, events) for kind, events in rows.items()}
