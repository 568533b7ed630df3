"""The rollout side of a training process: one engine, what it samples, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ledger.errors import NotFound, explain
from ledger.events import EvalScored
from ledger.seeds import derive_seed
from rollout.engines import create_engine
from rollout.evaluation import evaluate
from rollout.filters import create_filter
from rollout.reward_options import reward_function
from rollout.settings import RolloutSettings
from rollout.slime.arguments import slime_arguments
from rollout.tasks import create_source, stop_token_ids
from rollout.tasks.from_options import training_source
from rollout.worker import RolloutProgress, RolloutSummary, RolloutWorker

if TYPE_CHECKING:
    from ledger.store import Ledger
    from ledger.weights import TensorRecord
    from ledger.writer import Writer

__all__ = ["LocalRolloutSide", "load_tokenizer", "rollout_settings"]

EVALUATION = "held-out"
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
        arguments=slime_arguments(values),
        # Under another key the reward function brings the part itself.
        greedy_baseline_key=GREEDY_PART
        if values["advantage_estimator"] == "remax" and values["remax_baseline_key"] == GREEDY_PART
        else None,
    )


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


class LocalRolloutSide:
    """An engine in reach of this process, its prompts and its verifier.

    Made before anything is written, so that what cannot work shows first; `attach` then gives it
    the branch that it writes to.
    """

    def __init__(self, model_dir: Path, values: Mapping[str, Any]) -> None:
        """Load tokenizer and engine from `model_dir`; `values` are options by name.

        Raises InvalidArgument, NotFound or MissingDependency where an option, the folder or a
        package does not fit.
        """
        self._settings = rollout_settings(values)
        seed = values["rollout_seed"]
        task, options = values["task"], values["task_options"]
        self._tokenizer = load_tokenizer(model_dir)
        self._source = training_source(values, self._tokenizer)
        self._eval_seed = derive_seed("evaluation", seed)
        self._eval_source = create_source(task, seed=self._eval_seed, options=options)
        self._reward = reward_function(values, self._source.reward, args=self._settings.arguments)
        create_filter(self._settings.dynamic_sampling_filter_path)
        self._n_eval_prompts = values["n_eval_prompts"]
        self._engine = create_engine(
            values["engine"],
            model_dir,
            device=_device(),
            # The engine holds what was published, bit for bit.
            dtype="bfloat16" if values.get("bf16") else "float32",
            recompute_logprobs_via_prefill=values["recompute_logprobs_via_prefill"],
            micro_batch_rows=values["micro_batch_size"],
            seq_length=values["seq_length"],
            record_expert_weights=bool(
                values.get("record_routing_weights") or values.get("replay_routing_weights")
            ),
        )
        self._params = self._settings.sampling(stop_token_ids(self._source, self._tokenizer))
        self._worker: RolloutWorker | None = None

    def attach(
        self,
        ledger: Ledger,
        run_id: str,
        branch: str,
        writer: Writer,
        progress: Callable[[RolloutProgress], None] | None = None,
    ) -> None:
        """Name the branch whose rollouts are made, and the writer of their events."""
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

    transport = "memory"
    evaluates = True

    @property
    def name(self) -> str:
        """Of the engine."""
        return self._engine.name

    @property
    def acknowledged_by(self) -> list[str]:
        """The engine, whose own checksums `load_weights` returns."""
        return [self._engine.name]

    def location(self, version: int) -> None:
        """Nowhere: the engine has a copy in its memory."""
        return

    def rollout(self, rollout_step: int) -> RolloutSummary:
        """As `RolloutWorker.rollout`; after `attach`."""
        if self._worker is None:
            raise RuntimeError("rollout() before attach(): there is no branch to write to")
        return self._worker.rollout(rollout_step)

    @property
    def evaluation(self) -> tuple[str, int, int, str]:
        """Source, number of prompts, seed and verifier of an evaluation."""
        return self._eval_source.name, self._n_eval_prompts, self._eval_seed, self._reward.name

    def evaluate(self, version: int) -> EvalScored:
        """Measure the loaded weights, at the training temperature, on held-out prompts."""
        return evaluate(
            self._engine,
            self._eval_source,
            self._reward,
            self._tokenizer,
            name=EVALUATION,
            n_prompts=self._n_eval_prompts,
            params=self._params,
            seed=self._eval_seed,
            weight_version=version,
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
