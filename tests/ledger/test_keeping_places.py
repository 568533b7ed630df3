"""Compaction, retention, collection and a catalog made again, wherever a ledger lies.

Every store and every catalog once; the other tests of keeping have a folder with SQLite.
"""

from __future__ import annotations

import pytest

from ledger import Ledger
from ledger.collect import collect, plan_collection
from ledger.compact import compact, plan_compaction
from ledger.place import place_of
from ledger.rebuild_catalog import rebuild_catalog
from ledger.retention import Rule, apply_retention, plan_retention
from ledger.verify import verify_ledger
from tests.ledger import factory
from tests.ledger.keeping import PROGRESS, all_rows, what_readers_see
from tests.ledger.places import AnyPlace

RULE = Rule("signal_recorded", before_version=1)


def write(ledger: Ledger) -> None:
    """The first steps of the story, and another branch."""
    ledger.create_run(factory.RUN)
    commits = factory.story()
    with ledger.writer(factory.RUN, producer="a producer/with a name") as writer:
        for commit in commits[:8]:
            kept = [e for e in commit.events if e.KIND != "checkpoint_saved"]
            writer.append(kept)
        head = ledger.run(factory.RUN).head_seq
        for turn in range(2):
            writer.append([factory.score(turn, 1.0)])
    fork = next(e for c in commits for e in c.events if e.KIND == "branch_forked")
    ledger.fork(factory.RUN, fork.evolve(fork_seq=head), "factory").close()  # type: ignore[arg-type]


@pytest.mark.parametrize("any_place", ["local+postgres", "s3+sqlite"], indirect=True)
def test_keeping(any_place: AnyPlace) -> None:
    with any_place.open(create=True) as ledger:
        write(ledger)
        seen = what_readers_see(ledger)
        report = compact(ledger, plan_compaction(ledger))
        assert sum(f.segments for f in report.files) >= 4
        assert what_readers_see(ledger) == seen
        apply_retention(ledger, plan_retention(ledger, RULE))
        digests = {name: seen[name] for name in seen if name.startswith("digest")}
        assert {b: what_readers_see(ledger)[b] for b in digests} == digests
        plan = plan_collection(ledger, grace_s=0)
        done = collect(ledger, plan, grace_s=0)
        assert done.spared == 0
        assert {g.why for g in done.garbage} == {"compacted", "retired"}
        left = [p for p in ledger.store.list("runs") if p.startswith(f"runs/{factory.RUN}/hot/")]
        assert len(left) < len(ledger.segment_infos(factory.RUN))
        seen = what_readers_see(ledger)
        rows = all_rows(ledger, *PROGRESS)
        ledger.exporter.flush()
        # The catalog is lost; what a reader of the store alone can tell is all of it.
        place = place_of(ledger.store, any_place.catalog)
        again = rebuild_catalog(place, force=True)
        assert again.ok
        assert again.unlinked == ()
    with any_place.open() as ledger:
        assert all_rows(ledger, *PROGRESS) == rows
        assert what_readers_see(ledger) == seen
        assert verify_ledger(ledger).ok
        with ledger.writer(factory.RUN, producer="a producer/with a name") as writer:
            assert writer.epoch == 2
            writer.append([factory.score(5, 1.0)])
