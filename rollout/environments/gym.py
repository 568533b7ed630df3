"""reasoning-gym as an environment: one answer, or several with a word on each."""

from __future__ import annotations

from ledger.errors import InvalidArgument, explain
from rollout.environments.judging import judge
from rollout.environments.protocol import Action, EnvironmentTask, Message, StepResult
from rollout.rewards import GymReward

__all__ = ["GymEnvironment"]


class GymEnvironment:
    """A task of a reasoning-gym data set, with `attempts` to solve it.

    The reward of a right answer is `discount` to the power of the attempts before it; of none, 0.
    Parts: `solved`, `attempts`, and `verifier`, the library's own score of the last answer.
    """

    roles = ("user",)

    def __init__(
        self,
        dataset: str,
        *,
        attempts: int = 1,
        discount: float = 1.0,
        feedback: str = "\nwrong, try again: ",
        verifier: GymReward | None = None,
    ) -> None:
        """Raises InvalidArgument for numbers out of range, and as `GymReward` does."""
        if attempts < 1 or not 0 < discount <= 1:
            raise InvalidArgument(
                explain(
                    "making a reasoning-gym environment",
                    on="attempts and discount",
                    expected="at least 1, and above 0 up to 1",
                    found=f"{attempts} and {discount}",
                )
            )
        self._reward = verifier or GymReward(dataset)
        self.name = f"reasoning_gym:{dataset}"
        self.version = self._reward.version
        self._attempts, self._discount, self._feedback = attempts, discount, feedback
        self._task: EnvironmentTask | None = None
        self._tried = 0

    def reset(self, task: EnvironmentTask) -> None:
        """The prompt has all that is to be said."""
        self._task, self._tried = task, 0

    def step(self, action: Action) -> StepResult:
        """Judge an answer; a wrong one gets the feedback while there are attempts left."""
        if self._task is None:
            raise RuntimeError("step() before reset()")
        found = judge(self._reward, self._task, action)
        self._tried += 1
        solved = found.value == 1.0
        if not solved and self._tried < self._attempts:
            return StepResult(messages=[Message(text=self._feedback)])
        return StepResult(
            done=True,
            reward=self._discount ** (self._tried - 1) if solved else 0.0,
            parts={
                "solved": float(solved),
                "attempts": float(self._tried),
                "verifier": found.parts["verifier"],
            },
        )

    def close(self) -> None:
        """Nothing to free."""
