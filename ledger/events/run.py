"""Events about a run as a whole: its start, its continuations, its branches."""

from __future__ import annotations

import pyarrow as pa

from ledger.fields import Event, column, event

__all__ = ["BranchForked", "RunResumed", "RunStarted"]


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


@event("branch_forked", layout=1)
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
