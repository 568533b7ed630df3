"""What is kept in memory stays below its number of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ledger.kept import Kept


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=40))
def test_it_is_bounded_and_the_newest_is_there(puts: list[tuple[int, int]]) -> None:
    kept = Kept(100)
    sizes: dict[int, int] = {}
    for key, size_bytes in puts:
        kept.put(key, f"{key}:{size_bytes}", size_bytes)
        sizes[key] = size_bytes
        there = {k: size for k, size in sizes.items() if kept.get(k) == f"{k}:{size}"}
        assert kept.get(key) is not None
        assert kept.size_bytes == sum(there.values()) <= 100
        assert len(kept) == len(there)


def test_the_longest_unused_leaves_first() -> None:
    kept = Kept(100)
    for key in "abc":
        kept.put(key, key, 30)
    assert kept.get("a") == "a"
    kept.put("d", "d", 30)
    assert [key for key in "abcd" if kept.get(key)] == ["a", "c", "d"]
    kept.put("large", "large", 1000)
    assert (kept.get("large"), len(kept), kept.size_bytes) == ("large", 1, 1000)
