"""README and docs: what they say of commands and options is so, and nothing is left out."""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path

import pytest

from ledger import Ledger, open_ledger
from ledger.check import check_ledger
from ledger.cli import build_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CALL = re.compile(r"(?<![\w/.-])ledger ([a-z][a-z-]*)([^\n`]*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
EVERYWHERE = {"--help", "--json", "--ledger", "--catalog", "--run"}


def flags_of(parser: argparse.ArgumentParser) -> dict[str, set[str]]:
    """Command → its long options."""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {
        name: {f for a in made._actions for f in a.option_strings if f.startswith("--")}
        for name, made in commands.choices.items()
    }


FLAGS = flags_of(build_parser())


def calls(text: str) -> list[tuple[str, list[str]]]:
    """Command lines of `ledger` in fenced blocks and code spans: command and flags of each."""
    code = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.M | re.S)
    code += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    lines = (line.split("  #")[0] for block in code for line in block.split("\n"))
    found = (CALL.match(line.strip()) for line in lines)
    return [(call[1], FLAG.findall(call[2])) for call in found if call is not None]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_line_in_a_page_can_be_typed(page: Path) -> None:
    wrong = [
        (command, flag)
        for command, flags in calls(page.read_text(encoding="utf-8"))
        for flag in flags or [None]
        if command not in FLAGS or (flag is not None and flag not in FLAGS[command])
    ]
    assert wrong == []


def test_the_way_of_looking_finds_what_it_looks_for() -> None:
    text = 'See `ledger gc --grace 2` or\n```bash\nledger sql  --nope "x"  # --no\nls\n```\n'
    assert calls(text) == [("sql", ["--nope"]), ("gc", ["--grace"])]
    assert sum(len(calls(page.read_text(encoding="utf-8"))) for page in PAGES) > 40


def test_every_command_and_option_is_in_a_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(FLAG.findall(text))
    missing = {f"ledger {c} {f}" for c, flags in FLAGS.items() for f in flags - EVERYWHERE - named}
    missing |= {f"ledger {c}" for c in FLAGS if f"ledger {c}" not in text}
    assert missing == set()


def test_the_options_of_a_queue_are_those_of_its_table() -> None:
    page = (ROOT / "docs" / "writing.md").read_text(encoding="utf-8")
    table = page.partition("| option | meaning |")[2].partition("\n\n")[0]
    named = {
        name for row in table.splitlines()[1:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    taken = set(inspect.signature(Ledger.queued_writer).parameters)
    assert named == taken - {"self", "run_id", "branch", "producer"}


def test_the_first_events_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "writing.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/writing.md", "exec"), {})
    out = capsys.readouterr().out
    assert "last_seq=3" in out
    assert "[9707, 11, 220, 9330, 2]" in out
    with open_ledger(tmp_path / "my-ledger") as ledger:
        assert check_ledger(ledger.reader("run", None)).ok
