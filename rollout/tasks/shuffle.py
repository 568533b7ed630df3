"""A shuffled order that needs no memory: each position is computed from the seed alone.

Swap-or-not of Hoang, Morris, Rogaway ("An enciphering scheme based on a card shuffle", CRYPTO
2012): in each round x and K − x (modulo the size) are partners, and one bit that both share says
whether they change places. It is a permutation of any size, whatever the bits are. They are those
of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014)
under a key for each round: good enough for an order of prompts, not for a secret.
"""

from __future__ import annotations

from blake3 import blake3

from ledger.errors import InvalidArgument, explain

__all__ = ["ROUNDS", "Shuffle"]

ROUNDS = 96
"""Part of the order: another number is another order for every recorded run."""

_64 = (1 << 64) - 1


class Shuffle:
    """One order of 0..size−1, by `seed`; the same on every platform and version."""

    def __init__(self, size: int, seed: int) -> None:
        """Raises InvalidArgument for a size below 1 or a seed outside [0, 2**63)."""
        if size < 1 or not 0 <= seed < 2**63:
            raise InvalidArgument(
                explain(
                    "shuffling",
                    expected="at least one row, and a seed in [0, 2**63)",
                    found=f"{size} rows, seed {seed}",
                )
            )
        self._size = size
        # 128 bits modulo the size: no partner is noticeably more likely than another.
        drawn = blake3(b"shuffle" + seed.to_bytes(8, "little")).digest(length=24 * ROUNDS)
        numbers = [
            (int.from_bytes(drawn[at : at + 16], "little"), drawn[at + 16 : at + 24])
            for at in range(0, len(drawn), 24)
        ]
        self._rounds = [(k % size, int.from_bytes(key, "little")) for k, key in numbers]

    def __getitem__(self, position: int) -> int:
        """The row at `position`. Raises IndexError outside 0..size−1."""
        if not 0 <= position < self._size:
            raise IndexError(f"position {position} of {self._size}")
        row = position
        for partner, key in self._rounds:
            other = (partner - row) % self._size
            bits = ((row if row > other else other) + key) & _64
            bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & _64
            bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & _64
            if (bits ^ bits >> 31) & 1:
                row = other
        return row
