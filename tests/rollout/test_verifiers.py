"""Rewards by type: answers that are equal, time limits off the main thread, servers that fail."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest

from ledger.errors import InvalidArgument, RewardFailed
from rollout.custom_reward import CustomReward, CustomRewards, ask_rewards, rewards_of
from rollout.reward_options import reward_function
from rollout.rewards import Reward, ScoredSample, create_reward
from rollout.verifiers.remote import TRIES, RemoteReward
from rollout.verifiers.texts import f1_score, last_boxed
from rollout.verifiers.types import MathReward

SLOW = "\\boxed{9^{9^{9^{9^{9}}}}}"


def sample(response: str, label: str | None = None, index: int = 0) -> ScoredSample:
    return ScoredSample(
        index=index,
        group_index=0,
        rollout_id=index,
        prompt="p",
        response=response,
        tokens=np.zeros(1, np.int32),
        response_length=1,
        label=label,
        metadata={},
        finish_reason="stop",
    )


@pytest.fixture(scope="module")
def math() -> Iterator[MathReward]:
    pytest.importorskip("math_verify")
    made = MathReward(limit_s=60.0)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("response", "label", "value"),
    [
        ("so it is \\boxed{42}.", "42", 1.0),
        ("first \\boxed{41}, no: 42 it is, \\boxed{42}", "42", 1.0),
        ("the answer is 0.5", "\\frac{1}{2}", 1.0),
        ("$x^2 + 1$", "1+x^2", 1.0),
        ("\\boxed{43}", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("\\boxed{1,234}", "$1234$", 1.0),
    ],
)
def test_mathematically_equal(response: str, label: str, value: float, math: MathReward) -> None:
    found = math(sample(response, label))
    assert (found.value, found.parts["right"]) == (value, value)
    assert found.parts["read"] == float(response != "I do not know")


def test_a_verifier_in_any_thread_that_takes_too_long_is_ended(math: MathReward) -> None:
    math._processes._limit_s = 0.5
    try:
        expected = pytest.raises(RewardFailed, match=r"within 0\.5 s[^~]*--rm-timeout")
        with ThreadPoolExecutor(1) as threads, expected:
            threads.submit(math, sample(SLOW, "42")).result()
    finally:
        math._processes._limit_s = 60.0
    # The next one gets a process that works.
    assert math(sample("\\boxed{42}", "42")).value == 1.0


def test_a_verifier_that_dies_is_no_zero(math: MathReward) -> None:
    math(sample("1", "1"))
    process = math._processes._idle.get_nowait()
    process._process.kill()
    math._processes._idle.put(process)
    with pytest.raises(RewardFailed, match=r"the process ended|Broken pipe"):
        math(sample("1", "1"))


def test_what_cannot_be_judged_failed(math: MathReward) -> None:
    with pytest.raises(RewardFailed, match="a label that math-verify can read"):
        math(sample("\\boxed{1}", "\\text{}"))
    for name in ("math", "f1"):
        with pytest.raises(RewardFailed, match="--label-key"):
            create_reward(name)(sample("1", None))


def test_only_the_last_box_counts() -> None:
    assert last_boxed("\\boxed{1} \\boxed{\\frac{1}{2}} \\boxed{open") == "\\frac{1}{2}"
    assert last_boxed("\\fbox {a\\}b}") == "a\\}b"
    assert last_boxed("42") is None
    boxed = create_reward("boxed_math")
    assert boxed(sample("42", "42")) == Reward(value=0.0, parts={"read": 0.0, "right": 0.0})


def test_f1_by_hand() -> None:
    # Said: cat sat; wanted: cat sat down. Precision 1, recall 2/3.
    assert f1_score("The cat sat!", "a cat sat down") == (0.8, 1.0, 2 / 3)
    assert f1_score("dog", "cat") == (0.0, 0.0, 0.0)
    found = create_reward("boxed_f1")(sample("x \\boxed{cat}", "cat"))
    assert found.value == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deepscaler", "boxed_math"),
        ("dapo", "--custom-rm-path"),
        ("remote_rm", "--rm-url"),
        ("maths", "one of exact_line"),
    ],
)
def test_types_that_are_not_there(name: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        create_reward(name)


class _Server(HTTPServer):
    answers: list[tuple[int, Any]]
    asked: list[Any]


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status, body = self.server.answers.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    made = _Server(("127.0.0.1", 0), _Handler)
    made.asked = []
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_a_reward_server_is_asked_again_where_that_may_help(server: _Server) -> None:
    waits: list[float] = []
    ask = RemoteReward(f"http://127.0.0.1:{server.server_port}/rm", wait=waits.append)
    server.answers = [(503, "busy"), (200, 0.25)]
    assert ask(sample("r", "l")) == Reward(value=0.25)
    assert server.asked == [{"prompt": "p", "response": "r", "label": "l"}] * 2
    assert waits == [1.0]
    server.answers = [(200, {"score": 1, "length": 7, "why": "right"})]
    assert ask(sample("r")) == Reward(value=1.0, parts={"length": 7.0})
    server.answers = [(400, b"no such model")]
    with pytest.raises(RewardFailed, match="HTTP 400: no such model"):
        ask(sample("r"))
    server.answers = [(200, "high")] * TRIES
    with pytest.raises(RewardFailed, match="a JSON number"):
        ask(sample("r"))
    assert not server.answers


async def by_label(args: Any, sample: ScoredSample) -> Any:
    if sample.label == "raise":
        raise ZeroDivisionError("on purpose")
    return {
        "score": float(len(str(sample.label))),
        "loop": id(asyncio.get_running_loop()),
        "t": "x",
    }


def rank(args: Any, samples: list[ScoredSample]) -> list[float]:
    if any(one.label == "raise" for one in samples):
        raise ZeroDivisionError("on purpose")
    return [args * len(one.response) for one in samples]


async def rank_wrong(args: Any, samples: list[ScoredSample]) -> Any:
    return [1.0]


def test_coroutines_run_in_the_loop_that_asks() -> None:
    reward = CustomReward(f"{__name__}:by_label", None, "score")

    async def ask() -> tuple[list[Any], int]:
        with ThreadPoolExecutor(1) as executor:
            samples = [sample("", "abc", 0), sample("", "raise", 1)]
            return await ask_rewards(reward, samples, executor), id(asyncio.get_running_loop())

    (good, bad), loop = asyncio.run(ask())
    assert good == Reward(value=3.0, parts={"loop": float(loop)})
    assert isinstance(bad, RewardFailed)
    assert isinstance(bad.__cause__, ZeroDivisionError)
    with pytest.raises(InvalidArgument, match="--reward-key says which entry"):
        CustomReward(f"{__name__}:by_label", None)(sample("", "a"))
    with pytest.raises(InvalidArgument, match="a dictionary with 'other'"):
        CustomReward(f"{__name__}:by_label", None, "other")(sample("", "a"))


def test_a_group_is_scored_at_once() -> None:
    reward = CustomRewards(f"{__name__}:rank", 2)
    samples = [sample("ab", index=4), sample("abc", index=5)]

    async def ask(function: CustomRewards, samples: list[ScoredSample]) -> list[Any]:
        with ThreadPoolExecutor(1) as executor:
            return await ask_rewards(function, samples, executor)

    assert [one.value for one in asyncio.run(ask(reward, samples))] == [4.0, 6.0]
    found, failed = rewards_of(reward, samples)
    assert ({i: r.value for i, r in found.items()}, failed) == ({4: 4.0, 5: 6.0}, {})
    broken = [*samples, sample("a", "raise", 6)]
    assert all(isinstance(one, RewardFailed) for one in asyncio.run(ask(reward, broken)))
    assert sorted(rewards_of(reward, broken)[1]) == [4, 5, 6]
    with pytest.raises(InvalidArgument, match="a reward for each of 2 samples"):
        asyncio.run(ask(CustomRewards(f"{__name__}:rank_wrong", None), samples))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"custom_rm_path": f"{__name__}:rank", "rm_type": "math"}, "one of them"),
        ({"group_rm": True}, "--group-rm"),
        ({"reward_key": "score"}, "--reward-key"),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, Any], message: str) -> None:
    none = dict.fromkeys(
        ("custom_rm_path", "rm_type", "group_rm", "reward_key", "eval_reward_key", "rm_url")
    )
    values = {**none, "rm_timeout": 1.0, **given}
    with pytest.raises(InvalidArgument, match=message):
        reward_function(values, "exact_line")
