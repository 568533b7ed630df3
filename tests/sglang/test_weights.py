"""Weight updates of a real SGLang on the CPU: every transport that runs there, deltas, pause modes,
and what is left after a failure."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ledger.errors import Conflict, Diverged
from ledger.fields import Event
from ledger.weights import weights_root
from rollout.weights import EngineControl, WeightUpdater, WeightUpdateSettings
from rollout.weights.control import Answer
from rollout.weights.payload import SharedChunk
from tests.sglang.servers import Served

NORM = "model.norm.weight"
KEYS = "model.layers.0.self_attn.k_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
Weights = Mapping[str, Tensor]


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def updater_for(folder: Path, **settings: Any) -> WeightUpdater:
    config = json.loads((folder / "config.json").read_text())
    return WeightUpdater(WeightUpdateSettings(**settings), config)


def run(
    server: Served,
    folder: Path,
    test: Callable[[EngineControl, WeightUpdater], Awaitable[None]],
    **settings: Any,
) -> None:
    async def main() -> None:
        control = EngineControl(server.address, local=True, timeout_s=120.0)
        updater = updater_for(folder, **settings)
        try:
            await test(control, updater)
        finally:
            await updater.close()
            await control.close()

    asyncio.run(main())


def held(server: Served) -> dict[str, str]:
    """The engine's own checksums."""
    [rank] = server.call("/weights_checker", {"action": "checksum"})["ranks"]
    found: dict[str, str] = rank["checksums"]
    return found


def sample(server: Served, count: int, **more: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.call(
        "/generate",
        {
            "input_ids": [1, 2, 3],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True},
            **more,
        },
    )
    return answer


@pytest.fixture(params=["dense", "moe"])
def server(request: pytest.FixtureRequest) -> tuple[Served, str]:
    return request.getfixturevalue(request.param), request.param


@pytest.mark.parametrize("transport", ["disk", "tensor", "distributed"])
def test_an_engine_is_brought_a_version_and_then_what_has_changed(
    server: tuple[Served, str], folders: dict[str, Path], transport: str
) -> None:
    engine, kind = server
    first = weights_of(folders[f"{kind}-1"])
    name = EXPERT if kind == "moe" else KEYS
    second = {**first, name: weights_of(folders[f"{kind}-0"])[name]}
    before, after_first = held(engine), []

    async def test(control: EngineControl, updater: WeightUpdater) -> None:
        recorded: list[Event] = []

        async def record(events: Sequence[Event]) -> None:
            recorded.extend(events)

        updater.record = record
        for version, weights in ((5, first), (6, second), (7, second)):
            records = await updater.update([control], version, weights.items())
            assert weights_root(records) == updater.loaded()[0].root
            await updater.release(version)
            if version == 5:
                after_first.append(held(engine))
        sent = [(e.base_version, e.sent_tensors, e.cache_flushed) for e in recorded]  # type: ignore[attr-defined]
        assert sent == [(None, len(first), True), (5, 1, True), (6, 0, True)]
        assert [e.transport for e in recorded] == [transport] * 3  # type: ignore[attr-defined]

    # Small buffers: every update but the last is of many requests.
    run(engine, folders[f"{kind}-0"], test, transport=transport, mode="delta", buffer_size=65_536)
    after = held(engine)
    assert {key for key in before if before[key] != after[key]} == {
        key for key in before if "norm" not in key
    }
    answer = sample(engine, 4)
    assert answer["meta_info"]["weight_versions"] == [{"version": "7", "start": 0, "end": 4}]
    # What was brought is what SGLang's own loader makes of the files.
    engine.load(folders[f"{kind}-1"], 8)
    assert after_first == [held(engine)]


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_a_request_that_runs_on_is_told_which_version_sampled_each_token(
    dense: Served, folders: dict[str, Path], mode: str
) -> None:
    weights = weights_of(folders["dense-1"])
    answers: list[dict[str, Any]] = []
    many = 400
    began = dense.decoded()

    def ask() -> None:
        answers.append(sample(dense, many))

    async def test(control: EngineControl, updater: WeightUpdater) -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        while dense.decoded() < began + 5:
            await asyncio.sleep(0.01)
        await updater.update([control], 3, weights.items())
        [event] = updater.loaded()
        # In place the running request keeps its cache, which cannot be emptied then.
        assert event.cache_flushed == (mode != "in_place")
        await updater.release(3)
        await asyncio.to_thread(thread.join)

    run(dense, folders["dense-0"], test, transport="tensor", pause_mode=mode)
    [answer] = answers
    spans = answer["meta_info"]["weight_versions"]
    count = len(answer["output_ids"])
    if mode == "abort":
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert [span["version"] for span in spans] == ["0"]
        assert 5 <= count < many
    else:
        assert [span["version"] for span in spans] == ["0", "3"]
        assert (spans[0]["start"], spans[1]["start"], spans[1]["end"]) == (0, spans[0]["end"], many)
        assert count == many


def test_a_path_that_does_not_exist_changes_nothing(dense: Served, tmp_path: Path) -> None:
    before = held(dense)

    async def main() -> Answer:
        control = EngineControl(dense.address)
        try:
            path = str(tmp_path / "none")
            return await control.post(
                "/update_weights_from_disk", {"model_path": path, "weight_version": "9"}
            )
        finally:
            await control.close()

    answer = asyncio.run(main())
    assert not answer.ok
    assert answer.message.startswith("400: ")
    assert held(dense) == before
    assert sample(dense, 1)["meta_info"]["weight_version"] == "0"


class SomebodyElse(EngineControl):
    """Changes one tensor behind the updater's back, once."""

    done = False

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        answer = await super().post(path, body)
        if path == "/end_weight_update" and not self.done:
            self.done = True
            await super().post("/begin_weight_update")
            norm = SharedChunk({NORM: torch.full((64,), 0.5)})
            taken = await super().post(
                "/update_weights_from_tensor", {"serialized_named_tensors": norm.payloads(1)}
            )
            assert taken.ok
            await super().post("/end_weight_update")
        return answer


def test_other_bits_than_were_published_are_found_and_the_old_version_is_served_again(
    moe: Served, folders: dict[str, Path]
) -> None:
    first, second = weights_of(folders["moe-1"]), weights_of(folders["moe-0"])

    async def test(control: EngineControl, updater: WeightUpdater) -> None:
        await updater.update([control], 1, first.items())
        await updater.release(1)
        before = held(moe)
        other = SomebodyElse(moe.address, local=True)
        try:
            with pytest.raises(Diverged, match=f"{NORM} on rank 0 of 1: .* expected, .* found"):
                await updater.update([other], 2, second.items())
        finally:
            await other.close()
        assert not updater.unusable
        assert held(moe) == before
        assert sample(moe, 2)["meta_info"]["weight_versions"] == [
            {"version": "1", "start": 0, "end": 2}
        ]
        with pytest.raises(Conflict):
            await updater.release(2)

    run(moe, folders["moe-0"], test, transport="tensor")


def test_a_first_version_that_fails_leaves_what_the_engine_was_started_with(
    dense: Served, folders: dict[str, Path]
) -> None:
    dense.load(folders["dense-0"], 0)
    before = held(dense)

    async def test(control: EngineControl, updater: WeightUpdater) -> None:
        other = SomebodyElse(dense.address, local=True)
        try:
            with pytest.raises(Diverged, match="1 engines serve what they had"):
                await updater.update([other], 1, weights_of(folders["dense-1"]).items())
        finally:
            await other.close()

    run(dense, folders["dense-0"], test, transport="tensor")
    assert held(dense) == before
    assert sample(dense, 1)["meta_info"]["weight_version"] == "0"


def test_what_a_killed_process_left_half_done_is_put_right_by_the_next(
    dense: Served, folders: dict[str, Path]
) -> None:
    committed = weights_of(folders["dense-1"])

    async def killed(control: EngineControl, updater: WeightUpdater) -> None:
        """As far as a process came that was killed between two requests of an update."""
        assert (await control.pause("retract")).ok
        assert (await control.post("/begin_weight_update")).ok
        norm = SharedChunk({NORM: torch.full((64,), 0.5)})
        taken = await control.post(
            "/update_weights_from_tensor", {"serialized_named_tensors": norm.payloads(1)}
        )
        assert taken.ok

    async def next_process(control: EngineControl, updater: WeightUpdater) -> None:
        await updater.update([control], 4, committed.items())
        await updater.release(4)

    run(dense, folders["dense-0"], killed)
    run(dense, folders["dense-0"], next_process, transport="tensor", mode="delta")
    assert sample(dense, 1)["meta_info"]["weight_version"] == "4"
