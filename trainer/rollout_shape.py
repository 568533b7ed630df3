"""Which shapes of rollout go with which settings of the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ledger.errors import InvalidArgument, explain

__all__ = ["check_rollout_shape"]


def check_rollout_shape(values: Mapping[str, Any]) -> None:
    """Raise InvalidArgument where the options by name cannot work together, with what to do."""
    partial, fully = values["partial_rollout"], values["fully_async"]
    bound = values["max_weight_staleness"]
    if fully and partial:
        raise _refused(
            "--fully-async with --partial-rollout",
            "one of them: asynchronous generation is never cut, so there is nothing to put back",
            "both",
            "leave --partial-rollout out",
        )
    if bound is not None and not (fully or partial):
        raise _refused(
            f"--max-weight-staleness {bound}",
            "--fully-async or --partial-rollout: without them every sample is of the weights that "
            "the engine has",
            "neither",
        )
    for name in ("async_max_concurrent_samples", "async_data_buffer_capacity_factor"):
        default = 3.0 if name.endswith("factor") else None
        if values[name] != default and not fully:
            flag = f"--{name.replace('_', '-')}"
            raise _refused(f"{flag} {values[name]}", "--fully-async, which it limits", "none")
    if (fully or partial) and values["recompute_logprobs_via_prefill"]:
        raise _refused(
            "--recompute-logprobs-via-prefill",
            "responses of one weight version: a forward over a resumed one would take newer "
            "weights for all of its tokens",
            "--fully-async" if fully else "--partial-rollout",
            "leave it out: the log-probs of the sampler are recorded as they were",
        )
    if not fully:
        return
    lag = values["num_steps_per_rollout"] * (values["update_weights_interval"] - 1)
    if bound is not None and bound < lag:
        raise _refused(
            f"--max-weight-staleness {bound}",
            f"at least {lag}: the engine gets weights every {values['update_weights_interval']} "
            "rollout steps, and is that far behind before the last of them",
            bound,
            "raise it, or lower --update-weights-interval",
        )
    corrected = ("use_rollout_logprobs", "use_tis", "keep_old_actor")
    if bound != 0 and not any(values[name] for name in corrected):
        raise _refused(
            "--fully-async",
            "--use-rollout-logprobs, --use-tis or --keep-old-actor: by default the old log-probs "
            "are those of the policy that is trained, and the ratio does not see that older "
            "weights sampled",
            "none of them",
            "--use-rollout-logprobs takes the ratio against the policy that sampled; --use-tis "
            "corrects for it with a weight; or bound it away with --max-weight-staleness 0",
        )


def _refused(on: str, expected: str, found: object, do: str | None = None) -> InvalidArgument:
    return InvalidArgument(
        explain("choosing the shape of rollout", on=on, expected=expected, found=found, do=do)
    )
