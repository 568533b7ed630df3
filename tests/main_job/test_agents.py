"""Episodes of several turns and samples, from the engine to the trained step and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ledger import open_ledger
from ledger.check import check_ledger
from replay.cli import main as replay
from tests.main_job.job import train

AGENT = {
    "environment": "tests.main_job.environments:FirstLetters",
    "compact_context_at": 20,
    "compact_context_prompt": "sum:",
    "recompute_logprobs_via_prefill": False,
    "rollout_max_response_len": 5,
    "n_samples_per_prompt": 3,
    "num_steps_per_rollout": 2,
    "micro_batch_size": 3,
    "seq_length": 64,
    "eval_interval": 2,
    "n_eval_prompts": 4,
}


def test_siblings_and_turns_are_trained_counted_once_and_replayed(
    tiny_moe: Path, tmp_path: Path
) -> None:
    """With experts: the routing of every engine call, and of what stands between, is replayed."""
    train(tmp_path / "l", tiny_moe, **AGENT)
    with open_ledger(tmp_path / "l") as ledger:
        (run,) = ledger.runs()
        reader = ledger.reader(run.run_id)
        steps = reader.sql(
            "SELECT c.step, count(*) AS samples, count(DISTINCT s.rollout_id) AS rollouts,"
            " count(s.parent_index) AS siblings, max(s.turns) AS turns\n"
            "FROM consumption AS c JOIN samples AS s ON c.index = s.index\n"
            "GROUP BY c.step ORDER BY c.step"
        ).to_pylist()
        # 2 groups × 3 rollouts, in 2 steps of 3 rollouts: siblings come on top.
        assert [row["rollouts"] for row in steps] == [3, 3, 3, 3]
        assert sum(row["siblings"] for row in steps) > 0
        assert max(row["turns"] for row in steps) > 2
        together = reader.sql(
            "SELECT s.rollout_id FROM consumption AS c JOIN samples AS s ON c.index = s.index\n"
            "GROUP BY s.rollout_id HAVING count(DISTINCT c.step) > 1"
        )
        assert together.num_rows == 0
        report = check_ledger(reader)
        assert report.ok, report.findings
        signals = reader.sql(
            "SELECT t.loss_mask AS sampled, s.loss_mask AS used FROM signal_recorded AS s\n"
            "JOIN trajectories AS t ON s.index = t.index WHERE t.observations > 0"
        ).to_pylist()
        assert signals
        assert all(np.array_equal(row["sampled"], row["used"]) for row in signals)
        scores = reader.table("sample_scored").to_pylist()
        assert {(s["verifier"], s["verifier_version"]) for s in scores} == {("first_letters", "1")}
        evaluated = reader.table("eval_scored").to_pylist()
        assert [row["weight_version"] for row in evaluated] == [0, 4]
        for row in evaluated:
            assert row["verifier"] == "first_letters, or tests.main_job.rewards:starts_early"
            assert {reward * 4 for reward in row["rewards"]} <= {0, 1, 2, 3, 4}
            # Four turns and a summary, not one answer of five tokens.
            assert min(len(tokens) for tokens in row["response_tokens"]) > 5
    assert replay(["verify", "--ledger", str(tmp_path / "l")]) == 0
