"""Packed micro-batches on two ranks: the step of one process, within rounding.

Their widths differ, so pipeline stages tell each other shapes, and tensor ranks share rows whose
width is a multiple of their number.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from tests.trainer.ranks import checks_layouts, checks_packed
from tests.trainer.ranks.pair import Pair
from trainer.settings import ParallelSettings

pytestmark = pytest.mark.xdist_group("ranks")

TP2 = {"tensor_model_parallel_size": 2}
SP = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "data": ({}, [6, 5, 4, 8]),
    "tensor": (TP2, [6, 9, 8]),
    "tensor, sequence": (SP, [6, 10, 8]),
    "pipeline": (PP2, [6, 9, 8]),
    "interleaved": (PP2 | {"num_virtual_stages_per_pipeline_rank": 2}, [6, 4, 8, 5]),
}
"""Layout and the widths of its micro-batches: of samples of 6, 4, 8 and 5 tokens, at most 11."""


@pytest.fixture(scope="module")
def one_process(megatron: ParallelSettings, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With experts or without → the model's folder, and the step in one process."""

    def step(moe: bool) -> Any:
        folder = checks_layouts.make_folder(tmp_path_factory.mktemp("packed"), moe=moe)
        return folder, checks_packed.take_step(folder, megatron)

    return lru_cache(step)


@pytest.mark.parametrize(
    ("name", "moe"),
    [*((name, False) for name in LAYOUTS), ("tensor, sequence", True), ("pipeline", True)],
)
def test_a_layout_takes_the_packed_step_of_one_process(
    name: str, moe: bool, ranks: Pair, one_process: Any
) -> None:
    folder, expected = one_process(moe)
    parallel, widths = LAYOUTS[name]
    layout = ParallelSettings(**parallel)
    first, second = ranks.run(checks_packed.take_step, folder, layout, layout=layout)
    assert first.keys() == second.keys()
    for key in first.keys() - {"log_probs", "scored", "metrics"}:
        assert first[key] == second[key], key
    np.testing.assert_array_equal(first["log_probs"], second["log_probs"])
    for key in ("log_probs", "scored"):
        np.testing.assert_allclose(first[key], expected[key], rtol=0, atol=1e-5)
    assert first["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert first["grad_norm"] == pytest.approx(expected["grad_norm"], rel=3e-5)
    assert sorted(first["indices"]) == [0, 1, 2, 3]
    assert first["widths"] == widths
    assert first["ranks"] == ([0, 0, 1, 1] if name == "data" else [0] * len(widths))
