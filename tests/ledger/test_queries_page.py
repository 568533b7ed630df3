"""The page of worked queries: each query runs, and answers what the story says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ledger import Ledger
from ledger.sql import run_query
from tests.ledger.factory import REWARDS, RUN, MemoryReader, decide, prompt, step, table_of

PAGE = Path(__file__).parents[2] / "docs" / "queries.md"
QUERIES = re.findall(r"^```sql\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def ask(ledger: Ledger, containing: str) -> list[dict[str, Any]]:
    (query,) = (q for q in QUERIES if containing in q)
    return list(ledger.reader(RUN, None).sql(query).to_pylist())


@pytest.mark.parametrize("query", QUERIES, ids=range(len(QUERIES)))
def test_each_query_runs(story_ledger: Ledger, query: str) -> None:
    assert story_ledger.reader(RUN, None).sql(query).num_columns > 1


def test_reward_by_version(story_ledger: Ledger) -> None:
    found = ask(story_ledger, "weight_version_min AS version")
    # Version 0 sampled rollouts 0–8, 10, 11 (rewards 1 at 0 and 8) and began rollout 12 (reward 1).
    assert found[0] == {"version": 0, "rollouts": 12, "reward": pytest.approx(3 / 12)}
    # Version 1: 13, 14, 15 give 0 1 0; 16 and 18 give 0.5 and 0.
    assert found[1] == {"version": 1, "rollouts": 5, "reward": pytest.approx(1.5 / 5)}
    assert found[2] == {"version": None, "rollouts": 1, "reward": 0.25}


def test_zero_variance_groups(story_ledger: Ledger) -> None:
    assert [row["group_index"] for row in ask(story_ledger, "zero_variance")] == [1]


def test_largest_mismatch_first(story_ledger: Ledger) -> None:
    found = ask(story_ledger, "branch LIMIT 20")
    # The trainer differs by index / 100; step 1 trained samples 12–15 on both branches.
    assert [row["index"] for row in found[:4]] == [15, 15, 14, 14]
    assert found[0]["largest"] == pytest.approx(0.15, abs=1e-6)
    # Sample 1 has -inf and NaN: only its −0.0 can be compared.
    assert next(row for row in found if row["index"] == 1)["tokens"] == 1


def test_mismatch_by_version(story_ledger: Ledger) -> None:
    found = {row["weight_version"]: row for row in ask(story_ledger, "sum(not_finite)")}
    # Version 0: samples 0, 2, 3 (3 tokens), 8 to 11 (5), the −0.0 of 1; twice the 2 of 12.
    by_index = {0: 3, 2: 3, 3: 3, 1: 1} | dict.fromkeys(range(8, 12), 5) | {12: 2 * 2}
    differences = sum(count * index / 100 for index, count in by_index.items())
    assert found[0]["tokens"] == sum(by_index.values()) == 34
    assert found[0]["mean"] == pytest.approx(differences / 34, abs=1e-6)
    assert found[0]["largest"] == pytest.approx(0.12, abs=1e-6)
    assert found[0]["not_finite"] == 2
    # Version 1: twice the other 2 of 12, and the 4 of 13, 14 and 15.
    assert found[1]["tokens"] == 2 * (2 + 3 * 4)
    assert found[1]["largest"] == pytest.approx(0.15, abs=1e-6)
    assert set(found) == {0, 1}


def test_each_reward_is_its_samples(story_ledger: Ledger) -> None:
    found = ask(story_ledger, "place_in_batch")
    rewards = {4 * g + i: reward for g, of in REWARDS.items() for i, reward in enumerate(of)}
    assert {row["index"]: row["reward"] for row in found} == {i: rewards.get(i) for i in range(20)}
    # Group 1 was filtered: the batch goes on with sample 8, which has the reward of sample 8.
    main = [row for row in found if row["step"] == 0]
    assert [(r["index"], r["place_in_batch"], r["reward"], r["decision"]) for r in main] == [
        (index, place, rewards[index], "kept")
        for place, index in enumerate((0, 1, 2, 3, 8, 9, 10, 11))
    ]
    assert {r["decision"] for r in found if 4 <= r["index"] < 8} == {"filtered"}


def test_what_cannot_be_compared(story_ledger: Ledger) -> None:
    found = ask(story_ledger, "AND NOT isfinite")
    assert [(row["index"], row["position"]) for row in found] == [(1, 4), (1, 5)]


def test_staleness(story_ledger: Ledger) -> None:
    found = ask(story_ledger, "least")
    assert [(r["branch"], r["step"], r["least"], r["mean"], r["most"]) for r in found] == [
        ("main", 0, 0, 0.0, 0),
        ("main", 1, 0, 0.25, 1),
        ("rloo", 1, 0, 0.25, 1),
    ]


def test_what_was_dropped(story_ledger: Ledger) -> None:
    found = {row["decision"]: row for row in ask(story_ledger, "decision <> 'kept'")}
    assert {name: (row["samples"], row["tokens"]) for name, row in found.items()} == {
        "filtered": (4, 12),
        "surplus": (3, 12),
        "aborted": (1, 4),
    }
    assert found["filtered"]["rule"] == "check_reward_nonzero_std"


def test_what_was_decided_more_than_once_and_issued_again(story_ledger: Ledger) -> None:
    # The story decides each sample once, and issues nothing again.
    assert ask(story_ledger, "AS rollout_steps") == []
    assert ask(story_ledger, "again.retry_of") == []


def test_decisions_of_a_sample_that_was_put_back_and_of_a_group_that_came_again() -> None:
    events = [
        decide(0, "recycled", rollout_step=0),
        decide(0, "kept", rollout_step=1),
        decide(4, "failed", rollout_step=0, reason="a tool crashed", rule="the rule"),
    ]
    issued = [prompt(0, 0), prompt(1, 0), replace(prompt(2, 0), retry_of=1)]
    reader = MemoryReader(
        {
            "sample_decided": table_of(
                "sample_decided", [("main", 3 + n, event) for n, event in enumerate(events)]
            ),
            "prompt_issued": table_of(
                "prompt_issued", [("main", n, event) for n, event in enumerate(issued)]
            ),
        }
    )
    (put_back,) = (q for q in QUERIES if "AS rollout_steps" in q)
    assert run_query(reader, put_back).to_pylist() == [
        {"index": 0, "rollout_steps": [0, 1], "decisions": ["recycled", "kept"]}
    ]
    (again,) = (q for q in QUERIES if "again.retry_of" in q)
    assert run_query(reader, again).to_pylist() == [
        {
            "retry_of": 1,
            "group_index": 2,
            "source_row": issued[2].source_row,
            "decision": "failed",
            "rule": "the rule",
            "reason": "a tool crashed",
        }
    ]


def test_which_version_sampled_which_tokens(story_ledger: Ledger) -> None:
    rows = [row for row in ask(story_ledger, "AS first, start") if row["index"] in (12, 17)]
    assert [(r["index"], r["weight_version"], r["first"], r["last"]) for r in rows] == [
        (12, 0, 0, 1),
        (12, 1, 2, 3),
        (17, -1, 0, 3),
    ]
    by_version = ask(story_ledger, "GROUP BY engine, engine_address")
    assert {row["weight_version"] for row in by_version} == {-1, 0, 1}
    sampled = story_ledger.reader(RUN, None).sql("SELECT sum(sampled_tokens) AS n FROM samples")
    assert sum(row["tokens"] for row in by_version) == sampled.to_pylist()[0]["n"]


def test_tokens_of_a_step(story_ledger: Ledger) -> None:
    found = ask(story_ledger, "step_branch = 'main' AND step = 1")
    assert len(found) == 16
    assert {row["index"] for row in found} == {12, 13, 14, 15}


def test_nothing_was_trained_twice(story_ledger: Ledger) -> None:
    assert ask(story_ledger, "FROM consumption GROUP BY branch, index") == []
    assert ask(story_ledger, "AS trained, count(DISTINCT index)") == [
        {"branch": "main", "trained": 12, "samples": 12},
        {"branch": "rloo", "trained": 4, "samples": 4},
    ]


def test_a_sample_that_was_trained_twice_is_found() -> None:
    (query,) = (q for q in QUERIES if "HAVING count(*) > 1\n" in q)
    steps = [
        step(n, [0, 1, n + 4, 7], rollout_step=n, version_in=n, version_out=n + 1) for n in (0, 1)
    ]
    forged = MemoryReader(
        {
            "step_committed": table_of(
                "step_committed", [("main", n, s) for n, s in enumerate(steps)]
            )
        }
    )
    assert run_query(forged, query).to_pylist() == [
        {"branch": "main", "index": index, "times": 2, "steps": [0, 1]} for index in (0, 1, 7)
    ]


def test_what_came_since(story_ledger: Ledger) -> None:
    found = ask(story_ledger, "seq > 42")
    assert sum(row["events"] for row in found) == story_ledger.run(RUN).head_seq - 42
    assert found[0]["first"] == 43
