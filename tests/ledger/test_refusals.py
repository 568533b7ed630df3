"""What must never get into a ledger, or out of it: each refused by field, row, expected, found."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ledger import Ledger, open_ledger
from ledger.encode import events_to_table
from ledger.errors import InvalidEvent, LedgerError
from ledger.events import Event, SampleScored
from ledger.queue import QueuedWriter
from ledger.routing import MOST_EXPERTS, routing_of
from ledger.verify import verify_ledger
from tests.ledger import factory
from tests.ledger.factory import ints

ROOT = Path(__file__).parents[2]
SEGMENT = factory.segment(1, ints(5, 6, 7), rollout_step=0)
MASKED = factory.signal(1, 0, np.array([1, 0, 1], np.uint8), np.zeros(3, np.float32))


@pytest.fixture
def ledger(quick_path: Path) -> Ledger:
    opened = open_ledger(quick_path / "ledger", create=True)
    opened.create_run("r")
    return opened


CASES: list[tuple[str, Callable[[], list[Event]], tuple[str, int, str], str, str]] = [
    (
        "a null in a non-null column",
        lambda: [factory.score(0, 1.0), dataclasses.replace(factory.score(1, 1.0), reward=None)],
        ("sample_scored", 1, "reward"),
        "never null",
        "null",
    ),
    (
        "a log-prob array shorter than its tokens",
        lambda: [SEGMENT.evolve(rollout_log_probs=np.zeros(2, np.float32))],
        ("segment_generated", 0, "rollout_log_probs"),
        "3 values",
        "2 values",
    ),
    (
        "a mask neither 0 nor 1",
        lambda: [SEGMENT, MASKED.evolve(loss_mask=np.array([1, 2, 0], np.uint8))],
        ("signal_recorded", 0, "loss_mask"),
        "0 or 1",
        "2",
    ),
    (
        "a token id below zero",
        lambda: [
            factory.segment(0, ints(1), rollout_step=0),
            SEGMENT.evolve(tokens=ints(5, 6, -7)),
        ],
        ("segment_generated", 1, "tokens"),
        "0 or more",
        "-7",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_what_is_wrong_is_refused_by_writer_and_queue(
    ledger: Ledger,
    case: tuple[str, Callable[[], list[Event]], tuple[str, int, str], str, str],
) -> None:
    _, events, (kind, row, field), expected, found = case
    writer = ledger.writer("r", producer="p")
    writer.append([factory.weights(0, None, None)])
    queue: QueuedWriter
    with ledger.queued_writer("r", producer="q") as queue:
        for append in (writer.append, queue.append):
            with pytest.raises(InvalidEvent) as caught:
                append(events())
            text = str(caught.value)
            assert f"event '{kind}', row {row}, field '{field}'" in text
            assert expected in text.split("expected:")[1].split("found:")[0]
            assert found in text.split("found:")[1]
    assert ledger.run("r").head_seq == 1
    ledger.close()


def test_a_misspelt_or_missing_field_is_refused_when_the_event_is_made() -> None:
    given = {c.name: getattr(factory.score(0, 1.0), c.name) for c in SampleScored.COLUMNS}
    with pytest.raises(InvalidEvent, match=r"(?s)'sample_scored', field 'rewrad'.*'reward'.*not"):
        SampleScored(**(given | {"rewrad": 1.0}))
    del given["reward"]
    with pytest.raises(InvalidEvent, match=r"(?s)field 'reward'\n  expected: a value"):
        SampleScored(**given)
    assert factory.score(0, 1.0).evolve(reward=2.0).reward == 2.0


def test_tables_of_others_are_refused_where_arrow_would_take_them(ledger: Ledger) -> None:
    writer = ledger.writer("r", producer="p")
    good = events_to_table([factory.score(0, 1.0), factory.score(1, 1.0)])
    at = good.column_names.index("reward")

    def with_column(name: str, values: pa.Array) -> pa.Table:
        return good.set_column(at, pa.field(name, values.type), values).replace_schema_metadata(
            good.schema.metadata
        )

    wrong = [
        (with_column("rewrad", pa.array([1.0, 2.0])), 0, "rewrad", "a field that there is not"),
        (with_column("reward", pa.array([1.0, None])), 1, "reward", "null"),
        (with_column("reward", pa.array([1, 2])), 0, "reward", "int64"),
        (good.drop_columns(["reward"]), 0, "reward", "no such column"),
    ]
    for table, row, field, found in wrong:
        with pytest.raises(InvalidEvent) as caught:
            writer.append_tables({"sample_scored": table})
        assert f"row {row}, field '{field}'" in str(caught.value)
        assert found in str(caught.value).split("found:")[1]
    assert ledger.run("r").head_seq == 0
    writer.append_tables({"sample_scored": good})
    ledger.close()


def test_routing_of_another_shape_or_of_too_many_experts_is_refused() -> None:
    ids = np.zeros((2, 1, 2), np.int64)
    for array, field in ((ids[0], "expert_ids"), (ids.astype(float), "expert_ids")):
        with pytest.raises(InvalidEvent, match=f"field '{field}'"):
            routing_of(array, num_experts=8, index=0, segment=0)
    with pytest.raises(InvalidEvent, match="field 'weights'"):
        routing_of(ids, num_experts=8, index=0, segment=0, weights=np.zeros((2, 1, 2)))
    for experts in (0, MOST_EXPERTS + 1):
        with pytest.raises(InvalidEvent, match="field 'num_experts'"):
            routing_of(ids, num_experts=experts, index=0, segment=0)


def test_a_pickle_in_place_of_any_stored_file_is_never_executed(quick_path: Path) -> None:
    trap = quick_path / "executed"
    payload = factory.pickle_that_touches(trap)
    factory.write_story(quick_path / "ledger").close()
    stored = [
        path
        for path in (quick_path / "ledger").rglob("*")
        if path.is_file() and not path.name.endswith(("-wal", "-shm", "-turns", ".lock"))
    ]
    suffixes = {path.suffix for path in stored}
    assert {".arrow", ".json", ".sqlite"} <= suffixes
    refused: set[str] = set()
    for suffix in sorted(suffixes):
        path = next(path for path in stored if path.suffix == suffix)
        real = path.read_bytes()
        path.write_bytes(payload)
        try:
            with open_ledger(quick_path / "ledger") as ledger:
                for kind in ledger.reader(factory.RUN, None).kinds():
                    ledger.reader(factory.RUN, None).table(kind)
                if not verify_ledger(ledger).ok:
                    refused.add(suffix)
        except LedgerError:
            refused.add(suffix)
        path.write_bytes(real)
        assert not trap.exists(), path
    # catalog.place only notes where the catalog was: other bytes mean that it was elsewhere.
    assert refused == suffixes - {".place"}


def test_nothing_that_is_stored_is_a_pickle(quick_path: Path) -> None:
    """Neither by its first bytes nor by what Python's own opcodes would make of it."""
    with factory.write_story(quick_path / "ledger"):
        pass
    files = [path for path in (quick_path / "ledger").rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        data = path.read_bytes()
        assert not re.match(rb"\x80[\x02-\x05]", data), path
        assert b"cbuiltins\n" not in data, path
        assert b"c__builtin__\n" not in data, path


EXEMPT = {
    # What the ranks of one run tell each other, as torch's own object collectives do; it is in no
    # file, and nobody else's.
    "trainer/processes.py": {"pickle"},
    # What SGLang's own interface takes is written, and never read.
    "rollout/weights/payload.py": {"pickle"},
    # What a model wrote runs there, and nowhere else: in the sandbox.
    "rollout/tools/sandbox/child.py": {"exec", "eval"},
    # Whether an error can travel as Ray sends it is tried by reading what was just written.
    "rollout/ray/worker_actor.py": {"pickle"},
}


def test_our_code_does_not_read_pickles_nor_run_text() -> None:
    found: list[str] = []
    modules = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    calls = {"eval", "exec", "torch.load", "np.load", "numpy.load", "yaml.load"}
    for package in ("ledger", "migrations", "rollout", "trainer", "replay"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                named: set[str] = set()
                if isinstance(node, ast.Import):
                    named = {alias.name.partition(".")[0] for alias in node.names} & modules
                elif isinstance(node, ast.ImportFrom):
                    named = {(node.module or "").partition(".")[0]} & modules
                elif isinstance(node, ast.Call):
                    named = {ast.unparse(node.func)} & calls
                named -= EXEMPT.get(path.relative_to(ROOT).as_posix(), set())
                if named:
                    found.append(f"{path}:{getattr(node, 'lineno', 0)}: {named}")
    assert not found
