"""Events of the trainer: signals of samples, steps, weights, checkpoints."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ledger.fields import Event, column, event

__all__ = [
    "CheckpointSaved",
    "SignalRecorded",
    "StepCommitted",
    "WeightsLoaded",
    "WeightsPublished",
]

_floats = pa.list_(pa.float32())
_ints = pa.list_(pa.int32())
_names = pa.list_(pa.string())
_digests = pa.list_(pa.binary(32))


@event("signal_recorded", layout=2)
class SignalRecorded(Event):
    """What a step computed for one sample. R is the length of its response."""

    index: int = column(1, pa.int64(), "The sample.")
    step: int = column(2, pa.int64(), "The optimizer step on its branch.")
    settings_id: bytes = column(
        3, pa.binary(32), "blake3 of the settings (JSON) that made these signals."
    )
    loss_mask: np.ndarray = column(
        4, pa.list_(pa.uint8()), "[R] 1 where the token enters the loss, else 0."
    )
    log_probs: np.ndarray = column(
        5,
        _floats,
        "[R] By the policy before the rollout's first step; NaN where nothing was sampled.",
    )
    ref_log_probs: np.ndarray | None = column(
        6, _floats, "[R] By the reference policy.", nullable=True
    )
    values: np.ndarray | None = column(7, _floats, "[R] By the critic.", nullable=True)
    advantages: np.ndarray = column(8, _floats, "[R] Advantage of each token.")
    returns: np.ndarray | None = column(9, _floats, "[R] Return of each token.", nullable=True)
    teacher_log_probs: np.ndarray | None = column(
        10, _floats, "[R] By the teacher; NaN where nothing was sampled.", nullable=True, since=2
    )
    correction_weights: np.ndarray | None = column(
        11,
        _floats,
        "[R] What the off-policy correction multiplies the loss of each token with.",
        nullable=True,
        since=2,
    )


@event("step_committed", layout=2)
class StepCommitted(Event):
    """One optimizer step: what it consumed, its settings, and the digests of what came out."""

    step: int = column(1, pa.int64(), "Number of the step on its branch, from 0.")
    rollout_step: int = column(2, pa.int64(), "The outer iteration it trained on.")
    step_in_rollout: int = column(3, pa.int32(), "Its number within that iteration, from 0.")
    weight_version_in: int = column(4, pa.int64(), "The version it started from.")
    weight_version_out: int = column(5, pa.int64(), "The version it made.")
    indices: np.ndarray = column(6, pa.list_(pa.int64()), "[B] The samples, in training order.")
    micro_batch_offsets: np.ndarray = column(
        7, _ints, "[M+1] Micro-batch m is indices[offsets[m]:offsets[m+1]]."
    )
    micro_batch_ranks: np.ndarray = column(8, _ints, "[M] Data-parallel rank of each micro-batch.")
    micro_batch_rows: int = column(9, pa.int32(), "Rows of every micro-batch, padding included.")
    micro_batch_width: int = column(
        10, pa.int32(), "Tokens a row, padding included; of packed rows the widest."
    )
    settings_id: bytes = column(11, pa.binary(32), "blake3 of `settings`.")
    settings: str = column(12, pa.string(), "JSON: algorithm and optimizer settings of the step.")
    layout: str = column(13, pa.string(), "JSON: parallel sizes of the training.")
    learning_rate: float = column(14, pa.float64(), "Learning rate of the step.")
    loss: float = column(15, pa.float64(), "The loss.")
    grad_norm: float = column(16, pa.float64(), "Global norm of the gradients before clipping.")
    metric_names: list[str] = column(17, _names, "Names of the metrics of the step.")
    metric_values: np.ndarray = column(18, pa.list_(pa.float64()), "Their values.")
    batch_digest: bytes = column(
        19, pa.binary(32), "blake3 of everything that entered the step, in order."
    )
    micro_batch_digests: list[bytes] = column(
        20, _digests, "[M] blake3 of the current log-probs of each micro-batch."
    )
    gradient_digest: bytes = column(21, pa.binary(32), "Root over the gradients, by tensor.")
    optimizer_digest: bytes = column(
        22, pa.binary(32), "Root over the optimizer and scheduler state after the step."
    )
    random_state_digest: bytes = column(
        23, pa.binary(32), "blake3 of all random generator states after the step."
    )
    num_threads: int = column(24, pa.int32(), "Intra-operation threads during the step.")
    trained_tokens: int = column(25, pa.int64(), "Tokens with mask 1.")
    data_time_s: float | None = column(
        26, pa.float64(), "Seconds from SQL to tensors.", nullable=True, measurement=True
    )
    train_time_s: float | None = column(
        27,
        pa.float64(),
        "Seconds of forward, backward and optimizer.",
        nullable=True,
        measurement=True,
    )
    digest_time_s: float | None = column(
        28, pa.float64(), "Seconds spent on digests.", nullable=True, measurement=True
    )
    read_seq: int | None = column(
        29,
        pa.int64(),
        "The batch was read from the ledger as it stood at this seq; a replay reads it so again.",
        nullable=True,
        measurement=True,
    )
    micro_batch_widths: np.ndarray | None = column(
        30,
        _ints,
        "[M] Tokens of each packed micro-batch, padding included; NULL where samples are not "
        "packed, a row each.",
        nullable=True,
        since=2,
    )
    critic_gradient_digest: bytes | None = column(
        31, pa.binary(32), "As gradient_digest, of the critic.", nullable=True, since=2
    )
    critic_optimizer_digest: bytes | None = column(
        32, pa.binary(32), "As optimizer_digest, of the critic.", nullable=True, since=2
    )
    critic_root: bytes | None = column(
        33, pa.binary(32), "Root over the critic's weights after the step.", nullable=True, since=2
    )


@event("weights_published", layout=1)
class WeightsPublished(Event):
    """A weight version came into being. N tensors, under canonical Hugging Face names."""

    weight_version: int = column(1, pa.int64(), "Unique in the run, across branches.")
    parent_version: int | None = column(
        2, pa.int64(), "The version it was made from; NULL for a run's first.", nullable=True
    )
    step: int | None = column(3, pa.int64(), "The step that made it.", nullable=True)
    tensor_names: list[str] = column(4, _names, "[N] Sorted.")
    tensor_dtypes: list[str] = column(5, _names, "[N] 'float32', 'bfloat16', …")
    tensor_shapes: list[np.ndarray] = column(6, pa.list_(pa.list_(pa.int64())), "[N] Shapes.")
    tensor_checksums: list[bytes] = column(
        7, _digests, "[N] blake3 of the contiguous little-endian bytes of each tensor."
    )
    root: bytes = column(8, pa.binary(32), "blake3 over names, dtypes, shapes and checksums.")
    size_bytes: int = column(9, pa.int64(), "Bytes of all tensors.")
    shard_ranges: str | None = column(
        10,
        pa.string(),
        "JSON: what each serving shard holds, where it is not everything.",
        nullable=True,
    )
    location: str | None = column(
        11, pa.string(), "Where the bytes lie, if anywhere.", nullable=True, measurement=True
    )
    transport: str = column(12, pa.string(), "'none', 'memory', 'disk', …", measurement=True)
    acknowledged_by: list[str] = column(
        13, _names, "Engines whose own checksum equals `root`.", measurement=True
    )
    transfer_time_s: float | None = column(
        14, pa.float64(), "Seconds of the transfer.", nullable=True, measurement=True
    )


@event("weights_loaded", layout=1)
class WeightsLoaded(Event):
    """An engine took a weight version, and its own checksums were compared with the published ones.

    Written before the engine gets traffic under that version. All of it is measurement: which
    engines there are, and how weights reached them, does not change what was published.
    """

    weight_version: int = column(1, pa.int64(), "The version.", measurement=True)
    engine: str = column(2, pa.string(), "Name of the engine.", measurement=True)
    engine_address: str | None = column(
        3, pa.string(), "Which of several engines.", nullable=True, measurement=True
    )
    transport: str = column(
        4,
        pa.string(),
        "'memory', 'disk', 'tensor', 'distributed', 'checkpoint_engine'.",
        measurement=True,
    )
    base_version: int | None = column(
        5,
        pa.int64(),
        "The version that the engine had, where only tensors that differ were sent; NULL: all "
        "were.",
        nullable=True,
        measurement=True,
    )
    pause_mode: str = column(
        6, pa.string(), "'abort', 'retract', 'in_place' or 'idle'.", measurement=True
    )
    sent_tensors: int = column(7, pa.int32(), "Tensors that were sent.", measurement=True)
    sent_bytes: int = column(8, pa.int64(), "Their bytes.", measurement=True)
    root: bytes = column(9, pa.binary(32), "As in weights_published.", measurement=True)
    compared: str = column(
        10,
        pa.string(),
        "What of the engine was compared with the published tensors, in words.",
        measurement=True,
    )
    engine_checksum: str | None = column(
        11,
        pa.string(),
        "The engine's own checksum over all it holds, as it gives it.",
        nullable=True,
        measurement=True,
    )
    pause_time_s: float | None = column(
        12, pa.float64(), "Seconds until nothing ran.", nullable=True, measurement=True
    )
    transfer_time_s: float | None = column(
        13, pa.float64(), "Seconds of the transfer.", nullable=True, measurement=True
    )
    check_time_s: float | None = column(
        14, pa.float64(), "Seconds of the comparison.", nullable=True, measurement=True
    )
    reason: str = column(
        15,
        pa.string(),
        "'published': the engine followed the trainer; 'restored': it had been started anew, or an "
        "update that did not succeed was taken back.",
        measurement=True,
    )
    cache_flushed: bool = column(
        16,
        pa.bool_(),
        "Whether nothing that older weights computed stayed in the engine's prefix cache.",
        measurement=True,
    )


@event("checkpoint_saved", layout=1)
class CheckpointSaved(Event):
    """The whole state of a version was written: weights, optimizer, scheduler, random state.

    All of it is measurement: a checkpoint is a copy of a state that the steps already determine,
    and how often one is taken does not change what happened.
    """

    weight_version: int = column(1, pa.int64(), "The version.", measurement=True)
    step: int | None = column(
        2,
        pa.int64(),
        "The step that made it; NULL for the first.",
        nullable=True,
        measurement=True,
    )
    weights_root: bytes = column(3, pa.binary(32), "As in weights_published.", measurement=True)
    optimizer_digest: bytes = column(4, pa.binary(32), "As in step_committed.", measurement=True)
    random_state_digest: bytes = column(5, pa.binary(32), "As in step_committed.", measurement=True)
    format: str = column(
        6, pa.string(), "Stable name of the checkpoint's format.", measurement=True
    )
    location: str = column(
        7, pa.string(), "Its folder, relative to the ledger or absolute.", measurement=True
    )
    files: list[str] = column(8, _names, "File names in the folder.", measurement=True)
    file_hashes: list[bytes] = column(9, _digests, "blake3 of each file.", measurement=True)
    file_sizes: np.ndarray = column(
        10, pa.list_(pa.int64()), "Bytes of each file.", measurement=True
    )
    save_time_s: float | None = column(
        11, pa.float64(), "Seconds it took.", nullable=True, measurement=True
    )
