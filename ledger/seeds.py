"""Seeds: every random choice is a function of where it stands, through a stable hash."""

from __future__ import annotations

from blake3 import blake3

__all__ = ["derive_seed", "sample_seed"]


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on all `parts`, in order, on every platform and version."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake3(text.encode()).digest(length=8), "little") >> 1


def sample_seed(run_seed: int, rollout_step: int, group_index: int, index: int, turn: int) -> int:
    """The sampling seed of one engine call, in [0, 2**63)."""
    return derive_seed("sample", run_seed, rollout_step, group_index, index, turn)
