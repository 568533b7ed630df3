"""Whether an engine holds a version: its own checksums against those of the published tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.weights.checksums import parameter_checksum
from rollout.weights.control import EngineControl, EngineInfo, RankChecksums
from rollout.weights.parameters import RankPlace, engine_parameters
from rollout.weights.staged import StagedVersion

__all__ = ["Compared", "Comparison", "not_comparable"]


@dataclass(frozen=True, slots=True)
class Compared:
    """What an engine said, and whether it is right."""

    difference: str | None
    """The first parameter that is not what was published, with both checksums."""
    words: str
    """What was compared, for the record."""
    engine_checksum: str


def not_comparable(info: EngineInfo) -> str | None:
    """Why the parameters of an engine cannot be computed from published tensors; None: they can."""
    arguments = info.arguments
    if arguments.get("quantization") is not None:
        return f"quantization {arguments['quantization']}: its weights are made of others"
    if info.pp_size > 1:
        return f"pp_size {info.pp_size}: it gives the checksums of one stage alone"
    for name in ("enable_dp_attention", "enable_eplb", "ep_num_redundant_experts", "enable_lora"):
        if arguments.get(name):
            return f"{name}: where each rank keeps which weights is not known here"
    return None


class Comparison:
    """Computes what engines must say, once for engines that are laid out alike."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: the model's config.json."""
        self._config = config
        self._known: dict[tuple[Any, ...], dict[str, str]] = {}
        self._of: StagedVersion | None = None

    def unexplained(
        self, info: EngineInfo, ranks: Sequence[RankChecksums], staged: StagedVersion
    ) -> list[str]:
        """Parameters and tensors of an engine's ranks that cannot be compared."""
        missing: set[str] = set()
        used: set[str] = set()
        for rank in ranks:
            made = engine_parameters(
                rank.checksums, staged.shapes, _place(info, rank), self._config
            )
            missing.update(f"the engine's {name}" for name in rank.checksums.keys() - made.keys())
            used.update(piece.name for pieces in made.values() for piece in pieces)
        missing.update(f"the published {name}" for name in staged.tensors.keys() - used)
        return sorted(missing)

    async def compare(
        self, engine: EngineControl, info: EngineInfo, staged: StagedVersion
    ) -> Compared:
        """Ask an engine. Raises EngineFailed where it does not answer with checksums."""
        ranks, whole = await engine.checksums()
        algorithm = "sha256" if info.device == "cpu" else "mixed words"
        count = 0
        for rank in ranks:
            expected = await asyncio.to_thread(self._expected, info, rank, staged, algorithm)
            for name, found in rank.checksums.items():
                if expected.get(name) != found:
                    where = f"{name} on rank {rank.tp_rank} of {rank.tp_size}"
                    wanted = expected.get(name, "no such parameter")
                    return Compared(f"{where}: {wanted} expected, {found} found", "", whole)
            count += len(rank.checksums)
        words = (
            f"{count} parameters on {len(ranks)} rank{'s' if len(ranks) > 1 else ''}, "
            f"64-bit checksums ({algorithm}) that the engine gave and that the published tensors "
            "give"
        )
        return Compared(None, words, whole)

    def _expected(
        self, info: EngineInfo, rank: RankChecksums, staged: StagedVersion, algorithm: str
    ) -> dict[str, str]:
        if self._of is not staged:
            self._known, self._of = {}, staged
        place = _place(info, rank)
        key = (place, algorithm, tuple(sorted(rank.checksums)))
        if key not in self._known:
            made = engine_parameters(rank.checksums, staged.shapes, place, self._config)
            self._known[key] = {
                name: parameter_checksum(pieces, staged.tensors, algorithm)
                for name, pieces in made.items()
            }
        return self._known[key]


def _place(info: EngineInfo, rank: RankChecksums) -> RankPlace:
    return RankPlace(rank.tp_rank, rank.tp_size, info.ep_size)
