"""Engines and workers of a layout, placed on Ray, for a rollout side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.engines.batching import BatchingEngine
from rollout.environments.from_options import environment_tools
from rollout.protocol import AsyncEngine
from rollout.ray.cluster import environment, reserve
from rollout.ray.engine_actor import EngineActor
from rollout.ray.engines import RayEngines
from rollout.ray.layout import Layout
from rollout.ray.worker_actor import WorkerActor, WorkerPlace, WorkerServices
from rollout.ray.workers import RayWorkers
from rollout.reward_options import reward_function
from rollout.rewards import RewardFunction
from rollout.side import (
    RemoteWorkers,
    driver,
    embedded_options,
    load_tokenizer,
    rollout_settings,
    stops_of,
)
from rollout.tasks.from_options import training_source

if TYPE_CHECKING:
    from ledger.store import Ledger

__all__ = ["RayRollouts", "RolloutPlace", "embedded_engine", "worker_services"]


def embedded_engine(model_dir: str, values: Mapping[str, Any]) -> BatchingEngine:
    """The engine `transformers`, in the process of its actor."""
    from rollout.engines.transformers_engine import TransformersEngine

    _pin(values)
    mode = "abort" if values["pause_generation_mode"] == "abort" else "wait"
    return BatchingEngine(
        TransformersEngine(model_dir, **embedded_options(values)), pause_mode=mode
    )


def sglang_engine(model_dir: str, values: Mapping[str, Any], devices: int, tp: int) -> AsyncEngine:
    """The engine `sglang`: one server, which the actor starts and ends."""
    from rollout.engines.sglang.create import create_sglang_pool
    from rollout.engines.sglang.settings import sglang_settings
    from rollout.weights import WeightUpdateSettings

    one = {
        **values,
        "rollout_num_gpus": devices,
        "rollout_num_gpus_per_engine": devices,
        # What ends a server ends its actor: Ray starts both anew, and what it takes is recorded.
        "rollout_engine_restarts": 0,
    }
    if devices != tp:
        stages = {"pp-size": devices // tp}
        one["sglang_place_arguments"] = {**values["sglang_place_arguments"], **stages}
    return create_sglang_pool(
        Path(model_dir), sglang_settings(one), updates=WeightUpdateSettings.of(one)
    )


def worker_services(model_dir: str, values: Mapping[str, Any]) -> WorkerServices:
    """How a worker drives and judges, from the options of the command line by name."""
    settings = rollout_settings(values)
    folder = Path(model_dir)
    tokenizer = load_tokenizer(folder)
    source = training_source(values, tokenizer, environment_tools(values))
    stops = stops_of(values, settings, source, tokenizer, folder)
    return WorkerServices(
        tokenizer=tokenizer,
        drive=driver(values, tokenizer, stops, folder),
        reward=reward_function(values, source.reward, args=settings.arguments),
        run_seed=values["rollout_seed"],
        source=source.name,
    )


def _pin(values: Mapping[str, Any]) -> None:
    import torch

    torch.set_num_threads(values["num_threads"])
    torch.use_deterministic_algorithms(values["deterministic_mode"])


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlace:
    """The branch that workers write to."""

    ledger: Ledger
    catalog: str | None
    """As it was given on the command line."""
    run_id: str
    branch: str


class RayRollouts:
    """`rollout.side.RemoteRollouts` on Ray: actors that end with this process."""

    def __init__(
        self,
        ray: Any,
        layout: Layout,
        place: RolloutPlace,
        model_dir: Path,
        values: Mapping[str, Any],
        *,
        group: Any = None,
    ) -> None:
        """Reserve what the layout needs, and start the engines.

        `group`: the trainer's placement group, where engines share its devices. Raises
        InvalidArgument where the cluster cannot give it.
        """
        self._ray, self._layout, self._place = ray, layout, place
        self._model_dir, self._values = str(model_dir.absolute()), dict(values)
        self._reward: RewardFunction | None = None
        bundles = layout.rollout_bundles()
        own = reserve(ray, bundles, layout.strategy) if bundles else None
        count = layout.engines.number
        where = [(group, layout.node_of(n)) if layout.colocate else (own, n) for n in range(count)]
        self._engines = {
            f"engine-{n}": self._engine(n, *where[n], colocated=layout.colocate)
            for n in range(count)
        }
        first = 0 if layout.colocate else count
        self._bundles = {f"worker-{n}": (own, first + n) for n in range(layout.workers.number)}
        self._described: tuple[str, str] = ("", "")

    def _engine(self, number: int, group: Any, bundle: int, *, colocated: bool) -> Any:
        layout, name = self._layout, self._values["engine"]
        arguments: dict[str, Any] = {"model_dir": self._model_dir, "values": self._values}
        factory = "rollout.ray.remote:embedded_engine"
        if name == "sglang":
            factory = "rollout.ray.remote:sglang_engine"
            arguments |= {"devices": layout.engines.gpus, "tp": layout.engines.tensor_parallel}
        given = environment()
        on_gpu = layout.device == "gpu"
        if colocated and on_gpu:
            # The ranks have them all; Ray would give the engine none.
            given["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, layout.devices_of(number)))
        cores = max(1, layout.engines.cpus)
        return (
            self._ray.remote(EngineActor)
            .options(
                max_restarts=-1,
                num_gpus=layout.engines.gpus if on_gpu and not colocated else 0,
                num_cpus=cores if on_gpu or colocated else max(cores, layout.engines.gpus),
                scheduling_strategy=self._in(group, bundle),
            )
            .remote(f"engine-{number}", factory, arguments, given)
        )

    def _in(self, group: Any, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        )

    def judged_by(self, reward: RewardFunction) -> None:
        """As `RemoteRollouts.judged_by`."""
        self._reward = reward

    async def engines(self) -> AsyncEngine:
        """All engines as one, once each has started; this process supervises them."""
        for actor in self._engines.values():
            name, version, _ = await actor.describe.remote()
            self._described = (name, version)
        name, version = self._described
        return RayEngines(self._engines, name=name, version=version, supervises=True)

    def workers(self) -> RemoteWorkers | None:
        """Start the workers; None where the layout has none."""
        if not self._bundles or self._reward is None:
            return None
        place = self._place
        made = RayWorkers(place.ledger, place.run_id, place.branch, self._worker, self._reward)
        made.add(list(self._bundles))
        return made

    def _worker(self, name: str) -> Any:
        place, (engine_name, engine_version) = self._place, self._described
        return (
            self._ray.remote(WorkerActor)
            .options(
                num_cpus=self._layout.workers.cpus,
                scheduling_strategy=self._in(*self._bundles[name]),
            )
            .remote(
                WorkerPlace(
                    ledger=place.ledger.uri,
                    catalog=place.catalog,
                    run_id=place.run_id,
                    branch=place.branch,
                    worker=name,
                    engines=self._engines,
                    engine_name=engine_name,
                    engine_version=engine_version,
                ),
                "rollout.ray.remote:worker_services",
                {"model_dir": self._model_dir, "values": self._values},
                environment(),
            )
        )
