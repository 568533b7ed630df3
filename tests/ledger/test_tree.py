"""`ledger log` draws the tree of versions; `ledger show` a trajectory."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from ledger.errors import NotFound
from ledger.events import WeightsLoaded
from ledger.show import draw_trajectory, read_trajectory
from ledger.tree import LogEntry, draw_log, read_log
from tests.ledger.factory import MemoryReader, story_tables, table_of


def entry(version: int, parent: int | None, branch: str = "main") -> LogEntry:
    return LogEntry(version, parent, branch, version, None, None, None, "ab" * 32, None)


def graph(entries: list[LogEntry], ascii_only: bool = False) -> list[str]:
    """The drawing up to each version's number."""
    return [line.plain.partition("  ")[0] for line in draw_log(entries, ascii_only=ascii_only)]


def test_a_line_of_versions() -> None:
    assert graph([entry(2, 1), entry(1, 0), entry(0, None)]) == ["● 2", "● 1", "● 0"]


def test_a_branch_joins_the_line_of_its_parent() -> None:
    entries = [entry(3, 1, "b"), entry(2, 1), entry(1, 0), entry(0, None)]
    assert graph(entries) == ["● 3", "│ ● 2", "├─╯", "● 1", "● 0"]
    assert graph(entries, ascii_only=True) == ["* 3", "| * 2", "|-/", "* 1", "* 0"]


def test_branches_of_branches() -> None:
    parents = {9: 4, 8: 7, 7: 3, 6: 3, 5: 4, 4: 3, 3: 2, 2: None}
    assert graph([entry(version, parent) for version, parent in parents.items()]) == [
        "● 9",
        "│ ● 8",
        "│ ● 7",
        "│ │ ● 6",
        "│ │ │ ● 5",
        "├─┼─┼─╯",
        "● │ │ 4",
        "├─┴─╯",
        "● 3",
        "● 2",
    ]


def test_a_log_that_was_cut_draws_without_the_parents() -> None:
    assert graph([entry(9, 8), entry(7, 5)]) == ["● 9", "│ ● 7"]


def test_a_version_says_how_many_engines_took_it() -> None:
    taken = [
        WeightsLoaded(
            weight_version=1,
            engine="sglang",
            engine_address=address,
            transport="tensor",
            base_version=0,
            pause_mode="retract",
            sent_tensors=1,
            sent_bytes=4,
            root=b"r" * 32,
            compared="everything",
            reason="published",
            cache_flushed=True,
        )
        for address in ("http://a", "http://b", "http://a")
    ]
    rows = [("main", 1000 + n, one) for n, one in enumerate(taken)]
    tables = {**story_tables(), "weights_loaded": table_of("weights_loaded", rows)}
    found = {e.weight_version: e.engines for e in read_log(MemoryReader(tables))}
    assert found == {**dict.fromkeys(found, 0), 1: 2}
    [line] = [
        one.plain for one in draw_log(read_log(MemoryReader(tables))) if "engine" in one.plain
    ]
    assert "  2 engines" in line


def test_each_version_says_what_it_is(everything: MemoryReader) -> None:
    lines = [line.plain for line in draw_log(read_log(everything))]
    roots = [e.root for e in read_log(everything)]
    assert lines == [
        f"● 3  step 1  reward 0.5000  {roots[0][:10]}  checkpoint  (rloo)",
        f"│ ● 2  step 1  reward 0.5000  {roots[1][:10]}  checkpoint  (main)",
        "├─╯",
        f"● 1  step 0  reward 0.2857  {roots[2][:10]}",
        f"● 0  start  {roots[3][:10]}  checkpoint",
    ]


def drawn(index: int, *, colour: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=colour)
    console.print(draw_trajectory(read_trajectory(MemoryReader(story_tables()), index)))
    return out.getvalue()


def test_a_trajectory_shows_turns_text_tokens_and_fate() -> None:
    text = drawn(9)
    for part in (
        "sample 9  rollout 8  group 2",
        "reward 1 (raw 1; exact 1) by exact 1",
        "kept (by all)",
        "trained in step 0 of main, micro-batch 1: version 0 → 1",
        "prompt 2",
        "turn 0\n",
        "  tool, 2 tokens at 3 to 5",
        "  42",
        "turn 1\n  sampled, 2 tokens at 5 to 7  [0:2] version 0",
        "response 9",
    ):
        assert part in text
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    table = {row[0]: row[1:] for row in rows if row[-1] in ("prompt", "sampled", "tool")}
    assert table["0"] == ["102", "0", "prompt"]
    assert table["3"] == [
        "11",
        "1",
        "0",
        "-0.250000",
        "-0.160000",
        "+9.00e-02",
        "0.500000",
        "sampled",
    ]
    assert table["6"] == ["50", "0", "0.000000", "tool"]
    assert len(table) == 10


def test_versions_have_colours_on_a_terminal() -> None:
    text = drawn(12, colour=True)
    assert re.search(r"\x1b\[[\d;]*36m\[0:2\] version 0", text)
    assert re.search(r"\x1b\[[\d;]*35m\[2:4\] version 1", text)


def test_text_of_a_model_cannot_drive_the_terminal() -> None:
    tables = story_tables()
    scored = tables["sample_scored"]
    place = scored.column_names.index("response_text")
    evil = ["\x1b[2J\x07[bold]x" for _ in range(scored.num_rows)]
    tables["sample_scored"] = scored.set_column(place, "response_text", [evil])
    out = io.StringIO()
    Console(file=out, width=200).print(draw_trajectory(read_trajectory(MemoryReader(tables), 0)))
    assert "\\x1b[2J\\x07[bold]x" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_a_sample_that_is_not_there(everything: MemoryReader) -> None:
    with pytest.raises(NotFound, match="samples 0 to 19"):
        read_trajectory(everything, 20)
    with pytest.raises(NotFound, match="no samples"):
        read_trajectory(MemoryReader({}), 0)
