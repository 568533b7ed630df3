"""Events of realistic sizes, made from a seed, and what the raw comparisons write and read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ledger import Ledger, open_ledger
from ledger.events import RoutingRecorded, RunStarted, SampleScored, SegmentGenerated
from ledger.writer import Writer
from tests.bench.episodes import version

__all__ = [
    "RUN",
    "emptied",
    "generated",
    "linked_copy",
    "new_ledger",
    "routed",
    "scored",
    "segment_files",
    "write_durably",
]

RUN = "bench"
VOCABULARY = 150_000


def generated(size_bytes: int, *, seed: int = 0) -> list[SegmentGenerated]:
    """Segments of 1,000 to 2,000 tokens whose ids and log-probs have `size_bytes` together."""
    random = np.random.default_rng(seed)
    lengths: list[int] = []
    while 8 * sum(lengths) < size_bytes:
        lengths.append(int(random.integers(1000, 2001)))
    return [_segment(index, length, random) for index, length in enumerate(lengths)]


def _segment(index: int, length: int, random: np.random.Generator) -> SegmentGenerated:
    return SegmentGenerated(
        index=index,
        rollout_id=index,
        group_index=index // 8,
        rollout_step=0,
        segment=0,
        turn=0,
        start=0,
        tokens=random.integers(0, VOCABULARY, length, dtype=np.int32),
        rollout_log_probs=-random.exponential(0.5, length).astype(np.float32),
        logprob_mode="full",
        logprob_temperature=1.0,
        span_starts=np.array([0], np.int32),
        span_ends=np.array([length], np.int32),
        span_versions=np.array([0], np.int64),
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_new_tokens=2048,
        stop_token_ids=np.array([2], np.int32),
        sampling_seed=index,
        finish_reason="stop",
        engine="bench",
        engine_version="1",
        generation_time_s=1.0,
    )


def routed(size_bytes: int, *, seed: int = 0) -> list[RoutingRecorded]:
    """Routing of samples of 1,000 to 2,000 tokens: 48 layers, 8 of 128 experts, a byte each."""
    layers, topk, experts = 48, 8, 128
    random = np.random.default_rng(seed)
    made: list[RoutingRecorded] = []
    size = 0
    while size < size_bytes:
        rows = int(random.integers(1000, 2001))
        # Eight different experts: a router chooses none twice.
        first = random.integers(0, experts, (rows * layers, 1), dtype=np.uint8)
        ids = ((first + np.arange(0, experts, experts // topk, dtype=np.uint8)) % experts).tobytes()
        made.append(
            RoutingRecorded(
                index=len(made),
                segment=0,
                start=0,
                rows=rows,
                layers=layers,
                topk=topk,
                num_experts=experts,
                dtype="uint8",
                expert_ids=ids,
            )
        )
        size += len(ids)
    return made


@contextmanager
def new_ledger(folder: Path) -> Iterator[tuple[Ledger, Writer]]:
    """A ledger with a run whose version 0 is published, and a writer to it."""
    with open_ledger(folder, create=True) as ledger:
        ledger.create_run(RUN)
        with ledger.writer(RUN, producer="bench") as writer:
            writer.append([_started(), version(0, None)])
            yield ledger, writer


def _started() -> RunStarted:
    return RunStarted(
        run_id=RUN,
        run_seed=0,
        settings="{}",
        places="{}",
        environment="{}",
        deterministic=True,
        num_threads=1,
        model_digest=bytes(32),
        tokenizer_digest=bytes(32),
    )


def scored(index: int) -> SampleScored:
    """A small event."""
    return SampleScored(
        index=index,
        rollout_id=index,
        group_index=index // 8,
        raw_reward=1.0,
        reward=1.0,
        part_names=[],
        part_values=np.empty(0, np.float64),
        verifier="bench",
        verifier_version="1",
    )


def segment_files(ledger: Ledger, kind: str) -> list[Path]:
    """The files of a kind, in order."""
    infos = [s for s in ledger.segment_infos(RUN) if s.kind == kind and s.file is not None]
    return [ledger.root / s.file.path for s in infos if s.file is not None]


def write_durably(folder: Path, name: str, pieces: Sequence[Any]) -> Path:
    """What any store must at least do: write, sync, rename, sync the directory."""
    target, temporary = folder / name, folder / f".tmp-{name}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            while view.nbytes:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(temporary, target)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return target


def emptied(folder: Path) -> Path:
    """The folder, new and empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def linked_copy(source: Path, target: Path) -> Path:
    """A copy of a ledger that may be written to: files that never change are hard links."""
    emptied(target)
    for path in source.rglob("*"):
        there = target / path.relative_to(source)
        if path.is_dir():
            there.mkdir(parents=True, exist_ok=True)
        elif path.suffix == ".arrow":
            there.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, there)
        else:
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, there)
    return target
