"""Rewards and filters by import path that raise or answer nonsense: errors that name all of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ledger.errors import InvalidArgument, RewardFailed
from rollout.filters import DynamicFilterOutput, create_filter
from rollout.imports import is_import_path, load_function
from rollout.records import sample_scored
from rollout.rewards import Reward, ScoredSample, create_reward

ANSWER: Any = None


def sample() -> ScoredSample:
    return ScoredSample(
        index=7,
        group_index=3,
        rollout_id=7,
        prompt="",
        response="",
        tokens=np.zeros(1, np.int32),
        response_length=1,
        label=None,
        metadata={},
        finish_reason="stop",
        reward=0.5,
    )


def answers(sample: ScoredSample) -> Any:
    return ANSWER


def answers_group(args: Any, samples: Any) -> Any:
    return ANSWER


def raises(sample: ScoredSample) -> float:
    raise ZeroDivisionError("on purpose")


def raises_for_a_group(args: Any, samples: Any) -> bool:
    raise ZeroDivisionError("on purpose")


async def raises_later(args: Any, sample: ScoredSample) -> float:
    raise ZeroDivisionError("on purpose")


async def slime_style(args: Any, sample: ScoredSample, **kwargs: Any) -> float:
    return 0.25


def three(a: Any, b: Any, c: Any) -> float:
    return 0.0


class Unfit:
    def __float__(self) -> float:
        raise RuntimeError("no number")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "finite number or a rollout.rewards.Reward"),
        ("1.0", "'1.0'"),
        (float("nan"), "nan"),
        (np.ones(2), "finite number"),
        (Unfit(), "Unfit"),
        ([1.0], "finite number"),
        (Reward(value="x"), "value is a finite number"),  # type: ignore[arg-type]
        (Reward(value=1.0, parts={"length": "long"}), "part 'length'"),  # type: ignore[dict-item]
        (Reward(value=1.0, parts={"length": None}), "part 'length'"),  # type: ignore[dict-item]
        (Reward(value=1.0, parts={"length": float("inf")}), "part 'length'"),
        (Reward(value=1.0, parts=[1.0]), "mapping"),  # type: ignore[arg-type]
        (Reward(value=1.0, parts={1: 1.0}), "mapping"),  # type: ignore[dict-item]
    ],
)
def test_a_reward_that_is_none_is_refused(
    answer: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ANSWER", answer)
    with pytest.raises(InvalidArgument, match=message) as caught:
        create_reward(f"{__name__}:answers")(sample())
    assert f"--custom-rm-path {__name__}:answers, sample 7" in str(caught.value)
    if isinstance(answer, Reward):
        with pytest.raises(InvalidArgument, match=message):
            sample_scored(sample(), answer, create_reward("exact_line"))


@pytest.mark.parametrize(
    "answer",
    [1, True, np.float32(1), np.bool_(True), np.array(1.0), Reward(value=np.float64(1))],
)
def test_whatever_is_one_number_is_a_reward(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ANSWER", answer)
    found = create_reward(f"{__name__}:answers")(sample())
    assert (type(found.value), found.value) == (float, 1.0)


@pytest.mark.parametrize("name", ["raises", "raises_later"])
def test_an_exception_of_a_reward_is_the_cause(name: str) -> None:
    with pytest.raises(RewardFailed, match="ZeroDivisionError: on purpose") as caught:
        create_reward(f"{__name__}:{name}")(sample())
    assert f"--custom-rm-path {__name__}:{name}, sample 7" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_reward_with_the_signature_of_slime() -> None:
    assert create_reward(f"{__name__}.slime_style")(sample()).value == 0.25
    with pytest.raises(InvalidArgument, match="a function of 3 arguments"):
        create_reward(f"{__name__}.three")


@pytest.mark.parametrize(
    ("answer", "keep"),
    [
        (np.bool_(True), True),
        (np.bool_(False), False),
        (DynamicFilterOutput(keep=np.bool_(False), reason="alike"), False),  # type: ignore[arg-type]
    ],
)
def test_bools_of_numpy_are_bools(answer: Any, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ANSWER", answer)
    found = create_filter(f"{__name__}:answers_group")(None, [sample()])
    assert found.keep is keep
    assert (found.reason is None) == keep


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises_for_a_group", "ZeroDivisionError: on purpose"),
        ("answers", "TypeError"),
        ("answers_group", "None"),
    ],
)
def test_a_filter_that_fails_is_named_with_its_group(name: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        create_filter(f"{__name__}:{name}")(None, [sample()])
    assert f"--dynamic-sampling-filter-path {__name__}:{name}, group 3" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "is_path"),
    [("m:f", True), ("m.f", True), ("a.b.f", True), ("a.b:f", True), ("grpo", False)],
)
def test_what_an_import_path_is(name: str, is_path: bool) -> None:
    assert is_import_path(name) == is_path


def test_a_module_without_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "myrm.py").write_text(
        "def f(sample):\n    return 0.75\n\ndef g(args, samples):\n    return True\n"
    )
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "wrong.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("myrm:f", "myrm.f"):
        assert create_reward(path)(sample()).value == 0.75
    assert create_filter("myrm:g")(None, [sample()]).keep
    for path, message in (("leaves:f", "SystemExit: 3"), ("wrong:f", "SyntaxError")):
        with pytest.raises(InvalidArgument, match=message):
            load_function(path, setting="--custom-rm-path")


@pytest.mark.parametrize("path", ["no_such:f", ":f", "os:", "os:no_such", ".x:f", "os:sep", "..f"])
def test_a_path_to_nothing_names_the_option(path: str) -> None:
    for make, setting in (
        (create_reward, "--custom-rm-path"),
        (create_filter, "--dynamic-sampling-filter-path"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            make(path)
        text = str(caught.value)
        assert f"importing a function: {setting} {path}" in text
        assert "expected:" in text
        assert "found:" in text
