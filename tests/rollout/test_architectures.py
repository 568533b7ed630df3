"""The engine with GLM-4.5 and DeepSeek-V3: their routers are recorded, their biases are weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollout.engines.transformers_engine import TransformersEngine
from rollout.protocol import SamplingParams
from tests.rollout.engine_contract import request
from tests.trainer.megatron_models import make

PARAMS = SamplingParams(max_new_tokens=5)
LAYERS = 2


@pytest.fixture(scope="module", params=[("glm4_moe", 3), ("deepseek_v3", 4)], ids=lambda p: p[0])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind, topk = request.param
    return make(kind, tmp_path_factory.mktemp(kind)), topk


def test_routing_is_recorded_in_order_with_its_weights(model: Any) -> None:
    tiny, topk = model
    engine = TransformersEngine(tiny.folder, record_expert_weights=True)
    (result,) = engine.generate([request(0, [5, 6, 7])], PARAMS)
    tokens = torch.tensor([[5, 6, 7, *result.tokens.tolist()]])
    chosen: list[Any] = []
    gates = [layer.mlp.gate for layer in tiny.model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(lambda _m, _i, out: chosen.append(out)) for gate in gates]
    with torch.no_grad():
        tiny.model(tokens[:, :-1])
    for hook in hooks:
        hook.remove()
    assert result.expert_ids is not None
    assert result.expert_weights is not None
    assert result.expert_ids.dtype == np.uint8
    assert result.expert_ids.shape == (tokens.shape[1] - 1, LAYERS, topk)
    for layer, (_, weights, ids) in enumerate(chosen):
        # The order of the ids is the router's own, whatever the batch was.
        recorded = torch.from_numpy(result.expert_ids[:, layer].astype(np.int64))
        assert torch.equal(recorded.sort(-1).values, ids.sort(-1).values)
        in_our_order = torch.zeros(len(ids), 8).scatter(1, ids, weights).gather(1, recorded)
        found = torch.from_numpy(result.expert_weights[:, layer])
        torch.testing.assert_close(found, in_our_order, rtol=0, atol=1e-5)
        assert torch.allclose(found.sum(-1), torch.tensor(2.5))
    engine.close()


def test_the_bias_of_the_router_is_one_of_the_weights(model: Any) -> None:
    tiny, _ = model
    engine = TransformersEngine(tiny.folder)
    on_disk = load_file(tiny.folder / "model.safetensors")
    assert [record.name for record in engine.weight_records()] == sorted(on_disk)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(engine._views[bias], on_disk[bias])
    (before,) = engine.generate([request(0, [5, 6, 7])], PARAMS)
    changed = {**on_disk, bias: torch.tensor([9.0, 9, 9, 9, 0, 0, 0, 0])}
    engine.update_weights(1, changed.items())
    engine.release(1)
    (after,) = engine.generate([request(0, [5, 6, 7])], PARAMS)
    assert before.expert_ids is not None
    assert after.expert_ids is not None
    assert before.expert_ids[:, 0].max() > 3
    assert after.expert_ids[:, 0].max() <= 3
    engine.close()


def test_a_dense_glm4_has_the_names_of_its_file(tmp_path: Path) -> None:
    tiny = make("glm4", tmp_path)
    engine = TransformersEngine(tiny.folder)
    on_disk = load_file(tiny.folder / "model.safetensors")
    assert [record.name for record in engine.weight_records()] == sorted(on_disk)
    assert any(name.endswith("mlp.gate_up_proj.weight") for name in on_disk)
    engine.close()
