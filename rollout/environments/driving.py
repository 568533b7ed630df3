"""Episodes with an environment: a turn of the model, an answer of the environment, and so on.

An episode that was cut (a kill, an abort) goes on: a new environment is driven again with what is
recorded, turn by turn, and its answers are compared with the recorded ones. Nothing that was
sampled is sampled again, and where the environment does not repeat itself the sample fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ledger.errors import EnvironmentFailed, InvalidArgument, explain
from ledger.numbering import SAMPLE_SPAN, local_number
from ledger.seeds import derive_seed
from rollout.environments.calling import Caller
from rollout.environments.protocol import (
    Action,
    EnvironmentFactory,
    EnvironmentTask,
    Message,
    StepResult,
)
from rollout.environments.turns import TurnFormat
from rollout.episode import Episode, EpisodeAborted
from rollout.rewards import Reward, checked_reward
from rollout.trajectory import Observation, Segment, Trajectory

__all__ = ["EnvironmentEpisode", "EpisodeLimits"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """How long an episode may get. Raises InvalidArgument where a number is below 1."""

    max_turns: int = 8
    """Turns of the model."""
    max_context_tokens: int | None = None
    """Tokens of prompt and response; None: the limits of turns alone hold."""
    timeout_s: float = 60.0
    """Of each call of the environment."""
    compact_at: int | None = None
    """Tokens of prompt and response above which the model is asked to sum up, and goes on in a
    sibling sample that begins with the prompt and its summary; None: never."""
    compact_prompt: str = "Sum up what matters so far. You go on with your summary alone."
    """What it is told then."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in (
            ("--max-turns", self.max_turns),
            ("--rollout-max-context-len", self.max_context_tokens),
            ("--compact-context-at", self.compact_at),
        ):
            if value is not None and value < 1:
                raise InvalidArgument(
                    explain(
                        "checking the limits of an episode", on=name, expected=">= 1", found=value
                    )
                )


@dataclass(slots=True)
class _Earned:
    """What the steps of an episode brought so far."""

    value: float | None = None
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, result: StepResult, on: str) -> None:
        """Raises InvalidArgument where a number is not finite."""
        found = checked_reward(Reward(value=result.reward or 0.0, parts=result.parts), on=on)
        if result.reward is not None:
            self.value = (self.value or 0.0) + found.value
        for name, part in found.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + part


class EnvironmentEpisode:
    """The `EpisodeFunction` that drives an environment. One for all episodes of a rollout."""

    def __init__(
        self,
        name: str,
        make: EnvironmentFactory,
        turns: TurnFormat,
        limits: EpisodeLimits,
        version: str = "1",
    ) -> None:
        """`name` and `version` say in scores who gave the reward; `make` makes the environment of
        an episode."""
        self.__name__, self.version = name, version
        self._make, self._turns, self._limits = make, turns, limits

    async def __call__(self, episode: Episode) -> None:
        """Drive `episode` to its end; sets its reward where the environment gave one.

        It ends when the environment says so, after `max_turns` turns, or when the context has no
        room for another token: the parts of the reward say which (`turns`, `truncated`).

        Raises:
            EpisodeAborted: it was told to stop, also while the environment was at work.
            EnvironmentFailed: the environment crashed, hung, ended without an answer, or does not
                repeat what is recorded.
        """
        caller = Caller(self._make(), timeout_s=self._limits.timeout_s)
        try:
            await _Drive(episode, caller, self._turns, self._limits).run()
        finally:
            # Not the sample's fault any more: what it earned is known by now.
            try:
                await caller.close()
            except EnvironmentFailed as error:
                _log.warning("an environment did not close: %s", error)


class _Drive:
    """One run over one episode, from its beginning."""

    def __init__(
        self, episode: Episode, caller: Caller, turns: TurnFormat, limits: EpisodeLimits
    ) -> None:
        self._episode, self._caller, self._turns = episode, caller, turns
        self._limits, self._on = limits, f"environment {caller.environment.name!r}"
        self._root = episode
        self._recorded = list(episode.trajectory.pieces)
        self._at = 0
        """The next recorded piece that the environment has not come to."""
        self._earned = _Earned()
        self._last_token: int | None = None
        """The stop token that ended the last turn."""

    async def run(self) -> None:
        turn = await self._begin()
        while self._room() > 0:
            action = await self._action(turn)
            turn += 1
            result = await self._step(action)
            if result.done:
                self._end(turn, truncated=False)
                return
            # What is said last must be the model's: nothing would be learned of words behind it,
            # and no engine would report the experts of their tokens.
            if result.truncated or turn >= self._limits.max_turns:
                break
            tokens = self._turns.increment(result.messages, self._last_token)
            if self._is_long(len(tokens)):
                if not await self._compact(result.messages):
                    break
            elif not await self._answer(tokens, result.messages):
                break
        self._end(turn, truncated=True)

    async def _begin(self) -> int:
        """Reset, or resume; the number of turns that are done."""
        task = _task_of(self._episode)
        if self._recorded and hasattr(self._caller.environment, "resume"):
            return await self._resume(task)
        first = await self._call("reset", task)
        if first is not None:
            if not isinstance(first, Message):
                raise self._failed(f"reset gave a {type(first).__name__}, neither None nor Message")
            if not await self._answer(self._turns.opening([first]), [first]):
                raise self._failed("what reset adds leaves no room in the context")
        return 0

    async def _resume(self, task: EnvironmentTask) -> int:
        """Hand over whole turns that have an answer; the others go the usual way."""
        history: list[tuple[Action, StepResult]] = []
        while self._at < len(self._recorded):
            before = self._at
            action = self._recorded_action()
            answer = self._recorded[self._at] if self._at < len(self._recorded) else None
            if action is None and not history and isinstance(answer, Observation):
                self._at += 1  # what reset added
                continue
            is_answer = isinstance(answer, Observation) and not (
                answer.source == "user" and answer.text == self._limits.compact_prompt
            )
            if action is None or not isinstance(answer, Observation) or not is_answer:
                self._at = before
                break
            self._at += 1
            said = Message(text=answer.text or "", source=answer.source)
            history.append((action, StepResult(messages=[said])))
        await self._call("resume", task, history)
        return len(history)

    def _is_long(self, more: int) -> bool:
        most = self._limits.compact_at
        return most is not None and self._used() + more > most

    async def _compact(self, messages: Sequence[Message]) -> bool:
        """Ask for a summary; go on in a sibling: prompt, summary, messages.

        False where there is no room for a summary, or the sibling would be as long again.
        """
        asked = [Message(text=self._limits.compact_prompt, source="user")]
        if not await self._answer(self._turns.increment(asked, self._last_token), asked):
            return False
        said = await self._action(-1)
        self._require_all()
        summary = said.tokens[:-1] if said.finish_reason == "stop" else said.tokens
        root = self._root.trajectory
        prompt = np.concatenate(
            [root.prompt_tokens, summary, self._turns.increment(messages, None)]
        )
        if len(prompt) >= (self._limits.compact_at or 0):
            return False
        text = "".join([root.text, said.text, *(message.text for message in messages)])
        self._episode = await self._episode.sibling(prompt, text=text, once=True)
        self._recorded = list(self._episode.trajectory.pieces)
        self._at = 0
        return True

    async def _action(self, turn: int) -> Action:
        """What the model says next: as it is recorded, else sampled."""
        found = self._recorded_action()
        if found is None:
            limit = min(self._episode.services.params.max_new_tokens, self._room())
            at = self._episode.trajectory
            # An abort may have come with the last token that the turn could have.
            if not (at.pieces and at.sampled_in_turn >= limit):
                await self._episode.generate(max_new_tokens=limit)
            found = _action_of(self._episode, at.segments)
            self._at = len(at.pieces)
        self._last_token = int(found.tokens[-1]) if found.finish_reason == "stop" else None
        return replace(found, turn=turn)

    def _recorded_action(self) -> Action | None:
        """The next recorded turn where it is whole; None where there is none, or it was cut."""
        found: list[Segment] = []
        at = self._at
        while at < len(self._recorded):
            piece = self._recorded[at]
            if not isinstance(piece, Segment) or (found and piece.turn != found[0].turn):
                break
            found.append(piece)
            at += 1
        is_last = at == len(self._recorded)
        if not found or (is_last and found[-1].finish_reason == "abort"):
            return None
        self._at = at
        return _action_of(self._episode, found)

    async def _step(self, action: Action) -> StepResult:
        result = await self._call("step", action)
        if not isinstance(result, StepResult):
            raise self._failed(f"step {action.turn} gave a {type(result).__name__}, no StepResult")
        if not (result.done or result.truncated or result.messages):
            raise self._failed(f"step {action.turn} neither ended the episode nor said anything")
        try:
            self._earned.add(result, f"{self._on}, step {action.turn}")
        except InvalidArgument as error:
            raise self._failed(" ".join(str(error).split())) from error
        return result

    async def _answer(self, tokens: npt.NDArray[np.int32], messages: Sequence[Message]) -> bool:
        """Add [n] tokens of messages behind the response, or compare them with the recorded ones.

        False where the context has no room for them and a turn: nothing is added then.
        """
        source = messages[0].source
        text = "\n".join(message.text for message in messages)
        if self._at < len(self._recorded):
            self._compare(self._recorded[self._at], tokens, source)
            self._at += 1
            return True
        if len(tokens) >= self._room():
            return False
        await self._episode.observe(tokens, source, text)
        self._at = len(self._episode.trajectory.pieces)
        return True

    def _compare(
        self, piece: Segment | Observation, tokens: npt.NDArray[np.int32], source: str
    ) -> None:
        if isinstance(piece, Segment):
            raise self._failed(
                f"it answers turn {piece.turn - 1}, which is recorded without answer"
            )
        if piece.source == source and np.array_equal(piece.tokens, tokens):
            return
        shared = min(len(tokens), len(piece.tokens))
        differs = np.flatnonzero(tokens[:shared] != piece.tokens[:shared])
        place = int(differs[0]) if len(differs) else shared
        raise self._failed(
            f"it does not repeat itself: driven again, its answer to turn {piece.turn} differs "
            f"from the recorded one at token {place} ({len(piece.tokens)} recorded from "
            f"{piece.source}, {len(tokens)} now from {source})"
        )

    async def _call(self, method: str, *arguments: object) -> object:
        """Call the environment, unless the episode is aborted meanwhile."""
        work = asyncio.ensure_future(self._caller.call(method, *arguments))
        aborted = asyncio.ensure_future(self._episode.wait_aborted())
        try:
            await asyncio.wait([work, aborted], return_when=asyncio.FIRST_COMPLETED)
            if self._episode.is_aborted:
                raise EpisodeAborted  # the step is taken again when the episode goes on
            found: object = work.result()
            return found
        finally:
            for one in (work, aborted):
                one.cancel()
            await asyncio.gather(work, aborted, return_exceptions=True)

    def _used(self) -> int:
        """Tokens of the context that the environment has come to."""
        at = self._episode.trajectory
        return len(at.prompt_tokens) + sum(len(piece.tokens) for piece in at.pieces[: self._at])

    def _room(self) -> int:
        """Tokens that the context has room for behind that."""
        most = self._limits.max_context_tokens
        return 2**31 if most is None else most - self._used()

    def _require_all(self) -> None:
        """Raise unless the environment has come to all that is recorded of the sample."""
        if self._at < len(self._recorded):
            raise self._failed(
                "it does not repeat itself: driven again, it ends where more is recorded"
            )

    def _end(self, turns: int, *, truncated: bool) -> None:
        self._require_all()
        if any(one.unbegun for one in _all(self._root)):
            raise self._failed(
                "it does not repeat itself: driven again, it does not begin a sibling that is "
                "recorded"
            )
        if self._earned.value is not None:
            parts = {"turns": float(turns), "truncated": float(truncated)} | self._earned.parts
            self._root.reward = Reward(value=self._earned.value, parts=parts)

    def _failed(self, found: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"{self._on}: {found}")


def _all(episode: Episode) -> list[Episode]:
    """An episode with all that were begun in it."""
    return [episode, *(one for sibling in episode.siblings for one in _all(sibling))]


def _task_of(episode: Episode) -> EnvironmentTask:
    at: Trajectory = episode.trajectory
    return EnvironmentTask(
        prompt=at.text,
        label=at.label,
        metadata=at.metadata,
        seed=derive_seed(
            "environment",
            episode.services.run_seed,
            at.rollout_step,
            local_number(at.group_index, SAMPLE_SPAN),
            local_number(at.index, SAMPLE_SPAN),
        ),
    )


def _action_of(episode: Episode, segments: Sequence[Segment]) -> Action:
    """The turn that the last of `segments` belongs to, of all its engine calls."""
    turn = segments[-1].turn
    tokens = np.concatenate([one.tokens for one in segments if one.turn == turn])
    reason = "stop" if segments[-1].finish_reason == "stop" else "length"
    return Action(
        turn=turn,
        text=episode.response_text(tokens, reason),
        tokens=tokens,
        finish_reason=reason,
    )
