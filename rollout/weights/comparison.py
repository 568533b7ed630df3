"""Whether an engine holds a version: its own checksums against those of the published tensors.

Where an engine keeps other numbers than were published (quantised weights), or does not tell all
of them (pipeline stages), there is nothing to compute. With the check 'files' such an engine is
known by what it says after it has read a version from files whose tensors had the published
checksums: every engine that is started alike must say the same of that version. Whether it differs
from what was said of another version is on record.
"""

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

_VERSIONS_KEPT = 4


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
        self._said: dict[tuple[Any, ...], dict[bytes, str]] = {}
        """How an engine was started → root of a version → what one that had read it said."""

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
        self, engine: EngineControl, info: EngineInfo, staged: StagedVersion, uncomputed: str | None
    ) -> Compared:
        """Ask an engine. `uncomputed`: why its parameters cannot be computed; None: they can.

        Raises EngineFailed where it does not answer with checksums.
        """
        ranks, whole = await engine.checksums()
        if uncomputed is not None:
            return self._with_others(info, ranks, whole, staged, uncomputed)
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

    def forget(self, staged: StagedVersion) -> None:
        """What engines said of a version is worth nothing: its update failed."""
        for said in self._said.values():
            said.pop(staged.root, None)

    def _with_others(
        self,
        info: EngineInfo,
        ranks: Sequence[RankChecksums],
        whole: str,
        staged: StagedVersion,
        why: str,
    ) -> Compared:
        alike = (info.version, info.device, info.tp_size, info.dp_size, info.pp_size, info.ep_size)
        said = self._said.setdefault((*alike, why), {})
        root = staged.root
        than = "of engines before it" if root in said else "the first of this version"
        if said.setdefault(root, whole) != whole:
            return Compared(f"{said[root]} of engines alike expected, {whole} found", "", whole)
        for old in list(said)[:-_VERSIONS_KEPT]:
            del said[old]
        count = sum(len(rank.checksums) for rank in ranks)
        if any(checksum == whole for other, checksum in said.items() if other != root):
            than += ", and those of another version too"
        words = (
            f"not its {count} parameters ({why}): the files that it read were read back and had "
            f"the published checksums; its own are {than}"
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
