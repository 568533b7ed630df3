"""Routing replay on two ranks: every router follows what was recorded, and one process agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.ranks import checks_routing
from tests.trainer.ranks.checks_routing import LAYERS, ROWS, SIZES, TOP_K
from tests.trainer.ranks.pair import Pair
from trainer.settings import ParallelSettings

pytestmark = pytest.mark.xdist_group("ranks")

RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
PIPELINE = {"pipeline_model_parallel_size": 2}
INTERLEAVED = PIPELINE | {"num_virtual_stages_per_pipeline_rank": 2}
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERTS = {"expert_model_parallel_size": 2}
BY_ENGINE: dict[str, Any] = {}
BY_POLICY = {"routing_replay": "old_policy", "replay_routing_weights": True}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("pipeline", PIPELINE, BY_ENGINE),
    ("pipeline, recomputed", PIPELINE | RECOMPUTE, BY_ENGINE),
    ("pipeline, by the policy", PIPELINE, BY_POLICY),
    ("interleaved, recomputed", INTERLEAVED | RECOMPUTE, BY_ENGINE),
    ("interleaved, recomputed, by the policy", INTERLEAVED | RECOMPUTE, BY_POLICY),
    ("sequence", SEQUENCE, BY_ENGINE),
    ("sequence, recomputed, by the policy", SEQUENCE | RECOMPUTE, BY_POLICY),
    ("experts", EXPERTS, BY_ENGINE),
    ("experts, recomputed, by the policy", EXPERTS | RECOMPUTE, BY_POLICY),
]
TOLERANCE = 1e-5
"""Layouts add the same float32 numbers in another order."""


@pytest.fixture(scope="module")
def alone(megatron: ParallelSettings, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a model, and what one process makes of it by the engine's and own routing."""
    folder = checks_routing.make_folder(tmp_path_factory.mktemp("routed"))
    return folder, {
        str(algorithm): checks_routing.take_step(folder, megatron, algorithm)
        for algorithm in (BY_ENGINE, BY_POLICY)
    }


def maps_of(expert_ids: list[Any], layer: int, micro: int, tokens: slice) -> list[list[int]]:
    """The experts of each token that a router sees of a micro-batch of one sample, sorted."""
    ids = np.array(expert_ids[micro])[:, layer]
    width = SIZES.seq_length or 0
    padded = np.tile(np.arange(TOP_K), (width, 1))
    padded[: len(ids)], padded[len(ids)] = ids, ids[-1]
    return np.sort(padded, axis=1)[tokens].tolist()


@pytest.mark.parametrize(("name", "layout", "algorithm"), CASES, ids=[case[0] for case in CASES])
def test_two_ranks_replay_what_one_does(
    ranks: Pair, alone: Any, name: str, layout: dict[str, Any], algorithm: dict[str, Any]
) -> None:
    folder: Path = alone[0]
    one = alone[1][str(algorithm)]
    parallel = ParallelSettings(**layout)
    found = ranks.run(
        checks_routing.take_step, folder, parallel, algorithm, layout=parallel, deadline_s=90
    )
    seen: set[int] = set()
    for rank, mine in enumerate(found):
        tokens = slice(None)
        if parallel.sequence_parallel:
            half = (SIZES.seq_length or 0) // 2
            tokens = slice(half * rank, half * (rank + 1))
        wanted = {
            layer: [maps_of(one["expert_ids"], layer, m, tokens) for m in mine["micro_batches"]]
            for layer in range(LAYERS)
        }
        layers = {layer for layer, _ in mine["calls"]}
        seen |= layers
        for layer in layers:
            # The forward that chooses, and then that under checkpointing, have no gradient.
            count = len(mine["micro_batches"])
            plain = mine["calls"].get((layer, False), [])
            if mine["scored"]:
                for m, chosen in zip(mine["micro_batches"], plain[:count], strict=True):
                    recorded = len(range(len(ROWS[m]) - 1)[tokens])  # padding goes anywhere
                    assert (
                        chosen[:recorded] == maps_of(one["expert_ids"], layer, m, tokens)[:recorded]
                    )
                plain = plain[count:]
            assert plain == (wanted[layer] if "recompute_granularity" in layout else [])
            assert mine["calls"][layer, True] == wanted[layer]
        assert mine["expert_ids"] == one["expert_ids"]
        compare(mine["result"], one["result"])
    assert seen == set(range(LAYERS))
    # Both ranks build the same routing events, or leave them to the writer.
    written = found[0]["result"].routing
    assert [e.expert_ids for e in written] == [e.expert_ids for e in one["result"].routing]
    assert found[1]["result"].routing == []
    assert len(written) == (len(ROWS) if algorithm == BY_POLICY else 0)
    for mine_event, one_event in zip(written, one["result"].routing, strict=True):
        weights = [np.frombuffer(e.weights, np.float32) for e in (mine_event, one_event)]
        np.testing.assert_allclose(*weights, atol=TOLERANCE)


def compare(mine: Any, one: Any) -> None:
    agreements = {n: v for n, v in one.metrics.items() if n.startswith("routing_")}
    assert len(agreements) == 3 + LAYERS
    assert {n: mine.metrics[n] for n in agreements} == agreements
    assert mine.metrics.keys() == one.metrics.keys()
    assert mine.step_committed.loss == pytest.approx(one.step_committed.loss, abs=TOLERANCE)
    assert mine.step_committed.grad_norm == pytest.approx(
        one.step_committed.grad_norm, rel=10 * TOLERANCE
    )
    for ours, theirs in zip(mine.signals, one.signals, strict=True):
        assert ours.index == theirs.index
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=TOLERANCE)
