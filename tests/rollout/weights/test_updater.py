"""The barrier around a weight update: all engines that live have the new version, or none has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ledger.errors import (
    Conflict,
    Diverged,
    EngineFailed,
    FencedOff,
    InvalidArgument,
    StorageFailed,
)
from ledger.fields import Event
from ledger.weights import weights_root
from rollout.weights import EngineControl, WeightUpdater, WeightUpdateSettings
from rollout.weights.payload import SharedChunk
from tests.rollout.weights.engine import CONFIG, WeightEngine, tiny_weights

OLD, NEW = tiny_weights(1), tiny_weights(2)
NORM = "model.norm.weight"


class Pool:
    """Engines, what controls them, and an updater."""

    def __init__(self, engines: list[WeightEngine], settings: dict[str, Any]) -> None:
        self.engines = engines
        self.controls = [EngineControl(one.address, local=True, timeout_s=5.0) for one in engines]
        self.updater = WeightUpdater(WeightUpdateSettings(**settings), CONFIG)

    async def have(self, version: int, weights: Mapping[str, Tensor]) -> None:
        await self.updater.update(self.controls, version, weights.items())
        await self.updater.release(version)

    def serve(self, weights: Mapping[str, Tensor], label: str) -> list[bool]:
        return [
            not one.paused
            and one.label == label
            and all(torch.equal(one.weights[name], weights[name]) for name in weights)
            for one in self.engines
        ]


def run(test: Callable[[Pool], Awaitable[None]], engines: int = 1, **settings: Any) -> None:
    """A test in an event loop of its own, with engines that serve tiny_weights(0)."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            pool = Pool(
                [
                    await stack.enter_async_context(WeightEngine(tiny_weights(0)))
                    for _ in range(engines)
                ],
                settings,
            )
            try:
                await asyncio.wait_for(test(pool), 30)
            finally:
                for control in pool.controls:
                    await control.close()
                await pool.updater.close()

    asyncio.run(main())


def flipped(name: str, tensor: Tensor) -> Tensor:
    """One bit of the last norm is lost on the way."""
    if name != NORM:
        return tensor
    spoilt = tensor.clone()
    spoilt.view(torch.int16)[3] ^= 1
    return spoilt


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_engines_stay_paused_between_the_update_and_its_release(
    transport: str, tmp_path: Path
) -> None:
    async def test(pool: Pool) -> None:
        records = await pool.updater.update(pool.controls, 7, OLD.items())
        assert [one.paused for one in pool.engines] == [True, True]
        assert [record.name for record in records] == sorted(OLD)
        events = pool.updater.loaded()
        assert {event.engine_address for event in events} == {one.address for one in pool.engines}
        for event in events:
            assert (event.transport, event.base_version) == (transport, None)
            assert (event.sent_tensors, event.sent_bytes) == (
                len(OLD),
                sum(tensor.nbytes for tensor in OLD.values()),
            )
            assert event.root == weights_root(records)
            assert event.compared.startswith("7 parameters on 1 rank")
        await pool.updater.release(7)
        assert pool.serve(OLD, "7") == [True, True]
        assert not list(tmp_path.iterdir())
        assert pool.updater.loaded() == []

    run(test, engines=2, transport=transport, buffer_size=100, disk_dir=tmp_path)


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_a_delta_sends_what_has_changed_and_ends_at_the_whole_root(transport: str) -> None:
    async def test(pool: Pool) -> None:
        await pool.have(1, OLD)
        changed = {**OLD, NORM: NEW[NORM]}
        records = await pool.updater.update(pool.controls, 2, changed.items())
        [event] = pool.updater.loaded()
        assert (event.base_version, event.sent_tensors) == (1, 1)
        assert event.sent_bytes == NEW[NORM].nbytes
        assert event.root == weights_root(records)
        await pool.updater.release(2)
        assert pool.serve(changed, "2") == [True]
        # Nothing changes: the label alone goes.
        await pool.updater.update(pool.controls, 3, changed.items())
        [event] = pool.updater.loaded()
        assert (event.sent_tensors, event.sent_bytes) == (0, 0)
        await pool.updater.release(3)
        assert pool.serve(changed, "3") == [True]

    run(test, transport=transport, mode="delta")


def test_a_delta_from_another_version_is_refused_before_anything_is_touched() -> None:
    async def test(pool: Pool) -> None:
        await pool.have(1, OLD)
        pool.engines[0].label = "9"
        calls = len(pool.engines[0].calls)
        with pytest.raises(Conflict, match="it says '9'"):
            await pool.updater.update(pool.controls, 2, NEW.items())
        assert pool.engines[0].called()[calls:] == ["/model_info"]
        assert pool.serve(OLD, "9") == [True]

    run(test, mode="delta")


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_other_bits_than_were_published_are_taken_back_everywhere(
    transport: str, mode: str
) -> None:
    two = {**OLD, "model.embed_tokens.weight": NEW["model.embed_tokens.weight"]}

    async def test(pool: Pool) -> None:
        await pool.have(1, OLD)
        await pool.have(2, two)
        pool.engines[1].spoils = flipped

        async def heals(path: str) -> None:
            if path == "/weights_checker":
                pool.engines[1].spoils = lambda name, tensor: tensor

        pool.engines[1].before = heals
        with pytest.raises(Diverged, match=f"{NORM} on rank 0 of 1: .* expected, .* found"):
            await pool.updater.update(pool.controls, 3, NEW.items())
        assert pool.serve(two, "2") == [True, True]
        assert not pool.updater.unusable
        with pytest.raises(Conflict):
            await pool.updater.release(3)
        await pool.have(4, NEW)
        assert pool.serve(NEW, "4") == [True, True]

    run(test, engines=2, transport=transport, mode=mode)


def test_an_engine_that_cannot_be_put_back_is_unusable_and_stays_paused() -> None:
    async def test(pool: Pool) -> None:
        await pool.have(1, OLD)
        pool.engines[1].spoils = flipped
        with pytest.raises(Diverged, match="not usable until started again") as error:
            await pool.updater.update(pool.controls, 2, NEW.items())
        assert pool.engines[1].address in str(error.value)
        assert list(pool.updater.unusable) == [pool.engines[1].address]
        assert pool.engines[1].paused
        assert pool.serve(OLD, "1") == [True, False]
        pool.engines[1].spoils = lambda name, tensor: tensor
        pool.engines[1].start_again()
        event = await pool.updater.restore(pool.controls[1])
        assert event is not None
        assert (event.weight_version, event.reason) == (1, "restored")
        assert pool.serve(OLD, "1") == [True, True]
        assert not pool.updater.unusable

    run(test, engines=2, transport="tensor")


@pytest.mark.parametrize(
    ("transport", "path"),
    [
        ("disk", "/update_weights_from_disk"),
        ("tensor", "/begin_weight_update"),
        ("tensor", "/update_weights_from_tensor"),
        ("tensor", "/end_weight_update"),
        ("tensor", "/pause_generation"),
    ],
)
def test_an_answer_of_400_changes_nothing(transport: str, path: str) -> None:
    async def test(pool: Pool) -> None:
        await pool.have(1, OLD)
        pool.engines[0].refuses[path] = "no"

        seen: list[str] = []

        async def refuses_once(called: str) -> None:
            if path in seen:
                pool.engines[0].refuses.clear()
            seen.append(called)

        pool.engines[0].before = refuses_once
        with pytest.raises(Diverged, match="400: no"):
            await pool.updater.update(pool.controls, 2, NEW.items())
        assert pool.serve(OLD, "1") == [True]

    run(test, transport=transport)


def test_a_first_version_that_fails_leaves_the_weights_that_the_engine_was_started_with() -> None:
    async def test(pool: Pool) -> None:
        engine = pool.engines[0]
        engine.refuses["/update_weights_from_tensor"] = "no"
        with pytest.raises(Diverged, match="1 engines serve what they had"):
            await pool.updater.update(pool.controls, 1, NEW.items())
        assert pool.serve(tiny_weights(0), "default") == [True]
        # Where it cannot be shown, it gets no traffic.
        engine.initial = tiny_weights(5)
        engine.refuses = {"/end_weight_update": "no"}
        with pytest.raises(Diverged):
            await pool.updater.update(pool.controls, 1, NEW.items())
        assert engine.address in pool.updater.unusable
        assert engine.paused

    run(test, transport="tensor")


@pytest.mark.parametrize("path", ["/update_weights_from_tensor", "/weights_checker"])
def test_an_engine_that_dies_is_left_behind_and_given_its_weights_when_it_is_back(
    path: str,
) -> None:
    async def test(pool: Pool) -> None:
        await pool.have(1, OLD)
        pool.engines[1].dies_at = path
        await pool.updater.update(pool.controls, 2, NEW.items())
        assert [event.engine_address for event in pool.updater.loaded()] == [
            pool.engines[0].address
        ]
        assert list(pool.updater.unusable) == [pool.engines[1].address]
        pool.engines[1].start_again()
        # Back before the release: it waits with the others, and is in the record with them.
        assert await pool.updater.restore(pool.controls[1]) is None
        assert pool.engines[1].paused
        assert len(pool.updater.loaded()) == 2
        await pool.updater.release(2)
        assert pool.serve(NEW, "2") == [True, True]
        assert not pool.updater.unusable

    run(test, engines=2, transport="tensor", mode="delta")


def test_no_engine_left_is_an_error() -> None:
    async def test(pool: Pool) -> None:
        await pool.have(1, OLD)
        pool.engines[0].dies_at = "/update_weights_from_disk"
        with pytest.raises(EngineFailed, match="update_weights_from_disk"):
            await pool.updater.update(pool.controls, 2, NEW.items())
        with pytest.raises(EngineFailed):
            await pool.updater.update(pool.controls, 2, NEW.items())
        pool.engines[0].start_again()
        await pool.have(2, NEW)
        assert pool.serve(NEW, "2") == [True]

    run(test, transport="disk")


def test_what_a_killed_process_left_half_done_is_put_right_by_the_next() -> None:
    async def test(pool: Pool) -> None:
        await pool.have(1, OLD)
        engine = pool.engines[0]
        # Killed after a part of the tensors of version 2: paused, and a session left open.
        engine.paused = engine.open = True
        engine.weights[NORM] = NEW[NORM]
        after = WeightUpdater(WeightUpdateSettings(transport="tensor", mode="delta"), CONFIG)
        await after.update(pool.controls, 1, OLD.items())
        [event] = after.loaded()
        assert event.base_version is None
        await after.release(1)
        assert pool.serve(OLD, "1") == [True]

    run(test, transport="tensor")


def test_an_update_that_nobody_released_is_followed_by_another() -> None:
    async def test(pool: Pool) -> None:
        await pool.have(1, OLD)
        await pool.updater.update(pool.controls, 2, NEW.items())
        changed = {**OLD, NORM: NEW[NORM]}
        await pool.updater.update(pool.controls, 3, changed.items())
        [event] = pool.updater.loaded()
        assert event.base_version is None
        with pytest.raises(Conflict, match="brought last"):
            await pool.updater.release(2)
        await pool.updater.release(3)
        assert pool.serve(changed, "3") == [True]

    run(test, transport="tensor", mode="delta")


def test_what_was_loaded_is_on_record_before_it_is_served() -> None:
    async def test(pool: Pool) -> None:
        recorded: list[Event] = []

        async def record(events: Sequence[Event]) -> None:
            paused = {engine.address for engine in pool.engines if engine.paused}
            assert {event.engine_address for event in events} == paused  # type: ignore[attr-defined]
            recorded.extend(events)

        pool.updater.record = record
        await pool.have(1, OLD)
        assert len(recorded) == 2
        pool.engines[0].start_again()
        event = await pool.updater.restore(pool.controls[0])
        assert recorded[2:] == [event]

        async def refuse(events: Sequence[Event]) -> None:
            raise FencedOff("a newer process writes")

        pool.updater.record = refuse
        await pool.updater.update(pool.controls, 2, NEW.items())
        with pytest.raises(FencedOff):
            await pool.updater.release(2)
        assert [engine.paused for engine in pool.engines] == [True, True]

    run(test, engines=2, transport="tensor")


def test_weights_of_another_model_are_refused_before_anything_is_touched() -> None:
    async def test(pool: Pool) -> None:
        extra = {**OLD, "model.layers.1.mlp.gate.weight": OLD[NORM]}
        with pytest.raises(InvalidArgument, match=r"published model\.layers\.1\.mlp\.gate\.w"):
            await pool.updater.update(pool.controls, 1, extra.items())
        less = {name: tensor for name, tensor in OLD.items() if name != NORM}
        with pytest.raises(InvalidArgument, match=f"the engine's {NORM}"):
            await pool.updater.update(pool.controls, 1, less.items())
        await pool.have(1, OLD)
        wrong: Iterable[tuple[str, Tensor]] = {**OLD, NORM: OLD[NORM][:3]}.items()
        with pytest.raises(InvalidArgument, match=r"\[8\], as before"):
            await pool.updater.update(pool.controls, 2, wrong)
        assert pool.serve(OLD, "1") == [True]

    run(test, transport="tensor")


@pytest.mark.parametrize(
    "argument", [{"quantization": "fp8"}, {"pp_size": 2}, {"enable_dp_attention": True}]
)
def test_an_engine_whose_weights_cannot_be_compared_is_refused(argument: dict[str, Any]) -> None:
    async def test(pool: Pool) -> None:
        pool.engines[0].arguments.update(argument)
        with pytest.raises(InvalidArgument, match=next(iter(argument))):
            await pool.updater.update(pool.controls, 1, OLD.items())
        assert not pool.engines[0].paused

    run(test, transport="tensor")


def test_a_label_that_is_missing_is_not_taken_for_the_version() -> None:
    async def test(pool: Pool) -> None:
        await pool.have(1, OLD)
        pool.engines[0].label = None

        async def loses_it(path: str) -> None:
            if path == "/model_info":
                pool.engines[0].label = None

        pool.engines[0].before = loses_it
        with pytest.raises(Diverged, match="it says that it has version 'None'"):
            await pool.updater.update(pool.controls, 2, NEW.items())
        assert pool.engines[0].address in pool.updater.unusable

    run(test, transport="tensor")


def test_a_cache_that_could_not_be_emptied_is_on_record() -> None:
    async def test(pool: Pool) -> None:
        pool.engines[0].running = 1
        pool.engines[0].arguments["disable_overlap_schedule"] = True
        await pool.updater.update(pool.controls, 1, OLD.items())
        assert [event.cache_flushed for event in pool.updater.loaded()] == [False]
        await pool.updater.release(1)
        pool.engines[0].running = 0
        await pool.updater.update(pool.controls, 2, NEW.items())
        assert [event.cache_flushed for event in pool.updater.loaded()] == [True]
        await pool.updater.release(2)

    run(test, transport="tensor", pause_mode="in_place")


def test_in_place_is_refused_where_scheduling_overlaps_sampling() -> None:
    async def test(pool: Pool) -> None:
        with pytest.raises(InvalidArgument, match="--disable-overlap-schedule"):
            await pool.updater.update(pool.controls, 1, OLD.items())
        assert "/pause_generation" not in pool.engines[0].called()

    run(test, transport="tensor", pause_mode="in_place")


def test_a_way_that_does_not_reach_an_engine_is_refused() -> None:
    async def test(pool: Pool) -> None:
        pool.controls[0].local = False
        with pytest.raises(InvalidArgument, match="another host"):
            await pool.updater.update(pool.controls, 1, OLD.items())
        pool.controls[0].local = True
        pool.engines[0].arguments["dp_size"] = 2
        with pytest.raises(InvalidArgument, match="replicas from disk alone"):
            await pool.updater.update(pool.controls, 1, OLD.items())

    run(test, transport="tensor")


QUANTISED = {"quantization": "fp8"}


def test_engines_that_cannot_be_computed_read_files_and_agree_with_each_other() -> None:
    async def test(pool: Pool) -> None:
        for engine in pool.engines:
            engine.arguments.update(QUANTISED)
        await pool.have(1, OLD)
        await pool.updater.update(pool.controls, 2, {**OLD, NORM: NEW[NORM]}.items())
        for event in pool.updater.loaded():
            assert event.sent_tensors == len(OLD)
            assert event.compared.startswith("not its 7 parameters (quantization fp8")
            assert "another version" not in event.compared
        await pool.updater.release(2)
        # One loads something else.
        pool.engines[1].spoils = flipped
        with pytest.raises(Diverged, match="of engines alike expected"):
            await pool.updater.update(pool.controls, 3, NEW.items())
        assert list(pool.updater.unusable) == [pool.engines[1].address]
        assert pool.serve({**OLD, NORM: NEW[NORM]}, "2") == [True, False]

    run(test, engines=2, check="files", transport="disk", mode="delta")


def test_files_that_are_not_what_was_written_are_not_shown_to_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(pool: Pool) -> None:
        await pool.have(1, OLD)
        calls = len(pool.engines[0].calls)

        def rotten(path: Path) -> dict[str, Tensor]:
            return {name: flipped(name, tensor) for name, tensor in load_file(path).items()}

        with monkeypatch.context() as patch:
            patch.setattr("rollout.weights.transports.load_file", rotten)
            with pytest.raises(StorageFailed, match="another one"):
                await pool.updater.update(pool.controls, 2, NEW.items())
        shown = pool.engines[0].calls[calls:]
        assert not [body for path, body in shown if "model_path" in body]
        assert pool.serve(OLD, "1") == [True]
        assert not pool.updater.unusable

    run(test, check="files", transport="disk")


def test_where_there_is_no_room_for_the_old_version_either_engines_get_no_traffic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(pool: Pool) -> None:
        await pool.have(1, OLD)
        chunks: list[int] = []

        class Full(SharedChunk):
            def __init__(self, tensors: Mapping[str, Tensor]) -> None:
                chunks.append(len(tensors))
                if len(chunks) > 1:
                    raise StorageFailed("no room in /dev/shm")
                super().__init__(tensors)

        with monkeypatch.context() as patch:
            patch.setattr("rollout.weights.transports.SharedChunk", Full)
            with pytest.raises(StorageFailed, match="no room"):
                await pool.updater.update(pool.controls, 2, NEW.items())
        assert list(pool.updater.unusable) == [pool.engines[0].address]
        assert pool.engines[0].paused
        event = await pool.updater.restore(pool.controls[0])
        assert event is not None
        assert pool.serve(OLD, "1") == [True]

    run(test, transport="tensor", buffer_size=100)


def test_the_check_of_files_is_only_for_engines_that_read_files() -> None:
    async def test(pool: Pool) -> None:
        pool.engines[0].arguments.update(QUANTISED)
        with pytest.raises(InvalidArgument, match="--update-weight-check files"):
            await pool.updater.update(pool.controls, 1, OLD.items())

    run(test, check="files", transport="tensor")


def test_an_engine_that_gave_its_memory_back_is_brought_everything() -> None:
    async def test(pool: Pool) -> None:
        engine = pool.engines[0]
        await pool.have(1, OLD)
        with pytest.raises(InvalidArgument, match="keeps its memory"):
            await pool.updater.sleep(pool.controls)
        assert not engine.paused
        engine.arguments["enable_memory_saver"] = True
        await pool.updater.sleep(pool.controls)
        assert engine.paused
        calls = len(engine.calls)
        await pool.updater.update(pool.controls, 2, {**OLD, NORM: NEW[NORM]}.items())
        assert engine.called()[calls] == "/resume_memory_occupation"
        [event] = pool.updater.loaded()
        assert (event.base_version, event.sent_tensors) == (None, len(OLD))
        await pool.updater.release(2)
        assert pool.serve({**OLD, NORM: NEW[NORM]}, "2") == [True]
        # An update that fails after a sleep is taken back, too.
        await pool.updater.sleep(pool.controls)
        engine.spoils = flipped

        async def heals(path: str) -> None:
            if path == "/weights_checker" and engine.label == "3":
                engine.spoils = lambda name, tensor: tensor

        engine.before = heals
        with pytest.raises(Diverged, match="1 engines serve what they had"):
            await pool.updater.update(pool.controls, 3, NEW.items())
        assert pool.serve({**OLD, NORM: NEW[NORM]}, "2") == [True]
        assert engine.called().count("/resume_memory_occupation") == 2

    run(test, transport="tensor", mode="delta")
