"""Options that cannot work are refused by name before anything is read or written. No training."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

import trainer.cli
from ledger.errors import InvalidArgument, NotFound
from trainer.option_values import check_values, defaults, validate
from trainer.options import OPTIONS, add_options
from trainer.ranges import LARGEST, Range, above, at_least

FLOATS = [option.name for option in OPTIONS if option.type is float]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parsed(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return vars(parser.parse_args(words))


def refused(values: dict[str, Any], name: str, expected: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate(values)
    first, said, *_ = str(caught.value).splitlines()
    assert first == f"checking the options: {flag(name)}"
    assert expected in said


def test_the_defaults_are_within_their_own_ranges() -> None:
    full = validate({})
    assert full.keys() == defaults().keys()
    assert full["global_batch_size"] == 64
    check_values(full)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.name)
def test_every_number_has_a_range(option: Any) -> None:
    assert (option.within is not None) == (option.type in (int, float))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
@pytest.mark.parametrize("name", FLOATS)
def test_what_is_not_finite_is_refused_by_its_own_name(name: str, value: float) -> None:
    refused({name: value}, name, "finite")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lr", -1.0, "at least 0"),
        ("min_lr", -1e-9, "at least 0"),
        ("min_lr", 1.0, "at most --lr 1e-06"),
        ("adam_beta1", 1.0, "below 1"),
        ("adam_beta1", -0.1, "at least 0"),
        ("adam_beta2", 1.0, "below 1"),
        ("adam_eps", 0.0, "above 0"),
        ("weight_decay", -0.1, "at least 0"),
        ("clip_grad", -1.0, "at least 0"),
        ("eps_clip", -0.1, "at least 0"),
        ("eps_clip", 1.1, "at most 1"),
        ("eps_clip_high", -0.1, "at least 0"),
        ("eps_clip_c", 1.0, "above 1"),
        ("rollout_seed", -1, "at least 0"),
        ("rollout_seed", 2**63, "at most 9223372036854775807"),
        ("num_threads", 0, "at least 1"),
        ("num_threads", 1025, "at most 1024"),
        ("eval_interval", 0, "at least 1"),
        ("save_interval", 0, "at least 1"),
        ("num_rollout", 0, "at least 1"),
        ("num_rollout", LARGEST + 1, f"at most {LARGEST}"),
        ("rollout_batch_size", 0, "at least 1"),
        ("n_samples_per_prompt", -8, "at least 1"),
        ("over_sampling_batch_size", 0, "at least 1"),
        ("rollout_max_rounds", 0, "at least 1"),
        ("rollout_max_response_len", 0, "at least 1"),
        ("rollout_temperature", 0.0, "above 0"),
        ("rollout_top_p", 0.0, "above 0"),
        ("rollout_top_p", 1.5, "at most 1"),
        ("rollout_top_k", 0, "at least 1 and at most 2147483647, or -1 (off)"),
        ("n_eval_prompts", 0, "at least 1"),
        ("num_steps_per_rollout", 0, "at least 1"),
        ("global_batch_size", 0, "at least 1"),
        ("micro_batch_size", 0, "at least 1"),
        ("micro_batch_size", 65, "at most the samples of an optimizer step, 64"),
        ("seq_length", 1, "at least 2"),
        ("tensor_model_parallel_size", 0, "at least 1"),
        ("lr_warmup_iters", -1, "at least 0"),
        ("lr_decay_iters", 0, "at least 1"),
        ("from_version", -1, "at least 0"),
        ("run_id", "", "not empty"),
        ("branch", "", "not empty"),
        ("ledger", "", "not empty"),
        ("hf_checkpoint", "", "not empty"),
        ("kl_loss_type", "k9", "one of k1"),
        ("task_options", {"a": [1, {"b": math.nan}]}, "finite numbers"),
    ],
)
def test_what_is_out_of_range_is_refused_by_the_flag_that_was_typed(
    name: str, value: Any, expected: str
) -> None:
    refused({name: value}, name, expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.0),
        ("adam_beta1", 0.0),
        ("clip_grad", 0.0),
        ("eps_clip_high", 1.5),
        ("kl_coef", -0.1),
        ("entropy_coef", -0.1),
        ("rollout_seed", 2**63 - 1),
        ("rollout_top_k", -1),
        ("num_threads", 1024),
        ("micro_batch_size", 64),
        ("seq_length", 2),
        ("task_options", {"digits": 2, "weights": [0.5]}),
    ],
)
def test_the_ends_of_a_range_are_taken(name: str, value: Any) -> None:
    assert validate({name: value})[name] == value


def test_a_small_step_has_a_small_micro_batch_unless_one_is_given() -> None:
    small = {"rollout_batch_size": 1, "n_samples_per_prompt": 4}
    assert validate(small)["micro_batch_size"] == 4
    refused({**small, "micro_batch_size": 8}, "micro_batch_size", "optimizer step, 4")


def test_steps_must_divide_the_samples() -> None:
    with pytest.raises(InvalidArgument, match=r"--num-steps-per-rollout 3"):
        validate({"num_steps_per_rollout": 3})


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--lr", "nan"], "--lr"),
        (["--lr", "-1"], "--lr"),
        (["--rollout-max-rounds", "0"], "--rollout-max-rounds"),
        (["--task-options", '{"a": NaN}'], "--task-options"),
    ],
)
def test_the_command_says_so_and_makes_no_run(
    words: list[str], found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainer.cli.main(["--ledger", str(tmp_path / "ledger"), *words]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == f"ledger-train: checking the options: {found}"


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000])
def test_task_options_are_a_json_object(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--task-options", text)
    assert "--task-options" in capsys.readouterr().err


def test_ranges_say_what_they_take() -> None:
    assert [str(r) for r in (at_least(1), above(0, 1), Range(), at_least(1, off=-1))] == [
        "at least 1",
        "above 0 and at most 1",
        "a finite number",
        "at least 1, or -1 (off)",
    ]
    taken = [(0, above(0)), (1, above(0)), (1.0, Range(high=1, without_high=True)), (-1, Range())]
    assert [value in within for value, within in taken] == [False, True, False, True]


def test_a_filter_that_would_drop_every_group_is_refused(tmp_path) -> None:
    said = {"ledger": str(tmp_path / "ledger"), "hf_checkpoint": "models/none"}
    with pytest.raises(InvalidArgument, match="--dynamic-sampling-filter-path none"):
        trainer.cli.run({**said, "n_samples_per_prompt": 1}, show=False)
    # Without the filter it is the model that is missing.
    with pytest.raises(NotFound, match="models/none"):
        trainer.cli.run({**said, "n_samples_per_prompt": 1, "preset": "slime"}, show=False)
