"""Steps on two ranks in every layout, against the same steps in one process.

Layouts add the same numbers in another order, so losses, metrics and weights agree within rounding;
everything else that is recorded is equal, and both ranks record the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ledger.encode import events_to_table
from ledger.errors import InvalidArgument
from tests.trainer.ranks import checks_layouts
from tests.trainer.ranks.pair import Pair
from trainer.settings import ParallelSettings

pytestmark = pytest.mark.xdist_group("ranks")

TP2 = {"tensor_model_parallel_size": 2}
SP = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
DENSE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor": (TP2, {}),
    "tensor, sequence": (SP, {}),
    "pipeline": (PP2, {}),
    "interleaved": (PP2 | {"num_virtual_stages_per_pipeline_rank": 2}, {}),
    "data": ({}, {}),
    "data, distributed optimizer": ({}, {"use_distributed_optimizer": True}),
    "recompute": (
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {},
    ),
}
MOE = {
    "experts, all-gather": ({"expert_model_parallel_size": 2}, {}),
    "experts, all-to-all": (
        {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"},
        {"use_distributed_optimizer": True},
    ),
    "tensor in experts": (SP | {"moe_token_dispatcher_type": "alltoall"}, {}),
    "experts whole, rest divided": (
        SP | {"expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall"},
        {},
    ),
    "experts over a tensor group": (
        SP | {"expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2},
        {},
    ),
    "pipeline": (PP2, {}),
}


@pytest.fixture(scope="module")
def one_process(megatron: ParallelSettings, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Kind of model and settings → its folder, and what the steps in one process recorded."""
    held: dict[Any, Any] = {}

    def steps(moe: bool, tied: bool, parallel: dict[str, Any], algorithm: dict[str, Any]) -> Any:
        folder = tmp_path_factory.getbasetemp() / f"layouts-{moe}-{tied}"
        if not folder.exists():
            checks_layouts.make_folder(folder, moe=moe, tied=tied)
        key = (moe, tied, str(parallel), str(algorithm))
        if key not in held:
            held[key] = checks_layouts.take_steps(
                folder, ParallelSettings(**parallel), {}, algorithm
            )
        return folder, held[key]

    return steps


def compare(ours: list[dict[str, Any]], alone: dict[str, Any], *, tolerance: float) -> None:
    for rank in ours:
        assert rank["records"] == ours[0]["records"]
        assert rank["moment_records"] == ours[0]["moment_records"]
        assert [recorded(r) for r in rank["results"]] == [recorded(r) for r in ours[0]["results"]]
        np.testing.assert_array_equal(rank["scored"], ours[0]["scored"])
    first = ours[0]
    np.testing.assert_allclose(first["scored"], alone["scored"], atol=tolerance)
    for mine, theirs in zip(first["results"], alone["results"], strict=True):
        compare_events(mine, theirs, tolerance)
    names = [(r.name, r.shape, r.dtype) for r in alone["records"]]
    assert [(r.name, r.shape, r.dtype) for r in first["records"]] == names
    for kind in ("weights", "moments"):
        assert list(first[kind]) == list(alone[kind])
        for name, value in alone[kind].items():
            np.testing.assert_allclose(
                first[kind][name], value, atol=30 * tolerance, err_msg=f"{kind} {name}"
            )


def recorded(result: Any) -> list[str]:
    """Every event of a step, less what is a measurement."""
    rows = []
    for events in ([result.step_committed], result.signals, [result.weights]):
        measured = [c.name for c in type(events[0]).COLUMNS if c.measurement]
        rows += [repr(row) for row in events_to_table(events).drop_columns(measured).to_pylist()]
    return rows


def compare_events(mine: Any, theirs: Any, tolerance: float) -> None:
    ours, other = mine.step_committed, theirs.step_committed
    for name in ("batch_digest", "metric_names", "trained_tokens"):
        assert getattr(ours, name) == getattr(other, name), name
    settings, expected = json.loads(ours.settings), json.loads(other.settings)
    # How the optimizer's state is laid out is among its settings.
    settings["optimizer"]["use_distributed_optimizer"] = False
    assert settings == expected
    for name in ("indices", "micro_batch_offsets"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(other, name))
    assert ours.loss == pytest.approx(other.loss, abs=tolerance)
    assert ours.grad_norm == pytest.approx(other.grad_norm, rel=30 * tolerance)
    np.testing.assert_allclose(ours.metric_values, other.metric_values, atol=30 * tolerance)
    for signal, expected in zip(mine.signals, theirs.signals, strict=True):
        assert signal.index == expected.index
        np.testing.assert_array_equal(signal.loss_mask, expected.loss_mask)
        np.testing.assert_array_equal(signal.advantages, expected.advantages)
        np.testing.assert_allclose(signal.log_probs, expected.log_probs, atol=10 * tolerance)
    assert mine.weights.tensor_names == theirs.weights.tensor_names
    assert mine.weights.size_bytes == theirs.weights.size_bytes


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_layout_takes_the_steps_of_one_process(
    ranks: Pair, one_process: Any, name: str
) -> None:
    parallel, optimizer = DENSE[name]
    algorithm = {"entropy_coef": 0.01}
    tied = name in ("tensor", "pipeline")
    folder, alone = one_process(False, tied, {}, algorithm)
    layout = ParallelSettings(**parallel)
    ours = ranks.run(checks_layouts.take_steps, folder, layout, optimizer, algorithm, layout=layout)
    compare(ours, alone, tolerance=1e-6)


@pytest.mark.parametrize("name", MOE)
def test_a_layout_of_experts_takes_the_steps_of_one_process(
    ranks: Pair, one_process: Any, name: str
) -> None:
    parallel, optimizer = MOE[name]
    folder, alone = one_process(True, False, {}, {})
    layout = ParallelSettings(**parallel)
    ours = ranks.run(checks_layouts.take_steps, folder, layout, optimizer, {}, layout=layout)
    compare(ours, alone, tolerance=1e-6)


@pytest.mark.parametrize("distributed", [False, True])
def test_bfloat16_keeps_float32_main_weights(
    ranks: Pair, one_process: Any, distributed: bool
) -> None:
    """The gradients of two ranks are summed in float32, so only activations are rounded."""
    folder, alone = one_process(False, False, {"bf16": True}, {})
    layout = ParallelSettings(bf16=True)
    optimizer = {"use_distributed_optimizer": distributed}
    ours = ranks.run(checks_layouts.take_steps, folder, layout, optimizer, {}, layout=layout)
    compare(ours, alone, tolerance=1e-5)
    main = {name for name in alone["moments"] if name.startswith("main_weight.")}
    assert len(main) == len(alone["weights"])
    assert {record.dtype for record in ours[0]["records"]} == {"bfloat16"}


def test_the_layout_is_recorded(ranks: Pair, one_process: Any) -> None:
    folder: Path = one_process(False, False, {}, {})[0]
    layout = ParallelSettings(tensor_model_parallel_size=2)
    first, _ = ranks.run(checks_layouts.take_steps, folder, layout, {}, {}, 1, layout=layout)
    found = json.loads(first["results"][0].step_committed.layout)
    assert found["parallel"]["tensor_model_parallel_size"] == 2
    assert found["data_parallel_size"] == 1


@pytest.mark.parametrize("bf16", [False, True])
def test_a_distributed_optimizer_gives_back_the_bits_it_was_given(
    ranks: Pair, one_process: Any, bf16: bool
) -> None:
    """−0.0 and 0.0 are equal numbers and other bits: a sum of shards would lose the sign."""
    folder = one_process(False, False, {}, {})[0]
    layout = ParallelSettings(bf16=bf16)
    lost = ranks.run(checks_layouts.negative_zeros, folder, layout, layout=layout)
    assert lost == [[], []]


def test_gradients_are_the_same_however_they_are_reduced(ranks: Pair, one_process: Any) -> None:
    """A rank of a distributed optimizer has the sums of its own run alone; records are of all."""
    folder = one_process(False, False, {}, {})[0]
    layout = ParallelSettings()
    records = [
        ranks.run(checks_layouts.gradients, folder, layout, optimizer, layout=layout)
        for optimizer in ({}, {"use_distributed_optimizer": True})
    ]
    assert records[0][0] == records[0][1] == records[1][0] == records[1][1]


def test_a_vocabulary_that_one_rank_only_pads(ranks: Pair, one_process: Any) -> None:
    folder, alone = one_process(False, True, {}, {"entropy_coef": 0.01})
    layout = ParallelSettings(tensor_model_parallel_size=2, make_vocab_size_divisible_by=64)
    ours = ranks.run(
        checks_layouts.take_steps, folder, layout, {}, {"entropy_coef": 0.01}, layout=layout
    )
    compare(ours, alone, tolerance=1e-6)


def test_a_model_of_another_layout_than_the_groups_is_refused(
    megatron: ParallelSettings, one_process: Any
) -> None:
    """Megatron would leave gradients of experts unreduced without a word."""
    from trainer.model import build_chunks, read_config

    folder = one_process(True, False, {}, {})[0]
    other = ParallelSettings(expert_tensor_parallel_size=2)
    with pytest.raises(InvalidArgument, match="--expert-tensor-parallel-size"):
        build_chunks(read_config(folder), other, trainable=False)
