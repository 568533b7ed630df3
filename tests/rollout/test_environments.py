"""Episodes with environments: turns, tools, limits, what goes wrong, and going on after a cut."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest

from ledger.errors import EnvironmentFailed, InvalidArgument
from ledger.events import ObservationAppended, SegmentGenerated
from rollout.engines.scripted_async import ManualClock
from rollout.environments import create_environment
from rollout.environments.driving import EnvironmentEpisode, EpisodeLimits
from rollout.environments.protocol import Action, EnvironmentTask, Message, StepResult
from rollout.environments.turns import PlainTurns
from rollout.episode import EpisodeAborted
from tests.rollout.agents import STOP, Sink, begun, driven, ids_of, repeating, said, speaking


def function_of(tokenizer, make, **limits):
    return EnvironmentEpisode("test", make, PlainTurns(tokenizer), EpisodeLimits(**limits))


def named(tokenizer, name, options=None, **limits):
    make, _ = create_environment(name, options)
    return function_of(tokenizer, make, **limits)


class Counting:
    """Answers 'n>' to turn n; the episode ends at 'end'. The reward of a turn is its length."""

    name, version = "counting", "1"

    def __init__(self, opening=None):
        self.opening, self.closed, self.turns = opening, 0, 0

    def reset(self, task):
        self.task = task
        return self.opening

    def step(self, action):
        self.turns += 1
        done = action.text == "end"
        told = [] if done else [Message(text=f"{action.turn}>")]
        return StepResult(
            messages=told, done=done, reward=float(len(action.text)), parts={"letters": 1.0}
        )

    def close(self):
        self.closed += 1


class Async(Counting):
    async def reset(self, task):
        return super().reset(task)

    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)

    async def close(self):
        super().close()


# --- turns


@pytest.mark.parametrize("kind", [Counting, Async])
def test_turns_are_stored_one_after_the_other_and_only_what_is_new(tokenizer, kind):
    made = []
    engine = speaking(tokenizer, "abc", "de", "end")
    function = function_of(tokenizer, lambda: made.append(kind()) or made[0])
    episode, sink = driven(tokenizer, function, engine)
    ids = [*(ids_of(tokenizer, text) for text in ("abc", "0>", "de", "1>", "end"))]
    assert said(sink) == [
        ("sampled", 2, 0, 0, [*ids[0], STOP]),
        ("environment", 2, 0, 4, ids[1]),
        ("sampled", 2, 1, 6, [*ids[2], STOP]),
        ("environment", 2, 1, 9, ids[3]),
        ("sampled", 2, 2, 11, [*ids[4], STOP]),
    ]
    assert [s.segment for s in sink.of(SegmentGenerated)] == [0, 1, 2]
    assert [o.text for o in sink.of(ObservationAppended)] == ["0>", "1>"]
    # The engine gets everything before, the ids as they were sampled.
    prompt = ids_of(tokenizer, "x>")
    assert engine.requests[2].tokens.tolist() == [
        *prompt,
        *ids[0],
        STOP,
        *ids[1],
        *ids[2],
        STOP,
        *ids[3],
    ]
    assert episode.reward.value == 3 + 2 + 3
    assert episode.reward.parts == {"turns": 3.0, "truncated": 0.0, "letters": 3.0}
    assert made[0].closed == 1


def test_what_reset_says_stands_behind_the_prompt_and_ends_no_turn(tokenizer):
    opening = Message(text="go:")
    function = function_of(tokenizer, lambda: Counting(opening))
    episode, sink = driven(tokenizer, function, speaking(tokenizer, "end"))
    assert [(kind, turn, start) for kind, _, turn, start, _ in said(sink)] == [
        ("environment", 0, 0),
        ("sampled", 0, 3),
    ]
    assert episode.reward.parts["turns"] == 1.0


def test_several_episodes_have_seeds_of_their_own_that_stay(tokenizer):
    seeds = []

    class Seeded(Counting):
        def reset(self, task):
            seeds.append(task.seed)

    function = function_of(tokenizer, Seeded)
    for index in (2, 3, 2):
        driven(tokenizer, function, speaking(tokenizer, "end"), index=index)
    assert seeds[0] == seeds[2] != seeds[1]


# --- limits


def test_the_last_turn_is_the_models(tokenizer):
    """After --max-turns nothing is added that no turn follows."""
    function = function_of(tokenizer, Counting, max_turns=2)
    episode, sink = driven(tokenizer, function, speaking(tokenizer, "a", "b", "c"))
    assert [kind for kind, *_ in said(sink)] == ["sampled", "environment", "sampled"]
    assert episode.reward.parts["truncated"] == 1.0


@pytest.mark.parametrize(
    ("room", "kinds"),
    [
        (2 + 2, ["sampled"]),  # the turn fills it
        (2 + 4, ["sampled"]),  # the answer would fit, no turn behind it
        (2 + 5, ["sampled", "environment", "sampled"]),  # one token of the second turn
    ],
)
def test_the_context_is_limited(tokenizer, room, kinds):
    function = function_of(tokenizer, Counting, max_context_tokens=room)
    episode, sink = driven(tokenizer, function, speaking(tokenizer, "a", "b", "end"))
    assert [kind for kind, *_ in said(sink)] == kinds
    assert episode.reward.parts["truncated"] == 1.0
    assert len(episode.trajectory.context()) <= room
    # Driven again it ends in the same place, without the engine.
    again, _ = driven(tokenizer, function, speaking(tokenizer, "z"), sink.events)
    assert again.reward == episode.reward


def test_a_turn_that_was_cut_is_told_to_the_environment(tokenizer):
    seen = []

    class Cut(Counting):
        def step(self, action):
            seen.append((action.text, action.finish_reason))
            return StepResult(done=True, reward=0.0)

    driven(tokenizer, function_of(tokenizer, Cut), speaking(tokenizer, "ab…"), max_new_tokens=5)
    assert seen == [("ababa", "length")]


def test_limits_below_one_are_refused():
    for limits in ({"max_turns": 0}, {"max_context_tokens": 0}):
        with pytest.raises(InvalidArgument, match="limits of an episode"):
            EpisodeLimits(**limits)


# --- what goes wrong


class Broken(Counting):
    def __init__(self, where, how):
        super().__init__()
        self.where, self.how = where, how

    def _go(self, where, otherwise):
        return self.how() if self.where == where else otherwise

    def reset(self, task):
        return self._go("reset", None)

    def step(self, action):
        return self._go("step", StepResult(messages=[Message(text="go")]))


def crash():
    raise ConnectionError("the game\nserver is gone")


@pytest.mark.parametrize(
    ("where", "how", "match"),
    [
        (
            "reset",
            crash,
            "reset of environment 'counting': ConnectionError: the game server is gone",
        ),
        ("step", crash, "step of environment 'counting': ConnectionError"),
        ("step", lambda: None, "step 0 gave a NoneType, no StepResult"),
        ("step", lambda: StepResult(), "neither ended the episode nor said anything"),
        ("step", lambda: StepResult(done=True, reward=float("nan")), "finite"),
        ("reset", lambda: 5, "reset gave a int"),
        ("step", lambda: next(iter(())), "StopIteration"),
    ],
)
def test_a_broken_environment_fails_the_sample_and_gives_no_reward(tokenizer, where, how, match):
    made = []
    function = function_of(tokenizer, lambda: made.append(Broken(where, how)) or made[0])
    episodes = []

    async def main():
        episodes.append(begun(tokenizer, speaking(tokenizer, "a"), Sink()))
        with pytest.raises(EnvironmentFailed, match=match) as raised:
            await function(episodes[0])
        assert "\n" not in str(raised.value)  # it becomes the reason of a decision

    asyncio.run(main())
    assert episodes[0].reward is None
    assert made[0].closed == 1


def test_an_environment_that_hangs_fails_the_sample(tokenizer):
    let_go = threading.Event()

    class Hangs(Counting):
        def step(self, action):
            let_go.wait(30)

    class HangsAsync(Counting):
        async def step(self, action):
            await asyncio.Event().wait()

    for kind in (Hangs, HangsAsync):
        function = function_of(tokenizer, kind, timeout_s=0.05)
        with pytest.raises(EnvironmentFailed, match=r"no answer within 0\.05 s"):
            driven(tokenizer, function, speaking(tokenizer, "a"))
    let_go.set()


def test_what_was_earned_stays_where_the_environment_does_not_close(tokenizer, caplog):
    class Sticks(Counting):
        def close(self):
            raise OSError("busy")

    episode, _ = driven(tokenizer, function_of(tokenizer, Sticks), speaking(tokenizer, "end"))
    assert episode.reward.value == 3.0
    assert "OSError: busy" in caplog.text


# --- going on after a cut


def tools(tokenizer, **options):
    return named(tokenizer, "calculator", {"wrap": "={text}.", **options})


CASES = {
    "environment": (
        lambda tokenizer: function_of(tokenizer, lambda: Counting(Message(text="go:"))),
        ("abc", "de", "end"),
    ),
    "tools": (
        lambda tokenizer: tools(tokenizer, reward="exact_line"),
        ("?3+4", "?7*2", "14"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_killed_anywhere_it_goes_on_and_nothing_is_asked_twice(tokenizer, case):
    make, turns = CASES[case]
    whole, sink = driven(tokenizer, make(tokenizer), speaking(tokenizer, *turns), label="14")
    assert whole.reward is not None
    for kept in range(len(sink.events) + 1):
        engine = speaking(tokenizer, *turns)
        again, other = driven(tokenizer, make(tokenizer), engine, sink.events[:kept], label="14")
        assert said(other) == said(sink), f"cut after {kept} events"
        assert again.reward == whole.reward
        had = sum(isinstance(event, SegmentGenerated) for event in sink.events[:kept])
        assert len(engine.requests) == len(turns) - had


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_aborted_inside_a_turn_it_goes_on_with_the_tokens_it_has(tokenizer, tokens):
    function = function_of(tokenizer, Counting)
    _, sink = driven(tokenizer, function, speaking(tokenizer, "abc", "def", "end"))
    transcript = [token for *_, ids in said(sink) for token in ids]

    async def main():
        clock = ManualClock()
        engine = repeating(transcript, 2, len(tokenizer), clock=clock)
        cut = Sink()
        episode = begun(tokenizer, engine, cut)
        task = asyncio.create_task(function(episode))
        await clock.until(lambda: len(engine.running) == 1)
        await clock.advance(4)  # the first turn
        await clock.until(lambda: len(engine.requests) == 2)
        await clock.advance(tokens)
        await episode.abort()
        if tokens < 4:
            with pytest.raises(EpisodeAborted):
                await task
        again = begun(tokenizer, repeating(transcript, 2, len(tokenizer)), cut)
        await function(again)
        return again, cut

    again, cut = asyncio.run(main())
    assert again.trajectory.response().tolist() == transcript
    assert again.reward.parts["turns"] == 3.0
    turns = [event.turn for event in cut.of(SegmentGenerated)]
    assert turns == ([0, 1, 1, 2] if tokens < 4 else [0, 1, 2])


def test_aborted_while_the_environment_is_at_work(tokenizer):
    """It ends at once, and the step is taken again later: nothing of it is recorded."""
    at_work, let_go = threading.Event(), threading.Event()

    class Slow(Counting):
        def step(self, action):
            at_work.set()
            let_go.wait(30)
            return super().step(action)

    async def main():
        sink = Sink()
        episode = begun(tokenizer, speaking(tokenizer, "abc", "end"), sink)
        task = asyncio.create_task(function_of(tokenizer, Slow)(episode))
        await asyncio.to_thread(at_work.wait, 30)
        await episode.abort()
        let_go.set()
        with pytest.raises(EpisodeAborted):
            await task
        return sink

    sink = asyncio.run(main())
    assert [kind for kind, *_ in said(sink)] == ["sampled"]
    again, _ = driven(
        tokenizer, function_of(tokenizer, Counting), speaking(tokenizer, "abc", "end"), sink.events
    )
    assert again.reward.value == 6.0


class Forgetful(Counting):
    """Says something else, or ends, when it is driven again."""

    def __init__(self, text, ends_at):
        super().__init__()
        self.text, self.ends_at = text, ends_at

    def step(self, action):
        if action.turn == self.ends_at:
            return StepResult(done=True, reward=1.0)
        return StepResult(messages=[Message(text=self.text)])


@pytest.mark.parametrize(
    ("then", "match"),
    [
        (("hi>", 9), "its answer to turn 0 differs from the recorded one at token 1"),
        (
            ("ho> ", 9),
            "differs from the recorded one at token 3 .3 recorded from environment, 4 now",
        ),
        (("ho>", 0), "it ends where more is recorded"),
    ],
)
def test_an_environment_that_does_not_repeat_itself_fails_the_sample(tokenizer, then, match):
    first = function_of(tokenizer, lambda: Forgetful("ho>", 2))
    _, sink = driven(tokenizer, first, speaking(tokenizer, "a"))
    engine = speaking(tokenizer, "a")
    with pytest.raises(EnvironmentFailed, match=match):
        driven(tokenizer, function_of(tokenizer, lambda: Forgetful(*then)), engine, sink.events[:4])
    assert not engine.requests


# --- tools and tasks


def test_a_model_asks_a_calculator_and_answers(tokenizer):
    function = tools(tokenizer, reward="exact_line")
    engine = speaking(tokenizer, "?3+4", "?q", "7")
    episode, sink = driven(tokenizer, function, engine, label="7")
    assert [(kind, tokenizer.decode(ids)) for kind, *_, ids in said(sink)] == [
        ("sampled", "?3+4<eos>"),
        ("tool", "=7."),
        ("sampled", "?q<eos>"),
        ("tool", "=error: no such expression."),
        ("sampled", "7<eos>"),
    ]
    assert episode.reward.value == 1.0
    assert episode.reward.parts["calls"] == 2.0


def test_without_a_reward_of_its_own_the_rollouts_reward_function_is_asked(tokenizer):
    episode, _ = driven(tokenizer, tools(tokenizer), speaking(tokenizer, "7"))
    assert episode.reward is None


def test_a_tool_that_is_broken_fails_the_sample(tokenizer, monkeypatch):
    async def no_processes(*args, **kwargs):
        raise OSError("no processes left")

    monkeypatch.setattr("rollout.tools.sandbox.process._start", no_processes)
    function = named(tokenizer, "python", {"parser": "tests.rollout.test_environments:code_after"})
    with pytest.raises(EnvironmentFailed, match="OSError: no processes left"):
        driven(tokenizer, function, speaking(tokenizer, "?1+1"))


def code_after(text):
    """A parser: what follows a question mark is a program."""
    from rollout.tools.parsing import ParsedAnswer, ToolCall

    if not text.startswith("?"):
        return ParsedAnswer(content=text, calls=())
    arguments = json.dumps({"code": text[1:]})
    return ParsedAnswer(content="", calls=(ToolCall(name="python", arguments=arguments),))


def test_a_model_asks_python_and_answers(tokenizer):
    options = {
        "parser": "tests.rollout.test_environments:code_after",
        "reward": "exact_line",
        "wrap": "\n{text}\n",
        "limits": {"cpu_s": 5, "wall_s": 60},
    }
    function = named(tokenizer, "python", options)
    episode, sink = driven(tokenizer, function, speaking(tokenizer, "?6*7", "42"), label="42")
    assert [o.text for o in sink.of(ObservationAppended)] == ["\n42\n"]
    assert episode.reward.value == 1.0


def test_mathematics_with_python_is_judged_by_its_last_turn():
    """Hermes calls and the verifier of mathematics, without a tokenizer in between."""
    make, first = create_environment("python", {"reward": "math", "limits": {"wall_s": 60}})
    assert [one["function"]["name"] for one in first.tool_schemas] == ["python"]

    async def play(*turns):
        environment = make()
        environment.reset(EnvironmentTask(prompt="", label="42", metadata={}, seed=0))
        results = []
        for turn, text in enumerate(turns):
            action = Action(
                turn=turn, text=text, tokens=np.array([1], np.int32), finish_reason="stop"
            )
            results.append(await environment.step(action))
        return results

    call = json.dumps({"name": "python", "arguments": {"code": "print(6 * 7)"}})
    asked, told = asyncio.run(play(f"<tool_call>{call}</tool_call>", "It is \\boxed{42}."))
    assert [(m.text, m.role, m.source) for m in asked.messages] == [("42", "tool", "tool")]
    assert (told.done, told.reward, told.parts["calls"]) == (True, 1.0, 1.0)
    (wrong,) = asyncio.run(play("It is \\boxed{41}."))
    assert (wrong.done, wrong.reward) == (True, 0.0)


def test_reasoning_gym_in_one_turn_and_with_another_try(tokenizer):
    from rollout.tasks.gym import GymSource

    prompt = GymSource("spell_backward", seed=1).prompt(0)
    right = prompt.label
    entry = dict(prompt.metadata)

    def one(options, *turns):
        function = named(tokenizer, "reasoning_gym:spell_backward", options)
        engine = speaking(tokenizer, *turns)
        episode, sink = driven(tokenizer, function, engine, metadata=entry, label=right)
        return episode.reward, sink

    assert one({}, right)[0].value == 1.0
    assert one({}, "zzz")[0].value == 0.0
    again = {"attempts": 3, "discount": 0.5, "feedback": "no: "}
    reward, sink = one(again, "zzz", right)
    assert reward.value == 0.5
    assert (reward.parts["attempts"], reward.parts["solved"]) == (2.0, 1.0)
    assert [o.text for o in sink.of(ObservationAppended)] == ["no: "]
    reward, sink = one(again, "zzz")
    assert (reward.value, reward.parts["attempts"]) == (0.0, 3.0)
    assert len(sink.of(ObservationAppended)) == 2


def test_environments_that_cannot_be_made_say_why():
    for name, options, match in (
        ("chess", {}, "one of reasoning_gym"),
        ("calculator", {"size": 3}, "options that it takes"),
        ("python", {"limits": {"cores": 3}}, "limits of rollout.tools.sandbox"),
        ("reasoning_gym:spell_backward", {"attempts": 0}, "attempts and discount"),
        ("tests.rollout.test_environments:Counting", {"shape": 1}, "options that it takes"),
        ("tests.rollout.test_environments:crash_course", {}, "with a method reset"),
        ("tests.rollout.test_environments:later", {}, "a coroutine function"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            create_environment(name, options)


def crash_course():
    return object()


async def later():
    return Counting()


@pytest.mark.parametrize("aborted", [False, True])
def test_experts_of_observations_are_reported_by_the_next_turn(tokenizer, aborted):
    """Rows of all engine calls cover every token but the last, whatever lies between."""
    from tests.trainer.memory import MemoryReader
    from trainer.batch_routing import read_routing

    function = function_of(tokenizer, Counting)
    engine = speaking(tokenizer, "abc", "de", "end", routing=(2, 2, 8))
    episode, sink = driven(tokenizer, function, engine)
    events = sink.events
    if aborted:  # after the first answer: a second process goes on
        cut = next(i for i, event in enumerate(events) if isinstance(event, ObservationAppended))
        engine = speaking(tokenizer, "abc", "de", "end", routing=(2, 2, 8))
        episode, sink = driven(tokenizer, function, engine, events[: cut + 1])
        events = sink.events
    length = len(episode.trajectory.context())
    found = read_routing(MemoryReader(events), np.array([2]), np.array([length]))
    assert found.expert_ids[0].shape == (length - 1, 2, 2)
    context = episode.trajectory.context().astype(np.int64)[:-1]
    expected = (context * 7 + np.arange(length - 1)) % 8  # as the scripted engine chooses
    assert found.expert_ids[0][:, 0, 0].tolist() == expected.tolist()


def test_masks_are_right_in_the_batch(tokenizer):
    """Through the trainer's own loader: 1 where sampled, NaN log-probs elsewhere."""
    from tests.trainer.memory import MemoryReader, prompt, score
    from trainer.batch import load_batch

    function = function_of(tokenizer, Counting)
    _, sink = driven(tokenizer, function, speaking(tokenizer, "abc", "end"))
    issued = prompt([2], ids_of(tokenizer, "x>"), group=1)
    batch = load_batch(MemoryReader([issued, *sink.events, score(2, 1.0)]), [2])
    assert batch.loss_mask_N.tolist() == [1, 1, 1, 1, 0, 0, 1, 1, 1, 1]
    assert np.isnan(batch.rollout_log_probs_N).tolist() == [m == 0 for m in batch.loss_mask_N]
