"""Our side: `python -m tests.bench.trainer_ours CASE MODEL FOLDER HOW`; asked by lines on stdin.

A step is everything from the events of its rollout to its own being durable: append the rollout,
choose its samples, read them, train with all digests, append the step. HOW is padded, packed, or
packed-flash (attention by torch's kernel).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from tests.bench.samples import RUN, new_ledger, scored
from tests.bench.trainer_case import Case, answer, commands, peak_bytes


def main() -> None:
    case, model_dir, folder = Case(**json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    how = sys.argv[4]
    from ledger.store import Ledger
    from ledger.writer import Writer
    from trainer.parallel import initialize
    from trainer.scoring import score_policy
    from trainer.selection import select_kept
    from trainer.settings import (
        AlgorithmSettings,
        BatchSettings,
        OptimizerSettings,
        ParallelSettings,
    )
    from trainer.state import create_state
    from trainer.stepping import PlannedStep, plan_step, take_rollout

    layout = ParallelSettings(attention_backend="flash" if how == "packed-flash" else "auto")
    initialize(layout, seed=0, num_threads=case.threads, deterministic=True)
    optimizer = OptimizerSettings(lr=case.lr, adam_beta2=case.adam_beta2)
    state = create_state(model_dir, layout, optimizer, seed=0)
    groups = case.samples // case.n_samples_per_prompt
    packed = how != "padded"
    sizes = BatchSettings(
        rollout_batch_size=groups,
        n_samples_per_prompt=case.n_samples_per_prompt,
        global_batch_size=case.samples,
        num_steps_per_rollout=1,
        micro_batch_size=case.micro_batch_size,
        use_dynamic_batch_size=packed,
        max_tokens_per_gpu=case.max_tokens if packed else None,
    )

    def step(number: int, ledger: Ledger, writer: Writer) -> None:
        rounds = rollout_events(case, number)
        cpu, began = time.process_time(), time.perf_counter()
        for events in rounds:
            writer.append(events)
        appended = time.perf_counter()
        kept = select_kept(ledger.reader(RUN, "main"), number, n_samples=case.samples)
        plan = PlannedStep(
            step=number,
            rollout_step=number,
            step_in_rollout=0,
            weight_version_in=number,
            weight_version_out=number + 1,
            indices=kept,
        )
        selected = time.perf_counter()
        reader = ledger.reader(RUN, branch=None)
        taken = take_rollout(state, reader, [plan], AlgorithmSettings(), sizes)
        ((_, _, result),) = list(taken)
        trained = time.perf_counter()
        committed = result.step_committed.evolve(read_seq=reader.head_seq)
        writer.append([*result.signals, committed, result.weights])
        ended = time.perf_counter()
        answer(
            seconds=ended - began,
            cpu_seconds=time.process_time() - cpu,
            grad_norm=committed.grad_norm,
            ledger_s=selected - began + ended - trained + (committed.data_time_s or 0.0),
            append_s=appended - began + ended - trained,
            digest_s=committed.digest_time_s,
            micro_batches=len(committed.micro_batch_ranks),
            peak_bytes=peak_bytes(),
        )

    def score(ledger: Ledger, number: int) -> None:
        indices = np.arange(case.samples) + number * case.samples
        batch, cut_up = plan_step(ledger.reader(RUN), indices, sizes, layout)
        cpu, began = time.process_time(), time.perf_counter()
        score_policy(state, batch, cut_up)
        answer(seconds=time.perf_counter() - began, cpu_seconds=time.process_time() - cpu)

    with new_ledger(folder / "ledger") as (ledger, writer):
        answer(ready=1)
        number = 0
        for word in commands():
            if word == "score":
                score(ledger, number - 1)
            else:
                step(number, ledger, writer)
                number += 1


def rollout_events(case: Case, rollout_step: int, version: int | None = None) -> list[list[Any]]:
    """The appends of a rollout: prompts; segments; scores and decisions.

    `version` sampled it; None: the one that as many steps before it made.
    """
    from ledger.events import PromptIssued, SampleDecided, SegmentGenerated

    first = rollout_step * case.samples
    size = case.n_samples_per_prompt
    prompts: list[Any] = []
    segments: list[Any] = []
    verdicts: list[Any] = []
    responses, rewards = case.responses(), case.rewards()
    for group, tokens in enumerate(case.prompts()):
        indices = np.arange(first + group * size, first + (group + 1) * size)
        number = first // size + group
        prompts.append(
            PromptIssued(
                rollout_step=rollout_step,
                round=0,
                group_index=number,
                indices=indices,
                rollout_ids=indices,
                tokens=tokens,
                prompt_id=blake3(tokens.tobytes()).digest(),
                text="",
                source="bench",
                source_row=number,
                data_cursor=number + 1,
            )
        )
        for place, index in enumerate(indices.tolist()):
            sample = group * size + place
            response = responses[sample]
            length = len(response)
            segments.append(
                SegmentGenerated(
                    index=index,
                    rollout_id=index,
                    group_index=number,
                    rollout_step=rollout_step,
                    segment=0,
                    turn=0,
                    start=0,
                    tokens=response,
                    rollout_log_probs=np.full(length, -1.0, np.float32),
                    logprob_mode="full",
                    logprob_temperature=1.0,
                    span_starts=np.array([0], np.int32),
                    span_ends=np.array([length], np.int32),
                    span_versions=np.array(
                        [rollout_step if version is None else version], np.int64
                    ),
                    temperature=1.0,
                    top_p=1.0,
                    top_k=-1,
                    max_new_tokens=case.longest_response,
                    stop_token_ids=np.array([2], np.int32),
                    sampling_seed=index,
                    finish_reason="length",
                    engine="bench",
                    engine_version="1",
                    generation_time_s=1.0,
                )
            )
            reward = rewards[sample]
            verdicts.append(
                scored(index).evolve(group_index=number, raw_reward=reward, reward=reward)
            )
            verdicts.append(
                SampleDecided(
                    index=index,
                    rollout_id=index,
                    group_index=number,
                    rollout_step=rollout_step,
                    decision="kept",
                    reason="",
                    rule="bench",
                )
            )
    return [prompts, segments, verdicts]


if __name__ == "__main__":
    main()
