"""Process groups of two ranks, and the pair of processes that the tests of layouts use."""

from __future__ import annotations

from typing import Any

import pytest

from ledger.errors import InvalidArgument
from tests.trainer.ranks import checks_groups, checks_pair
from tests.trainer.ranks import pair as pair_module
from tests.trainer.ranks.pair import Pair, RankFailed
from trainer.layout import check_expert_groups, check_layout, check_model_layout, padded_vocab_size
from trainer.settings import ParallelSettings

in_pair = pytest.mark.xdist_group("ranks")


@in_pair
@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ({}, {"data": 2}),
        ({"tensor_model_parallel_size": 2}, {"tensor": 2, "expert_tensor": 2}),
        ({"pipeline_model_parallel_size": 2}, {"pipeline": 2}),
        ({"expert_model_parallel_size": 2}, {"data": 2, "expert": 2}),
        (
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            {"tensor": 2},
        ),
    ],
)
def test_groups_are_of_the_sizes_asked_for(
    ranks: Pair, layout: dict[str, Any], sizes: dict[str, int]
) -> None:
    ones = dict.fromkeys(("tensor", "pipeline", "expert", "expert_tensor", "data"), 1)
    found = ranks.run(checks_groups.group_sizes, layout=ParallelSettings(**layout))
    assert found == [{**ones, **sizes, "rank": rank} for rank in range(2)]


@in_pair
def test_the_ranks_reach_each_other(ranks: Pair) -> None:
    layout = ParallelSettings()
    assert ranks.run(checks_groups.sum_over_ranks, 2.0, layout=layout) == [6.0, 6.0]


def test_a_pair_tells_what_went_wrong_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_module, "_OTHER_S", 0.5)
    pair = Pair()
    try:
        with pytest.raises(RankFailed, match="the reason"):
            pair.run(checks_pair.fail_on, "1", deadline_s=30)
        with pytest.raises(RankFailed, match="in hang"):
            pair.run(checks_pair.hang, deadline_s=2)
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("change", "world_size", "message"),
    [
        ({"tensor_model_parallel_size": 2}, 3, "tensor × pipeline"),
        ({"tensor_model_parallel_size": 0}, 1, "--tensor-model-parallel-size"),
        ({"expert_model_parallel_size": 3}, 4, "expert tensor × expert"),
        ({"expert_tensor_parallel_size": 2}, 1, "expert tensor × expert"),
        ({"sequence_parallel": True}, 2, "--sequence-parallel"),
        ({"num_virtual_stages_per_pipeline_rank": 2}, 2, "--num-virtual-stages"),
        ({"context_parallel_size": 2}, 2, r"(?s)TEDotProductAttention.*no CUDA"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(
    change: dict[str, Any], world_size: int, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check_layout(ParallelSettings(**change), world_size, cuda=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor_model_parallel_size": 3}, "attention heads"),
        ({"tensor_model_parallel_size": 4}, "keys and values"),
        ({"pipeline_model_parallel_size": 4}, "6 layers"),
        (
            {"pipeline_model_parallel_size": 3, "num_virtual_stages_per_pipeline_rank": 4},
            "6 layers",
        ),
        ({"expert_model_parallel_size": 3}, "8 experts"),
        ({"tensor_model_parallel_size": 2}, "--sequence-parallel"),
    ],
)
def test_a_model_that_cannot_be_split_so_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check_model_layout(
            ParallelSettings(**change),
            num_layers=6,
            num_attention_heads=8,
            num_query_groups=2,
            num_experts=8,
        )


def test_experts_are_split_as_the_groups_are() -> None:
    class Config:
        expert_tensor_parallel_size = 2

    check_expert_groups(Config, {"expert_tensor_parallel_size": 2})
    with pytest.raises(InvalidArgument, match=r"(?s)--expert-tensor-parallel-size.*process groups"):
        check_expert_groups(Config, {"expert_tensor_parallel_size": 1})


@pytest.mark.parametrize(
    ("tensor", "multiple", "rows"), [(1, 1, 97), (2, 1, 98), (4, 1, 100), (2, 64, 128)]
)
def test_every_tensor_rank_has_as_many_rows(tensor: int, multiple: int, rows: int) -> None:
    settings = ParallelSettings(
        tensor_model_parallel_size=tensor, make_vocab_size_divisible_by=multiple
    )
    assert padded_vocab_size(97, settings) == rows
