"""Whatever is changed behind the ledger's back is noticed, and named."""

from __future__ import annotations

import dataclasses
import pickle
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from blake3 import blake3

from ledger import Ledger, open_ledger
from ledger.canonical import canonical_json
from ledger.catalog.tables import METADATA
from ledger.cli import main
from ledger.errors import Corrupt, LedgerError, NotFound
from ledger.finding import Finding
from ledger.hashing import file_hash
from ledger.links import parse_links, put_links
from ledger.segment import Identity
from ledger.storage import LocalStore
from ledger.verify import verify_ledger
from tests.ledger import factory

FLIPS = 120
"""Flipped bits of the catalog that are tried."""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with the whole story, closed."""
    folder = tmp_path_factory.mktemp("story") / "ledger"
    factory.write_story(folder).close()
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


def files_of(folder: Path, kind: str) -> list[Path]:
    return sorted((folder / "runs" / factory.RUN / "hot" / kind).rglob("*.arrow"))


def read_all(ledger: Ledger, **options: Any) -> None:
    reader = ledger.reader(factory.RUN, None, **options)
    for kind in reader.kinds():
        reader.table(kind)


def test_an_untouched_ledger_verifies(pristine: Path) -> None:
    calls: list[tuple[int, int]] = []
    with open_ledger(pristine) as ledger:
        report = verify_ledger(ledger, progress=lambda done, total: calls.append((done, total)))
        assert verify_ledger(ledger, factory.RUN) == report
        with pytest.raises(NotFound):
            verify_ledger(ledger, "other")
    assert report.ok
    assert report.rows == sum(len(commit.events) for commit in factory.story())
    assert calls == [(n, report.segments + 3) for n in range(1, report.segments + 4)]
    assert report.checkpoints == 3
    assert "all as committed" in report.lines()[-1]
    assert report.as_json()["ok"] is True


def test_every_flipped_bit_is_found(folder: Path) -> None:
    path = files_of(folder, "signal_recorded")[0]
    good = path.read_bytes()
    with open_ledger(folder) as ledger:
        committed = next(
            s.file
            for s in ledger.reader(factory.RUN, None).segments()
            if s.file and s.file.path.endswith(path.name)
        )
    for position in range(0, len(good), len(good) // 12):
        bad = bytearray(good)
        bad[position] ^= 1
        path.write_bytes(bad)
        with open_ledger(folder) as ledger:
            with pytest.raises(Corrupt) as caught:
                read_all(ledger)
            (finding,) = verify_ledger(ledger).findings
        for text in (str(caught.value), str(finding)):
            assert path.name in text
            assert committed.file_hash.hex() in text
            found = text.split("found:")[1].split("blake3 ")[1][:64]
            assert len(bytes.fromhex(found)) == 32
            assert found != committed.file_hash.hex()
    path.write_bytes(good)
    with open_ledger(folder) as ledger:
        assert verify_ledger(ledger).ok


def test_a_bit_flipped_under_an_open_ledger_is_found(folder: Path) -> None:
    path = files_of(folder, "sample_scored")[0]
    with open_ledger(folder) as ledger:
        reader = ledger.reader(factory.RUN, as_of=1)
        reader.table("sample_scored")
        bad = bytearray(path.read_bytes())
        bad[-100] ^= 1
        path.write_bytes(bad)
        with pytest.raises(Corrupt, match=path.name):
            read_all(ledger)


def test_missing_truncated_swapped_and_foreign_files(folder: Path) -> None:
    first, second = files_of(folder, "prompt_issued")
    good = first.read_bytes(), second.read_bytes()

    def spoiled() -> str:
        with open_ledger(folder) as ledger:
            with pytest.raises(Corrupt) as caught:
                read_all(ledger)
            report = verify_ledger(ledger)
        assert not report.ok
        assert all("prompt_issued" in f.where for f in report.findings)
        return str(caught.value)

    first.unlink()
    assert "no such file" in spoiled()
    first.write_bytes(good[0][:-9])
    assert f"found:    {len(good[0]) - 9} bytes" in spoiled()
    first.write_bytes(b"")
    assert "found:    0 bytes" in spoiled()
    first.write_bytes(good[1])
    second.write_bytes(good[0])
    # Names follow from hashes over times: either may be the one that is read first.
    assert any(path.name in spoiled() for path in (first, second))


class _Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("verify", [True, False])
def test_a_pickle_in_place_of_a_segment_is_refused(
    folder: Path, tmp_path: Path, verify: bool
) -> None:
    trap = tmp_path / "executed"
    files_of(folder, "sample_scored")[0].write_bytes(pickle.dumps(_Payload(trap)))
    with open_ledger(folder) as ledger, pytest.raises(Corrupt):
        read_all(ledger, verify=verify)
    assert not trap.exists()


def test_without_verification_a_flipped_value_goes_unnoticed(folder: Path) -> None:
    """This is what `verify=False` gives up."""
    path = files_of(folder, "segment_generated")[0]
    raw = path.read_bytes()
    at = raw.index(b"scripted")
    path.write_bytes(raw[:at] + b"S" + raw[at + 1 :])
    with open_ledger(folder) as ledger:
        read_all(ledger, verify=False)
        with pytest.raises(Corrupt):
            read_all(ledger, verify=True)


TAMPERING = [
    "UPDATE segments SET rows = rows + 1 WHERE kind = 'run_started'",
    "UPDATE segments SET kind = 'sample_decided' WHERE kind = 'sample_scored'",
    "UPDATE segments SET kind = 'unheard_of' WHERE kind = 'sample_scored'",
    "UPDATE segments SET layout = 2 WHERE kind = 'sample_scored'",
    "UPDATE segments SET branch = 'rloo' WHERE kind = 'run_started'",
    "UPDATE segments SET logical_hash = zeroblob(32) WHERE first_seq = 1",
    "UPDATE segments SET chain = zeroblob(32) WHERE first_seq = 1",
    "UPDATE segments SET commit_seq = 1 WHERE first_seq = 3",
    "UPDATE segments SET commit_seq = 77777 WHERE first_seq = 1",
    "UPDATE segments SET max_index = 3 WHERE kind = 'sample_scored'",
    "UPDATE segments SET min_step = NULL WHERE kind = 'step_committed'",
    "UPDATE segments SET min_step = 3 WHERE kind = 'sample_scored'",
    "UPDATE segments SET max_index = 3 WHERE kind = 'weights_published'",
    "UPDATE segments SET first_seq = 9999 WHERE first_seq = 1",
    "DELETE FROM segments WHERE first_seq = (SELECT max(first_seq) FROM segments)",
    "DELETE FROM segments WHERE first_seq = 1",
    "INSERT INTO segments SELECT run_id, 9999, rows, kind, layout, branch, commit_seq,"
    " logical_hash, chain, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL"
    " FROM segments WHERE first_seq = 1",
    "UPDATE commits SET branch = 'rloo' WHERE first_seq = 1",
    "UPDATE commits SET producer = 'x' WHERE first_seq = 1",
    "UPDATE commits SET epoch = 7 WHERE first_seq = 1",
    "UPDATE commits SET producer_seq = 777 WHERE first_seq = 1",
    "UPDATE commits SET content_hash = zeroblob(32) WHERE first_seq = 1",
    "UPDATE commits SET chain = zeroblob(32) WHERE first_seq = 1",
    "UPDATE commits SET last_seq = last_seq + 1 WHERE first_seq = 1",
    "DELETE FROM commits WHERE first_seq = 1",
    "UPDATE runs SET head_seq = head_seq + 1",
    "UPDATE runs SET head_chain = zeroblob(32)",
    "UPDATE branches SET parent = NULL WHERE name = 'rloo'",
    "UPDATE branches SET fork_seq = fork_seq - 1 WHERE name = 'rloo'",
    "UPDATE branches SET fork_version = 0 WHERE name = 'rloo'",
    "INSERT INTO branches (run_id, name) VALUES ('run', 'third')",
    "DELETE FROM branches WHERE name = 'rloo'",
    "UPDATE versions SET root = zeroblob(32) WHERE weight_version = 1",
    "UPDATE versions SET parent_version = 0 WHERE weight_version = 2",
    "UPDATE versions SET step = 7 WHERE weight_version = 1",
    "UPDATE versions SET branch = 'main' WHERE weight_version = 3",
    "DELETE FROM versions WHERE weight_version = 1",
    "UPDATE consumption SET step = 5 WHERE sample_index = 3",
    "UPDATE consumption SET seq = 5 WHERE sample_index = 3",
    "DELETE FROM consumption WHERE sample_index = 3",
    "INSERT INTO consumption VALUES ('run', 'main', 7, 0, 5)",
    "UPDATE producers SET epoch = 0",
    "INSERT INTO producers VALUES ('run', 'nobody', 1)",
    "UPDATE exports SET last_seq = last_seq + 1",
    "UPDATE exports SET last_seq = 2",
    "UPDATE locations SET path = '../' || path WHERE first_seq = 1",
    "UPDATE locations SET path = (SELECT path FROM locations WHERE first_seq = 1)"
    " WHERE first_seq = 2",
    "UPDATE locations SET row_offset = 1 WHERE first_seq = 1",
    "UPDATE locations SET rows = 0 WHERE first_seq = 1",
    "UPDATE locations SET file_hash = zeroblob(32) WHERE first_seq = 1",
    "UPDATE locations SET size_bytes = size_bytes + 1 WHERE first_seq = 1",
    "UPDATE locations SET format = 'parquet' WHERE first_seq = 1",
    "DELETE FROM locations WHERE first_seq = 1",
]


def test_every_changed_row_of_the_catalog_is_found(folder: Path) -> None:
    catalog = folder / "catalog.sqlite"
    with open_ledger(folder) as ledger, ledger.catalog.read() as connection:
        connection.exec_driver_sql("SELECT 1")
    connection = sqlite3.connect(catalog)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    good = catalog.read_bytes()
    unnoticed = []
    for statement in TAMPERING:
        connection = sqlite3.connect(catalog)
        with connection:
            changed = connection.execute(statement).rowcount
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        assert changed >= 1, statement
        with open_ledger(folder) as ledger:
            report = verify_ledger(ledger)
        if report.ok:
            unnoticed.append(statement)
        catalog.write_bytes(good)
    assert unnoticed == []
    with open_ledger(folder) as ledger:
        assert verify_ledger(ledger).ok


def findings(folder: Path, **options: Any) -> tuple[Finding, ...]:
    with open_ledger(folder) as ledger:
        return verify_ledger(ledger, **options).findings


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_missing_checkpoint_is_found_on_every_branch(folder: Path, version: int) -> None:
    gone = folder / "checkpoints" / str(version)
    shutil.rmtree(gone)
    (finding,) = findings(folder)
    assert f"checkpoint of version {version} on branch" in finding.where
    assert str(gone) in finding.where
    assert finding.found == "no such folder"
    assert findings(folder, checkpoints=False) == ()


def test_every_flipped_bit_of_a_checkpoint_is_found_with_both_hashes(folder: Path) -> None:
    path = folder / "checkpoints" / "2" / "model.safetensors"
    good = path.read_bytes()
    for at in range(0, len(good), 3):
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        path.write_bytes(bad)
        (finding,) = findings(folder)
        assert "version 2 on branch 'main'" in finding.where
        assert finding.what == f"file {path.name}"
        assert finding.expected == f"40 bytes, blake3 {blake3(good).hexdigest()}"
        assert finding.found == f"40 bytes, blake3 {blake3(bad).hexdigest()}"
    path.write_bytes(good[:-1])
    assert findings(folder)[0].found.startswith("39 bytes, blake3 ")
    path.write_bytes(b"")
    assert findings(folder)[0].found.startswith("0 bytes, blake3 ")
    path.unlink()
    assert findings(folder)[0].found == "no such file"
    path.mkdir()
    assert findings(folder)[0].found == "no such file"


def test_other_files_beside_a_checkpoint_are_no_finding(folder: Path) -> None:
    (folder / "checkpoints" / "2" / "README.md").write_text("mine")
    assert findings(folder) == ()


def test_a_checkpoint_whose_event_cannot_be_read_is_reported_once(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    path = files_of(folder, "checkpoint_saved")[0]
    path.write_bytes(path.read_bytes()[:-8])
    found = findings(folder, progress=lambda done, total: calls.append((done, total)))
    assert [path.name in str(f) for f in found] == [True]
    assert calls[-1][0] == calls[-1][1]


NOTED_ONCE = {"producers": {"epoch"}, "exports": {"last_seq"}}
"""Columns of the catalog that nothing else repeats, or only in part: a producer's epoch may be one
below what is noted beside the data; how far links are written says how far they may be missing."""


def dump(catalog: Path) -> dict[str, Any]:
    """What the tables say, read from their own pages without any index; errors as they come.

    Columns that are noted once are left out, and so is how a schema spells what it says: SQLite
    does not tell capitals in names.
    """
    connection = sqlite3.connect(f"file:{catalog}?mode=ro", uri=True)
    connection.text_factory = bytes
    said: dict[str, Any] = {}
    try:
        for name, table in METADATA.tables.items():
            for pragma in ("table_info", "foreign_key_list", "index_list"):
                rows = connection.execute(f"PRAGMA {pragma}({name})")
                said[f"{pragma} {name}"] = sorted(repr(row).lower() for row in rows)
            columns = [c.name for c in table.columns if c.name not in NOTED_ONCE.get(name, ())]
            listed = ", ".join(f'"{c}"' for c in columns)
            said[name] = sorted(
                map(repr, connection.execute(f"SELECT {listed} FROM {name} NOT INDEXED"))
            )
        said["revision"] = connection.execute("SELECT * FROM alembic_version").fetchall()
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        said["error"] = str(error)
    finally:
        connection.close()
    return said


def test_every_flipped_bit_that_changes_what_the_catalog_says_is_found(
    folder: Path,
) -> None:
    catalog = folder / "catalog.sqlite"
    connection = sqlite3.connect(catalog)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    good = catalog.read_bytes()
    before = dump(catalog)
    assert findings(folder) == ()
    # Most bytes of a small database are unused: take those that are not zero, and their neighbours.
    used = [at for at, byte in enumerate(good) if byte]
    chosen = random.Random(5)
    changed, unnoticed = 0, []
    for _ in range(FLIPS):
        at, bit = chosen.choice(used) + chosen.choice((0, 0, 1)), chosen.randrange(8)
        bad = bytearray(good)
        bad[at % len(good)] ^= 1 << bit
        for rest in folder.glob("catalog.sqlite-*"):
            rest.unlink()
        catalog.write_bytes(bad)
        if dump(catalog) == before:
            continue
        changed += 1
        try:
            noticed = bool(findings(folder, checkpoints=False))
        except LedgerError as error:
            noticed = len(str(error).splitlines()) > 1
        if not noticed:
            unnoticed.append((at, bit))
    assert unnoticed == []
    assert changed > FLIPS // 4


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE meta SET value = 'q' WHERE key = 'format'",
        "UPDATE meta SET value = '' WHERE key = 'format'",
        "UPDATE meta SET key = 'f' WHERE key = 'format'",
        "UPDATE meta SET key = 'l' WHERE key = 'ledger_id'",
        "ALTER TABLE meta RENAME TO metb",
        "ALTER TABLE meta RENAME COLUMN value TO valve",
        "UPDATE meta SET value = CAST(x'f1' AS TEXT) WHERE key = 'format'",
    ],
)
def test_a_catalog_that_does_not_say_what_it_is_is_corrupt(folder: Path, statement: str) -> None:
    connection = sqlite3.connect(folder / "catalog.sqlite")
    with connection:
        connection.execute(statement)
    connection.close()
    with pytest.raises(Corrupt, match="from a copy"):
        open_ledger(folder)


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("DROP INDEX ix_locations_path", "indexes"),
        ("ALTER TABLE consumption RENAME COLUMN step TO text", "columns"),
        ("UPDATE runs SET head_chain = 7", "blob"),
        ("UPDATE segments SET chain = 'text' WHERE first_seq = 1", "blob"),
        ("UPDATE segments SET rows = x'00' WHERE first_seq = 1", "integer"),
        ("UPDATE runs SET created_at = 'x'", "integer"),
        ("UPDATE consumption SET run_id = 'rum'", "a row in runs"),
    ],
)
def test_damage_that_no_event_contradicts_is_found(folder: Path, statement: str, says: str) -> None:
    connection = sqlite3.connect(folder / "catalog.sqlite")
    with connection:
        connection.execute(statement)
    connection.close()
    assert any(says in str(finding) for finding in findings(folder, checkpoints=False))


def test_damaged_pages_are_told_by_every_command_without_a_traceback(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    catalog = folder / "catalog.sqlite"
    good = catalog.read_bytes()
    catalog.write_bytes(good[:4096] + bytes(len(good) - 4096))
    assert main(["runs", "--ledger", str(folder)]) == 2
    assert "put the catalog back from a copy" in capsys.readouterr().err
    assert main(["verify", "--ledger", str(folder)]) in (1, 2)
    shown = capsys.readouterr()
    assert "malformed" in shown.out + shown.err
    at = good.index(b"CREATE TABLE")
    catalog.write_bytes(good[:at] + b"KREATE" + good[at + 6 :])
    assert main(["verify", "--ledger", str(folder)]) == 2
    assert "malformed database schema" in capsys.readouterr().err


def test_an_added_file_is_found_and_what_a_crash_leaves_is_a_note(folder: Path) -> None:
    path = files_of(folder, "sample_scored")[0]
    table = pa.ipc.open_file(path.read_bytes()).read_all()
    changed = table.slice(0, 1)

    def put(data: bytes, name: str | None = None) -> Path:
        added = path.with_name(f"{name or file_hash(data).hex()}.arrow")
        added.write_bytes(data)
        return added

    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, changed.schema) as writer:
        writer.write_table(changed)
    left = put(sink.getvalue().to_pybytes())
    with open_ledger(folder) as ledger:
        report = verify_ledger(ledger)
    assert report.ok
    assert any(left.name in note and "never committed" in note for note in report.notes)
    half = put(path.read_bytes()[:100], "ab" * 32)
    with open_ledger(folder) as ledger:
        assert any(half.name in note for note in verify_ledger(ledger).notes)
    half.unlink()
    parquet = folder / "runs" / factory.RUN / "sealed" / "sample_scored" / f"{'ab' * 32}.parquet"
    parquet.parent.mkdir(parents=True)
    parquet.write_bytes(b"half")
    assert "a file whose blake3 is" in findings(folder)[0].found
    parquet.unlink()
    foreign = changed.replace_schema_metadata(
        {
            **changed.schema.metadata,
            b"ledger.identity": canonical_json(Identity("x", "main", "p", 1, 0, 0)).encode(),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, foreign.schema) as writer:
        writer.write_table(foreign)
    for data, name, says in (
        (b"no segment", None, "no segment"),
        (sink.getvalue().to_pybytes(), None, "a segment of run ['x']"),
    ):
        added = put(data, name)
        (finding,) = findings(folder)
        assert added.name in finding.where
        assert says in finding.found
        added.unlink()


def test_links_that_disagree_with_the_catalog_are_found(folder: Path) -> None:
    links = sorted((folder / "runs" / factory.RUN / "links").iterdir())
    store = LocalStore(folder)
    with open_ledger(folder) as ledger:
        commits = [
            c
            for path in links
            for c in parse_links("x", store.read(path.relative_to(folder).as_posix()))[1]
        ]
        ledger_id = ledger.ledger_id
    good = {path: path.read_bytes() for path in links}

    def restore() -> None:
        for path in (folder / "runs" / factory.RUN / "links").iterdir():
            path.unlink()
        for path, data in good.items():
            path.write_bytes(data)

    # A changed time, or a commit that the catalog does not have; nothing else knows of either.
    for path in links:
        path.unlink()
    forged = [dataclasses.replace(commits[0], committed_at=1), *commits[1:]]
    put_links(store, ledger_id, forged)
    (finding,) = findings(folder)
    assert "committed_at 1" in finding.found
    restore()
    put_links(store, ledger_id, [dataclasses.replace(commits[-1], first_seq=500, last_seq=501)])
    (finding,) = findings(folder)
    assert "the catalog is older than the store" in finding.found
    restore()
    for path in links:
        path.unlink()
    (finding,) = findings(folder)
    assert "export-links --all" in finding.expected
    assert main(["export-links", "--ledger", str(folder), "--all"]) == 0
    assert findings(folder) == ()
    with open_ledger(folder) as ledger:
        with ledger.catalog.write() as connection:
            connection.exec_driver_sql(
                "UPDATE exports SET last_seq ="
                " (SELECT max(last_seq) FROM commits WHERE last_seq <= 50)"
            )
            connection.exec_driver_sql("UPDATE producers SET epoch = epoch + 7")
        for path in (folder / "runs" / factory.RUN / "links").iterdir():
            path.unlink()
        report = verify_ledger(ledger)
    assert len(report.findings) == 2
    assert any("are not written yet" in note for note in report.notes)


def test_a_head_that_was_kept_elsewhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--ledger", str(folder)]
    assert main(["head", *where]) == 0
    kept = capsys.readouterr().out.strip()
    assert main(["verify", *where, "--head", kept]) == 0
    assert "is the run's head" in capsys.readouterr().out
    with open_ledger(folder) as ledger, ledger.writer(factory.RUN, producer="p") as writer:
        writer.append([factory.score(0, 1.0), factory.score(1, 1.0)])
        newer = ledger.run(factory.RUN)
    assert main(["verify", *where, "--head", kept]) == 0
    assert "extends the head" in capsys.readouterr().out
    seq, chain = newer.head_seq, newer.head_chain.hex()
    for wrong in (f"{seq}:{'00' * 32}", f"{seq - 1}:{chain}", f"{seq + 1}:{chain}"):
        assert main(["verify", *where, "--head", wrong]) == 1
        assert "the head that was given" in capsys.readouterr().out
    for nonsense in ("5", "x:00", f"-1:{chain}", f"{seq}:{chain[:-2]}"):
        assert main(["verify", *where, "--head", nonsense]) == 2


def test_what_lies_beside_the_data_is_missed_and_mistaken(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        for _ in range(3):
            ledger.writer(factory.RUN, producer="idle")
        ledger.create_run("other")
        ledger.writer("other", producer="p").append([factory.score(0, 1.0)])
    beside = folder / "runs" / factory.RUN
    epochs = beside / "producers" / "idle"
    assert findings(folder) == ()
    for gone in (folder / "ledger.json", beside / "run.json", epochs / "3.json"):
        kept = gone.read_bytes()
        gone.unlink()
        assert len(findings(folder)) == 1, gone
        gone.write_bytes(kept)
    added = epochs / "7.json"
    added.write_bytes((epochs / "3.json").read_bytes())
    (found,) = findings(folder)
    assert (found.what, found.where) == ("what it is about", added.relative_to(folder).as_posix())
    added.unlink()
    connection = sqlite3.connect(folder / "catalog.sqlite")
    with connection:
        connection.execute("DELETE FROM producers WHERE producer = 'idle'")
    (found,) = findings(folder)
    assert (found.expected, found.found) == ("3, as noted beside the data", "no row")
    with connection:
        connection.execute("INSERT INTO producers VALUES ('run', 'idle', 3)")
        for table in ("exports", "locations", "segments", "commits", "producers", "branches"):
            connection.execute(f"DELETE FROM {table} WHERE run_id = 'other'")
        connection.execute("DELETE FROM runs WHERE run_id = 'other'")
    connection.close()
    (found,) = findings(folder)
    assert (found.run_id, found.found) == ("other", "links up to seq 1")
