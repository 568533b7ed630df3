"""A critic on two ranks, against the same critic in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.trainer.ranks import checks_critic, checks_layouts
from tests.trainer.ranks.pair import Pair
from trainer.settings import ParallelSettings

pytestmark = pytest.mark.xdist_group("ranks")

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor, sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "data": {},
}


@pytest.fixture(scope="module")
def alone(megatron: ParallelSettings, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = checks_layouts.make_folder(tmp_path_factory.mktemp("critic"), moe=False)
    return folder, checks_critic.take_steps(folder, ParallelSettings())


@pytest.mark.parametrize(
    ("name", "packed"),
    [*((name, False) for name in LAYOUTS), ("tensor, sequence", True), ("pipeline", True)],
)
def test_a_critic_takes_the_steps_of_one_process(
    ranks: Pair, alone: Any, name: str, packed: bool
) -> None:
    """Packed micro-batches have different widths: the stages of a pipeline tell each other."""
    folder, one = alone
    layout = ParallelSettings(**LAYOUTS[name])
    first, second = ranks.run(checks_critic.take_steps, folder, layout, packed, layout=layout)
    for key in ("roots", "gradients", "metrics"):
        assert repr(first[key]) == repr(second[key])
    for mine, theirs in zip(first["values"], one["values"], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    for mine, theirs in zip(first["metrics"], one["metrics"], strict=True):
        assert mine.keys() == theirs.keys()
        for metric in ("value_loss", "critic_grad_norm", "value_mean", "return_mean"):
            assert mine[metric] == pytest.approx(theirs[metric], rel=1e-4), metric
    assert first["weights"].keys() == one["weights"].keys()
    for tensor, value in one["weights"].items():
        np.testing.assert_allclose(first["weights"][tensor], value, atol=1e-4, err_msg=tensor)
