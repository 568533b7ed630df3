"""Partial and asynchronous rollouts under real training, with the engine of this process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import ledger.cli
import replay.cli
from ledger import open_ledger
from ledger.errors import InvalidArgument
from ledger.writer import Writer
from rollout.engines.batching import BatchingEngine
from tests.main_job.job import train

LONG: dict[str, Any] = {
    "recompute_logprobs_via_prefill": False,
    "seq_length": 48,
    "rollout_max_response_len": 24,
    "use_rollout_logprobs": True,
}


def rows(where: Path, query: str) -> list[dict[str, Any]]:
    with open_ledger(where) as opened:
        return opened.reader("run").sql(query).to_pylist()


def assert_sound(where: Path, rollouts: int) -> None:
    """Every rollout step trained on its kept samples, each once, and the bits can be had again."""
    trained = rows(where, "select index, rollout_step from consumption")
    assert len({row["index"] for row in trained}) == len(trained) == rollouts * 8
    kept = rows(where, "select index, rollout_step from decisions where last and decision = 'kept'")
    assert sorted(map(str, kept)) == sorted(map(str, trained))
    assert ledger.cli.main(["check", "--ledger", str(where)]) == 0
    assert replay.cli.main(["verify", "--ledger", str(where)]) == 0


def test_what_is_cut_goes_on_and_is_trained_on(
    tiny_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group a batch of the engine: when two are kept, the next ones are on their way."""
    small = functools.partial(BatchingEngine, max_batch_rows=4)
    monkeypatch.setattr("rollout.engines.batching.BatchingEngine", small)
    where = tmp_path / "ledger"
    train(
        where,
        tiny_moe,
        **LONG,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=True,
        over_sampling_batch_size=4,
        dynamic_sampling_filter_path="none",
        num_rollout=3,
    )
    assert_sound(where, 3)
    recycled = rows(where, "select distinct group_index from decisions where decision = 'recycled'")
    assert {2, 3} <= {row["group_index"] for row in recycled}
    # Put back with what they had, they came next, in their order.
    first = rows(
        where,
        "select rollout_step, list(distinct group_index order by group_index) as groups "
        "from decisions where last and decision = 'kept' group by all order by all",
    )
    assert first[1]["groups"] == [2, 3]
    stale = rows(where, "select rollout_step, largest from staleness order by rollout_step")
    assert [row["largest"] for row in stale][:2] == [0, 1]


class Dead(Exception):
    """The process ended here."""


def test_asynchronous_rollouts_go_on_after_a_kill(
    tiny_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "ledger"
    shape = {**LONG, "fully_async": True, "max_weight_staleness": 2, "num_rollout": 4}
    shape["n_eval_prompts"] = 4
    append, steps = Writer.append, []

    def mortal(writer: Writer, events: Any, **keywords: Any) -> Any:
        """From the commit of the second step on nothing of this process is stored."""
        steps.extend(event for event in events if event.KIND == "step_committed")
        if len(steps) > 2:
            raise Dead
        return append(writer, events, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "append", mortal)
        with pytest.raises(Dead):
            train(where, tiny_dense, **shape)
    again = train(where, tiny_dense, **shape, eval_interval=1)
    assert (again["kind"], again["weight_version"]) == ("resume", 4)
    assert_sound(where, 4)
    # Nothing that was given out is given out again, and what was on its way is there.
    issued = rows(where, "select source_row, retry_of from prompt_issued order by seq")
    first = [row["source_row"] for row in issued if row["retry_of"] is None]
    assert first == list(range(len(first)))
    stale = rows(where, "select largest from staleness")
    assert max(row["largest"] for row in stale) <= 2
    measured = rows(where, "select weight_version from eval_scored order by all")
    assert [row["weight_version"] for row in measured] == [2, 3, 4]
    with pytest.raises(InvalidArgument, match="--use-rollout-logprobs takes the ratio"):
        train(tmp_path / "refused", tiny_dense, **{**shape, "use_rollout_logprobs": False})
    with pytest.raises(InvalidArgument, match="leave --partial-rollout out"):
        train(tmp_path / "refused", tiny_dense, **shape, partial_rollout=True)
    with pytest.raises(InvalidArgument, match="raise it, or lower --update-weights-interval"):
        train(tmp_path / "refused", tiny_dense, **shape, update_weights_interval=4)
