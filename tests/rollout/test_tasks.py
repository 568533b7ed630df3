"""Prompt sources, rewards and filters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ledger.errors import InvalidArgument
from rollout.filters import check_reward_nonzero_std, create_filter
from rollout.rewards import ScoredSample, create_reward
from rollout.tasks import create_source, stop_token_ids

GYM = "reasoning_gym:spell_backward"


def sample(
    response: str,
    label: str | None = None,
    metadata: Any = None,
    finish_reason: str = "stop",
    reward: float | None = None,
) -> ScoredSample:
    return ScoredSample(
        index=0,
        group_index=0,
        rollout_id=0,
        prompt="",
        response=response,
        tokens=np.zeros(1, np.int32),
        response_length=1,
        label=label,
        metadata=metadata or {},
        finish_reason=finish_reason,
        reward=reward,
    )


@pytest.mark.parametrize("task", ["addition", GYM, "reasoning_gym:chain_sum"])
def test_a_row_is_the_same_prompt_in_any_order(task: str) -> None:
    forward = [create_source(task, seed=4).prompt(row) for row in range(20)]
    source = create_source(task, seed=4)
    backward = [source.prompt(row) for row in reversed(range(20))][::-1]
    assert [p.text for p in forward] == [p.text for p in backward]
    assert [p.label for p in forward] == [p.label for p in backward]
    other = [create_source(task, seed=5).prompt(row).text for row in range(20)]
    assert other != [p.text for p in forward]


def test_prompts_are_pinned() -> None:
    """A change here changes every run: it must be meant."""
    assert create_source("addition", seed=0).prompt(0).text == "3+4=7\n5+2=7\n7+3="
    assert create_source(GYM, seed=0).prompt(0).text == "rev stap>"


@pytest.mark.parametrize("task", ["addition", GYM, "reasoning_gym:chain_sum"])
def test_the_character_tokenizer_is_exact_on_task_text(task: str, tokenizer: Any) -> None:
    source = create_source(task, seed=1)
    for row in range(300):
        prompt = source.prompt(row)
        for text in (prompt.text, str(prompt.label)):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert len(ids) == len(text)
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text


def test_every_id_decodes(tokenizer: Any) -> None:
    assert len(tokenizer) == 64
    for token in range(64):
        text = tokenizer.decode([token], skip_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == [token]


def test_stop_ids(tokenizer: Any) -> None:
    newline = tokenizer.encode("\n")
    assert stop_token_ids(create_source("addition", seed=0), tokenizer) == tuple(newline)
    assert stop_token_ids(create_source(GYM, seed=0), tokenizer) == (tokenizer.eos_token_id,)


def test_exact_line_is_strict() -> None:
    reward = create_reward("exact_line")
    assert reward(sample("9", "9")).value == 1.0
    for response in ("09", " 9", "9 ", "8", ""):
        assert reward(sample(response, "9")).value == 0.0
    assert reward(sample("9", "9", finish_reason="length")).value == 0.0


def test_the_gym_verifier_is_strict_unless_asked() -> None:
    prompt = create_source(GYM, seed=0).prompt(0)
    assert prompt.label == "pats"
    strict, partial = create_reward(GYM), create_reward(GYM, strict=False)
    assert strict(sample("pats", metadata=prompt.metadata)).value == 1.0
    nearly = sample("patx", metadata=prompt.metadata)
    assert strict(nearly).value == 0.0
    assert strict(nearly).parts["verifier"] == 0.75
    assert partial(nearly).value == 0.75
    endless = sample("pats", metadata=prompt.metadata, finish_reason="length")
    assert strict(endless).value == partial(endless).value == 0.0
    with pytest.raises(InvalidArgument, match="entry of the data set"):
        strict(sample("pats"))


def test_options_as_json() -> None:
    source = create_source(GYM, seed=0, options='{"max_word_len": 3, "format": "question"}')
    assert source.prompt(0).text.startswith("Spell this word backward")
    assert '"max_word_len": 3' in source.name


@pytest.mark.parametrize(
    ("task", "options", "match"),
    [
        ("subtraction", {}, "addition, reasoning_gym"),
        ("addition", {"shot": 1}, "shot"),
        ("addition", {"shots": 7}, "shots in 0..2"),
        ("reasoning_gym:no_such", {}, "data sets, such as spell_backward"),
        (GYM, {"max_word": 3}, "options of this data set"),
        ("reasoning_gym:gcd", {"format": "compact"}, "'compact' for chain_sum, spell_backward"),
        (GYM, "{", "a JSON object"),
        (GYM, "[1]", "a JSON object"),
    ],
)
def test_wrong_tasks_are_refused(task: str, options: Any, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        create_source(task, seed=0, options=options)


def test_the_default_filter_compares_rewards_exactly() -> None:
    keep = [sample("", reward=0.1 + 0.2), sample("", reward=0.3)]
    assert check_reward_nonzero_std(None, keep).keep
    drop = check_reward_nonzero_std(None, [sample("", reward=0.3)] * 3)
    assert (drop.keep, drop.reason) == (False, "zero reward deviation: all 0.3")
    assert not check_reward_nonzero_std(None, [sample("", reward=1.0)]).keep
    assert create_filter("none")(None, [sample("", reward=1.0)]).keep


def verdict(args: Any, samples: Any) -> Any:
    return args


def test_custom_filters_may_answer_with_a_bool_and_nothing_else() -> None:
    custom = create_filter("tests.rollout.test_tasks.verdict")
    assert custom(True, [sample("")]).keep
    assert custom(False, [sample("")]).reason == "dropped by tests.rollout.test_tasks.verdict"
    with pytest.raises(InvalidArgument, match="a bool or an object"):
        custom("yes", [sample("")])


@pytest.mark.parametrize("name", ["no_such", "tests.no_such.f", "tests.rollout.test_tasks.nothing"])
def test_unknown_filters_and_rewards_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument):
        create_filter(name)
    with pytest.raises(InvalidArgument):
        create_reward(name)
