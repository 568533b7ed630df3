"""Sharing samples among ranks and micro-batches by their lengths.

Everything here is a function of the lengths and the sizes asked for: no random numbers, no order of
a dictionary, ties broken by the position of a sample. Positions are those in `lengths_B`.

B samples, K sets.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain

__all__ = ["fewest_bins", "largest_differencing", "share_bins"]

Lengths = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Sets:
    """K sets of positions with their sums, the largest sum first."""

    sums: list[int]
    members: list[list[int]]


def largest_differencing(
    lengths_B: Lengths, n_sets: int, *, equal_sizes: bool = False
) -> list[Positions]:
    """K sets whose sums of lengths are as equal as the largest differencing method makes them.

    With `equal_sizes`, each has as many samples as every other, or one less where B is no multiple
    of K. Each set is in ascending order of positions, and the sets are in order of their first.
    Sets may be empty where B < K.

    Source: Karmarkar and Karp, The differencing method of set partitioning, UCB/CSD-82-113 (1982):
    the two partial solutions with the largest differences are joined, the largest sums of the one
    with the smallest of the other, until one is left. The form with equal sizes begins with runs of
    K neighbours by length (Michiels, Korst, Aarts and van Leeuwen, Performance ratios for the
    differencing method applied to the balanced number partitioning problem, STACS 2003).
    """
    order = sorted(range(len(lengths_B)), key=lambda i: (-int(lengths_B[i]), i))
    begin: list[list[tuple[int, int | None]]] = []
    if equal_sizes:
        # Missing samples of the last run count as empty ones.
        for first in range(0, len(order), n_sets):
            run: list[tuple[int, int | None]] = [
                (int(lengths_B[i]), i) for i in order[first : first + n_sets]
            ]
            begin.append(run + [(0, None)] * (n_sets - len(run)))
    else:
        nothing: list[tuple[int, int | None]] = [(0, None)] * (n_sets - 1)
        begin = [[(int(lengths_B[i]), i), *nothing] for i in order]
    heap: list[tuple[int, int, _Sets]] = []
    for number, run in enumerate(begin):
        made = _Sets([size for size, _ in run], [[i] if i is not None else [] for _, i in run])
        heap.append((made.sums[-1] - made.sums[0], number, made))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        joined = _join(heapq.heappop(heap)[2], heapq.heappop(heap)[2])
        heapq.heappush(heap, (joined.sums[-1] - joined.sums[0], number, joined))
        number += 1
    members = heap[0][2].members if heap else [[] for _ in range(n_sets)]
    sets = sorted((sorted(one) for one in members), key=lambda one: one[:1] or [len(lengths_B)])
    return [np.array(one, np.int64) for one in sets]


def _join(one: _Sets, other: _Sets) -> _Sets:
    pairs = [
        (one.sums[i] + other.sums[-1 - i], one.members[i] + other.members[-1 - i])
        for i in range(len(one.sums))
    ]
    pairs.sort(key=lambda pair: -pair[0])  # stable: ties stay in the order of `one`
    return _Sets([total for total, _ in pairs], [members for _, members in pairs])


def fewest_bins(lengths_B: Lengths, capacity: int) -> list[Positions]:
    """Bins of at most `capacity` tokens, about as few as there can be: best fit, longest first.

    Never more than 11/9 of the fewest, and one (Johnson et al., Worst-case performance bounds for
    simple one-dimensional packing algorithms, SIAM J. Comput. 3, 1974). A sample longer than
    `capacity` gets a bin of its own. Each bin is in ascending order of positions, and the bins are
    in order of their first.
    """
    room: list[tuple[int, int]] = []  # (room left, number of the bin), ascending
    bins: list[list[int]] = []
    for i in sorted(range(len(lengths_B)), key=lambda i: (-int(lengths_B[i]), i)):
        length = int(lengths_B[i])
        at = _first_with(room, length)
        if at == len(room):
            bins.append([i])
            left = (capacity - length, len(bins) - 1)
        else:
            space, number = room.pop(at)
            bins[number].append(i)
            left = (space - length, number)
        if left[0] > 0:
            room.insert(_first_with(room, *left), left)
    return [np.array(sorted(one), np.int64) for one in sorted(bins, key=min)]


def _first_with(room: Sequence[tuple[int, int]], space: int, number: int = -1) -> int:
    low, high = 0, len(room)
    while low < high:
        middle = (low + high) // 2
        if room[middle] < (space, number):
            low = middle + 1
        else:
            high = middle
    return low


def share_bins(
    lengths_B: Lengths, capacity: int, *, n_ranks: int, multiple_of: int = 1
) -> list[list[Positions]]:
    """For each rank the same number of bins of at most `capacity` tokens; every bin has a sample.

    Samples are shared among the ranks by `largest_differencing`, with equal sizes only where some
    rank would have too few samples else; then each rank's are put into bins. Their number is the
    least that suffices for the rank that needs most, raised to a multiple of `multiple_of`. Where
    so many bins of about equal sums keep to the capacity, they are taken, because ranks wait for
    each other at every micro-batch; else those of `fewest_bins`, the fullest split until there are
    enough.

    A sample longer than `capacity` gets a bin of its own.

    Raises InvalidArgument where a rank has fewer samples than bins are wanted.
    """
    for equal_sizes in (False, True):
        shares = largest_differencing(lengths_B, n_ranks, equal_sizes=equal_sizes)
        fewest = [
            [share[inside] for inside in fewest_bins(lengths_B[share], capacity)]
            for share in shares
        ]
        wanted = -(-max(len(bins) for bins in fewest) // multiple_of) * multiple_of
        scarce = min(len(share) for share in shares)
        if scarce >= wanted:
            break
    if scarce < wanted:
        raise InvalidArgument(
            explain(
                "sharing samples among data-parallel ranks by tokens",
                on=f"{len(lengths_B)} samples of {int(lengths_B.sum())} tokens, at most {capacity} "
                f"to a micro-batch",
                expected=f"at least {wanted} samples for each of {n_ranks} ranks: one for each "
                "micro-batch, whose number is the same on all"
                + (f" and a multiple of {multiple_of}" if multiple_of > 1 else ""),
                found=f"{scarce} on one of them",
                do="raise --global-batch-size, or --max-tokens-per-gpu",
            )
        )
    return [
        _exactly(lengths_B, share, bins, capacity, wanted)
        for share, bins in zip(shares, fewest, strict=True)
    ]


def _exactly(
    lengths_B: Lengths, share: Positions, fewest: list[Positions], capacity: int, wanted: int
) -> list[Positions]:
    level = [share[inside] for inside in largest_differencing(lengths_B[share], wanted)]
    sums = [int(lengths_B[one].sum()) for one in level]
    if min(len(one) for one in level) and all(
        total <= capacity or len(one) == 1 for one, total in zip(level, sums, strict=True)
    ):
        return level
    bins = list(fewest)
    while len(bins) < wanted:
        # The fullest that has two samples; there is one, as there are more samples than bins.
        number = max(
            (i for i, one in enumerate(bins) if len(one) > 1),
            key=lambda i: (int(lengths_B[bins[i]].sum()), -i),
        )
        split = largest_differencing(lengths_B[bins[number]], 2, equal_sizes=True)
        bins[number : number + 1] = [bins[number][inside] for inside in split]
    return sorted(bins, key=lambda one: int(one[0]))
