"""Context parallelism on two CPU ranks against one process.

Attention is a stand-in that gathers (`checks_context.GatheredAttention`): TransformerEngine's needs
GPUs. What stands around it is what runs there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.ranks import (
    checks_context,
    checks_critic,
    checks_layouts,
    checks_packed,
    checks_routing,
)
from tests.trainer.ranks.pair import Pair
from tests.trainer.test_context_parallel import micro_batch
from tests.trainer.test_ranks_layouts import compare
from trainer.context_parallel import with_even_sequences
from trainer.schedule import widened_to
from trainer.settings import ParallelSettings

pytestmark = pytest.mark.xdist_group("ranks")

ONE_GROUP = ParallelSettings()
BY_POLICY = {"routing_replay": "old_policy", "replay_routing_weights": True}


@pytest.fixture(scope="module")
def folder_of(megatron: ParallelSettings, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With experts or without → the folder of a model."""
    return lru_cache(
        lambda moe: checks_layouts.make_folder(tmp_path_factory.mktemp("context"), moe=moe)
    )


EXPERTS = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}


@pytest.mark.parametrize(
    ("moe", "other"), [(False, {}), (True, {}), (True, EXPERTS)], ids=["dense", "moe", "experts"]
)
def test_packed_rows(ranks: Pair, folder_of: Any, moe: bool, other: dict[str, Any]) -> None:
    """Twice the tokens fit into a micro-batch, and the recorded widths are those of the plan."""
    folder = folder_of(moe)
    layout = ParallelSettings(context_parallel_size=2, **other)
    expected = checks_packed.take_step(folder, ONE_GROUP)
    first, second = ranks.run(checks_context.take_step, folder, layout, layout=ONE_GROUP)
    for key in first.keys() - {"log_probs", "scored", "metrics"}:
        assert first[key] == second[key], key
    assert repr(first["metrics"]) == repr(second["metrics"])
    for key in ("log_probs", "scored"):
        np.testing.assert_array_equal(first[key], second[key])
        np.testing.assert_allclose(first[key], expected[key], rtol=0, atol=1e-5)
    assert first["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert first["grad_norm"] == pytest.approx(expected["grad_norm"], rel=3e-5)
    assert first["widths"] == [12, 12]
    assert first["ranks"] == [0, 0]


def test_padded_rows(ranks: Pair, folder_of: Any) -> None:
    """Two steps with a distributed optimizer, divided over both ranks."""
    folder, algorithm = folder_of(False), {"entropy_coef": 0.01}
    alone = checks_layouts.take_steps(folder, ONE_GROUP, {}, algorithm)
    ours = ranks.run(checks_context.take_steps, folder, algorithm, layout=ONE_GROUP)
    compare(ours, alone, tolerance=1e-6)


def test_a_critic(ranks: Pair, folder_of: Any) -> None:
    folder = folder_of(False)
    one = checks_critic.take_steps(folder, ONE_GROUP)
    first, second = ranks.run(checks_context.take_critic_steps, folder, layout=ONE_GROUP)
    for key in ("roots", "gradients", "metrics"):
        assert repr(first[key]) == repr(second[key])
    for mine, theirs in zip(first["values"], one["values"], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    for tensor, value in one["weights"].items():
        np.testing.assert_allclose(first["weights"][tensor], value, atol=1e-4, err_msg=tensor)


@pytest.mark.parametrize("algorithm", [{}, BY_POLICY], ids=["by the engine", "by the policy"])
def test_routing_replay(
    ranks: Pair, megatron: ParallelSettings, tmp_path: Any, algorithm: dict[str, Any]
) -> None:
    """Each rank's routers follow its own tokens, and what both chose is one record."""
    folder = checks_routing.make_folder(tmp_path)
    one = checks_routing.take_step(folder, megatron, algorithm)
    found = ranks.run(checks_context.take_routed_step, folder, algorithm, layout=ONE_GROUP)
    for mine in found:
        assert mine["expert_ids"] == one["expert_ids"]
        ours, alone = mine["result"], one["result"]
        # Agreement of recorded and free routing counts every token once.
        assert {n: v for n, v in ours.metrics.items() if n.startswith("routing_")} == {
            n: v for n, v in alone.metrics.items() if n.startswith("routing_")
        }
        assert ours.step_committed.loss == pytest.approx(alone.step_committed.loss, abs=1e-5)
        assert ours.step_committed.grad_norm == pytest.approx(
            alone.step_committed.grad_norm, rel=1e-4
        )


def test_losses_of_whole_samples_and_their_gradients(ranks: Pair) -> None:
    """A loss that joins tokens of both ranks, of a model without attention: as in one process."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(6, 40, generator=generator)
    embedding = torch.randn(40, 6, generator=generator)
    padded = widened_to(micro_batch([[3, 5], [6, 1]], packed=False), 4)
    # All responses of the second are in the first chunk, which rank 0 has: rank 1 has none.
    packed = with_even_sequences(micro_batch([[3, 5], [6, 1], [1, 2]], packed=True), 4, 4)
    lone = widened_to(micro_batch([[1, 2], [9, 1]], packed=False, take=1), 12)
    cases = [(padded, False), (packed, True), (lone, False)]
    for mine in ranks.run(checks_context.linear_models, cases, head, embedding, layout=ONE_GROUP):
        for found, (micro, is_packed) in zip(mine, cases, strict=True):
            expected = checks_context.linear_model(micro, head, embedding, is_packed)
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            for name in ("log_probs", "entropy"):
                torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)
            torch.testing.assert_close(
                found["gradient"], expected["gradient"], rtol=1e-5, atol=1e-3
            )
