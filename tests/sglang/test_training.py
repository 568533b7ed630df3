"""Whole trainings on a real engine: recorded, checked, and replayed bit for bit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.sglang.models import byte_tokenizer
from tests.sglang.servers import Served
from tests.sglang.training import checked, rows, train

SEGMENTS = 'select * from segment_generated order by "index", segment'


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_steps_are_replayed_bit_for_bit(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Synchronous. The mixture's trainer routes as the engine did; log-probs of both agree."""
    server: Served = request.getfixturevalue(kind)
    assert train(tmp_path / "ledger", server)["steps"] == 3
    with checked(tmp_path / "ledger") as ledger:
        segments = rows(ledger, SEGMENTS)
        assert {one["engine_version"] for one in segments} == {"0.5.23"}
        assert {one["engine_address"] for one in segments} == {server.address}
        assert {v for one in segments for v in one["span_versions"]} == {0, 1, 2}
        loaded = rows(ledger, "select * from weights_loaded order by weight_version")
        assert [one["weight_version"] for one in loaded] == [0, 1, 2, 3]
        assert {one["transport"] for one in loaded} == {"tensor"}
        assert len({one["engine_checksum"] for one in loaded}) == 4
        steps = rows(ledger, "select metric_names, metric_values from step_committed")
        for step in steps:
            metrics = dict(zip(step["metric_names"], step["metric_values"], strict=True))
            # Float32 kernels of two programs.
            assert metrics["logprob_mismatch_max"] < 1e-4
            if kind == "moe":
                assert metrics["routing_agreement_set"] > 0.99
        routed = rows(ledger, 'select "index" from routing_recorded')
        assert len(routed) == (len(segments) if kind == "moe" else 0)


def test_ids_that_their_text_would_not_give_are_trained_on_all_the_same(
    dense: Served, tmp_path: Path
) -> None:
    """Bytes that are no UTF-8 decode to something else: that is on record, and the ids stay."""
    train(tmp_path / "ledger", dense, num_rollout=1)
    tokenizer = byte_tokenizer()
    with checked(tmp_path / "ledger", replayed=False) as ledger:
        segments = rows(ledger, SEGMENTS)
        drifted = [one for one in segments if one["retokenization_drift"]]
        assert drifted
        for one in drifted:
            again = tokenizer(tokenizer.decode(one["tokens"]), add_special_tokens=False)
            assert again["input_ids"] != one["tokens"]
        [step] = rows(ledger, "select metric_names, metric_values from step_committed")
        metrics = dict(zip(step["metric_names"], step["metric_values"], strict=True))
        # The trainer's log-probs are of the same ids.
        assert metrics["logprob_mismatch_max"] < 1e-4


def test_partial_rollouts_go_on_under_new_weights(moe: Served, tmp_path: Path) -> None:
    """What was cut keeps tokens, versions and experts; the next segment begins where it ends."""
    train(
        tmp_path / "ledger",
        moe,
        num_rollout=4,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=True,
        over_sampling_batch_size=4,
    )
    with checked(tmp_path / "ledger") as ledger:
        recycled = rows(ledger, "select * from sample_decided where decision = 'recycled'")
        assert recycled
        kept = rows(ledger, "select * from sample_decided where decision = 'kept'")
        assert len(kept) == 4 * 2 * 4
        segments = rows(ledger, SEGMENTS)
        routed = {
            (one["index"], one["segment"]): one
            for one in rows(ledger, 'select "index", segment, "start", rows from routing_recorded')
        }
        prompts = {
            index: len(one["tokens"])
            for one in rows(ledger, "select indices, tokens from prompt_issued")
            for index in one["indices"]
        }
        resumed = 0
        for before, after in pairwise(segments):
            if before["index"] != after["index"]:
                continue
            resumed += 1
            assert before["finish_reason"] == "abort"
            assert after["turn"] == before["turn"]
            assert after["start"] == before["start"] + len(before["tokens"])
            assert after["sampling_seed"] == before["sampling_seed"]
            assert min(after["span_versions"]) >= max(before["span_versions"])
            first, second = (routed[one["index"], one["segment"]] for one in (before, after))
            assert second["start"] == first["start"] + first["rows"]
            whole = prompts[after["index"]] + after["start"] + len(after["tokens"])
            assert second["start"] + second["rows"] == whole - 1
        assert resumed
        assert any(one["staleness"] for one in kept)


def test_fully_asynchronous_rollouts_stay_within_their_bound(
    dense: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end samples are still on their way: what they have is recorded, and nothing fails."""
    train(
        tmp_path / "ledger",
        dense,
        num_rollout=5,
        fully_async=True,
        use_rollout_logprobs=True,
        max_weight_staleness=1,
    )
    with checked(tmp_path / "ledger") as ledger:
        kept = rows(ledger, "select * from sample_decided where decision = 'kept'")
        assert len(kept) == 5 * 2 * 4
        assert {one["staleness"] for one in kept} <= {0, 1}
        assert 1 in {one["staleness"] for one in kept}
        stale = rows(ledger, "select * from sample_decided where decision = 'stale'")
        assert all(one["staleness"] > 1 for one in stale)
        assert rows(ledger, "select * from segment_generated where finish_reason = 'abort'")
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
