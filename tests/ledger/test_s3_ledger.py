"""A whole ledger whose objects lie on S3."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ledger import open_ledger
from ledger.collect import collect, plan_collection
from ledger.compact import compact, plan_compaction
from ledger.errors import Corrupt, StorageFailed
from ledger.place import place_of
from ledger.rebuild_catalog import rebuild_catalog
from ledger.storage import open_store
from ledger.verify import verify_ledger
from tests.ledger import factory
from tests.servers.s3 import S3Server

APPENDS = 2


def test_two_processes_append_and_a_third_reads(s3_server: S3Server, tmp_path: Path) -> None:
    bucket = s3_server.bucket()
    uri, catalog = f"s3://{bucket}/team/ledger", f"sqlite:///{tmp_path}/catalog.sqlite"
    environment = os.environ | s3_server.environment | {"LEDGER_CATALOG": catalog}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ledger.append_child", uri, str(n), str(APPENDS)],
            env=environment,
            stderr=subprocess.PIPE,
        )
        for n in range(2)
    ]
    for child in children:
        _, said = child.communicate(timeout=100)
        assert child.returncode == 0, said.decode()

    with open_ledger(uri, catalog=catalog, storage_options=s3_server.storage_options) as ledger:
        assert ledger.uri == uri
        assert ledger.run("r").head_seq == 2 * APPENDS * 3
        assert sorted(ledger.reader("r").table("sample_scored")["index"].to_pylist()) == [
            *range(4 * APPENDS)
        ]
        assert verify_ledger(ledger).ok

        # An append is a PUT for each segment; a second reading asks only whether all is as it was.
        s3_server.asked(bucket)
        with ledger.writer("r", producer="here") as writer:
            writer.append([factory.score(1000, 1.0), factory.score(1001, 0.5)])
        asked = [a.method for a in s3_server.asked(bucket) if "/hot/" in a.path]
        assert asked == ["PUT"]
        query = "select count(*) n, sum(reward) reward from rewards"
        before = ledger.reader("r").sql(query).to_pylist()
        s3_server.asked(bucket)
        assert ledger.reader("r").sql(query).to_pylist() == before
        assert {a.method for a in s3_server.asked(bucket)} <= {"HEAD"}

    with open_ledger(uri, catalog=catalog, storage_options=s3_server.storage_options) as ledger:
        assert ledger.reader("r").sql(query).to_pylist() == before
        lost = next(iter(ledger.store.list("runs/r/hot/sample_scored")))
        ledger.store.delete(lost)
        found = verify_ledger(ledger)
        assert not found.ok
        assert any(lost in str(finding) for finding in found.findings)
    with open_ledger(uri, catalog=catalog, storage_options=s3_server.storage_options) as ledger:
        reader = ledger.reader("r")
        with pytest.raises(Corrupt, match="missing"):
            reader.table("sample_scored")


def test_compaction_collection_and_a_new_catalog(s3_server: S3Server, tmp_path: Path) -> None:
    uri, file = f"s3://{s3_server.bucket()}/l", tmp_path / "catalog.sqlite"
    catalog, options = f"sqlite:///{file}", s3_server.storage_options
    with open_ledger(uri, create=True, catalog=catalog, storage_options=options) as ledger:
        ledger.create_run("r")
        with ledger.writer("r", producer="p") as writer:
            for first in range(0, 6, 2):
                writer.append([factory.score(first, 1.0), factory.score(first + 1, 0.0)])
        head = ledger.run("r").head_chain
        rows = ledger.reader("r").table("sample_scored").to_pylist()
        [made] = compact(ledger, plan_compaction(ledger)).batches
        assert len(made.segments) == 3

        left = f"runs/r/hot/sample_scored/{'0' * 64}.arrow"
        ledger.store.put([(left, b"of a writer that was killed before its commit")])
        waiting = plan_collection(ledger)
        assert (waiting.garbage, waiting.waiting) == ((), 4)
        collected = collect(ledger, plan_collection(ledger, grace_s=0), grace_s=0)
        assert len(collected.garbage) == 4
        assert list(ledger.store.list("runs/r/hot")) == []
        assert ledger.reader("r").table("sample_scored").to_pylist() == rows
    file.unlink()
    store = open_store(uri, options)
    assert rebuild_catalog(place_of(store, catalog)).ok
    with open_ledger(uri, catalog=catalog, storage_options=options) as ledger:
        assert ledger.run("r").head_chain == head
        assert ledger.reader("r").table("sample_scored").to_pylist() == rows
        assert verify_ledger(ledger).ok


def test_no_ledger_is_made_where_objects_are_overwritten(
    s3_server: S3Server, tmp_path: Path
) -> None:
    bucket = s3_server.bucket()
    s3_server.forget_conditions(bucket)
    with pytest.raises(StorageFailed, match="overwrites objects"):
        open_ledger(
            f"s3://{bucket}",
            create=True,
            catalog=f"sqlite:///{tmp_path}/catalog.sqlite",
            storage_options=s3_server.storage_options,
        )
    assert list(open_store(f"s3://{bucket}", s3_server.storage_options).list("")) == []
