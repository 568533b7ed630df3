"""What this process knows of engines before it touches them."""

from __future__ import annotations

from ledger.errors import Conflict, InvalidArgument, explain
from rollout.weights.choice import TransportChoice
from rollout.weights.comparison import Comparison, not_comparable
from rollout.weights.control import EngineControl, EngineInfo
from rollout.weights.settings import WeightUpdateSettings
from rollout.weights.staged import StagedVersion
from rollout.weights.turn import Turn

__all__ = ["Contacts"]


class Contacts:
    """How engines were started, and which version they acknowledged; by their addresses."""

    def __init__(
        self, settings: WeightUpdateSettings, choice: TransportChoice, comparison: Comparison
    ) -> None:
        """Nobody is known."""
        self._settings, self._choice, self._comparison = settings, choice, comparison
        self._infos: dict[str, EngineInfo] = {}
        self._acknowledged: dict[str, int] = {}
        self._uncomputed: dict[str, str | None] = {}
        """Why its parameters cannot be computed; None: they can."""

    def acknowledge(self, engine: EngineControl, info: EngineInfo, version: int) -> None:
        """An engine serves a version, which was compared."""
        self._infos[engine.address], self._acknowledged[engine.address] = info, version

    def forget(self, engine: EngineControl) -> None:
        """What it has is not known any more: it is met again, and brought everything."""
        self._infos.pop(engine.address, None)
        self._acknowledged.pop(engine.address, None)

    async def look_at(
        self, engine: EngineControl, staged: StagedVersion, served: StagedVersion | None
    ) -> Turn:
        """What there is to do for an engine; `served` is what it is thought to have.

        Raises InvalidArgument, Conflict and EngineFailed as `WeightUpdater.update`.
        """
        address = engine.address
        acknowledged = self._acknowledged.get(address)
        if acknowledged is None:
            info = self._infos[address] = await engine.info()
            label = info.weight_version
        else:
            info, label = self._infos[address], await engine.weight_version()
        transport = self._choice.of(engine, info)
        turn = Turn(engine, info, transport, sorted(staged.tensors), None)
        if acknowledged is None:
            await self._meet(turn, staged)
        turn.uncomputed = self._uncomputed[address]
        if self._settings.mode == "delta" and acknowledged is not None and not turn.uncomputed:
            if served is None or acknowledged != served.version or label != str(acknowledged):
                raise Conflict(
                    explain(
                        "sending an engine what has changed",
                        on=f"version {staged.version}, engine {address}",
                        expected=f"version {acknowledged}, from which the delta is made",
                        found=f"it says {label!r}",
                        do="find out who else gives it weights; start it again, and it is given "
                        "all tensors",
                    )
                )
            turn.names, turn.base_version = staged.changed_from(served), served.version
        return turn

    async def _meet(self, turn: Turn, staged: StagedVersion) -> None:
        """An engine that this process has not brought anything yet. Raises InvalidArgument."""
        self._check_pause(turn.info, turn.engine.address)
        ranks, _ = await turn.engine.checksums()
        turn.before = {
            (rank.tp_rank, name): value for rank in ranks for name, value in rank.checksums.items()
        }
        why = not_comparable(turn.info)
        if why is None:
            missing = self._comparison.unexplained(turn.info, ranks, staged)
            why = f"unexplained: {_first(missing)}" if missing else None
        by_files = self._settings.check == "files" and turn.transport.name == "disk"
        if why is not None and not by_files:
            raise InvalidArgument(
                explain(
                    "checking whether an engine's weights can be compared",
                    on=turn.engine.address,
                    expected="parameters that are made of the published tensors alone",
                    found=why,
                    do="start it with the same model, and without what changes its weights; or "
                    "take --update-weight-check files with --update-weight-transport disk",
                )
            )
        self._uncomputed[turn.engine.address] = why

    def _check_pause(self, info: EngineInfo, address: str) -> None:
        """Whether a pause leaves labels right. Raises InvalidArgument.

        SGLang 0.5.23 pauses in place while the result of a batch is on its way, and does not count
        its tokens when the version changes: they get the new label, though the old weights sampled
        them. Without overlapping schedules there is no such batch.
        """
        if self._settings.pause_mode != "in_place" or info.arguments.get(
            "disable_overlap_schedule"
        ):
            return
        raise InvalidArgument(
            explain(
                "pausing an engine in place for new weights",
                on=address,
                expected="one that was started with --disable-overlap-schedule",
                found="one that schedules while it samples: the first token that the old weights "
                "sample after the pause would be labelled with the new version",
                do="start it with --sglang-disable-overlap-schedule, or use "
                "--pause-generation-mode retract",
            )
        )


def _first(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
