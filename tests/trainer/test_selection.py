"""Which samples a rollout step trains on: rollouts are counted, not samples."""

from __future__ import annotations

import numpy as np
import pytest

from ledger import open_ledger
from ledger.errors import InvalidArgument
from ledger.events import SampleDecided
from trainer.selection import select_kept, split_rollouts


def decided(index, rollout, group, decision="kept", rollout_step=0):
    return SampleDecided(
        index=index,
        rollout_id=rollout,
        group_index=group,
        rollout_step=rollout_step,
        decision=decision,
        reason="",
        rule="test",
    )


@pytest.fixture
def selected(tmp_path):
    """Appends decisions and asks for the rollouts of step 0."""
    with open_ledger(tmp_path / "ledger", create=True) as ledger:
        ledger.create_run("run")
        with ledger.writer("run", producer="test") as writer:

            def select(events, **sizes):
                writer.append(events)
                return [part.tolist() for part in select_kept(ledger.reader("run"), 0, **sizes)]

            yield select


def test_siblings_stay_with_their_rollout_and_count_once(selected):
    """Two groups of two rollouts each; 4 and 6 are siblings of 1, 5 of 2."""
    events = [decided(i, i, i // 2) for i in range(4)]
    events += [decided(4, 1, 0), decided(6, 1, 0), decided(5, 2, 1)]
    assert selected(events, n_rollouts=4, n_steps=2) == [[0, 1, 4, 6], [2, 5, 3]]


def test_without_siblings_the_order_is_that_of_groups_and_samples(selected):
    events = [decided(i, i, i // 2) for i in (3, 1, 2, 0)]
    assert selected(events, n_rollouts=4) == [[0, 1, 2, 3]]


def test_the_last_decision_counts_and_a_sibling_may_be_left_out(selected):
    events = [decided(0, 0, 0, "recycled"), decided(1, 1, 0), decided(2, 1, 0, "aborted")]
    assert selected([*events, decided(0, 0, 0)], n_rollouts=2) == [[0, 1]]


def test_as_many_samples_as_rollouts_are_wanted_do_not_do(selected):
    events = [decided(0, 0, 0), decided(1, 1, 0), decided(2, 1, 0), decided(3, 1, 0)]
    with pytest.raises(InvalidArgument, match=r"(?s)of 4 rollouts.*2 rollouts, 4 samples"):
        selected(events, n_rollouts=4)


def test_rollouts_that_do_not_divide(selected):
    with pytest.raises(InvalidArgument, match=r"(?s)multiple of 2 rollouts.*3"):
        split_rollouts(np.arange(5), np.array([1, 1, 2, 3, 3]), 2)
    parts = split_rollouts(np.arange(5), np.array([4, 4, 2, 7, 7]), 3)
    assert [part.tolist() for part in parts] == [[0, 1], [2], [3, 4]]
