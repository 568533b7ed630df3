"""The rewards that --rm-type names."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from ledger.errors import InvalidArgument, MissingDependency, RewardFailed, explain
from rollout.rewards import Reward, RewardFunction, ScoredSample
from rollout.verifiers.processes import VerifierProcesses
from rollout.verifiers.remote import RemoteReward
from rollout.verifiers.texts import f1_score, last_boxed

__all__ = ["REWARD_TYPES", "F1Reward", "MathReward", "create_reward_type"]

REWARD_TYPES = ("math", "boxed_math", "f1", "boxed_f1", "remote_rm")
"""What --rm-type takes besides the names of `rollout.rewards`."""

_ELSEWHERE = {
    "deepscaler": "boxed_math compares the last box with the label, and custom functions do the "
    "rest: --custom-rm-path",
    "dapo": "math or boxed_math give 1 and 0; for 1 and -1 write a function: --custom-rm-path",
    "gpqa": "exact_line compares with the label; or write a function: --custom-rm-path",
    "ifbench": "write a function: --custom-rm-path",
    "random": "write a function: --custom-rm-path",
}
_PROCESSES = max(1, min(8, (os.cpu_count() or 2) // 2))


class MathReward:
    """1.0 where the answer is mathematically equal to the label by math-verify, else 0.0.

    It runs in processes of its own, and may be called from any thread. What stands in the last
    `\\boxed{}` of the response is its answer; without one, what looks like an answer, or with
    `boxed` nothing. Parts: 'right', and 'read' where the response had an answer at all.
    """

    def __init__(self, *, boxed: bool = False, limit_s: float = 10.0) -> None:
        """Raises MissingDependency without math-verify."""
        try:
            self.version = version("math-verify")
        except PackageNotFoundError as error:
            raise MissingDependency(
                explain(
                    "making a reward",
                    on="--rm-type math",
                    expected="the package math-verify",
                    found="not installed",
                    do="pip install 'math-verify[antlr4_13_2]'",
                )
            ) from error
        self.name = "boxed_math" if boxed else "math"
        self._boxed = boxed
        self._processes = VerifierProcesses(
            "rollout.verifiers.math_process", limit_s=limit_s, count=_PROCESSES
        )

    def __call__(self, sample: ScoredSample) -> Reward:
        """Judge one sample.

        Raises:
            RewardFailed: no verdict in time, the verifier broke, or the label is no mathematics.
        """
        label, response = _label(self.name, sample), sample.response
        inner = last_boxed(response)
        if inner is not None:
            response = f"\\boxed{{{inner}}}"
        elif self._boxed:
            return Reward(value=0.0, parts={"read": 0.0, "right": 0.0})
        found = self._processes.ask({"response": response, "label": label})
        if "right" not in found:
            raise RewardFailed(
                explain(
                    f"scoring with {self.name}",
                    on=f"sample {sample.index}",
                    expected="a label that math-verify can read"
                    if "label" in found
                    else "a verdict",
                    found=repr(label) if "label" in found else found.get("error"),
                )
            )
        parts = {"read": float(found["read"]), "right": float(found["right"])}
        return Reward(value=parts["right"], parts=parts)

    def close(self) -> None:
        """End its processes."""
        self._processes.close()


class F1Reward:
    """The F1 score of the words of the response, or of its last box; parts precision and recall."""

    version = "1"

    def __init__(self, *, boxed: bool = False) -> None:
        self.name, self._boxed = "boxed_f1" if boxed else "f1", boxed

    def __call__(self, sample: ScoredSample) -> Reward:
        """Compare with the label. Raises RewardFailed without one."""
        answer = (last_boxed(sample.response) or "") if self._boxed else sample.response
        score, precision, recall = f1_score(answer, _label(self.name, sample))
        return Reward(value=score, parts={"precision": precision, "recall": recall})


def _label(name: str, sample: ScoredSample) -> str:
    if not sample.label:
        raise RewardFailed(
            explain(
                f"scoring with {name}",
                on=f"sample {sample.index}",
                expected="a label to compare with",
                found=repr(sample.label),
                do="name the field with --label-key",
            )
        )
    return sample.label


def create_reward_type(
    name: str, *, limit_s: float = 10.0, url: str | None = None
) -> RewardFunction | None:
    """The reward of --rm-type `name`; None where it is none of `REWARD_TYPES`.

    `limit_s` is the time that a verifier has for a sample, `url` the address for remote_rm.

    Raises:
        InvalidArgument: remote_rm without an address, or a type that other frameworks have and this
            one has not.
        MissingDependency: the library behind it is not installed.
    """
    made: dict[str, Callable[[], RewardFunction]] = {
        "math": lambda: MathReward(limit_s=limit_s),
        "boxed_math": lambda: MathReward(boxed=True, limit_s=limit_s),
        "f1": F1Reward,
        "boxed_f1": lambda: F1Reward(boxed=True),
        "remote_rm": lambda: RemoteReward(url, limit_s=limit_s),
    }
    if name in _ELSEWHERE:
        raise InvalidArgument(
            explain(
                "making a reward",
                on=f"--rm-type {name}",
                expected=f"one of {', '.join(REWARD_TYPES)}",
                found=name,
                do=_ELSEWHERE[name],
            )
        )
    return made[name]() if name in made else None
