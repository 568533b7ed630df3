"""The evaluations that the options of a command line name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ledger.errors import InvalidArgument, explain
from ledger.seeds import derive_seed
from rollout.evaluation import EvaluationRun
from rollout.protocol import SamplingParams
from rollout.reward_options import reward_function
from rollout.rewards import RewardFunction
from rollout.settings import RolloutSettings
from rollout.tasks import create_source, stop_token_ids
from rollout.tasks.files import FileSource
from rollout.tasks.from_options import (
    check_digest,
    evaluation_paths,
    how_judged,
    prompt_data_of,
)

__all__ = ["HELD_OUT", "evaluation_runs"]

HELD_OUT = "held-out"
"""The evaluation on the task's own prompts, of another seed."""


def evaluation_runs(
    values: Mapping[str, Any],
    settings: RolloutSettings,
    params: SamplingParams,
    reward: RewardFunction,
    tokenizer: Any,
    *,
    tools: list[dict[str, Any]] | None = None,
) -> Sequence[EvaluationRun]:
    """What is measured every --eval-interval rollout steps; empty without it.

    `params` and `reward` are those of the rollouts, which the task's own evaluation shares; `tools`
    are told to the chat template where a row has none of its own.

    Raises InvalidArgument where --prompt-data goes without evaluation data, where the data is not
    that of the run, and as `FileSource`.
    """
    paths = evaluation_paths(values)
    if values["eval_interval"] is None:
        return ()
    seed = derive_seed("evaluation", values["rollout_seed"])
    if not paths:
        if values["prompt_data"] is not None:
            raise InvalidArgument(
                explain(
                    "choosing evaluations",
                    on="--eval-interval with --prompt-data",
                    expected="--eval-prompt-data NAME PATH: prompts that are not trained on",
                    found="none",
                )
            )
        source = create_source(values["task"], seed=seed, options=values["task_options"])
        return (
            EvaluationRun(
                name=HELD_OUT,
                source=source,
                reward=reward,
                n_prompts=values["n_eval_prompts"],
                params=params,
                seed=seed,
            ),
        )
    judge = reward_function(values, how_judged(values), args=settings.arguments, evaluation=True)
    made = []
    for name, path in paths.items():
        data = prompt_data_of(values, path, evaluation=True)
        of_file = FileSource(
            data, tokenizer=tokenizer, seed=seed, reward=how_judged(values), tools=tools
        )
        check_digest(path, values["eval_data_digests"].get(name), of_file.digest)
        stops = settings.rollout_stop_token_ids
        if stops is None:
            stops = stop_token_ids(of_file, tokenizer)
        made.append(
            EvaluationRun(
                name=name,
                source=of_file,
                reward=judge,
                n_prompts=len(of_file),
                n_samples=values["n_samples_per_eval_prompt"],
                params=_params(values, params, stops),
                seed=seed,
                says_sampling=True,
            )
        )
    return made


def _params(
    values: Mapping[str, Any], base: SamplingParams, stop: tuple[int, ...]
) -> SamplingParams:
    """As in the rollout, but for what --eval-… says."""

    def said(name: str, otherwise: Any) -> Any:
        return otherwise if values[f"eval_{name}"] is None else values[f"eval_{name}"]

    return SamplingParams(
        temperature=said("temperature", base.temperature),
        top_p=said("top_p", base.top_p),
        top_k=said("top_k", base.top_k),
        max_new_tokens=said("max_response_len", base.max_new_tokens),
        stop_token_ids=stop,
        logprob_mode="full",
    )
