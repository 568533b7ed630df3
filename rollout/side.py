"""The rollout side of a training process: one engine, what it samples, and how it is judged."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ledger.errors import InvalidArgument, NotFound, explain
from ledger.evaluations import Evaluation
from ledger.events import EvalScored
from rollout.async_side import AsyncRollouts
from rollout.buffer import DataBuffer
from rollout.coordinator import Coordinator
from rollout.driving import drives_episodes, episode_function
from rollout.engines import (
    create_async_engine,
    create_engine,
    longest_context,
    own_end_token_ids,
)
from rollout.environments.from_options import environment_tools
from rollout.episode import Episode, EpisodeFunction, single_turn
from rollout.evaluation_episodes import evaluate_episodes, judged_in
from rollout.evaluation_options import evaluation_runs
from rollout.filters import create_filter
from rollout.left_out import record_left_out
from rollout.protocol import AsyncEngine, Engine
from rollout.reward_options import reward_function
from rollout.rewards import RewardFunction
from rollout.settings import RolloutSettings
from rollout.shapes import RolloutShape
from rollout.slime.arguments import slime_arguments
from rollout.tasks import PromptSource, stop_token_ids
from rollout.tasks.from_options import training_source
from rollout.worker import RolloutProgress, RolloutSummary, RolloutWorker

if TYPE_CHECKING:
    from ledger.store import Ledger
    from ledger.weights import TensorRecord
    from ledger.writer import Writer

__all__ = [
    "LocalRolloutSide",
    "RemoteRollouts",
    "RemoteWorkers",
    "driver",
    "embedded_options",
    "is_asynchronous",
    "load_tokenizer",
    "rollout_settings",
    "stops_of",
]

GREEDY_PART = "greedy_reward"
"""Part of a reward that holds the reward of the prompt's greedy sample."""


def rollout_settings(values: Mapping[str, Any]) -> RolloutSettings:
    """From the options of the command line, by name. Raises InvalidArgument."""
    return RolloutSettings(
        run_seed=values["rollout_seed"],
        rollout_batch_size=values["rollout_batch_size"],
        n_samples_per_prompt=values["n_samples_per_prompt"],
        over_sampling_batch_size=values["over_sampling_batch_size"],
        dynamic_sampling_filter_path=values["dynamic_sampling_filter_path"],
        max_rounds=values["rollout_max_rounds"],
        rollout_max_response_len=values["rollout_max_response_len"],
        rollout_temperature=values["rollout_temperature"],
        rollout_top_p=values["rollout_top_p"],
        rollout_top_k=values["rollout_top_k"],
        rollout_logprob_mode=values["rollout_logprob_mode"],
        rollout_stop_token_ids=None
        if values["rollout_stop_token_ids"] is None
        else tuple(values["rollout_stop_token_ids"]),
        arguments=slime_arguments(values),
        # Under another key the reward function brings the part itself.
        greedy_baseline_key=GREEDY_PART
        if values["advantage_estimator"] == "remax" and values["remax_baseline_key"] == GREEDY_PART
        else None,
    )


def rollout_shape(values: Mapping[str, Any]) -> RolloutShape:
    """From the options of the command line, by name. Raises InvalidArgument."""
    names = (
        "partial_rollout",
        "fully_async",
        "max_weight_staleness",
        "async_max_concurrent_samples",
        "async_data_buffer_capacity_factor",
        "async_unused_samples_handler",
        "max_sample_retries",
    )
    return RolloutShape(
        **{name: values[name] for name in names},
        versions_per_rollout=values["num_steps_per_rollout"],
    )


def is_asynchronous(values: Mapping[str, Any]) -> bool:
    """Whether the rollouts go through the coordinator and an asynchronous engine.

    The others are made by `RolloutWorker`, in process, one round after the other, bit for bit the
    same again.
    """
    return bool(
        values["engine"] != "transformers"
        or values["partial_rollout"]
        or values["fully_async"]
        or drives_episodes(values)
    )


def driver(
    values: Mapping[str, Any], tokenizer: Any, stops: tuple[int, ...], model_dir: Path
) -> EpisodeFunction:
    """What drives an episode, from the options of the command line by name.

    Where no option says how long a context may become, it is what the engine serves of the model.
    Raises as `episode_function`.
    """
    if values["environment"] is not None and values["rollout_max_context_len"] is None:
        length = values["sglang_arguments"].get("context-length")
        longest = longest_context(values["engine"], model_dir, int(length) if length else None)
        values = {**values, "rollout_max_context_len": longest}
    return episode_function(
        values,
        tokenizer,
        stops,
        slime_arguments({**values, "hf_checkpoint": str(model_dir)}),
        vocab_size=_vocab_size(model_dir),
    )


def stops_of(
    values: Mapping[str, Any],
    settings: RolloutSettings,
    source: PromptSource,
    tokenizer: Any,
    model_dir: Path,
) -> tuple[int, ...]:
    """The ids that end an answer: as the settings say, or of the source; and those at which the
    engine stops by itself."""
    given = settings.rollout_stop_token_ids
    stops = stop_token_ids(source, tokenizer) if given is None else given
    more = set(own_end_token_ids(values["engine"], model_dir)).difference(stops)
    return (*stops, *sorted(more))


def embedded_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine in this process takes, from the options of the command line by name."""
    return {
        "device": _device(),
        # The engine holds what was published, bit for bit.
        "dtype": "bfloat16" if values.get("bf16") else "float32",
        "recompute_logprobs_via_prefill": values["recompute_logprobs_via_prefill"],
        "micro_batch_rows": values["micro_batch_size"],
        "seq_length": values["seq_length"],
        "record_expert_weights": bool(
            values.get("record_routing_weights") or values.get("replay_routing_weights")
        ),
    }


def _device() -> str:
    """Where the embedded engine computes: the GPU where there is one, as the trainer does."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_tokenizer(model_dir: Path) -> Any:
    """The tokenizer of a model folder. Raises NotFound where there is none that loads."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError) as error:
        raise NotFound(
            explain(
                "loading a tokenizer",
                on=str(model_dir),
                expected="tokenizer.json and tokenizer_config.json",
                found=str(error).splitlines()[0],
                do="save the model's tokenizer in its folder: tokenizer.save_pretrained(folder)",
            )
        ) from error


def _vocab_size(model_dir: Path) -> int:
    """The ids that the model can take."""
    config = json.loads((model_dir / "config.json").read_text("utf-8"))
    return int(config.get("text_config", config)["vocab_size"])


class RemoteWorkers(RewardFunction, Protocol):
    """Processes that drive and judge the samples of a coordinator."""

    buffer: DataBuffer | None
    """The coordinator's; set before the first sample is driven."""

    async def drive(self, episode: Episode) -> None:
        """As `EpisodeFunction`."""


class RemoteRollouts(Protocol):
    """Engines, and maybe workers, in other processes: as `rollout.ray.remote.RayRollouts`."""

    def judged_by(self, reward: RewardFunction) -> None:
        """The reward function that the workers have, as this process has it."""

    def engines(self) -> Coroutine[Any, Any, AsyncEngine]:
        """All engines as one, of the event loop that runs this."""

    def workers(self) -> RemoteWorkers | None:
        """The workers, of the event loop that calls this; None: there are none."""


class LocalRolloutSide:
    """An engine in reach of this process, its prompts and its verifier.

    Made before anything is written, so that what cannot work shows first; `attach` then gives it
    the branch that it writes to.
    """

    def __init__(
        self, model_dir: Path, values: Mapping[str, Any], remote: RemoteRollouts | None = None
    ) -> None:
        """Load tokenizer and engine from `model_dir`; `values` are options by name.

        `remote` has engines, and maybe workers, in other processes in place of those of this one.

        Raises InvalidArgument, NotFound or MissingDependency where an option, the folder or a
        package does not fit.
        """
        self._settings = rollout_settings(values)
        self._tokenizer = load_tokenizer(model_dir)
        tools = environment_tools(values)
        self._source = training_source(values, self._tokenizer, tools)
        self._reward = reward_function(values, self._source.reward, args=self._settings.arguments)
        create_filter(self._settings.dynamic_sampling_filter_path)
        self._remote = remote
        if remote is not None:
            remote.judged_by(self._reward)
        stops = stops_of(values, self._settings, self._source, self._tokenizer, model_dir)
        if self._settings.rollout_stop_token_ids != stops:
            self._settings = replace(self._settings, rollout_stop_token_ids=stops)
        runs = evaluation_runs(
            values,
            self._settings,
            self._settings.sampling(stops),
            self._reward,
            self._tokenizer,
            tools=tools,
        )
        self._shape = rollout_shape(values)
        self._offload = bool(values.get("offload_rollout"))
        if self._offload and values["engine"] != "sglang":
            raise InvalidArgument(
                explain(
                    "setting up the rollouts",
                    on="--offload-rollout",
                    expected="--engine sglang: an engine in processes of its own",
                    found=f"--engine {values['engine']}",
                )
            )
        self._drive = driver(values, self._tokenizer, stops, model_dir)
        if self._drive is not single_turn:
            runs = [judged_in(run, self._drive) for run in runs]
        self._evaluations = {run.name: run for run in runs}
        self._worker: RolloutWorker | AsyncRollouts | None = None
        self._asynchronous: AsyncRollouts | None = None
        self._engine: Engine
        name = values["engine"]
        if remote is not None:
            self._engine = self._asynchronous = AsyncRollouts(remote.engines())
        elif is_asynchronous(values):
            self._engine = self._asynchronous = AsyncRollouts(
                create_async_engine(name, model_dir, values, embedded_options(values))
            )
        else:
            self._engine = create_engine(name, model_dir, **embedded_options(values))

    def attach(
        self,
        ledger: Ledger,
        run_id: str,
        branch: str,
        writer: Writer,
        progress: Callable[[RolloutProgress], None] | None = None,
    ) -> None:
        """Name the branch whose rollouts are made, and the writer of their events."""
        record_left_out(ledger.reader(run_id, branch), writer, self._source)
        if self._asynchronous is None:
            self._worker = RolloutWorker(
                ledger,
                run_id,
                branch,
                writer,
                self._engine,
                self._source,
                self._reward,
                self._tokenizer,
                self._settings,
                progress,
            )
            return

        remote = self._remote

        def coordinator(engine: AsyncEngine) -> Coordinator:
            workers = None if remote is None else remote.workers()
            made = Coordinator(
                ledger,
                run_id,
                branch,
                writer,
                engine,
                self._source,
                self._reward if workers is None else workers,
                self._tokenizer,
                self._settings,
                self._shape,
                drive=self._drive if workers is None else workers.drive,
                progress=progress,
            )
            if workers is not None:
                workers.buffer = made.buffer
            return made

        self._asynchronous.attach(coordinator)
        self._worker = self._asynchronous

    evaluates = True

    @property
    def records_weights(self) -> bool:
        """Whether it records how engines took the version that waits for its release."""
        return self._asynchronous is not None and bool(self._asynchronous.loaded())

    @property
    def transport(self) -> str:
        """How the version that waits for its release reached the engine."""
        loaded = [] if self._asynchronous is None else self._asynchronous.loaded()
        return loaded[0].transport if loaded else "memory"

    @property
    def name(self) -> str:
        """Of the engine."""
        return self._engine.name

    @property
    def acknowledged_by(self) -> list[str]:
        """The engine, or each of its servers: whose own checksums were compared."""
        loaded = [] if self._asynchronous is None else self._asynchronous.loaded()
        return [one.engine_address or one.engine for one in loaded] or [self._engine.name]

    def location(self, version: int) -> None:
        """Nowhere: the engine has a copy in its memory."""
        return

    def rollout(self, rollout_step: int, consumer_version: int | None) -> RolloutSummary:
        """As `RolloutWorker.rollout` or `Coordinator.rollout`; after `attach`."""
        if self._worker is None:
            raise RuntimeError("rollout() before attach(): there is no branch to write to")
        if isinstance(self._worker, RolloutWorker):
            return self._worker.rollout(rollout_step)
        summary = self._worker.rollout(rollout_step, consumer_version)
        if self._offload:
            self._worker.sleep()
        return summary

    @property
    def evaluations(self) -> Sequence[Evaluation]:
        """What is measured, by name."""
        return [run.key for run in self._evaluations.values()]

    def evaluate(self, version: int, name: str) -> EvalScored:
        """Measure the loaded weights by the evaluation of that name."""
        run = self._evaluations[name]
        if self._drive is single_turn or self._asynchronous is None:
            return run.measure(self._engine, self._tokenizer, version)
        return self._asynchronous.run(
            lambda engine: evaluate_episodes(engine, run, self._drive, self._tokenizer, version)
        )

    def load_weights(self, version: int, named: Iterable[tuple[str, Any]]) -> list[TensorRecord]:
        """As `Engine.update_weights`: the engine stays stopped until `release`."""
        return self._engine.update_weights(version, named)

    def release(self, version: int) -> None:
        """As `Engine.release`."""
        self._engine.release(version)

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()
