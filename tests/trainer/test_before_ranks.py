"""What is refused before several ranks are started."""

from __future__ import annotations

from pathlib import Path

import pytest

from ledger import open_ledger
from ledger.errors import InvalidArgument, NotFound
from trainer.before_ranks import check_before_ranks
from trainer.begin import find_standing


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tensor_model_parallel_size": 3}, "a divisor of the model's 4 attention heads"),
        ({"pipeline_model_parallel_size": 5}, "a divisor of the model's 2 layers"),
        (
            {"expert_model_parallel_size": 2, "data_parallel_size": 2},
            "the model has no experts",
        ),
        ({"data_parallel_size": 2, "advantage_estimator": "grop"}, "one of dr_grpo"),
    ],
)
def test_a_layout_or_algorithm_that_every_rank_would_refuse(
    tiny_dense: Path, tmp_path: Path, options, told
) -> None:
    with open_ledger(tmp_path / "ledger", create=True) as ledger:
        standing = find_standing(ledger, {"hf_checkpoint": str(tiny_dense), **options})
        with pytest.raises(InvalidArgument, match=told):
            check_before_ranks(standing)
        assert not ledger.runs()


def test_a_layout_that_fits_and_a_model_that_is_not_there(tiny_dense: Path, tmp_path: Path) -> None:
    with open_ledger(tmp_path / "ledger", create=True) as ledger:
        fits = {"hf_checkpoint": str(tiny_dense), "tensor_model_parallel_size": 2}
        check_before_ranks(find_standing(ledger, fits))
        gone = {**fits, "hf_checkpoint": str(tmp_path / "none")}
        with pytest.raises(NotFound, match="no such folder"):
            check_before_ranks(find_standing(ledger, gone))
