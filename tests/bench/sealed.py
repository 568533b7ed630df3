"""What a sealed file takes of the disk, against the bare values."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ledger import Ledger, open_ledger
from ledger.catalog.records import SegmentInfo
from ledger.compact import compact, plan_compaction
from ledger.segment import HOT_FORMAT
from tests.bench.episodes import skewed_routing
from tests.bench.figures import Figure
from tests.bench.mismatch import write_training
from tests.bench.samples import emptied, new_ledger

__all__ = ["recorded_size", "sealed_figures"]

GROUP = "sealed size"
_OF_TOKENS = {
    "segment_generated": ("tokens", "rollout_log_probs"),
    "signal_recorded": ("loss_mask", "log_probs"),
}
_OF_ROUTING = {"routing_recorded": ("expert_ids",)}
_SYNTHETIC = "synthetic data (tests/bench/episodes.py)"


def sealed_figures(folder: Path, *, quick: bool) -> Iterator[Figure]:
    """Tokens, both log-probs and masks of a training; routing of a mixture of experts."""
    training = emptied(folder / "training")
    write_training(training, 1, 280_000)
    with open_ledger(training) as ledger:
        yield _size(ledger, "tokens, log-probs, masks", _OF_TOKENS, 0.6, _SYNTHETIC)
    experts = emptied(folder / "experts")
    with new_ledger(experts) as (ledger, writer):
        random = np.random.default_rng(0)
        for _ in range(2 if quick else 4):
            writer.append(skewed_routing(4, 500, random))
        what = f"{_SYNTHETIC}: 8 of 128 experts, 48 layers, each with favourites"
        yield _size(ledger, "expert ids of routing", _OF_ROUTING, 0.9, what)


def recorded_size(source: Path, folder: Path) -> Iterator[Figure]:
    """The same of a finished run's ledger."""
    copied = emptied(folder) / "ledger"
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns("checkpoints"))
    name = source.name.removeprefix("ledger-")
    with open_ledger(copied) as ledger:
        yield _size(ledger, f"the same of {name}", _OF_TOKENS, None, "recorded by a real training")


def _size(
    ledger: Ledger, name: str, columns: Mapping[str, Sequence[str]], goal: float | None, note: str
) -> Figure:
    run_id = ledger.run().run_id
    reader = ledger.reader(run_id, branch=None)
    raw = {
        f"{kind}.{column}": _value_bytes(reader.table(kind).column(column))
        for kind, names in columns.items()
        for column in names
    }
    hot = sum(
        s.file.size_bytes for s in ledger.segment_infos(run_id) if s.kind in columns and s.file
    )
    files = seal(ledger, run_id, list(columns))
    stored = {
        f"{kind}.{column}": sum(_column_bytes(file, column) for file in files[kind])
        for kind, names in columns.items()
        for column in names
    }
    whole = sum(file.stat().st_size for paths in files.values() for file in paths)
    each = ", ".join(
        f"{key.partition('.')[2]} {stored[key] / size:.2f}" for key, size in raw.items() if size
    )
    total = sum(raw.values())
    return Figure(
        group=GROUP,
        name=f"{name}, {total / 1e6:.1f} MB",
        against="the bare values",
        ratio=sum(stored.values()) / total,
        goal=goal,
        at_most=True,
        note=f"{each}; whole files {whole / hot:.2f} × the hot ones; {note}",
        details={f"{key}_stored_bytes": size for key, size in stored.items()}
        | {f"{key}_raw_bytes": size for key, size in raw.items()},
    )


def seal(ledger: Ledger, run_id: str, kinds: Sequence[str]) -> dict[str, list[Path]]:
    """Compact these kinds; the files of each."""
    report = compact(ledger, plan_compaction(ledger, run_id, kinds))
    left = [s.kind for s in ledger.segment_infos(run_id) if s.kind in kinds and _hot(s)]
    if left or ledger.root is None:
        raise RuntimeError(f"not sealed: {left} of {ledger.uri}")
    made: dict[str, list[Path]] = {kind: [] for kind in kinds}
    for file in report.files:
        made[file.kind].append(ledger.root / file.path)
    return made


def _hot(segment: SegmentInfo) -> bool:
    return segment.file is not None and segment.file.format == HOT_FORMAT


def _value_bytes(column: pa.ChunkedArray) -> int:
    """Bytes of the values alone: no lengths, no offsets."""
    if pa.types.is_list(column.type):
        size = column.type.value_type.bit_width // 8
        return sum(len(chunk.flatten()) for chunk in column.chunks) * size
    return sum(len(value) for value in column.to_pylist() if value is not None)


def _column_bytes(file: Path, column: str) -> int:
    """Bytes of a column in a Parquet file, lengths included."""
    metadata = pq.read_metadata(file)
    return sum(
        metadata.row_group(group).column(i).total_compressed_size
        for group in range(metadata.num_row_groups)
        for i in range(metadata.num_columns)
        if metadata.row_group(group).column(i).path_in_schema.partition(".")[0] == column
    )
