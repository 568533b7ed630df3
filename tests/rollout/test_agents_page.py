"""The code of docs/agents.md runs, and does what the page says."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ledger.events import ObservationAppended, PromptIssued
from rollout.environments.driving import EnvironmentEpisode, EpisodeLimits
from rollout.environments.from_options import environment_function
from rollout.environments.protocol import Action, EnvironmentTask, Message, StepResult
from rollout.environments.turns import PlainTurns
from rollout.side import driver
from tests.rollout.agents import STOP, answering, driven, said
from trainer.option_values import defaults

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        exec(compile(code, str(PAGE), "exec"), names)
    return names


def test_the_game_is_played(page, tokenizer):
    def halving(context):
        """Between the largest number that was too low and the smallest that was too high."""
        low, high = 0, 21
        for number, word in re.findall(r"(\d+)<eos>\n(higher|lower): ", context):
            low, high = (int(number), high) if word == "higher" else (low, int(number))
        return str((low + high) // 2) if "a number" in context else "what"

    function = EnvironmentEpisode(
        "guess", page["Guess"], PlainTurns(tokenizer), EpisodeLimits(max_turns=7)
    )
    episode, sink = driven(tokenizer, function, answering(tokenizer, halving))
    assert episode.reward.value == 1.0
    assert episode.reward.parts["odd"] == 1.0
    told = [one.text.strip() for one in sink.of(ObservationAppended)]
    assert told[0] == "a number:"
    assert set(told[1:]) <= {"higher:", "lower:"}
    # The same sample is asked for the same number again.
    again, _ = driven(tokenizer, function, answering(tokenizer, halving), sink.events)
    assert again.reward == episode.reward


def test_the_driver_asks_its_helpers(page, tokenizer):
    def say(context):
        return "a" if "helper" in context else "b"

    drive = functools.partial(page["with_helpers"], helpers=3)
    _, sink = driven(tokenizer, drive, answering(tokenizer, say))
    assert len(sink.of(PromptIssued)) == 3
    root = [(kind, tokenizer.decode(ids)) for kind, index, *_, ids in said(sink) if index == 2]
    assert root == [("tool", "a,a,a:"), ("sampled", "b<eos>")]


async def nothing(episode: Any, word: str = "a") -> None:
    """A driver for the test below."""
    episode.word = word


def test_an_async_function_drives_the_episode_itself(tokenizer):
    own = f"{__name__}:nothing"
    values = defaults() | {"environment": own, "environment_options": {"word": "b"}}
    function = environment_function(values, tokenizer, [STOP])
    episode, _ = driven(tokenizer, function, answering(tokenizer, str))
    assert (episode.word, function.__name__) == ("b", "nothing")


class Endless:
    """It always has another question."""

    name, version = "endless", "1"

    def reset(self, task: EnvironmentTask) -> None:
        pass

    def step(self, action: Action) -> StepResult:
        return StepResult(messages=[Message(text="and?")], reward=0.0)

    def close(self) -> None:
        pass


def test_a_context_ends_where_the_engine_serves_no_more_of_the_model(tokenizer, tmp_path):
    config = {"vocab_size": len(tokenizer), "max_position_embeddings": 40, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = defaults() | {"environment": f"{__name__}:Endless", "max_turns": 50}
    engine = answering(tokenizer, lambda context: "no", max_positions=40)
    episode, _ = driven(tokenizer, driver(values, tokenizer, (STOP,), tmp_path), engine)
    assert 30 < len(episode.trajectory.context()) <= 40
    assert episode.reward.parts["truncated"] == 1.0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"compact_context_at": 9}, "(?s)--compact-context-at.*--environment"),
        ({"environment": f"{__name__}:nothing", "environment_options": {"x": 1}}, "'x'"),
        ({"environment": "calculator", "environment_turns": "chat"}, "a tokenizer with a chat"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tokenizer, changes, match):
    from ledger.errors import InvalidArgument

    with pytest.raises(InvalidArgument, match=match):
        environment_function(defaults() | changes, tokenizer, [STOP])


def test_without_an_environment_there_is_nothing_to_drive(tokenizer):
    assert environment_function(defaults(), tokenizer, [STOP]) is None
