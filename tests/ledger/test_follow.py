"""Followers see every event once, in order, while processes write; and look at what is new only."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from ledger import Ledger, open_ledger
from ledger.cli import main
from ledger.errors import InvalidArgument, NotFound
from ledger.follow import NewEvents, events_after, follow
from tests.ledger.factory import RUN, decide, prompt, score

WRITERS, COMMITS = 2, 15


def write(folder: Path, number: int) -> None:
    """One process's part: commits of one to three events on samples of its own."""
    with open_ledger(folder) as ledger, ledger.writer(RUN, producer=f"w{number}") as writer:
        for commit in range(COMMITS):
            group = 100 * (number + 1) + commit
            scores = [score(4 * group + i, float(number)) for i in range(commit % 3)]
            writer.append([prompt(group, 0), *scores])


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with open_ledger(tmp_path / "ledger", create=True) as made:
        made.create_run(RUN)
        yield made


def numbers(news: list[NewEvents]) -> list[int]:
    """The numbers of all events; each batch agrees with what it says of itself."""
    found: list[int] = []
    for events in news:
        assert events.table is not None
        seqs = events.table["seq"].to_pylist()
        assert seqs == list(range(events.first_seq, events.last_seq + 1))
        assert events.table["branch"].to_pylist() == [events.branch] * len(seqs)
        found += seqs
    return found


def test_a_follower_of_writing_processes_misses_and_repeats_nothing(ledger: Ledger) -> None:
    assert ledger.root is not None
    stop = threading.Event()
    seen: list[NewEvents] = []
    only: list[NewEvents] = []

    def watch(into: list[NewEvents], kinds: list[str] | None) -> None:
        into.extend(follow(ledger, RUN, kinds=kinds, poll_s=0.02, stop=stop))

    threads = [
        threading.Thread(target=watch, args=(seen, None)),
        threading.Thread(target=watch, args=(only, ["sample_scored"])),
    ]
    for thread in threads:
        thread.start()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=write, args=(ledger.root, n)) for n in range(WRITERS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    head = ledger.run(RUN).head_seq
    assert head == WRITERS * sum(1 + commit % 3 for commit in range(COMMITS))
    assert numbers(seen) == list(range(1, head + 1))
    scored = ledger.reader(RUN).table("sample_scored")["seq"].to_pylist()
    assert numbers(only) == scored
    assert {events.kind for events in only} == {"sample_scored"}


def test_it_begins_anywhere_also_within_a_segment(ledger: Ledger) -> None:
    with ledger.writer(RUN, producer="w") as writer:
        for group in range(3):
            writer.append([prompt(group, 0), *(score(4 * group + i, 1.0) for i in range(4))])
    for since in range(16):
        assert numbers(list(events_after(ledger, RUN, since))) == list(range(since + 1, 16))
    (cut, *_) = events_after(ledger, RUN, 3, kinds=["sample_scored"])
    assert cut.table is not None
    assert cut.table["index"].to_pylist() == [2, 3]
    assert cut.table.equals(ledger.reader(RUN, None).table("sample_scored").slice(2, 2))


def test_a_branch_is_followed_with_its_ancestors(story_ledger: Ledger) -> None:
    for branch in ("main", "rloo", None):
        expected = story_ledger.reader(RUN, branch).sql("SELECT seq FROM events ORDER BY seq")
        assert numbers(list(events_after(story_ledger, RUN, branch=branch))) == (
            expected["seq"].to_pylist()
        )


@contextmanager
def counted(ledger: Ledger) -> Iterator[list[int]]:
    """One entry for each statement that reads the catalog."""
    given: list[int] = []

    def count(connection: object, cursor: object, statement: str, *rest: object) -> None:
        if statement.startswith("SELECT"):
            given.append(1)

    sa.event.listen(ledger.catalog.engine, "after_cursor_execute", count)
    try:
        yield given
    finally:
        sa.event.remove(ledger.catalog.engine, "after_cursor_execute", count)


def test_the_cost_is_that_of_what_is_new(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = ledger.segments.open

    def open_(file: object, kind: str, *rest: object, **more: object) -> object:
        opened.append(kind)
        return real(file, kind, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(ledger.segments, "open", open_)
    stop = threading.Event()
    costs = []
    with ledger.writer(RUN, producer="w") as writer:
        for group in range(40):
            writer.append([prompt(group, 0), decide(4 * group, "kept", rollout_step=0)])
            if group in (3, 39):
                head = ledger.run(RUN).head_seq
                news = follow(ledger, RUN, head, poll_s=0.001, stop=stop)
                with counted(ledger) as statements:
                    opened.clear()
                    writer.append([prompt(1000 + group, 0)])
                    writer_statements = len(statements)
                    assert next(news).first_seq == head + 1
                    costs.append((len(statements) - writer_statements, list(opened)))
    # One statement finds what is new, whether 4 or 40 commits lie before; one file is opened.
    assert costs == [(1, ["prompt_issued"])] * 2


def test_it_ends_when_it_is_told_to(ledger: Ledger) -> None:
    stop = threading.Event()
    with ledger.writer(RUN, producer="w") as writer:
        writer.append([prompt(0, 0)])
        news = follow(ledger, RUN, poll_s=0.001, stop=stop)
        assert next(news).last_seq == 1
        stop.set()
        # What had come before the stop is given.
        writer.append([prompt(1, 0)])
        assert numbers(list(news)) == [2]
    assert list(news) == []


def test_what_cannot_be_followed(ledger: Ledger) -> None:
    with pytest.raises(NotFound, match="nothing"):
        ledger.follow("nothing")
    with pytest.raises(NotFound, match="twig"):
        ledger.follow(RUN, branch="twig")
    with pytest.raises(InvalidArgument, match=r"'step_comitted'\n.*did you mean step_committed"):
        ledger.follow(RUN, kinds=["step_comitted"])
    with pytest.raises(InvalidArgument, match="not come as far"):
        ledger.follow(RUN, ledger.run(RUN).head_seq + 1)
    with pytest.raises(InvalidArgument, match="0 or more"):
        ledger.follow(RUN, -1)
    with pytest.raises(InvalidArgument, match="above 0"):
        ledger.follow(RUN, poll_s=float("nan"))


def test_the_command_line(story_ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--ledger", str(story_ledger.root), "--once"]
    assert main(["follow", "--since", "0", *where]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["1", "1", "main", "run_started", "1"]
    assert sum(int(line[-1]) for line in lines) == story_ledger.run(RUN).head_seq
    assert main(["follow", "--since", "0", "--kind", "sample_scored", "--json", *where]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in found] == ["sample_scored"] * 20
    assert found[0]["reward"] == 1.0
    # Without --since it begins now: nothing is new.
    assert main(["follow", *where]) == 0
    assert capsys.readouterr().out == ""


def test_the_command_line_prints_what_comes(
    ledger: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ledger.writer(RUN, producer="w") as writer:
        writer.append([prompt(0, 0)])
        given = 0

        def wait(self: threading.Event, timeout: float | None = None) -> bool:
            nonlocal given
            given += 1
            if given > 2:
                raise KeyboardInterrupt
            writer.append([prompt(given, 0)])
            return False

        monkeypatch.setattr("ledger.follow._Never.wait", wait)
        assert main(["follow", "--ledger", str(ledger.root)]) == 130
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["2", "3"]
