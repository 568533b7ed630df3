"""Sharing by lengths: nothing is lost, limits are kept, sums are level, the same every time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import InvalidArgument
from trainer.balance import fewest_bins, largest_differencing, share_bins

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=24).map(
    lambda values: np.array(values, np.int64)
)


def long_tailed(n: int, seed: int, *, median: int = 400, longest: int = 2048) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.clip(random.lognormal(np.log(median), 0.9, n).astype(np.int64), 16, longest)


def sums(lengths: np.ndarray, sets: list[np.ndarray]) -> list[int]:
    return [int(lengths[one].sum()) for one in sets]


def everything_once(lengths: np.ndarray, sets: list[np.ndarray]) -> None:
    assert sorted(np.concatenate(sets).tolist()) == list(range(len(lengths)))
    assert all((np.diff(one) > 0).all() for one in sets)


def test_the_example_of_the_paper() -> None:
    """8, 7, 6, 5, 4 in two sets: differencing gives 14 and 16, as worked out in the paper."""
    lengths = np.array([8, 7, 6, 5, 4])
    assert sorted(sums(lengths, largest_differencing(lengths, 2))) == [14, 16]
    # Three samples to a set, two to the other: 8+4+... cannot do better than 16 and 14 either.
    level = largest_differencing(lengths, 2, equal_sizes=True)
    assert sorted(len(one) for one in level) == [2, 3]
    assert sorted(sums(lengths, level)) == [14, 16]


@given(LENGTHS, st.integers(1, 6), st.booleans())
def test_sets_hold_everything_once(lengths: np.ndarray, n_sets: int, equal: bool) -> None:
    sets = largest_differencing(lengths, n_sets, equal_sizes=equal)
    assert len(sets) == n_sets
    everything_once(lengths, sets)
    if equal:
        sizes = [len(one) for one in sets]
        assert max(sizes) - min(sizes) <= 1
    # No set exceeds the mean by more than the longest sample.
    assert max(sums(lengths, sets)) <= lengths.sum() / n_sets + lengths.max()


@given(st.lists(st.integers(1, 30), min_size=2, max_size=7).map(np.array), st.integers(2, 3))
def test_sets_are_about_as_level_as_any(lengths: np.ndarray, n_sets: int) -> None:
    """Against every partition there is: within 4/3 − 1/(3K) of the best largest sum (Graham's
    bound for longest-first, which differencing keeps, Michiels et al. 2003)."""
    found = max(sums(lengths, largest_differencing(lengths, n_sets)))
    best = min(
        max(np.bincount(choice, weights=lengths, minlength=n_sets))
        for choice in itertools.product(range(n_sets), repeat=len(lengths))
    )
    assert found <= best * (4 / 3 - 1 / (3 * n_sets)) + 1e-9


@given(LENGTHS, st.integers(20, 80))
def test_bins_keep_to_the_capacity(lengths: np.ndarray, capacity: int) -> None:
    bins = fewest_bins(lengths, capacity)
    everything_once(lengths, bins)
    for one, total in zip(bins, sums(lengths, bins), strict=True):
        assert total <= capacity or len(one) == 1
    # No two bins would fit into one: the emptiest and the next.
    emptiest = sorted(sums(lengths, bins))[:2]
    assert len(emptiest) < 2 or sum(emptiest) > capacity


@given(LENGTHS, st.integers(20, 80), st.integers(1, 4), st.integers(1, 3))
def test_ranks_get_as_many_bins(
    lengths: np.ndarray, capacity: int, n_ranks: int, multiple: int
) -> None:
    scarce = len(lengths) < n_ranks * (len(fewest_bins(lengths, capacity)) + multiple)
    try:
        shared = share_bins(lengths, capacity, n_ranks=n_ranks, multiple_of=multiple)
    except InvalidArgument:
        if scarce:  # too few samples for the bins of some rank
            return
        raise
    assert len({len(bins) for bins in shared}) == 1
    assert len(shared[0]) % multiple == 0
    flat = [one for bins in shared for one in bins]
    everything_once(lengths, flat)
    for one, total in zip(flat, sums(lengths, flat), strict=True):
        assert len(one)
        assert total <= capacity or len(one) == 1
    again = share_bins(lengths.copy(), capacity, n_ranks=n_ranks, multiple_of=multiple)
    assert [one.tolist() for bins in again for one in bins] == [one.tolist() for one in flat]


@pytest.mark.parametrize("n_ranks", [1, 2, 8])
@pytest.mark.parametrize("seed", range(4))
def test_long_tailed_lengths_fill_bins_and_balance_ranks(n_ranks: int, seed: int) -> None:
    lengths = long_tailed(128, seed)
    shared = share_bins(lengths, 8192, n_ranks=n_ranks)
    loads = [sum(sums(lengths, bins)) for bins in shared]
    assert max(loads) / min(loads) < 1.02
    needed = -(-max(loads) // 8192)
    assert len(shared[0]) <= needed + 1


def test_a_sample_longer_than_the_capacity_stands_alone() -> None:
    lengths = np.array([5, 100, 6, 7])
    (bins,) = share_bins(lengths, 20, n_ranks=1)
    assert [one.tolist() for one in bins] == [[0, 2, 3], [1]]


def test_too_few_samples_for_the_ranks_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least 2 samples for each of 2 ranks"):
        share_bins(np.array([9, 9, 9]), 10, n_ranks=2)
    with pytest.raises(InvalidArgument, match="a multiple of 4"):
        share_bins(np.array([9, 9, 9]), 100, n_ranks=1, multiple_of=4)
