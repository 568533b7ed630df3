"""The engines under the contract suite, and what is special to each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ledger.errors import Conflict, InvalidArgument, MissingDependency, NotFound
from rollout.engines import create_engine
from rollout.engines.parameters import canonical_views
from rollout.engines.scripted import ScriptedEngine
from rollout.engines.transformers_engine import TransformersEngine
from rollout.protocol import GenerationRequest, SamplingParams
from tests.rollout.engine_contract import (
    PARAMS,
    REQUESTS,
    EngineCase,
    EngineContract,
    request,
    same,
)


def transformers_case(folder: Path) -> EngineCase:
    engine = TransformersEngine(folder)
    return EngineCase(
        engine=engine,
        vocab_size=64,
        max_positions=64,
        named=lambda: {name: view.clone() for name, view in engine._views.items()},
        changed=lambda tensor: tensor * 1.5 + 0.01,
    )


class TestScripted(EngineContract):
    @pytest.fixture
    def case(self) -> EngineCase:
        weights = {"a.weight": np.ones((2, 3), np.float32), "b.bias": np.zeros(4, np.float32)}
        return EngineCase(
            engine=ScriptedEngine(weights=weights, vocab_size=32, max_positions=40),
            vocab_size=32,
            max_positions=40,
            named=lambda: {name: value.copy() for name, value in weights.items()},
            changed=lambda value: value + 1,
        )


class TestTransformersDense(EngineContract):
    @pytest.fixture
    def case(self, tiny_dense: Path) -> EngineCase:
        return transformers_case(tiny_dense)


class TestTransformersMoe(EngineContract):
    @pytest.fixture
    def case(self, tiny_moe: Path) -> EngineCase:
        return transformers_case(tiny_moe)


@pytest.fixture(params=["dense", "moe"])
def folder(request: pytest.FixtureRequest) -> Path:
    return Path(request.getfixturevalue(f"tiny_{request.param}"))


def test_names_are_those_of_the_file(folder: Path) -> None:
    from safetensors.torch import load_file

    on_disk = load_file(folder / "model.safetensors")
    views = canonical_views(TransformersEngine(folder)._model)
    assert list(views) == sorted(on_disk)
    assert all(torch.equal(views[name], on_disk[name]) for name in views)
    assert "lm_head.weight" not in views


def test_new_weights_change_what_is_said(folder: Path) -> None:
    engine = TransformersEngine(folder)
    before = engine.generate(REQUESTS, PARAMS)
    engine.update_weights(1, [(n, v.clone() * 0.5) for n, v in engine._views.items()])
    engine.release(1)
    after = engine.generate(REQUESTS, PARAMS)
    assert before[0].log_probs.tobytes() != after[0].log_probs.tobytes()


def test_an_update_that_breaks_half_way_stops_the_engine(
    tiny_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransformersEngine(tiny_dense)
    before = engine.generate(REQUESTS, PARAMS)
    named = {name: view.clone() for name, view in engine._views.items()}

    def broken(_views: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("rollout.engines.transformers_engine.record_views", broken)
        with pytest.raises(RuntimeError, match="no memory"):
            engine.update_weights(2, [(name, value * 2) for name, value in named.items()])
    with pytest.raises(Conflict, match="update to version 2 that has not finished"):
        engine.generate(REQUESTS, PARAMS)
    for version in (2, engine.weight_version):
        with pytest.raises(Conflict, match="a finished update"):
            engine.release(version)
    engine.update_weights(1, named.items())
    engine.release(1)
    after = engine.generate(REQUESTS, PARAMS)
    assert all(same(a, b) for a, b in zip(before, after, strict=True))


def test_log_probs_are_those_of_a_plain_forward(folder: Path) -> None:
    """The only tolerance: decoding with a cache sums in another order than a full forward."""
    temperature = 0.7
    engine = TransformersEngine(folder)
    params = SamplingParams(max_new_tokens=9, temperature=temperature, stop_token_ids=(2, 20))
    # Prompts that return, in any order: each is prefilled once.
    requests = [request(i, [5 + i % 3, 6, 7][: 1 + i % 3]) for i in range(8)] + REQUESTS
    for asked, result in zip(requests, engine.generate(requests, params), strict=True):
        ids = torch.tensor(np.concatenate([asked.tokens, result.tokens]).astype(np.int64))[None]
        logits = engine._model(input_ids=ids, use_cache=False).logits.detach()
        full = torch.log_softmax(logits / temperature, -1)[0, :-1].gather(1, ids[0, 1:, None])
        expected = full[-len(result.tokens) :, 0].numpy()
        assert np.abs(expected - result.log_probs).max() < 1e-5
        assert result.logprob_temperature == temperature


def test_prefill_gives_the_bits_of_a_fixed_batch(tiny_dense: Path) -> None:
    rows, width = 4, 16
    engine = TransformersEngine(
        tiny_dense,
        recompute_logprobs_via_prefill=True,
        micro_batch_rows=rows,
        seq_length=width,
    )
    results = engine.generate(REQUESTS, PARAMS)
    plain = TransformersEngine(tiny_dense).generate(REQUESTS, PARAMS)
    batch = torch.zeros((rows, width), dtype=torch.int64)
    for row, i in enumerate((4, 1, 5)):  # other rows, in another order, with other padding
        sequence = np.concatenate([REQUESTS[i].tokens, results[i].tokens])
        batch[row] = 63
        batch[row, : len(sequence)] = torch.from_numpy(sequence.astype(np.int64))
    logits = engine._model(input_ids=batch, use_cache=False).logits.detach()
    log_probs = torch.log_softmax(logits, dim=-1)[:, :-1].gather(-1, batch[:, 1:, None])[..., 0]
    for row, i in enumerate((4, 1, 5)):
        begin = len(REQUESTS[i].tokens) - 1
        expected = log_probs[row, begin : begin + len(results[i].tokens)].numpy()
        assert expected.tobytes() == results[i].log_probs.tobytes()
    for result, other in zip(results, plain, strict=True):
        assert np.array_equal(result.tokens, other.tokens)
        assert result.sampler_log_probs is not None
        assert result.sampler_log_probs.tobytes() == other.log_probs.tobytes()
        assert (result.batch_rows, result.batch_width) == (rows, width)
        assert np.abs(result.log_probs - result.sampler_log_probs).max() < 1e-5


def test_a_sequence_longer_than_the_fixed_width_is_refused(tiny_dense: Path) -> None:
    engine = TransformersEngine(tiny_dense, recompute_logprobs_via_prefill=True, seq_length=5)
    with pytest.raises(InvalidArgument, match="--seq-length = 5"):
        engine.generate(REQUESTS, SamplingParams(max_new_tokens=9))


def test_batches_are_cut_by_max_batch_rows(tiny_dense: Path) -> None:
    results = TransformersEngine(tiny_dense, max_batch_rows=4).generate(REQUESTS, PARAMS)
    assert [r.batch_rows for r in results] == [4, 4, 4, 4, 2, 2]
    whole = TransformersEngine(tiny_dense).generate(REQUESTS, PARAMS)
    # Bits may differ; what is sampled agrees unless a choice lies within the last bits.
    assert [r.tokens.tolist() for r in results] == [r.tokens.tolist() for r in whole]


def test_greedy_takes_the_most_likely(tiny_dense: Path) -> None:
    engine = TransformersEngine(tiny_dense)
    asked = request(0, [5, 6, 7])
    result = engine.generate([asked], SamplingParams(temperature=0, max_new_tokens=1))[0]
    logits = engine._model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1]
    assert result.tokens[0] == int(logits.argmax())
    assert result.logprob_temperature == 1.0


def router_outputs(
    engine: TransformersEngine, tokens: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and weights of each router in one forward."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, out: seen.append((out[2], out[1])))
        for name, module in engine._model.named_modules()
        if name.endswith("mlp.gate")
    ]
    engine._model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("recompute", [False, True])
def test_the_routing_of_every_fed_token_is_recorded(tiny_moe: Path, recompute: bool) -> None:
    engine = TransformersEngine(
        tiny_moe,
        recompute_logprobs_via_prefill=recompute,
        record_expert_weights=True,
        micro_batch_rows=4,
        seq_length=12,
    )
    for asked, result in zip(REQUESTS, engine.generate(REQUESTS, PARAMS), strict=True):
        ids = np.concatenate([asked.tokens, result.tokens]).astype(np.int64)
        assert result.expert_ids is not None
        assert result.expert_weights is not None
        assert result.expert_ids.shape == (len(ids) - 1, 2, 2)
        assert result.expert_ids.dtype == np.uint8
        assert result.num_experts == 8
        seen = router_outputs(engine, torch.tensor(ids[:-1])[None])
        expected_ids = torch.stack([s[0] for s in seen], 1).numpy()
        expected_weights = torch.stack([s[1] for s in seen], 1).detach().numpy()
        assert np.array_equal(expected_ids, result.expert_ids)
        assert np.abs(expected_weights - result.expert_weights).max() < 1e-5


def test_dense_models_record_no_routing(tiny_dense: Path) -> None:
    assert TransformersEngine(tiny_dense).generate(REQUESTS, PARAMS)[0].expert_ids is None


def test_unknown_routers_are_refused(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as source

    real = source.Qwen3MoeTopKRouter.forward

    def two(self: object, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, weights, ids = real(self, hidden)
        return logits, ids, weights

    monkeypatch.setattr(source.Qwen3MoeTopKRouter, "forward", two)
    with pytest.raises(InvalidArgument, match="Qwen3MoeTopKRouter returned"):
        TransformersEngine(tiny_moe)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such folder"):
        create_engine("transformers", tmp_path / "nothing")


def test_unknown_engines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="transformers, sglang"):
        create_engine("vllm", tmp_path)


def test_sglang_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(MissingDependency, match="--rollout-engine-urls"):
        create_engine("sglang", tmp_path)


def test_a_negative_seed_is_refused(tiny_dense: Path) -> None:
    bad = GenerationRequest(index=3, tokens=np.array([5], np.int32), seed=-1)
    with pytest.raises(InvalidArgument, match="sample 3, seed"):
        TransformersEngine(tiny_dense).generate([bad], PARAMS)
