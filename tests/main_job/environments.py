"""Environments for small runs of the main job."""

from __future__ import annotations

from rollout.environments.protocol import Action, EnvironmentTask, Message, StepResult

TURNS = 4


class FirstLetters:
    """Four turns; the reward is the share of those that begin with a letter up to 'm'."""

    name, version = "first_letters", "1"

    def reset(self, task: EnvironmentTask) -> None:
        self.early = 0

    def step(self, action: Action) -> StepResult:
        self.early += "a" <= action.text[:1] <= "m"
        if action.turn + 1 < TURNS:
            return StepResult(messages=[Message(text=f"{action.turn}:")])
        return StepResult(done=True, reward=self.early / TURNS, parts={"early": float(self.early)})

    def close(self) -> None:
        pass
