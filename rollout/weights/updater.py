"""New weights for engines, behind a barrier: either all that live have them, or none.

pause → transfer → the engine's own checksums compared → (the caller commits the event) → continue.
Nothing here decides that a version is real: that is the event's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from ledger.errors import (
    Conflict,
    Diverged,
    EngineFailed,
    InvalidArgument,
    LedgerError,
    explain,
)
from ledger.events import WeightsLoaded
from ledger.fields import Event
from ledger.weights import TensorRecord
from rollout.weights.checkpoint_engine import gpus_of
from rollout.weights.choice import TransportChoice
from rollout.weights.comparison import Comparison
from rollout.weights.contacts import Contacts
from rollout.weights.control import EngineControl
from rollout.weights.memory import give_memory_back, take_memory
from rollout.weights.settings import WeightUpdateSettings
from rollout.weights.staged import StagedVersion, stage
from rollout.weights.transports import Delivery, Transport
from rollout.weights.turn import Turn, reload_first

__all__ = ["WeightUpdater"]


class WeightUpdater:
    """Brings versions to SGLang engines. All calls come from one event loop, one at a time.

    The tensors of the version that engines serve stay here until the next one is released: an
    update that fails is taken back with them, and an engine that was started anew is given them.
    """

    def __init__(self, settings: WeightUpdateSettings, config: Mapping[str, Any]) -> None:
        """`config`: the model's config.json, by which parameters are told apart."""
        self._settings = settings
        self._comparison = Comparison(config)
        self._served: StagedVersion | None = None
        self._pending: StagedVersion | None = None
        self._turns: list[Turn] = []
        self._choice = TransportChoice(settings)
        self._contacts = Contacts(settings, self._choice, self._comparison)
        self._asleep: set[str] = set()
        self.record: Callable[[Sequence[Event]], Awaitable[Any]] | None = None
        """Stores `weights_loaded` events durably, such as `EventSink.append`: awaited before an
        engine gets traffic under a version. None: nobody keeps them."""
        self.unusable: dict[str, str] = {}
        """Address → why: engines that must not get traffic until `restore` has brought them a
        version again. They are paused, or gone."""

    @property
    def served_version(self) -> int | None:
        """The version that was released last; None: none was by this process."""
        return None if self._served is None else self._served.version

    def stage(self, version: int, named: Iterable[tuple[str, Any]]) -> StagedVersion:
        """Copy a version to this side; for `update`, which else does so in a thread of its own.

        Raises InvalidArgument where it is not the same model as the version that is served.
        """
        return stage(version, named, self._served)

    async def update(
        self,
        engines: Sequence[EngineControl],
        version: int,
        named: StagedVersion | Iterable[tuple[str, Any]],
    ) -> list[TensorRecord]:
        """Pause engines, bring them a version, compare their checksums; they stay paused.

        Returns the records of the version's tensors, sorted by name: they are true of every engine
        that is not in `unusable`. An engine that is gone is put there, and the others go on; the
        update fails where none is left.

        Raises:
            InvalidArgument: weights that do not fit the engines, or a transport that cannot reach
                them. Nothing was touched.
            Conflict: an engine does not have the version that a delta is made from. Nothing was
                touched.
            Diverged: an engine refused the tensors, or holds other bits than were published. Every
                engine serves the old version again; one for which that failed is in `unusable`.
            EngineFailed: no engine is left.
            StorageFailed: as Diverged, where this host has no room for the transfer.
        """
        staged = named
        if not isinstance(staged, StagedVersion):
            staged = await asyncio.to_thread(self.stage, version, staged)
        if staged.version != version:
            raise ValueError(f"version {staged.version} was staged, {version} is to be loaded")
        for turn in self._turns:  # of an update that nobody released
            self._contacts.forget(turn.engine)
        self._pending, self._turns = None, []
        await self._wake(engines)
        turns = await self._prepare(engines, staged)
        try:
            await self._bring(turns, staged)
        except BaseException:
            await asyncio.shield(self._take_back(turns))
            raise
        failed = [turn for turn in turns if turn.problem is not None]
        if failed:
            address, problem = failed[0].engine.address, failed[0].problem
            self._comparison.forget(staged)
            put_back = await self._take_back(turns)
            raise Diverged(
                explain(
                    "updating the weights of engines",
                    on=f"version {version}, engine {address}",
                    expected="the tensors taken, and the checksums of what was published",
                    found=problem,
                    do=f"{put_back}; nothing of version {version} may be committed",
                )
            )
        live = [turn for turn in turns if turn.gone is None]
        if not live:
            raise turns[-1].gone or EngineFailed(explain("updating the weights: no engine is left"))
        self._pending, self._turns = staged, live
        return list(staged.records.values())

    def loaded(self) -> list[WeightsLoaded]:
        """The events of the update that waits for `release`, which stores them."""
        if self._pending is None:
            return []
        return [
            turn.event(self._pending, self._settings.pause_mode, "published")
            for turn in self._turns
        ]

    async def release(self, version: int) -> None:
        """Let the engines serve `version`, which was committed; first `record` it.

        Raises Conflict where another version, or none, was brought to them; and what `record`
        raises, and then they stay paused.
        """
        pending = self._pending
        if pending is None or pending.version != version:
            raise Conflict(
                explain(
                    "releasing engines after a weight update",
                    on=f"version {version}",
                    expected="the version that they were brought last",
                    found="none" if pending is None else pending.version,
                    do="call update_weights with that version first",
                )
            )
        if self.record is not None:
            await self.record(self.loaded())
        for turn in self._turns:
            self._contacts.acknowledge(turn.engine, turn.info, version)
            self.unusable.pop(turn.engine.address, None)
        await self._continue([turn.engine for turn in self._turns])
        self._served, self._pending, self._turns = pending, None, []

    async def restore(self, engine: EngineControl) -> WeightsLoaded | None:
        """Give an engine that was started anew, or is unusable, the version that others serve.

        It is paused, filled, compared, and generates again; where an update waits for its release
        it gets that version, and waits with the others: its event is then among `loaded`, and None
        is returned.

        Raises as `update`; the engine is in `unusable` then. Raises Conflict where this process
        has no version to give.
        """
        staged = self._pending or self._served
        if staged is None:
            raise Conflict(
                explain(
                    "giving an engine its weights again",
                    on=engine.address,
                    expected="a version that this process has brought to engines",
                    found="none yet",
                    do="call update_weights first",
                )
            )
        self._contacts.forget(engine)
        self._asleep.discard(engine.address)
        self.unusable[engine.address] = "it is being given its weights again"
        [turn] = await self._prepare([engine], staged)
        await self._bring([turn], staged)
        if not turn.well:
            self._give_up(turn)
            raise turn.gone or Diverged(
                explain(
                    "giving an engine its weights again",
                    on=f"version {staged.version}, engine {engine.address}",
                    expected="the checksums of what was published",
                    found=turn.problem,
                    do="start the engine again",
                )
            )
        if self._pending is not None:
            self._turns.append(turn)
            return None
        event = turn.event(staged, self._settings.pause_mode, "restored")
        if self.record is not None:
            await self.record([event])
        self._contacts.acknowledge(engine, turn.info, staged.version)
        self.unusable.pop(engine.address, None)
        await self._continue([engine])
        return event

    async def sleep(self, engines: Sequence[EngineControl]) -> None:
        """Let engines give their GPU memory back until the next `update`, which brings everything.

        Raises InvalidArgument and EngineFailed as `give_memory_back`; engines that did not are in
        `unusable` where they were touched.
        """
        for engine in engines:
            self._contacts.forget(engine)
            self._asleep.add(engine.address)
            try:
                await give_memory_back(engine, self._settings.pause_mode)
            except InvalidArgument:
                self._asleep.discard(engine.address)
                raise
            except EngineFailed as error:
                self.unusable[engine.address] = str(error)
                raise

    async def _wake(self, engines: Sequence[EngineControl]) -> None:
        for engine in engines:
            if engine.address not in self._asleep:
                continue
            self._asleep.discard(engine.address)
            try:
                await take_memory(engine)
            except EngineFailed as error:
                self.unusable[engine.address] = str(error)
                raise

    async def close(self) -> None:
        """Forget the versions, remove the temporary folder, and leave the group of a broadcast.

        Engines go on with what they have.
        """
        self._served, self._pending, self._turns = None, None, []
        await self._choice.close()

    # Before anything is touched

    async def _prepare(self, engines: Sequence[EngineControl], staged: StagedVersion) -> list[Turn]:
        found = await asyncio.gather(
            *(self._contacts.look_at(engine, staged, self._served) for engine in engines),
            return_exceptions=True,
        )
        turns: list[Turn] = []
        gone: EngineFailed | None = None
        for engine, one in zip(engines, found, strict=True):
            if isinstance(one, EngineFailed):
                gone = one
                self._contacts.forget(engine)
                self.unusable[engine.address] = str(one)
            elif isinstance(one, BaseException):
                raise one
            else:
                turns.append(one)
        if not turns:
            raise gone or InvalidArgument(explain("updating the weights of no engine"))
        return turns

    # The barrier

    async def _bring(self, turns: Sequence[Turn], staged: StagedVersion) -> None:
        """Pause, transfer, compare: what went wrong with an engine is in its turn."""
        await self._each(turns, self._pause)
        for transport in {id(turn.transport): turn.transport for turn in turns}.values():
            for names in {tuple(turn.names): turn.names for turn in turns}.values():
                mine = [
                    turn
                    for turn in turns
                    if turn.transport is transport and turn.names == names and turn.well
                ]
                if mine:
                    await self._send(mine, transport, names, staged)
        await self._each(turns, lambda turn: self._compare(turn, staged))
        for turn in turns:
            if turn.gone is not None:
                self._give_up(turn)

    async def _each(self, turns: Sequence[Turn], do: Any) -> None:
        async def one(turn: Turn) -> None:
            try:
                await do(turn)
            except EngineFailed as error:
                turn.gone = error

        await asyncio.gather(*(one(turn) for turn in turns if turn.well))

    async def _pause(self, turn: Turn) -> None:
        began = time.perf_counter()
        turn.touched = True
        answer = await turn.engine.pause(self._settings.pause_mode)
        if not answer.ok:
            turn.problem = f"/pause_generation: {answer.message}"
        turn.pause_s = time.perf_counter() - began

    async def _send(
        self,
        turns: Sequence[Turn],
        transport: Transport,
        names: Sequence[str],
        staged: StagedVersion,
    ) -> None:
        began = time.perf_counter()
        # Requests that are paused in place hold their cache, and the engine refuses to empty it.
        flush = self._settings.pause_mode != "in_place"
        outcomes = await transport.send(
            [
                Delivery(turn.engine, turn.info.tp_size, turn.info.device, gpus_of(turn.info))
                for turn in turns
            ],
            staged,
            names,
            flush=flush,
        )
        for turn, outcome in zip(turns, outcomes, strict=True):
            turn.transfer_s = time.perf_counter() - began
            turn.flushed = flush and bool(names)
            if isinstance(outcome, EngineFailed):
                turn.gone = outcome
            else:
                turn.problem = outcome

    async def _compare(self, turn: Turn, staged: StagedVersion) -> None:
        began = time.perf_counter()
        if not turn.flushed:
            turn.flushed = (await turn.engine.post("/flush_cache")).ok
        label = await turn.engine.weight_version()
        turn.compared = await self._comparison.compare(
            turn.engine, turn.info, staged, turn.uncomputed
        )
        turn.problem = turn.compared.difference
        if label != str(staged.version):
            turn.problem = f"it says that it has version {label!r}"
        turn.check_s = time.perf_counter() - began

    # After a failure

    async def _take_back(self, turns: Sequence[Turn]) -> str:
        """Give every engine what it had, and let it serve; says how that went."""
        touched = [turn for turn in turns if turn.touched and turn.gone is None]
        for turn in touched:
            self._contacts.forget(turn.engine)
        touched = [
            dataclasses.replace(turn, base_version=None, problem=None, flushed=False)
            for turn in touched
        ]
        if self._served is None:
            await self._each(touched, reload_first)
        else:
            await self._bring_again(touched, self._served)
        well = [turn for turn in touched if turn.well]
        for turn in touched:
            if not turn.well:
                self._give_up(turn)
        for turn in well:
            if self._served is not None:
                self._contacts.acknowledge(turn.engine, turn.info, self._served.version)
        await self._continue([turn.engine for turn in well])
        lost = sorted(turn.engine.address for turn in turns if turn.engine.address in self.unusable)
        said = f"{len(well)} engines serve what they had"
        return f"{said}; not usable until started again: {', '.join(lost)}" if lost else said

    async def _bring_again(self, turns: Sequence[Turn], served: StagedVersion) -> None:
        """The version that was served, to those that do not hold it any more."""

        async def look(turn: Turn) -> None:
            await turn.engine.post("/end_weight_update")  # says no where none is open
            await self._compare(turn, served)

        await self._each(turns, look)
        changed = [turn for turn in turns if turn.problem is not None]
        for turn in changed:
            turn.names, turn.problem = sorted(served.tensors), None
        try:
            await self._bring(changed, served)
        except LedgerError as error:  # the way is not there any more: no memory, no disk
            for turn in changed:
                turn.problem = str(error)

    async def _continue(self, engines: Sequence[EngineControl]) -> None:
        async def one(engine: EngineControl) -> None:
            try:
                answer = await engine.resume()
                found = None if answer.ok else f"/continue_generation: {answer.message}"
            except EngineFailed as error:
                found = str(error)
            if found is not None:
                self._contacts.forget(engine)
                self.unusable[engine.address] = found

        await asyncio.gather(*(one(engine) for engine in engines))

    def _give_up(self, turn: Turn) -> None:
        self._contacts.forget(turn.engine)
        self.unusable[turn.engine.address] = str(turn.gone or turn.problem)
