"""The values of options: what was given, checked and completed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ledger.errors import InvalidArgument, explain
from trainer.options import OPTIONS, Option, passed_on_options
from trainer.ranges import LARGEST_FLOAT
from trainer.rank_count import with_ranks
from trainer.settings_conditions import WITH_CONSTANT

__all__ = ["check_values", "content_of", "defaults", "passed_on", "places_of", "validate"]


def defaults() -> dict[str, Any]:
    """The value of every option where neither the command line nor a recorded run sets it."""
    return {option.name: option.default for option in OPTIONS}


def content_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that decide what comes out. Of Megatron's own those that were given."""
    return {o.name: values[o.name] for o in _options(values) if o.content and o.name in values}


_OWN = frozenset(option.name for option in OPTIONS)


def _options(values: Mapping[str, Any]) -> Sequence[Option]:
    """All options that `values` may be of; Megatron's are looked up where there is one."""
    return OPTIONS if values.keys() <= _OWN else (*OPTIONS, *passed_on_options())


def passed_on(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of Megatron's own settings among `values`: what is no option of this package."""
    return {name: value for name, value in values.items() if name not in _OWN}


def places_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say where, how long and how often."""
    return {o.name: values[o.name] for o in OPTIONS if not o.content and o.name in values}


def check_values(values: Mapping[str, Any]) -> None:
    """Check what was given, option by option; what is absent or None is not looked at.

    Raises InvalidArgument, naming the flag: a number that is not finite or out of its range, an
    empty text, a JSON object with a number that is not finite.
    """
    for option in _options(values):
        value = values.get(option.name)
        if value is None:
            continue
        expected: object = None
        if isinstance(value, float) and not abs(value) <= LARGEST_FLOAT:
            expected = "a finite number of 32 bits"
        elif option.within is not None and value not in option.within:
            expected = option.within
        elif option.type is str and not value:
            expected = "a text that is not empty"
        elif option.choices is not None and value not in option.choices:
            expected = f"one of {', '.join(option.choices)}"
        elif option.type == "json" and not _is_finite(value):
            expected = "finite numbers"
        if expected is not None:
            raise _refused(option.flag, expected, repr(value))


def _is_finite(value: Any) -> bool:
    """Whether a JSON value holds no NaN and no infinity."""
    if isinstance(value, Mapping):
        return all(_is_finite(inner) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_finite(inner) for inner in value)
    return not isinstance(value, float) or math.isfinite(value)


def _refused(on: str, expected: object, found: object, do: str | None = None) -> InvalidArgument:
    return InvalidArgument(
        explain("checking the options", on=on, expected=expected, found=found, do=do)
    )


def validate(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what follows from other options. Raises InvalidArgument for what cannot work.

    The result has every content and place option of `OPTIONS` by name. `values` are checked by
    `check_values` first.
    """
    check_values(values)
    full = {**defaults(), **values}
    if full["min_lr"] > full["lr"]:
        raise _refused("--min-lr", f"at most --lr {full['lr']}", full["min_lr"])
    made = full["rollout_batch_size"] * full["n_samples_per_prompt"]
    if full["global_batch_size"] is None:
        steps = full["num_steps_per_rollout"]
        if made % steps:
            raise InvalidArgument(
                explain(
                    "dividing a rollout step into optimizer steps",
                    on=f"--num-steps-per-rollout {steps}",
                    expected="a divisor of rollout_batch_size × n_samples_per_prompt = "
                    f"{full['rollout_batch_size']} × {full['n_samples_per_prompt']} = {made}",
                    found=steps,
                    do="change --num-steps-per-rollout, or give --global-batch-size",
                )
            )
        full["global_batch_size"] = made // steps
    if values.get("micro_batch_size") is None:
        full["micro_batch_size"] = min(full["micro_batch_size"], full["global_batch_size"])
    if full["micro_batch_size"] > full["global_batch_size"]:
        raise _refused(
            "--micro-batch-size",
            f"at most the samples of an optimizer step, {full['global_batch_size']}",
            full["micro_batch_size"],
            "give a smaller --micro-batch-size, or a larger --global-batch-size",
        )
    if full["over_sampling_batch_size"] is None:
        full["over_sampling_batch_size"] = full["rollout_batch_size"]
    if full["loss_scale_factor"] is None and full["loss_aggregation"] in WITH_CONSTANT:
        full["loss_scale_factor"] = float(full["rollout_max_response_len"])
    if full["use_kl_loss"] and full["kl_coef"]:
        raise InvalidArgument(
            explain(
                "choosing where the KL goes",
                on="--use-kl-loss and --kl-coef",
                expected="one of them",
                found=f"--use-kl-loss with --kl-coef {full['kl_coef']}",
                do="--use-kl-loss puts it in the loss, --kl-coef in the reward",
            )
        )
    if full["recompute_logprobs_via_prefill"] and full["seq_length"] is None:
        raise InvalidArgument(
            explain(
                "fixing the shape of the log-prob forward",
                on="--recompute-logprobs-via-prefill",
                expected="--seq-length, the width that engine and trainer share",
                found="no --seq-length",
                do="give --seq-length at least the longest prompt plus --rollout-max-response-len",
            )
        )
    return with_ranks(full)
