"""`ledger check` finds each kind of violation, in tables that no writer would have accepted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ledger import Ledger
from ledger.check import check_ledger
from ledger.events import WeightsLoaded
from ledger.retention import Rule, apply_retention, plan_retention
from tests.ledger.factory import (
    RUN,
    MemoryReader,
    digest,
    longs,
    prompt,
    story_tables,
    table_of,
    write_story,
)


def forge(kind: str, row: int, **values: Any) -> Callable[[dict[str, pa.Table]], None]:
    """Overwrite columns of one row of a kind."""

    def change(tables: dict[str, pa.Table]) -> None:
        table = tables[kind]
        for name, value in values.items():
            place = table.column_names.index(name)
            field = table.schema.field(place)
            column = table.column(name).to_pylist()
            column[row] = value(column[row]) if callable(value) else value
            table = table.set_column(place, field, pa.array(column, type=field.type))
        tables[kind] = table

    return change


def drop(kind: str, row: int) -> Callable[[dict[str, pa.Table]], None]:
    """Take one row of a kind away."""

    def change(tables: dict[str, pa.Table]) -> None:
        keep = np.arange(tables[kind].num_rows) != row
        tables[kind] = tables[kind].filter(pa.array(keep))

    return change


def double(kind: str, row: int) -> Callable[[dict[str, pa.Table]], None]:
    """Append a row a second time, with a number of its own."""

    def change(tables: dict[str, pa.Table]) -> None:
        again = tables[kind].slice(row, 1)
        place = again.column_names.index("seq")
        again = again.set_column(place, again.schema.field(place), pa.array([1000], pa.int64()))
        tables[kind] = pa.concat_tables([tables[kind], again])

    return change


def add_loaded(root: bytes, seq: int = 1000) -> Callable[[dict[str, pa.Table]], None]:
    """An engine took version 1, which it says has this root."""

    def change(tables: dict[str, pa.Table]) -> None:
        taken = WeightsLoaded(
            weight_version=1,
            engine="sglang",
            engine_address="http://a",
            transport="disk",
            base_version=None,
            pause_mode="abort",
            sent_tensors=2,
            sent_bytes=8,
            root=root,
            compared="names and checksums",
            engine_checksum=None,
            pause_time_s=None,
            transfer_time_s=None,
            check_time_s=None,
            reason="published",
            cache_flushed=True,
        )
        tables["weights_loaded"] = table_of("weights_loaded", [("main", seq, taken)])

    return change


def sampled_on(engine: str, taken_at: int) -> Callable[[dict[str, pa.Table]], None]:
    """Segment 0 was sampled on an engine by version 1, which http://a took at a seq."""

    def change(tables: dict[str, pa.Table]) -> None:
        published = tables["weights_published"].to_pylist()
        [root] = [row["root"] for row in published if row["weight_version"] == 1]
        add_loaded(root, taken_at)(tables)
        forge("segment_generated", 0, engine_address=engine, span_versions=lambda v: [1])(tables)

    return change


def add_sibling(**values: Any) -> Callable[[dict[str, pa.Table]], None]:
    """Sample 50 began in the episode of sample 10."""

    def change(tables: dict[str, pa.Table]) -> None:
        fields = {
            "indices": longs(50),
            "rollout_ids": longs(10),
            "group_index": 2,
            "parent_index": 10,
        }
        began = dataclasses.replace(prompt(2, 0), **(fields | values))
        added = table_of("prompt_issued", [("main", 1000, began)])
        tables["prompt_issued"] = pa.concat_tables([tables["prompt_issued"], added])

    return change


def both(*changes: Any) -> Callable[[dict[str, pa.Table]], None]:
    def change(tables: dict[str, pa.Table]) -> None:
        for one in changes:
            one(tables)

    return change


# Rows: segment_generated 0–7 are samples 0–7, then two rows each for 8–11, then 12–19;
# signal_recorded 0–7 are samples 0–3 and 8–11; step_committed 0 and 1 are main's.
CASES = {
    "fewer log-probs than tokens": (
        forge("segment_generated", 0, rollout_log_probs=lambda v: v[:-1]),
        ("I", "segment_generated", 0, "2 log-probs for 3 tokens"),
    ),
    "a null log-prob": (
        forge("segment_generated", 0, rollout_log_probs=lambda v: [None, *v[1:]]),
        ("I", "segment_generated", 0, "without id or log-prob"),
    ),
    "a token id below zero": (
        forge("segment_generated", 3, tokens=lambda v: [-5, *v[1:]]),
        ("I", "segment_generated", 3, "-5"),
    ),
    "an impossible temperature": (
        forge("segment_generated", 2, temperature=float("nan")),
        ("I", "segment_generated", 2, "temperature nan"),
    ),
    "an impossible top_p": (
        forge("segment_generated", 2, top_p=0.0),
        ("I", "segment_generated", 2, "top_p 0.0"),
    ),
    "a version that was never published": (
        forge("segment_generated", 4, span_versions=[9]),
        ("I", "segment_generated", 4, "version 9"),
    ),
    "a sample without a prompt": (
        forge("segment_generated", 5, index=99),
        ("I", "segment_generated", 99, "never issued"),
    ),
    "a prompt that was issued twice": (
        double("prompt_issued", 0),
        ("I", "prompt_issued", 0, "issued 2 times"),
    ),
    "a trained token of an unknown version": (
        forge("segment_generated", 0, span_versions=[-1]),
        ("I", "signal_recorded", 0, "no known weight version"),
    ),
    "a prompt under another name": (
        forge("prompt_issued", 0, prompt_id=digest("other")),
        ("I", "prompt_issued", None, "prompt_id"),
    ),
    "routing of the wrong size": (
        forge("routing_recorded", 0, expert_ids=b"123"),
        ("I", "routing_recorded", 0, "3 bytes"),
    ),
    "routing to an expert that is not there": (
        forge("routing_recorded", 0, expert_ids=bytes([0, 4] * 5)),
        ("I", "routing_recorded", 0, "expert 4 of 4"),
    ),
    "an expert twice": (
        forge("routing_recorded", 0, expert_ids=bytes([0, 1] * 3 + [2, 2] + [0, 1])),
        ("I", "routing_recorded", 0, "layer 0, position 3: one expert twice in [2, 2]"),
    ),
    "a layer that nobody captured": (
        forge("routing_recorded", 0, expert_ids=bytes(10)),
        ("I", "routing_recorded", 0, "all of this layer is zero"),
    ),
    "routing rows that overlap": (
        double("routing_recorded", 0),
        ("I", "routing_recorded", 0, "rows 0 to 5 overlap those before, which end at 5"),
    ),
    "routing of more tokens than there are": (
        forge("routing_recorded", 0, start=1),
        ("I", "routing_recorded", 0, "6 routing rows for 6 tokens"),
    ),
    "a mask of 2": (
        forge("signal_recorded", 1, loss_mask=[1, 2, 1]),
        ("II", "signal_recorded", 1, "a mask of 2"),
    ),
    "a short mask": (
        forge("signal_recorded", 1, loss_mask=[1, 1]),
        ("II", "signal_recorded", 1, "a mask of 2 tokens for a response of 3"),
    ),
    "fewer advantages than the mask": (
        forge("signal_recorded", 1, advantages=[0.5]),
        ("II", "signal_recorded", 1, "1 advantages"),
    ),
    "mask 1 on a tool's token": (
        forge("signal_recorded", 4, loss_mask=[1] * 7),
        ("II", "signal_recorded", 8, "nobody sampled"),
    ),
    "a hole in a response": (
        forge("observation_appended", 0, start=4),
        ("II", "segment_generated", 8, "hole or overlap"),
    ),
    "a filtered sample that was trained": (
        forge("sample_decided", 0, decision="filtered"),
        ("II", "step_committed", 0, "filtered"),
    ),
    "a decision behind a final one": (
        double("sample_decided", 0),
        ("II", "sample_decided", 0, "kept behind kept, which was final"),
    ),
    "a sample that nobody decided on": (
        drop("sample_decided", 0),
        ("II", "step_committed", 0, "missing"),
    ),
    "a step without a signal": (
        drop("signal_recorded", 2),
        ("II", "step_committed", 2, "without a recorded signal"),
    ),
    "siblings with two rewards": (
        forge("sample_scored", 9, reward=0.25),
        ("II", "sample_scored", 9, "2 different rewards"),
    ),
    "a score under another rollout": (
        forge("sample_scored", 1, rollout_id=7),
        ("II", "sample_scored", 0, "rollout 7"),
    ),
    "a sibling of another rollout": (
        add_sibling(rollout_ids=longs(11)),
        ("II", "prompt_issued", 50, "that sample is of rollout 10 and group 2"),
    ),
    "a sibling of another group": (
        add_sibling(group_index=3),
        ("II", "prompt_issued", 50, "sibling of sample 10 in rollout 10 and group 3"),
    ),
    "a sibling of nobody": (
        add_sibling(parent_index=77),
        ("II", "prompt_issued", 50, "not issued before it"),
    ),
    "spans with a hole": (
        forge("segment_generated", 16, span_starts=[0, 3]),
        ("III", "segment_generated", 12, "do not cover"),
    ),
    "spans that end early": (
        forge("segment_generated", 0, span_ends=[2]),
        ("III", "segment_generated", 0, "do not cover"),
    ),
    "versions that fall": (
        forge("segment_generated", 16, span_versions=[1, 0]),
        ("III", "segment_generated", 12, "fall"),
    ),
    "a version that sampled before it was published": (
        forge("weights_published", 1, seq=10_000),
        ("III", "segment_generated", 12, "before its publication"),
    ),
    "a staleness that the spans do not give": (
        forge("sample_decided", 0, consumer_version=2, staleness=1),
        ("III", "sample_decided", 0, "staleness 1: tokens of version 0 are consumed at version 2"),
    ),
    "weights that an engine took under another root": (
        add_loaded(digest("other")),
        ("IV", "weights_loaded", None, "version 1: what engine http://a took"),
    ),
    "a segment of an engine that had not taken its version": (
        sampled_on("http://a", taken_at=1000),
        ("III", "segment_generated", 0, "on engine http://a, which had not taken it by then"),
    ),
    "a step whose version was never published": (
        forge("weights_published", 1, parent_version=7),
        ("III", "step_committed", None, "never published"),
    ),
    "a version that was published twice": (
        double("weights_published", 1),
        ("III", "weights_published", None, "2 times"),
    ),
    "a tensor without checksum": (
        forge("weights_published", 0, tensor_checksums=lambda v: v[:-1]),
        ("IV", "weights_published", None, "1 checksums"),
    ),
    "names out of order": (
        forge("weights_published", 0, tensor_names=["b", "a"]),
        ("IV", "weights_published", None, "sorted"),
    ),
    "a root of other tensors": (
        forge("weights_published", 2, root=digest("other")),
        ("IV", "weights_published", None, "its tensors give"),
    ),
    "a layout that is not JSON": (
        forge("step_committed", 0, layout="tp=1"),
        ("IV", "step_committed", None, "not JSON"),
    ),
    "micro-batches that leave a sample out": (
        forge("step_committed", 0, micro_batch_offsets=[0, 4, 7]),
        ("IV", "step_committed", None, "do not divide 8 samples"),
    ),
    "a checkpoint of other weights": (
        forge("checkpoint_saved", 1, weights_root=digest("other")),
        ("IV", "checkpoint_saved", None, "not the published ones"),
    ),
    "a sample that was trained twice": (
        forge("step_committed", 1, indices=[0, 13, 14, 15]),
        ("once", "step_committed", 0, "trained 2 times"),
    ),
    "siblings that were trained in two steps": (
        both(
            forge("step_committed", 0, indices=[0, 1, 2, 3, 8, 10, 11, 12]),
            forge("step_committed", 1, indices=[9, 13, 14, 15]),
        ),
        ("once", "step_committed", 9, "samples of rollout 8 trained in several steps"),
    ),
}


def test_the_story_has_no_violation(story_ledger: Ledger) -> None:
    for branch in (None, "main", "rloo"):
        report = check_ledger(story_ledger.reader(RUN, branch))
        assert report.ok, report.findings


@pytest.mark.parametrize(("engine", "taken_at"), [("http://a", 0), ("http://b", 1000)])
def test_a_segment_may_come_from_an_engine_that_had_its_version_or_is_not_in_the_events(
    engine: str, taken_at: int
) -> None:
    tables = story_tables()
    sampled_on(engine, taken_at)(tables)
    found = check_ledger(MemoryReader(tables), invariants=["III"]).findings
    assert not [one for one in found if "had not taken it" in one.what]


def test_a_sibling_of_its_own_rollout_is_no_violation() -> None:
    tables = story_tables()
    add_sibling()(tables)
    report = check_ledger(MemoryReader(tables), invariants=["I", "II"])
    assert report.ok, report.findings


def test_an_empty_ledger_has_no_violation() -> None:
    assert check_ledger(MemoryReader({})).ok


@pytest.mark.parametrize("case", CASES)
def test_a_violation_is_found(case: str) -> None:
    change, (invariant, kind, index, what) = CASES[case]
    tables = story_tables()
    change(tables)
    report = check_ledger(MemoryReader(tables), invariants=[invariant])
    assert not report.ok
    found = [
        f for f in report.findings if (f.invariant, f.kind, f.index) == (invariant, kind, index)
    ]
    assert any(what in f.what for f in found), report.findings
    assert all(f.branch in ("main", "rloo") and f.seq > 0 for f in report.findings)


def test_all_violations_are_counted_and_a_few_listed() -> None:
    tables = story_tables()
    place = tables["segment_generated"].column_names.index("top_p")
    wrong = pa.array([2.0] * tables["segment_generated"].num_rows)
    tables["segment_generated"] = tables["segment_generated"].set_column(place, "top_p", wrong)
    report = check_ledger(MemoryReader(tables), invariants=["I"], limit=3)
    assert (report.violations, len(report.findings)) == (24, 3)
    assert report.as_json()["findings"][0] == dataclasses.asdict(report.findings[0])


def test_what_retention_took_is_no_violation(tmp_path: Path) -> None:
    with write_story(tmp_path / "ledger") as ledger:
        for kind in ("routing_recorded", "signal_recorded", "observation_appended"):
            rule = Rule(kind, older_than_days=0.0)
            apply_retention(ledger, plan_retention(ledger, rule))
            report = check_ledger(ledger.reader(RUN, None))
            assert report.findings == ()
            assert report.ok
        # 12 samples on main and 4 on rloo were trained without a signal that is left, and 4 of
        # two turns have a hole where their observation was.
        assert report.unchecked == 16 + 4


def test_what_is_missing_without_a_rule_of_retention_is_found(tmp_path: Path) -> None:
    with write_story(tmp_path / "ledger") as ledger:
        rule = Rule("signal_recorded", before_version=2)
        apply_retention(ledger, plan_retention(ledger, rule))
        reader = ledger.reader(RUN, None)
        report = check_ledger(reader)
        assert (report.violations, report.unchecked) == (0, 12)
        # The same rows, but nobody said that they were retired.
        tables = {kind: reader.table(kind) for kind in reader.kinds()}
        tables["signal_recorded"] = tables["signal_recorded"].slice(0, 0)
        assert check_ledger(MemoryReader(tables)).violations == 16
