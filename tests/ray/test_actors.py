"""Engines and workers as actors: one of each is killed in the middle, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ledger import open_ledger
from ledger.check import check_ledger
from ledger.errors import FencedOff
from ledger.events import WeightsPublished
from ledger.weights import tensor_record, weights_root
from rollout.coordinator import Coordinator
from rollout.ray.cluster import cluster, environment
from rollout.ray.engine_actor import EngineActor
from rollout.ray.engines import RayEngines
from rollout.ray.worker_actor import Assignment, WorkerActor, WorkerPlace
from rollout.ray.workers import RayWorkers
from rollout.shapes import RolloutShape
from rollout.tasks import create_source
from rollout.trajectory import Trajectory
from tests.ray.made import SETTINGS, TOKENS, TURNS, WEIGHTS, ByIndex, Tokens

pytestmark = pytest.mark.xdist_group("ray")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(ROOT))
        patched.setenv("RAY_DEDUP_LOGS", "0")
        with cluster({"CPU": 6}) as found:
            yield found


class Bench:
    """A ledger with one published version, two engines and two workers."""

    def __init__(self, ray: Any, root: Path, token_s: float) -> None:
        self.ray, self.ledger = ray, open_ledger(root, create=True)
        self.ledger.create_run("run")
        with self.ledger.writer("run", producer="ledger-train/main") as writer:
            writer.append([_published()])
        made = ray.remote(EngineActor)
        self.engine_actors = {
            name: made.options(max_restarts=-1, num_cpus=1).remote(
                name, "tests.ray.made:engine", {"token_s": token_s}, environment()
            )
            for name in ("engine-0", "engine-1")
        }
        self.writer = self.ledger.writer("run", producer="ledger-rollout/main")
        self.engines = RayEngines(self.engine_actors, name="scripted", version="1", supervises=True)
        self.workers = RayWorkers(self.ledger, "run", "main", self.worker, ByIndex())
        self.workers.add(["worker-0", "worker-1"])

    def worker(self, name: str) -> Any:
        place = WorkerPlace(
            ledger=str(self.ledger.root),
            catalog=None,
            run_id="run",
            branch="main",
            worker=name,
            engines=self.engine_actors,
            engine_name="scripted",
            engine_version="1",
        )
        made = self.ray.remote(WorkerActor)
        return made.options(num_cpus=1).remote(place, "tests.ray.made:services", {}, environment())

    def coordinator(self) -> Coordinator:
        made = Coordinator(
            self.ledger,
            "run",
            "main",
            self.writer,
            self.engines,
            create_source("addition", seed=3),
            self.workers,
            Tokens(),
            SETTINGS,
            RolloutShape(),
            drive=self.workers.drive,
        )
        self.workers.buffer = made.buffer
        return made

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return self.ledger.reader("run").table(kind).to_pylist()

    async def until(self, condition: Any) -> None:
        for _ in range(3000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise TimeoutError("the condition did not hold")

    def close(self) -> None:
        for actor in (*self.engine_actors.values(), *self.workers.actors.values()):
            self.ray.kill(actor)
        self.ledger.close()


def _published() -> WeightsPublished:
    records = [tensor_record("w", "float32", (1,), WEIGHTS["w"])]
    return WeightsPublished(
        weight_version=0,
        parent_version=None,
        step=None,
        tensor_names=["w"],
        tensor_dtypes=["float32"],
        tensor_shapes=[np.array([1], np.int64)],
        tensor_checksums=[records[0].checksum],
        root=weights_root(records),
        size_bytes=4,
        transport="none",
        acknowledged_by=[],
    )


def test_an_engine_and_a_worker_are_killed_and_what_comes_late_is_refused(
    ray: Any, tmp_path: Path
) -> None:
    bench = Bench(ray, tmp_path / "ledger", 0.1)
    asyncio.run(_killed(bench))
    samples = [row["index"] for row in bench.rows("sample_decided") if row["decision"] == "kept"]
    assert len(samples) == len(set(samples)) == 4
    segments = bench.rows("segment_generated")
    assert {row["engine_address"] for row in segments} <= {"ray:engine-0", "ray:engine-1"}
    for index in samples:
        mine = [row for row in segments if row["index"] == index]
        assert [row["turn"] for row in mine] == list(range(TURNS))
        assert [row["start"] for row in mine] == [turn * (TOKENS + 2) for turn in range(TURNS)]
    assert len(segments) == 4 * TURNS  # none of the one that came late
    loaded = [(row["engine_address"], row["reason"]) for row in bench.rows("weights_loaded")]
    assert sorted(loaded) == [
        ("ray:engine-0", "restored"),
        ("ray:engine-0", "restored"),
        ("ray:engine-1", "restored"),
    ]
    assert bench.workers.replaced == 2
    assert bench.engines.restarts == 1
    checked = check_ledger(bench.ledger.reader("run", branch=None))
    assert checked.ok, checked
    bench.close()


async def _killed(bench: Bench) -> None:
    coordinator = bench.coordinator()
    await coordinator.update_weights(0, iter(WEIGHTS.items()))
    await coordinator.release(0)
    await _late(bench, coordinator)
    made = asyncio.ensure_future(coordinator.rollout(0, 0))
    # Every sample has two of its three turns before it when the first one is recorded.
    await bench.until(lambda: made.done() or bench.rows("segment_generated"))
    assert not made.done()
    worker = await bench.workers.actors["worker-1"].ready.remote()
    _, _, engine = await bench.engine_actors["engine-0"].describe.remote()
    os.kill(worker, signal.SIGKILL)
    os.kill(engine, signal.SIGKILL)
    await made
    await bench.until(lambda: bench.engines.restarts)
    await coordinator.close()
    await bench.engines.close()


async def _late(bench: Bench, coordinator: Coordinator) -> None:
    """A worker that is taken to be gone answers all the same: the ledger refuses it."""
    old = bench.workers._workers["worker-0"]
    assignment = Assignment(
        trajectory=Trajectory(
            index=10**6,
            group_index=10**6,
            rollout_id=10**6,
            rollout_step=0,
            prompt_tokens=np.array([1, 2], np.int32),
            text="",
            label=None,
            metadata={},
        ),
        siblings=[],
        params=coordinator.params,
        spare_indices=[],
    )
    before = await old.actor.ready.remote()
    late = old.actor.drive.remote(assignment)
    await bench.workers._fenced(old)
    driven = await late
    assert isinstance(driven.error, FencedOff)
    assert await bench.workers.actors["worker-0"].ready.remote() != before
    bench.ray.kill(old.actor)
