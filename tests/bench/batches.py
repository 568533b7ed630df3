"""Building the batch of a step, from the query that chooses its samples to tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ledger.reader import Reader
from tests.bench.figures import Figure, interleaved
from tests.bench.samples import RUN, emptied, new_ledger
from tests.bench.trainer_case import Case, long_tailed
from tests.bench.trainer_ours import rollout_events

__all__ = ["batch_figures", "packing_figures"]

GROUP = "batch of a step"
_CASE = Case(
    samples=128,
    n_samples_per_prompt=8,
    prompt_length=256,
    median_response=1792,
    longest_response=1792,
    micro_batch_size=8,
    max_tokens=8192,
    vocab_size=150_000,
    hidden_size=0,
    layers=0,
    heads=0,
    kv_heads=0,
    intermediate_size=0,
    threads=1,
    same_length=True,
)
_ROLLOUTS = 4


def batch_figures(folder: Path, *, quick: bool) -> Iterator[Figure]:
    """128 samples of 2,048 tokens, chosen from four rollouts, warm: against copying the arrays."""
    from trainer.batch import Batch
    from trainer.selection import select_kept
    from trainer.settings import BatchSettings, ParallelSettings
    from trainer.stepping import plan_step

    sizes = BatchSettings(
        rollout_batch_size=_CASE.samples // _CASE.n_samples_per_prompt,
        n_samples_per_prompt=_CASE.n_samples_per_prompt,
        global_batch_size=_CASE.samples,
        num_steps_per_rollout=1,
        micro_batch_size=_CASE.micro_batch_size,
    )
    layout = ParallelSettings()

    def tensors(batch: Batch) -> list[torch.Tensor]:
        # The indices come from the query's own memory, which torch warns about.
        return [torch.from_numpy(array) for array in _arrays(batch) if array.flags.writeable]

    with new_ledger(emptied(folder)) as (ledger, writer):
        for rollout_step in range(_ROLLOUTS):
            for events in rollout_events(_CASE, rollout_step, version=0):
                writer.append(events)
        state: dict[str, Any] = {}

        def build(reader: Reader, *, choose: bool) -> None:
            indices = second
            if choose:
                indices = select_kept(reader, 1, n_samples=_CASE.samples)
            state["batch"] = plan_step(reader, indices, sizes, layout)[0]
            tensors(state["batch"])

        second = np.arange(_CASE.samples, dtype=np.int64) + _CASE.samples
        kept = ledger.reader(RUN, "main")
        build(kept, choose=True)
        arrays = _arrays(state["batch"])
        size = sum(array.nbytes for array in arrays)
        times = interleaved(
            {
                "copy": lambda: [array.copy() for array in arrays],
                "build": lambda: build(kept, choose=False),
                "query and build": lambda: build(ledger.reader(RUN, "main"), choose=True),
            },
            5 if quick else 25,
        )
    copy = times["copy"]
    for name, text, goal in (
        ("query and build", "SQL into torch", 0.5),
        ("build", "known indices, open reader", None),
    ):
        one = times[name]
        yield Figure(
            group=GROUP,
            name=f"{text}, {size / 1e6:.0f} MB",
            against="memory copy of the same arrays",
            ratio=copy.seconds / one.seconds,
            goal=None if quick else goal,
            mb_per_s=size / 1e6 / one.seconds,
            mb_per_cpu_s=size / 1e6 / one.cpu_seconds,
            note=f"{1e3 * one.seconds:.1f} ms against {1e3 * copy.seconds:.1f}: "
            f"{_CASE.samples} × {_CASE.tokens // _CASE.samples:,} tokens, every check included",
            details={"ours_s": one.seconds, "copy_s": copy.seconds, "size_bytes": size},
        )
    yield from packing_figures()


def packing_figures() -> Iterator[Figure]:
    """Padding of packed micro-batches, of all their tokens: long-tailed lengths, no time in it."""
    from trainer.partition import PartitionTerms, partition_for
    from trainer.settings import BatchSettings

    sizes = BatchSettings(
        rollout_batch_size=16,
        n_samples_per_prompt=8,
        global_batch_size=128,
        num_steps_per_rollout=1,
        micro_batch_size=8,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=16_384,
    )
    for ranks, multiple in ((1, 1), (4, 1), (4, 8)):
        terms = PartitionTerms(data_parallel_size=ranks, width_multiple=multiple)
        wastes = []
        for seed in range(16):
            lengths = 256 + long_tailed(128, median=1024, longest=16_000, seed=seed)
            plan = partition_for(lengths, np.arange(128), sizes, terms)
            wastes.append(1 - int(lengths.sum()) / int(plan.widths_M.sum()))
        yield Figure(
            group=GROUP,
            name=f"packing waste, {ranks} ranks, width a multiple of {multiple}",
            against="tokens of the packed rows",
            ratio=max(wastes),
            goal=0.02,
            at_most=True,
            unit="%",
            note="worst of 16 batches of 128 samples, log-normal lengths",
            details={"mean": float(np.mean(wastes))},
        )


def _arrays(batch: Any) -> list[np.ndarray]:
    """The arrays of a batch, each once."""
    found = [getattr(batch, field.name) for field in fields(batch)]
    return list({id(a): a for a in found if isinstance(a, np.ndarray)}.values())
