"""Compaction: other files, the same ledger; whatever happens in between."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

from ledger import Ledger, open_ledger
from ledger.catalog.records import SegmentInfo
from ledger.cli import main
from ledger.compact import compact, compact_in_background, plan_compaction
from ledger.encode import events_to_table
from ledger.errors import Corrupt, InvalidArgument
from ledger.events import EVENTS, Event
from ledger.fields import column, event
from ledger.hashing import file_hash, logical_hash
from ledger.schema import UPCASTS, arrow_schema, with_null_column
from ledger.sealed import SEALED_FORMAT, SealedFile, SealedWriter
from ledger.segment import SegmentFile
from ledger.segment_reader import SegmentReader
from ledger.storage import LocalStore
from ledger.verify import verify_ledger
from tests.bench.episodes import skewed_routing
from tests.ledger import factory
from tests.ledger.keeping import all_rows, what_readers_see
from tests.ledger.strategies import tables_of_events

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("story") / "ledger"
    factory.write_story(folder).close()
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


@pytest.fixture
def ledger(folder: Path) -> Iterator[Ledger]:
    with open_ledger(folder) as opened:
        yield opened


def seal(ledger: Ledger, **options: Any) -> Any:
    return compact(ledger, plan_compaction(ledger, **options))


def sealed_paths(ledger: Ledger, kind: str) -> list[str]:
    return sorted(
        {
            s.file.path
            for s in ledger.segment_infos(factory.RUN)
            if s.kind == kind and s.file is not None and s.file.format == SEALED_FORMAT
        }
    )


def test_readers_see_no_difference(ledger: Ledger, folder: Path) -> None:
    seen, rows = what_readers_see(ledger), all_rows(ledger, "locations", "unreferenced", "exports")
    report = seal(ledger)
    assert all(f.lost == 0 for f in report.files)
    assert what_readers_see(ledger) == seen
    with open_ledger(folder) as opened:
        assert what_readers_see(opened) == seen
        assert all_rows(opened, "locations", "unreferenced", "exports") == rows
        assert verify_ledger(opened).ok
        sealed = [s for s in opened.segment_infos(factory.RUN) if s.file and s.file.format != "x"]
        assert sum(s.file.format == SEALED_FORMAT for s in sealed if s.file) == sum(
            f.segments for f in report.files
        )
        # Ranges still leave whole segments out, of sealed files too.
        late = opened.reader(factory.RUN, None).table(
            "segment_generated", ["index"], where={"index": (12, 13)}
        )
        assert set(late["index"].to_pylist()) == set(range(12, 20))
        # The old files wait for collection.
        listed = {row[0] for row in all_rows(opened)["unreferenced"]}
        assert len(listed) == sum(f.segments for f in report.files)
        assert all((folder / path).exists() for path in listed)
    assert plan_compaction(ledger) == []


def test_any_parquet_reader_reads_it(ledger: Ledger, folder: Path) -> None:
    wanted = ledger.reader(factory.RUN, None).table("segment_generated")
    seal(ledger)
    (path,) = sealed_paths(ledger, "segment_generated")
    file = str(folder / path)
    plain = pq.read_table(file)
    assert plain.column_names[:3] == ["run_id", "branch", "seq"]
    assert plain["seq"].to_pylist() == wanted["seq"].to_pylist()
    rows = duckdb.sql(
        f"SELECT seq, run_id, branch, tokens, rollout_log_probs FROM '{file}' ORDER BY seq"
    ).fetchall()
    log_probs = np.array(rows[1][4], np.float32)  # sample 1: -0.0, -inf, NaN
    assert log_probs.tobytes() == factory.SPECIAL.tobytes()
    assert [row[:3] for row in rows] == list(
        zip(
            wanted["seq"].to_pylist(),
            wanted["run_id"].to_pylist(),
            wanted["branch"].to_pylist(),
            strict=True,
        )
    )
    assert [row[3] for row in rows] == wanted["tokens"].to_pylist()
    frame = pandas.read_parquet(file)
    assert [list(t) for t in frame["tokens"]] == wanted["tokens"].to_pylist()
    assert polars.read_parquet(file)["tokens"].to_list() == wanted["tokens"].to_pylist()
    sealed = {kind: sealed_paths(ledger, kind) for kind in ledger.reader(factory.RUN, None).kinds()}
    assert {"weights_published", "step_committed"} <= {kind for kind, at in sealed.items() if at}
    for kind in (kind for kind, at in sealed.items() if at):
        ours = ledger.reader(factory.RUN, None).table(kind)
        (other,) = sealed[kind]
        everything = pandas.read_parquet(folder / other)
        assert sorted(everything.columns) == sorted(ours.column_names)
        assert everything["seq"].tolist() == ours["seq"].to_pylist()
        if kind == "weights_published":
            checksums = [list(row) for row in everything["tensor_checksums"]]
            assert checksums == ours["tensor_checksums"].to_pylist()
    metadata = pq.read_metadata(file).row_group(0)
    codings = {metadata.column(i).path_in_schema: metadata.column(i) for i in range(33)}
    assert "BYTE_STREAM_SPLIT" in codings["rollout_log_probs.list.element"].encodings
    assert "RLE_DICTIONARY" in codings["tokens.list.element"].encodings
    assert {c.compression for c in codings.values()} == {"ZSTD"}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(tables_of_events())
def test_every_value_of_every_kind_comes_back_by_its_bits(events: list[Event]) -> None:
    kind = type(events[0]).KIND
    if {"run_id", "branch"} & set(arrow_schema(kind).names):
        events = [e.evolve(**own(kind)) for e in events]
    table = events_to_table(events, recorded_at=7)
    digest = logical_hash(table)
    writer = SealedWriter("r", kind, EVENTS[kind].LAYOUT)
    for first in (1, 1 + table.num_rows):
        writer.add(info(kind, first, table, digest), table)
    data = writer.finish()
    assert [h.row_offset for h in SealedFile("x", data).held()] == [0, table.num_rows]
    reader = SegmentReader(_One(data))  # type: ignore[arg-type]
    for held in writer.held:
        file = SegmentFile(
            "x", SEALED_FORMAT, held.row_offset, held.rows, file_hash(data), data.size
        )
        back = reader.open(file, kind, EVENTS[kind].LAYOUT)
        assert back.schema.equals(arrow_schema(kind), check_metadata=True)
        assert logical_hash(back) == digest


def own(kind: str) -> dict[str, str]:
    """run_id and branch are those that the row was written to: the writer sees to it."""
    names = set(arrow_schema(kind).names)
    return {name: value for name, value in (("run_id", "r"), ("branch", "main")) if name in names}


def info(kind: str, first_seq: int, table: pa.Table, digest: bytes) -> SegmentInfo:
    return SegmentInfo(
        "r", first_seq, table.num_rows, kind, 1, "main", first_seq, digest, b"", {}, None
    )


class _One:
    """A store of one object, in memory."""

    root = None

    def __init__(self, data: pa.Buffer) -> None:
        self._data = data

    def stamp(self, path: str) -> Any:
        return LocalStore(Path(__file__).parent).stamp(Path(__file__).name)

    def read(self, path: str) -> pa.Buffer:
        return self._data


def test_a_kill_at_any_point_leaves_a_ledger_that_works(quick_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.ledger.compact_child", str(quick_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    states = [json.loads(line) for line in child.stdout.splitlines()]
    points = child.stderr.splitlines()
    assert {"write", "fsync", "link", "commit", "committed"} <= set(points)
    done = points.index("committed")
    for number, (point, state) in enumerate(zip(points, states, strict=True)):
        moved = 3 if number >= done else 0
        assert state == {
            "moved": moved,
            "scores": [0.0, 1.0, 2.0],
            "ok": True,
            "rebuilt": True,
            "again": 3 - moved,
            "scores_after": [0.0, 1.0, 2.0],
        }, (number, point)


def test_of_two_compactions_one_wins_and_nothing_is_lost(folder: Path, ledger: Ledger) -> None:
    seen = what_readers_see(ledger)
    (batch,) = plan_compaction(ledger, kinds=["signal_recorded"])
    with open_ledger(folder) as other:
        # The other one knows of a segment more, so that its file is another one.
        with other.writer(factory.RUN, producer="p") as writer:
            writer.append(factory.trained(0, [0]))
        seal(other, kinds=["signal_recorded"])
    (file,) = compact(ledger, [batch]).files
    assert (file.segments, file.lost) == (0, len(batch.segments))
    assert len(sealed_paths(ledger, "signal_recorded")) == 1
    rows = all_rows(ledger)
    assert file.path not in {row[2] for row in rows["locations"]}
    assert file.path in {row[0] for row in rows["unreferenced"]}
    assert verify_ledger(ledger).ok
    assert seen.keys() == what_readers_see(ledger).keys()


def test_writers_write_while_two_processes_worth_of_compaction_run(folder: Path) -> None:
    options: dict[str, Any] = {"interval_s": 0.01, "keep_hot_s": 0.0, "at_least_bytes": 1}
    with (
        open_ledger(folder) as ledger,
        open_ledger(folder) as other,
        compact_in_background(ledger, **options) as one,
        compact_in_background(other, **options) as two,
    ):

        def write(number: int) -> None:
            with ledger.writer(factory.RUN, producer=f"w{number}") as writer:
                for turn in range(8):
                    writer.append(
                        [factory.score(turn, 1.0), factory.decide(turn, "kept", rollout_step=0)]
                    )

        threads = [threading.Thread(target=write, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            table = other.reader(factory.RUN, None).table("sample_decided")
            assert len(set(table["seq"].to_pylist())) == table.num_rows
        for thread in threads:
            thread.join()
    assert (one.failures, two.failures) == (0, 0)
    with open_ledger(folder) as ledger:
        assert ledger.reader(factory.RUN, None).table("sample_decided").num_rows == 20 + 16
        assert verify_ledger(ledger).ok
        assert one.files or two.files


def test_a_reader_that_runs_for_long_follows_its_segments(folder: Path, ledger: Ledger) -> None:
    reader = ledger.reader(factory.RUN, None)
    segments = reader.segments("signal_recorded")
    with open_ledger(folder) as other:
        seal(other)
        for path, *_ in all_rows(other)["unreferenced"]:
            other.store.delete(path)
    table = reader.table("signal_recorded")
    assert table.num_rows == sum(s.rows for s in segments)
    assert ledger.lookup(factory.RUN).pieces(np.array([1, 12])).num_rows > 0
    assert all(
        s.file is not None and s.file.format == SEALED_FORMAT
        for s in reader.segments("signal_recorded")
    )


def test_a_small_sealed_file_is_taken_in_again_once_as_much_follows(ledger: Ledger) -> None:
    kind = "sample_scored"
    seal(ledger, kinds=[kind])
    (small,) = sealed_paths(ledger, kind)
    with ledger.writer(factory.RUN, producer="p") as writer:
        writer.append([factory.score(0, 1.0)])
        assert plan_compaction(ledger, kinds=[kind]) == []  # one alone gains nothing
        writer.append([factory.score(1, 1.0)])
        writer.append([factory.score(2, 1.0)])
    (batch,) = plan_compaction(ledger, kinds=[kind])
    assert [s.first_seq for s in batch.segments] == sorted(s.first_seq for s in batch.segments)
    compact(ledger, [batch])
    (large,) = sealed_paths(ledger, kind)
    assert large != small
    assert small in {row[0] for row in all_rows(ledger)["unreferenced"]}
    assert verify_ledger(ledger).ok
    assert plan_compaction(ledger, kinds=[kind], keep_hot_s=3600) == []
    with pytest.raises(InvalidArgument):
        plan_compaction(ledger, target_bytes=0)


def test_large_batches_become_several_files(ledger: Ledger) -> None:
    (batch,) = plan_compaction(ledger, kinds=["weights_published"])
    seen = what_readers_see(ledger)
    report = compact(ledger, [batch], target_bytes=1)
    # A row group holds many small segments: size counts when it is full.
    assert sum(f.segments for f in report.files) == len(batch.segments)
    assert what_readers_see(ledger) == seen


def test_each_layout_has_a_file_of_its_own(
    ledger: Ledger, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "layout_tested"

    @event(kind, layout=1)
    class First(Event):
        index: int = column(1, pa.int64(), "The sample.")

    del EVENTS[kind]  # or the second one would be declared twice

    @event(kind, layout=2)
    class Second(Event):
        index: int = column(1, pa.int64(), "The sample.")
        more: float | None = column(2, pa.float64(), "More.", nullable=True, since=2)

    monkeypatch.setitem(UPCASTS, (kind, 1), lambda t: with_null_column(t, "more", pa.float64()))
    try:
        with ledger.writer(factory.RUN, producer="p") as writer:
            EVENTS[kind] = First
            for index in range(2):
                writer.append([First(index=index)])
            EVENTS[kind] = Second
            for index in range(2, 4):
                writer.append([Second(index=index, more=-0.0)])
        report = seal(ledger, kinds=[kind])
        assert [(f.layout, f.segments) for f in report.files] == [(1, 2), (2, 2)]
        with open_ledger(folder) as opened:
            table = opened.reader(factory.RUN).table(kind, ["index", "more"])
            assert table["index"].to_pylist() == [0, 1, 2, 3]
            assert str(table["more"].to_pylist()) == "[None, None, -0.0, -0.0]"
            assert verify_ledger(opened).ok
    finally:
        del EVENTS[kind]


def test_damage_of_a_sealed_file_is_found_and_nothing_is_moved_onto_it(
    ledger: Ledger, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "sample_decided"

    class Lying(LocalStore):
        def read(self, path: str) -> pa.Buffer:
            data = super().read(path)
            if not path.endswith(".parquet"):
                return data
            flipped = bytearray(data)
            flipped[200] ^= 1
            return pa.py_buffer(bytes(flipped))

    before = all_rows(ledger)
    honest = ledger.store
    monkeypatch.setattr(ledger, "store", Lying(folder))
    with pytest.raises(Corrupt, match="not what was committed"):
        seal(ledger, kinds=[kind])
    monkeypatch.setattr(ledger, "store", honest)
    assert all_rows(ledger) == before
    seal(ledger, kinds=[kind])
    (path,) = sealed_paths(ledger, kind)
    good = (folder / path).read_bytes()
    for at in range(4, len(good), len(good) // 8):
        bad = bytearray(good)
        bad[at] ^= 1
        (folder / path).write_bytes(bad)
        with open_ledger(folder) as opened:
            with pytest.raises(Corrupt) as caught:
                opened.reader(factory.RUN, None).table(kind)
            assert path in str(caught.value)
            assert file_hash(good).hex() in str(caught.value)
            assert not verify_ledger(opened, checkpoints=False).ok
    (folder / path).unlink()
    with open_ledger(folder) as opened, pytest.raises(Corrupt, match="a segment is missing"):
        opened.reader(factory.RUN, None).table(kind)


def test_only_the_columns_that_are_asked_for_are_decoded(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(ledger)
    decoded: list[str] = []
    real = SealedFile.read_group

    def recorded(self: SealedFile, group: int, names: Any) -> pa.Table:
        decoded.extend(names)
        return real(self, group, names)

    monkeypatch.setattr(SealedFile, "read_group", recorded)
    reader = ledger.reader(factory.RUN, None)
    reader.table("segment_generated", ["index", "seq"])
    assert decoded == ["index"]
    reader.sql("SELECT count(*), sum(len(tokens)) FROM segment_generated")
    assert decoded == ["index", "tokens"]
    ledger.reader(factory.RUN, None).table("segment_generated", ["tokens", "index"])
    assert decoded == ["index", "tokens"], "kept from before"


def test_what_is_kept_is_bounded(folder: Path, ledger: Ledger) -> None:
    seal(ledger)
    reader = SegmentReader(ledger.store, keep_bytes=2000)
    infos = [s for s in ledger.segment_infos(factory.RUN) if s.kind == "segment_generated"]
    for s in infos * 2:
        assert s.file is not None
        reader.open(s.file, s.kind, s.layout)
        assert reader.kept_bytes <= 2000 or reader.kept_items == 1


def test_sealed_sizes_are_what_was_promised() -> None:
    """Against the hot files. The bench's table has it against bare values, and of recorded runs."""
    random = np.random.default_rng(0)
    vocabulary = np.minimum(random.zipf(1.3, 200_000), 150_000).astype(np.int32)
    responses = [
        factory.segment(
            index,
            tokens,
            rollout_step=0,
            log_probs=-random.exponential(0.4, len(tokens)).astype(np.float32),
        )
        for index, tokens in enumerate(np.split(vocabulary, 100))
    ]
    ratios = {}
    for events in (responses, skewed_routing(2, 300, random)):
        kind, table = events[0].KIND, events_to_table(events, recorded_at=7)
        writer = SealedWriter("r", kind, 1)
        writer.add(info(kind, 1, table, b""), table)
        ratios[kind] = writer.finish().size / table.nbytes
    print({kind: round(ratio, 3) for kind, ratio in ratios.items()})
    assert ratios["segment_generated"] <= 0.6
    assert ratios["routing_recorded"] <= 0.9


def test_the_command_says_what_it_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compact", "--ledger", str(folder), "--kind", "sample_scored"]
    assert main([*arguments[:-1], "samples_scored"]) == 2
    assert "did you mean sample_scored?" in capsys.readouterr().err
    assert main([*arguments, "--dry-run"]) == 0
    assert "nothing was changed" in capsys.readouterr().out
    assert main([*arguments, "--json", "--keep-hot", "1d"]) == 0
    assert json.loads(capsys.readouterr().out)["batches"] == []
    assert main([*arguments, "--target-size", "64MB"]) == 0
    assert ".parquet: 2 segments of sample_scored" in capsys.readouterr().out
    assert main([*arguments, "--target-size", "big"]) == 2
    assert main([*arguments, "--keep-hot", "-1"]) == 2
    assert main(["verify", "--ledger", str(folder)]) == 0
