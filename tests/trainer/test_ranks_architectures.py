"""Architectures on two ranks in each kind of layout, against one process."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.megatron_models import make
from tests.trainer.ranks import checks_architectures
from tests.trainer.ranks.pair import Pair
from trainer.settings import ParallelSettings
from trainer.weights.files import INDEX_FILE, read_safetensors

pytestmark = pytest.mark.xdist_group("ranks")

TP2 = {"tensor_model_parallel_size": 2}
SP = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
CASES = {
    "glm4, tensor": ("glm4", TP2),
    "glm4, tensor and sequence": ("glm4", SP),
    "glm4, pipeline": ("glm4", PP2),
    "deepseek_v3, tensor and sequence": ("deepseek_v3", SP),
    "deepseek_v3, pipeline": ("deepseek_v3", PP2),
    "glm4_moe, experts": ("glm4_moe", EP2),
    "glm4_moe, tensor": ("glm4_moe", SP),
}


@pytest.fixture(scope="module")
def one_process(megatron: ParallelSettings, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Kind → its folder, and what came out in one process."""

    def learnt(kind: str) -> Any:
        # Sizes that two ranks can divide, the vocabulary too.
        folder = make(
            kind, tmp_path_factory.mktemp(kind), vocab_size=96, num_hidden_layers=4
        ).folder
        return folder, checks_architectures.learn(folder, megatron, None)

    return lru_cache(learnt)


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_exported_weights_are_those_of_one_process(
    ranks: Pair, one_process: Any, case: str, tmp_path: Path
) -> None:
    kind, parallel = CASES[case]
    folder, alone = one_process(kind)
    layout = ParallelSettings(**parallel)
    found = ranks.run(checks_architectures.learn, folder, layout, tmp_path, layout=layout)
    losses = [each["losses"] for each in found if each["losses"] is not None]
    for each in losses:
        np.testing.assert_allclose(each, alone["losses"], rtol=0, atol=1e-5)
    gradients = found[0]["gradients"]
    assert gradients.keys() == alone["gradients"].keys()
    for name, expected in alone["gradients"].items():
        np.testing.assert_allclose(
            gradients[name], expected, rtol=1e-3, atol=2e-6, err_msg=f"{case}: {name}"
        )
    assert found[0]["written"] == found[1]["written"]
    assert INDEX_FILE in found[0]["written"]
    stored, exported = read_safetensors(folder), read_safetensors(tmp_path)
    assert exported.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(exported[name].view(torch.int32), tensor.view(torch.int32)), name
