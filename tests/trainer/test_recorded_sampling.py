"""Old log-probs are of the distribution that was sampled from: temperature and sets as recorded."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ledger.errors import InvalidArgument, InvalidEvent
from rollout.engines.transformers_engine import TransformersEngine
from rollout.protocol import GenerationRequest, SamplingParams
from tests.trainer.memory import MemoryReader, prompt, score, segment
from tests.trainer.test_step import SIZES, plan_of, step
from tests.trainer.tiny_policy import make_folder, make_state
from trainer.algorithms.metrics import mismatch_metrics
from trainer.batch import batch_digest, load_batch
from trainer.scoring import score_policy

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("dense"))


def sampled(folder, *params: SamplingParams):
    """One sample from each of the parameters, as the events record it."""
    engine = TransformersEngine(folder)
    events = [prompt(range(len(params)), PROMPT)]
    for index, one in enumerate(params):
        request = GenerationRequest(index=index, tokens=np.array(PROMPT, np.int32), seed=index)
        (result,) = engine.generate([request], one)
        events.append(
            segment(
                index,
                result.tokens,
                result.log_probs,
                logprob_mode=result.logprob_mode,
                logprob_temperature=result.logprob_temperature,
                rollout_top_p_token_ids=result.top_p_token_ids,
                rollout_top_p_token_offsets=result.top_p_token_offsets,
            )
        )
        events.append(score(index, index % 2))
    return events


def mismatch(state, batch) -> float:
    log_probs_N = score_policy(state, batch, plan_of(batch, SIZES))
    metrics = mismatch_metrics(log_probs_N, batch.rollout_log_probs_N, batch.sampled_N)
    return metrics["logprob_mismatch_max"]


def test_log_probs_agree_with_the_engine_at_the_recorded_temperature(folder):
    cool, warm = (SamplingParams(temperature=t, max_new_tokens=6) for t in (0.7, 1.3))
    batch = load_batch(MemoryReader(sampled(folder, cool, cool, warm, warm)), range(4))
    state = make_state(folder)
    assert mismatch(state, batch) < 1e-5
    ignored = dataclasses.replace(batch, logprob_temperatures_B=np.ones(4))
    assert mismatch(state, ignored) > 0.1
    metrics = step(folder, ignored, state=state).metrics
    assert metrics["logprob_mismatch_max"] > 0.1
    assert metrics["logprob_mismatch_mean"] > 0.01


def test_log_probs_agree_with_the_engine_over_the_recorded_sets(folder):
    cut = SamplingParams(
        temperature=0.7, top_p=0.7, max_new_tokens=6, logprob_mode="processed", top_k=9
    )
    whole = SamplingParams(temperature=0.7, max_new_tokens=6)
    events = sampled(folder, cut, cut, whole, cut)
    batch = load_batch(MemoryReader(events), range(4))
    assert (batch.kept_lengths_N[batch.offsets_N[2] : batch.offsets_N[3]] == 0).all()
    state = make_state(folder)
    assert mismatch(state, batch) < 1e-5
    without = dataclasses.replace(batch, kept_ids_K=None, kept_lengths_N=None)
    assert mismatch(state, without) > 0.05
    assert batch_digest(without) != batch_digest(batch)
    with pytest.raises(InvalidArgument, match="rollout_top_p_token_ids"):
        step(folder, without, state=state)
    assert step(folder, batch, state=state).metrics["logprob_mismatch_max"] < 1e-5


def test_sets_that_cannot_be_are_refused(folder):
    cut = SamplingParams(top_p=0.5, max_new_tokens=4, logprob_mode="processed")
    events = sampled(folder, cut)
    wrong = events[1].rollout_top_p_token_ids.copy()
    token = int(events[1].tokens[0])
    wrong[wrong == token] = 31 - token
    for change, message in (
        ({"rollout_top_p_token_ids": wrong}, f"token {token} among the ids"),
        ({"rollout_top_p_token_offsets": np.array([0, 1], np.int32)}, "offsets of 4 sets"),
    ):
        events[1] = dataclasses.replace(sampled(folder, cut)[1], **change)
        with pytest.raises(InvalidEvent, match=message):
            load_batch(MemoryReader(events), [0])
