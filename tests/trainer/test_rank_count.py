"""How many ranks a command needs, and what a launcher's environment says."""

from __future__ import annotations

from typing import Any

import pytest

from ledger.errors import InvalidArgument
from trainer.launch import end_code
from trainer.option_values import validate
from trainer.processes import as_launched
from trainer.rank_count import ranks_of


@pytest.mark.parametrize(
    ("given", "ranks", "data"),
    [
        ({}, 1, 1),
        ({"tensor_model_parallel_size": 2}, 2, 1),
        ({"actor_num_gpus_per_node": 2}, 2, 2),
        ({"actor_num_gpus_per_node": 4, "actor_num_nodes": 2}, 8, 8),
        ({"actor_num_gpus_per_node": 4, "pipeline_model_parallel_size": 2}, 4, 2),
        ({"data_parallel_size": 3, "tensor_model_parallel_size": 2}, 6, 3),
    ],
)
def test_ranks_and_data_parallel_size_follow_each_other(
    given: dict[str, Any], ranks: int, data: int
) -> None:
    values = validate(given)
    assert ranks_of(values) == ranks
    assert values["data_parallel_size"] == data


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"actor_num_gpus_per_node": 3, "tensor_model_parallel_size": 2}, "2 ranks: 1"),
        ({"actor_num_gpus_per_node": 2, "data_parallel_size": 1}, "1 ranks: 1"),
        ({"actor_num_nodes": 1, "tensor_model_parallel_size": 2}, "2 (tensor_model)"),
    ],
)
def test_a_layout_that_the_ranks_cannot_form_is_refused(
    given: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        validate(given)
    assert expected in str(refused.value)


def test_a_launchers_ranks_are_those_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_launched({"lr": 1.0}) == {"lr": 1.0}
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    counted = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 2}
    assert as_launched({"lr": 1.0}) == {"lr": 1.0, **counted}
    assert as_launched(counted) == counted
    with pytest.raises(InvalidArgument) as refused:
        as_launched({"actor_num_gpus_per_node": 2})
    assert "WORLD_SIZE" in str(refused.value)


def test_a_rank_that_was_killed_gives_the_status_of_the_shell(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert end_code(1, 2) == 2
    assert end_code(1, -9) == 137
    assert "rank 1 was ended by signal 9" in capsys.readouterr().err
