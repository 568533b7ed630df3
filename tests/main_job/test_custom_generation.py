"""`ledger-train --custom-generate-function-path`: slime's functions, to the trained step."""

from __future__ import annotations

from pathlib import Path

from ledger import open_ledger
from ledger.check import check_ledger
from tests.main_job.job import train

MODULE = "tests.main_job.generation"


def test_a_custom_function_generates_what_is_trained(tiny_dense: Path, tmp_path: Path) -> None:
    train(
        tmp_path / "l",
        tiny_dense,
        custom_generate_function_path=f"{MODULE}:two_turns",
        custom_rm_path=f"{MODULE}:length_and_letters",
        rollout_sample_hook_path=[f"{MODULE}:seen"],
        reward_key="score",
        recompute_logprobs_via_prefill=False,
        num_rollout=1,
        seq_length=32,
    )
    with open_ledger(tmp_path / "l") as ledger:
        reader = ledger.reader("run", "main")
        segments = reader.table("segment_generated").to_pylist()
        observed = reader.table("observation_appended").to_pylist()
        scored = reader.table("sample_scored").to_pylist()
        report = check_ledger(reader)
        steps = reader.table("step_committed").to_pylist()
    assert report.ok, report.findings
    assert {(one["engine"], one["segment"], one["turn"]) for one in segments} == {
        ("transformers", 0, 0),
        ("transformers", 1, 1),
    }
    assert {(one["text"], one["source"]) for one in observed} == {("ok", "environment")}
    assert {one["verifier"] for one in scored} == {f"{MODULE}:length_and_letters"}
    for one in scored:
        assert one["part_names"] == ["length"]
        assert 0 <= one["raw_reward"] < 7
    (step,) = steps
    trained = {(s["index"], s["segment"]): len(s["tokens"]) for s in segments}
    assert step["trained_tokens"] == sum(
        size for (index, _), size in trained.items() if index in step["indices"]
    )
