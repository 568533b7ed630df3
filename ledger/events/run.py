"""Events about a run as a whole: its start, its continuations, its branches, and its keeping."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ledger.fields import Event, column, event

__all__ = [
    "BranchForked",
    "GapRecorded",
    "RowsRetired",
    "RunResumed",
    "RunStarted",
    "TrainingStarted",
]

_names = pa.list_(pa.string())
_digests = pa.list_(pa.binary(32))


@event("run_started", layout=1)
class RunStarted(Event):
    """A run began: every setting that decides its results, and the environment it began in."""

    run_id: str = column(1, pa.string(), "Name of the run.", measurement=True)
    run_seed: int = column(2, pa.int64(), "Root of every random seed of the run.")
    settings: str = column(
        3, pa.string(), "JSON: every setting that decides results, with secrets redacted."
    )
    places: str = column(
        4, pa.string(), "JSON: paths, addresses, names, intervals of saving.", measurement=True
    )
    environment: str = column(
        5,
        pa.string(),
        "JSON: package versions, hardware, host, determinism flags, source revision.",
        measurement=True,
    )
    deterministic: bool = column(6, pa.bool_(), "Whether bitwise repeatability was asked for.")
    num_threads: int = column(7, pa.int32(), "Intra-operation threads, pinned.")
    model_digest: bytes = column(8, pa.binary(32), "blake3 of the model configuration (JSON).")
    tokenizer_digest: bytes = column(9, pa.binary(32), "blake3 of the tokenizer's own JSON.")
    chat_template_digest: bytes | None = column(
        10, pa.binary(32), "blake3 of the chat template, where one is applied.", nullable=True
    )


@event("run_resumed", layout=1)
class RunResumed(Event):
    """A run went on in a new process. All measurement: an interrupted run is the same run."""

    run_id: str = column(1, pa.string(), "Name of the run.", measurement=True)
    weight_version: int = column(
        2, pa.int64(), "The version whose state was restored.", measurement=True
    )
    rollout_step: int = column(3, pa.int64(), "The rollout step it goes on with.", measurement=True)
    places: str = column(4, pa.string(), "As in run_started.", measurement=True)
    environment: str = column(5, pa.string(), "As in run_started.", measurement=True)


@event("training_started", layout=1)
class TrainingStarted(Event):
    """A trainer took up a run that rollouts had begun without one: with which settings it trains.

    It goes with the first checkpoint of the run, in one append.
    """

    weight_version: int = column(1, pa.int64(), "The version it starts from.")
    settings: str = column(
        2, pa.string(), "JSON: every setting of the run from here on, as in run_started."
    )
    places: str = column(3, pa.string(), "JSON: as in run_started.", measurement=True)
    environment: str = column(4, pa.string(), "JSON: as in run_started.", measurement=True)


@event("branch_forked", layout=2)
class BranchForked(Event):
    """A branch began at a weight version of another one. It is the first event of the branch."""

    branch: str = column(1, pa.string(), "Name of the new branch.", measurement=True)
    parent_branch: str = column(2, pa.string(), "The branch it leaves.", measurement=True)
    fork_seq: int = column(
        3,
        pa.int64(),
        "The branch sees its ancestors' events with seq at or below this.",
        measurement=True,
    )
    weight_version: int = column(4, pa.int64(), "The version it starts from.")
    settings: str = column(5, pa.string(), "JSON: every setting of the branch, as in run_started.")
    data: str = column(6, pa.string(), "Which trajectories it trains on: 'recorded' or 'fresh'.")
    places: str | None = column(
        7,
        pa.string(),
        "JSON: paths, names and intervals, as in run_started.",
        nullable=True,
        measurement=True,
        since=2,
    )


@event("gap_recorded", layout=1)
class GapRecorded(Event):
    """Events that a producer had are missing for good: what, how many, and why.

    All of it is measurement: a gap is an accident of keeping, not a result of training.
    """

    producer: str = column(1, pa.string(), "Whose events are missing.", measurement=True)
    epoch: int = column(2, pa.int64(), "The producer's epoch that had them.", measurement=True)
    first_producer_seq: int | None = column(
        3,
        pa.int64(),
        "Number of the first missing append, if known.",
        nullable=True,
        measurement=True,
    )
    last_producer_seq: int | None = column(
        4,
        pa.int64(),
        "Number of the last missing append, if known.",
        nullable=True,
        measurement=True,
    )
    kinds: list[str] = column(5, _names, "[N] Kinds of the missing events.", measurement=True)
    counts: np.ndarray = column(
        6,
        pa.list_(pa.int64()),
        "[N] How many of each are missing; -1: not known.",
        measurement=True,
    )
    began_at: int | None = column(
        7,
        pa.timestamp("us", tz="UTC"),
        "When the first of them was lost.",
        nullable=True,
        measurement=True,
    )
    ended_at: int | None = column(
        8,
        pa.timestamp("us", tz="UTC"),
        "When the last of them was lost.",
        nullable=True,
        measurement=True,
    )
    reason: str = column(9, pa.string(), "What happened, in words.", measurement=True)


@event("rows_retired", layout=1)
class RowsRetired(Event):
    """The rows of some segments are no longer kept, by a rule of retention: N segments, M rows.

    It is chained, so a segment that is missing without such an event is a loss. What remains of a
    segment is its row count and logical hash in the chain, and here the hash of each row, so that
    content digests can still be computed. All of it is measurement.
    """

    kind: str = column(
        1, pa.string(), "The kind of event that the segments hold.", measurement=True
    )
    first_seqs: np.ndarray = column(
        2, pa.list_(pa.int64()), "[N] First sequence number of each segment.", measurement=True
    )
    row_counts: np.ndarray = column(
        3, pa.list_(pa.int64()), "[N] Rows of each segment; M in all.", measurement=True
    )
    row_hashes: list[bytes] = column(
        4,
        _digests,
        "[M] Content hash of each row, in order; empty where the kind has no content.",
        measurement=True,
    )
    size_bytes: int = column(
        5, pa.int64(), "Bytes that the rows took in their files.", measurement=True
    )
    rule: str = column(6, pa.string(), "The rule of retention that asked for it.", measurement=True)
