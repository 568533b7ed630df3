"""What top-p and top-k left is reported with each token, and log-probs are of that distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.engines.transformers_engine import TransformersEngine
from rollout.models.tiny import make_tiny_model
from rollout.protocol import GenerationRequest, SamplingParams

PARAMS = SamplingParams(
    temperature=0.7, top_p=0.8, top_k=20, max_new_tokens=6, logprob_mode="processed"
)
REQUESTS = [
    GenerationRequest(index=i, tokens=np.array(tokens, np.int32), seed=40 + i)
    for i, tokens in enumerate(([3, 4, 5], [7, 8, 9, 10], [11]))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("random"), warmup_steps=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_log_probs_are_of_the_sets_that_are_reported(folder, recompute):
    engine = TransformersEngine(
        folder, recompute_logprobs_via_prefill=recompute, micro_batch_rows=2, seq_length=12
    )
    for request, result in zip(REQUESTS, engine.generate(REQUESTS, PARAMS), strict=True):
        assert result.logprob_mode == "processed"
        assert len(result.top_p_token_offsets) == len(result.tokens) + 1
        whole = np.concatenate([request.tokens, result.tokens])
        with torch.no_grad():
            logits = engine._model(torch.from_numpy(whole).long()[None]).logits[0].double().numpy()
        for t, token in enumerate(result.tokens):
            first, last = result.top_p_token_offsets[t : t + 2]
            kept = result.top_p_token_ids[first:last]
            scaled = logits[len(request.tokens) - 1 + t] / 0.7
            # The set by its definition: the most likely 20, of them the fewest that hold 0.8.
            order = np.argsort(-scaled, kind="stable")[:20]
            mass = np.exp(scaled[order] - scaled.max())
            enough = int((np.cumsum(mass) - mass < 0.8 * mass.sum()).sum())
            assert sorted(kept) == sorted(order[:enough])
            assert token in kept
            among = scaled[kept] - scaled.max()
            expected = scaled[token] - scaled.max() - np.log(np.exp(among).sum())
            assert abs(result.log_probs[t] - expected) < 1e-5


def test_full_log_probs_report_no_sets(folder):
    engine = TransformersEngine(folder)
    full = SamplingParams(temperature=0.7, top_p=0.8, max_new_tokens=6)
    nothing_cut = SamplingParams(max_new_tokens=6, logprob_mode="processed")
    for params in (full, nothing_cut):
        for result in engine.generate(REQUESTS, params):
            assert result.logprob_mode == "full"
            assert result.top_p_token_ids is None
