"""One engine on its way from one version to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from ledger.errors import EngineFailed
from ledger.events import WeightsLoaded
from rollout.weights.comparison import Compared
from rollout.weights.control import EngineControl, EngineInfo
from rollout.weights.staged import StagedVersion
from rollout.weights.transports import Transport

__all__ = ["Turn", "reload_first"]


@dataclass(slots=True, eq=False)
class Turn:
    """One engine on its way from one version to the next."""

    engine: EngineControl
    info: EngineInfo
    transport: Transport
    names: list[str]
    base_version: int | None
    before: dict[tuple[int, str], str] = field(default_factory=dict)
    """At first contact: its checksums, by which it is known again when it is put back."""
    uncomputed: str | None = None
    """Why its parameters cannot be computed from the published tensors; None: they can."""
    touched: bool = False
    problem: str | None = None
    gone: EngineFailed | None = None
    compared: Compared | None = None
    flushed: bool = False
    pause_s: float = 0.0
    transfer_s: float = 0.0
    check_s: float = 0.0

    @property
    def well(self) -> bool:
        return self.problem is None and self.gone is None

    def event(self, staged: StagedVersion, pause_mode: str, reason: str) -> WeightsLoaded:
        """The record of it, once it was compared."""
        if self.compared is None:
            raise RuntimeError(f"{self.engine.address} was not compared")
        return WeightsLoaded(
            weight_version=staged.version,
            engine=self.engine.name,
            engine_address=self.engine.address,
            transport=self.transport.name,
            base_version=self.base_version,
            pause_mode=pause_mode,
            sent_tensors=len(self.names),
            sent_bytes=staged.size_bytes(self.names),
            root=staged.root,
            compared=self.compared.words,
            engine_checksum=self.compared.engine_checksum,
            pause_time_s=self.pause_s,
            transfer_time_s=self.transfer_s,
            check_time_s=self.check_s,
            reason=reason,
            cache_flushed=self.flushed,
        )


async def reload_first(turn: Turn) -> None:
    """Give an engine the weights that it had when this process first saw it, from where it had read
    them; what went wrong is in `problem`. Raises EngineFailed where it does not answer."""
    await turn.engine.post("/end_weight_update")  # says no where none is open
    if await _is_as_before(turn):
        return
    answer = await turn.engine.post(
        "/update_weights_from_disk",
        {
            "model_path": turn.info.model_path,
            "load_format": "auto",
            "weight_version": turn.info.weight_version,
        },
    )
    if not answer.ok:
        turn.problem = f"/update_weights_from_disk: {answer.message}"
    elif not await _is_as_before(turn):
        turn.problem = f"{turn.info.model_path} holds other weights than it had"


async def _is_as_before(turn: Turn) -> bool:
    ranks, _ = await turn.engine.checksums()
    found = {
        (rank.tp_rank, name): value for rank in ranks for name, value in rank.checksums.items()
    }
    return found == turn.before and await turn.engine.weight_version() == turn.info.weight_version
