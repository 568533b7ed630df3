"""The views over the events: what they hold, that they agree with what documents them."""

from __future__ import annotations

from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger import Ledger
from ledger.errors import InvalidArgument
from ledger.events import EVENTS, Event, ObservationAppended
from ledger.sql import run_query
from ledger.views import describe_view, register_views, view_names
from tests.ledger.factory import (
    RUN,
    SPECIAL,
    MemoryReader,
    ints,
    prompt,
    score,
    segment,
    step,
    story_tables,
    table_of,
)

SAMPLE_OF_EACH = {"prompt": 0, "two turns": 9, "special floats": 1, "two versions": 12}


def rows(reader: Any, sql: str) -> list[dict[str, Any]]:
    return list(run_query(reader, sql).to_pylist())


def bits(values: Any) -> list[int]:
    return np.asarray(values, dtype=np.float32).view(np.uint32).tolist()


def memory(*events: Event) -> MemoryReader:
    by_kind: dict[str, list[tuple[str, int, Event]]] = {}
    for seq, event in enumerate(events, start=1):
        by_kind.setdefault(event.KIND, []).append(("main", seq, event))
    return MemoryReader({kind: table_of(kind, found) for kind, found in by_kind.items()})


NOT_IN_THE_STORY = (
    "indexer_recorded",
    "prompts_left_out",
    "weights_loaded",
    "engine_weights",
    "eval_scored",
    "gap_recorded",
    "rows_retired",
    "run_resumed",
    "training_started",
)


@pytest.mark.parametrize("tables", [{}, story_tables()], ids=["empty", "story"])
def test_every_view_has_exactly_the_documented_columns(tables: dict[str, pa.Table]) -> None:
    with duckdb.connect() as con:
        register_views(con, MemoryReader(tables))
        for name in view_names():
            found = con.sql(f'SELECT * FROM "{name}"').to_arrow_table()
            doc, columns = describe_view(name)
            assert found.column_names == [column.name for column in columns], name
            assert doc, name
            assert all(column.doc for column in columns), name
            assert (found.num_rows == 0) == (not tables or name in NOT_IN_THE_STORY)


def test_the_stored_ledger_shows_what_the_tables_in_memory_show(story_ledger: Ledger) -> None:
    for branch in (None, "rloo"):
        stored = story_ledger.reader(RUN, branch)
        memory_reader = MemoryReader(story_tables(branch))
        for view in ("samples", "groups", "versions", "tokens"):
            query = f"SELECT * FROM {view} ORDER BY ALL"
            # repr, because NaN is not equal to itself
            assert repr(rows(stored, query)) == repr(rows(memory_reader, query)), (branch, view)


def test_every_event_is_a_view_and_in_events(everything: MemoryReader) -> None:
    counted = rows(everything, "SELECT kind, count(*) AS n FROM events GROUP BY kind")
    assert {row["kind"]: row["n"] for row in counted} == {
        kind: table.num_rows for kind, table in everything.tables.items()
    }
    assert set(EVENTS) <= set(view_names())


def test_a_trajectory_of_two_turns_is_put_together_in_order(everything: MemoryReader) -> None:
    (found,) = rows(everything, "SELECT * FROM trajectories WHERE index = 9")
    assert found["tokens"] == [102, 101, 102, 11, 12, 13, 50, 51, 14, 2]
    assert (found["prompt_length"], found["response_length"]) == (3, 7)
    assert found["loss_mask"] == [1, 1, 1, 0, 0, 1, 1]
    assert found["rollout_log_probs"] == [-0.25, -0.375, -0.5, None, None, -0.25, -0.375]
    assert found["weight_versions"] == [0, 0, 0, None, None, 0, 0]
    assert found["turn_of_tokens"] == [0, 0, 0, 0, 0, 1, 1]
    assert found["sources"] == ["sampled"] * 3 + ["tool"] * 2 + ["sampled"] * 2
    assert (found["turns"], found["segments"], found["observations"]) == (2, 2, 1)
    assert found["complete"] is True
    assert (found["rollout_id"], found["group_index"], found["finish_reason"]) == (8, 2, "stop")


def test_special_floats_keep_their_bits(everything: MemoryReader) -> None:
    table = run_query(everything, "SELECT rollout_log_probs FROM trajectories WHERE index = 1")
    assert bits(table["rollout_log_probs"][0].values.to_numpy()) == bits(SPECIAL)
    table = run_query(
        everything,
        "SELECT rollout_log_prob FROM tokens WHERE index = 1 AND response_position >= 0 "
        "ORDER BY position",
    )
    assert bits(table["rollout_log_prob"].to_numpy()) == bits(SPECIAL)


def test_versions_of_tokens_follow_the_spans(everything: MemoryReader) -> None:
    found = rows(
        everything,
        "SELECT index, weight_versions FROM trajectories WHERE index IN (12, 13, 17)",
    )
    assert {row["index"]: row["weight_versions"] for row in found} == {
        12: [0, 0, 1, 1],
        13: [1, 1, 1, 1],
        17: [None] * 4,
    }


def test_tokens_have_the_trainers_numbers_only_where_something_was_sampled(
    everything: MemoryReader,
) -> None:
    found = rows(everything, "SELECT * FROM tokens WHERE index = 9 ORDER BY position")
    assert [row["position"] for row in found] == list(range(10))
    assert [row["response_position"] for row in found] == [None] * 3 + list(range(7))
    assert [row["loss_mask"] for row in found] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert [row["log_prob"] is not None for row in found] == [
        source == "sampled" for source in (row["source"] for row in found)
    ]
    assert [row["advantage"] for row in found] == [None] * 3 + [0.5, 0.5, 0.5, 0, 0, 0.5, 0.5]
    assert {(row["step"], row["step_branch"]) for row in found} == {(0, "main")}
    untrained = rows(everything, "SELECT * FROM tokens WHERE index = 4")
    assert {row["loss_mask"] for row in untrained} == {0}
    assert {row["log_prob"] for row in untrained} == {None}
    assert {row["step"] for row in untrained} == {None}


def test_a_sample_that_two_branches_trained_is_one_trajectory(everything: MemoryReader) -> None:
    (tokens,) = rows(everything, "SELECT count(*) AS n FROM tokens WHERE index = 12")
    assert tokens["n"] == 7
    trained = rows(
        everything,
        "SELECT step_branch, count(*) AS n FROM trained_tokens WHERE index = 12 AND step = 1 "
        "GROUP BY step_branch ORDER BY step_branch",
    )
    assert trained == [{"step_branch": "main", "n": 7}, {"step_branch": "rloo", "n": 7}]
    (sample,) = rows(everything, "SELECT * FROM samples WHERE index = 12")
    assert (sample["trained_branch"], sample["times_trained"]) == ("rloo", 2)


def test_the_last_score_counts(everything: MemoryReader) -> None:
    (found,) = rows(everything, "SELECT * FROM rewards WHERE index = 2")
    assert (found["reward"], found["times_scored"]) == (0.0, 2)
    assert dict(found["parts"]) == {"exact": 0.0}


def test_the_reward_of_siblings_counts_once(everything: MemoryReader) -> None:
    groups = {row["group_index"]: row for row in rows(everything, "SELECT * FROM groups")}
    assert (groups[2]["size"], groups[2]["rollouts"]) == (4, 3)
    assert groups[2]["reward_mean"] == pytest.approx(1 / 3)
    # rewards 1 0 0: variance (4/9 + 1/9 + 1/9) / 2 = 1/3
    assert groups[2]["reward_std"] == pytest.approx((1 / 3) ** 0.5)
    versions = {r["weight_version"]: r for r in rows(everything, "SELECT * FROM versions")}
    # group 0: 1 0 0 0; group 2 counts three rollouts: 1 0 0
    assert versions[1]["reward_mean"] == pytest.approx(2 / 7)


def test_zero_variance_and_what_was_kept(everything: MemoryReader) -> None:
    groups = {row["group_index"]: row for row in rows(everything, "SELECT * FROM groups")}
    assert {number: row["zero_variance"] for number, row in groups.items()} == {
        0: False,
        1: True,
        2: False,
        3: False,
        4: False,
    }
    assert [(groups[n]["kept"], groups[n]["dropped"]) for n in range(5)] == [
        (4, 0),
        (0, 4),
        (4, 0),
        (4, 0),
        (0, 4),
    ]


@pytest.mark.parametrize(
    ("given_rewards", "zero_variance", "std"),
    [
        ([1.0], True, None),
        ([0.0, -0.0], True, 0.0),
        ([], None, None),
        ([float("inf"), float("inf")], False, float("nan")),
        ([float("nan"), 1.0], False, float("nan")),
        ([1.0, 0.0, 0.0, 0.0], False, 0.5),
    ],
)
def test_unusual_rewards_of_a_group(
    given_rewards: list[float], zero_variance: bool | None, std: float | None
) -> None:
    reader = memory(prompt(0, 0), *(score(i, value) for i, value in enumerate(given_rewards)))
    (found,) = rows(reader, "SELECT * FROM groups")
    assert found["zero_variance"] is zero_variance
    if std is None:
        # reward_std of no finite rewards is NaN only where there are rewards
        assert found["reward_std"] is None or (not given_rewards and np.isnan(found["reward_std"]))
    else:
        assert found["reward_std"] == pytest.approx(std, nan_ok=True)


def test_samples_say_what_became_of_them(everything: MemoryReader) -> None:
    found = {row["index"]: row for row in rows(everything, "SELECT * FROM samples")}
    assert len(found) == 20
    assert (found[4]["decision"], found[4]["reason"]) == ("filtered", "zero variance")
    assert (found[4]["trained_step"], found[4]["times_trained"]) == (None, 0)
    assert (found[8]["trained_step"], found[8]["trained_branch"]) == (0, "main")
    assert (found[9]["response_length"], found[9]["sampled_tokens"]) == (7, 5)
    assert (found[9]["turns"], found[9]["segments"]) == (2, 2)
    assert (found[12]["weight_version_min"], found[12]["weight_version_max"]) == (0, 1)
    assert found[17]["weight_version_min"] is None
    assert found[19]["reward"] is None
    assert (found[19]["decision"], found[19]["finish_reason"]) == ("aborted", "abort")


def test_a_sample_without_response_is_pending() -> None:
    found = rows(memory(prompt(0, 0)), "SELECT * FROM samples ORDER BY index")
    assert [row["index"] for row in found] == [0, 1, 2, 3]
    assert {row["decision"] for row in found} == {None}
    assert {row["response_length"] for row in found} == {0}


def test_consumption_keeps_the_order_of_training() -> None:
    committed = step(7, [5, 3, 9, 1], rollout_step=2, version_in=7, version_out=8)
    found = rows(memory(committed), "SELECT * FROM consumption ORDER BY position")
    assert [row["index"] for row in found] == [5, 3, 9, 1]
    assert [row["position"] for row in found] == [0, 1, 2, 3]
    assert [row["micro_batch"] for row in found] == [0, 0, 1, 1]


def test_staleness_is_counted_from_the_oldest_token_to_the_first_step(
    everything: MemoryReader,
) -> None:
    # Rollout step 1 trains on 12 to 15, on both branches, from version 1. Version 0 began 12.
    found = rows(everything, "SELECT * FROM staleness ORDER BY rollout_step, branch")
    counted = [tuple(row.values())[1:] for row in found]
    assert counted == [
        ("main", 0, 0, 8, 0.0, 0, 0, 0, 0),
        ("main", 1, 1, 4, 0.25, 1, 1, 1, 0),
        ("rloo", 1, 1, 4, 0.25, 1, 1, 1, 0),
    ]


def test_metrics_are_a_map_unless_a_name_occurs_twice() -> None:
    import dataclasses

    good = step(0, [0, 1], rollout_step=0, version_in=0, version_out=1)
    twice = dataclasses.replace(good, step=1, metric_names=["loss", "loss"])
    found = rows(memory(good, twice), "SELECT step, metrics['entropy'] AS e, metrics FROM steps")
    assert {row["step"]: row["e"] for row in found} == {0: 2.0, 1: None}
    assert {row["step"]: row["metrics"] is None for row in found} == {0: False, 1: True}


def test_the_tree_of_versions(everything: MemoryReader) -> None:
    found = {row["weight_version"]: row for row in rows(everything, "SELECT * FROM versions")}
    assert {v: row["parent_version"] for v, row in found.items()} == {0: None, 1: 0, 2: 1, 3: 1}
    assert {v: row["depth"] for v, row in found.items()} == {0: 0, 1: 1, 2: 2, 3: 2}
    assert {v: row["branch"] for v, row in found.items()} == {
        0: "main",
        1: "main",
        2: "main",
        3: "rloo",
    }
    assert {v: row["children"] for v, row in found.items()} == {0: 1, 1: 2, 2: 0, 3: 0}
    assert found[1]["checkpoint"] is None
    assert found[2]["checkpoint"] == "checkpoints/2"


def test_a_branch_sees_its_ancestors_up_to_the_fork() -> None:
    on_branch = MemoryReader(story_tables("rloo"))
    found = rows(on_branch, "SELECT weight_version FROM versions ORDER BY weight_version")
    assert [row["weight_version"] for row in found] == [0, 1, 3]


def test_one_event_with_a_branch_of_its_own_has_one_branch_column(everything: MemoryReader) -> None:
    (found,) = rows(everything, "SELECT * FROM branch_forked")
    assert (found["branch"], found["parent_branch"]) == ("rloo", "main")


def test_a_view_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(InvalidArgument, match="trajectories"):
        describe_view("nothing")
    with pytest.raises(InvalidArgument):
        describe_view("_pieces")


pieces = st.lists(
    st.tuples(
        st.booleans(),  # sampled or observed
        st.lists(st.tuples(st.integers(1, 3), st.integers(-1, 2)), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=15, deadline=None)
@given(pieces, st.randoms(use_true_random=False))
def test_any_pieces_in_any_order_of_appending_join_in_order_of_start(
    drawn: list[tuple[bool, list[tuple[int, int]]]], random: Any
) -> None:
    events: list[Event] = []
    tokens: list[int] = []
    mask: list[int] = []
    versions: list[int | None] = []
    for number, (sampled, spans) in enumerate(drawn):
        length = sum(count for count, _ in spans)
        new = list(range(len(tokens), len(tokens) + length))
        start = len(tokens)
        if sampled:
            events.append(
                segment(
                    0,
                    ints(*new),
                    rollout_step=0,
                    segment=number,
                    turn=number,
                    start=start,
                    spans=spans,
                )
            )
            versions += [v if v >= 0 else None for count, v in spans for _ in range(count)]
        else:
            events.append(
                ObservationAppended(
                    index=0,
                    rollout_id=0,
                    turn=number,
                    start=start,
                    tokens=ints(*new),
                    source="tool",
                )
            )
            versions += [None] * length
        tokens += new
        mask += [int(sampled)] * length
    random.shuffle(events)
    (found,) = rows(memory(prompt(0, 0), *events), "SELECT * FROM trajectories")
    assert found["tokens"][3:] == tokens
    assert found["loss_mask"] == mask
    assert found["weight_versions"] == versions
    assert [p is None for p in found["rollout_log_probs"]] == [m == 0 for m in mask]
    assert found["complete"] is True
