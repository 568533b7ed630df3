"""Episodes of several turns and samples: how they are shown, and how groups count them."""

from __future__ import annotations

import dataclasses

import pyarrow as pa
from rich.console import Console

from ledger.show import draw_trajectory, read_trajectory
from tests.ledger.factory import MemoryReader, longs, prompt, score, story_tables, table_of
from tests.ledger.test_views import rows


def with_sibling() -> MemoryReader:
    """The story, and sample 50, which began in the episode of sample 10 and shares its reward."""
    tables = story_tables()
    began = dataclasses.replace(
        prompt(2, 0), indices=longs(50), rollout_ids=longs(10), parent_index=10, text="go on"
    )
    same = dataclasses.replace(score(10, 0.0), index=50)
    for kind, event in (("prompt_issued", began), ("sample_scored", same)):
        added = table_of(kind, [("main", 1000, event)])
        tables[kind] = pa.concat_tables([tables[kind], added])
    return MemoryReader(tables)


def shown(reader: MemoryReader, index: int) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(draw_trajectory(read_trajectory(reader, index)))
    return capture.get()


def test_turns_and_what_tools_said_are_shown_in_order() -> None:
    lines = shown(MemoryReader(story_tables()), 8).splitlines()
    begin = lines.index("turn 0")
    assert [line.split("  seed")[0].rstrip() for line in lines[begin : begin + 5]] == [
        "turn 0",
        "  sampled, 3 tokens at 0 to 3  [0:3] version 0  stop",
        "  tool, 2 tokens at 3 to 5",
        "    42",
        "turn 1",
    ]
    # Parameters are told once, where they stay the same.
    assert "temperature 1" in lines[begin + 1]
    assert "temperature" not in lines[begin + 5]


def test_siblings_are_named_on_both_sides() -> None:
    reader = with_sibling()
    assert "the same rollout, one reward: samples 50 (began in 10)" in shown(reader, 10)
    text = shown(reader, 50)
    assert "began in the episode of sample 10" in text
    assert "the same rollout, one reward: samples 10\n" in text.replace(" \n", "\n")
    assert "the same rollout" not in shown(reader, 11)


def test_a_group_stays_one_row_and_counts_the_rollout_once() -> None:
    before = {r["group_index"]: r for r in rows(MemoryReader(story_tables()), "FROM groups")}
    after = {r["group_index"]: r for r in rows(with_sibling(), "FROM groups")}
    assert len(rows(with_sibling(), "FROM groups")) == len(before)
    assert (after[2].pop("siblings"), before[2].pop("siblings")) == (1, 0)
    assert after[2] == before[2]
    (sample,) = rows(with_sibling(), "SELECT * FROM samples WHERE index = 50")
    assert (sample["parent_index"], sample["rollout_id"]) == (10, 10)
