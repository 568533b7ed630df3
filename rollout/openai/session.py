"""A session: what one agent asks, as samples of one rollout.

A request that goes on from a recorded answer adds only what is new to that sample: an observation,
then the next segment. Everything else — a rewritten history, a sub-agent, two requests at a time —
begins a sibling sample of the same rollout. Ids that were sampled are never encoded anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.episode import Episode, EpisodeAborted, GenerationCut
from rollout.openai.asked import Asked, Known
from rollout.openai.branches import Branch, find_place
from rollout.openai.errors import ApiError
from rollout.openai.messages import Message
from rollout.openai.reading import Answer, Reader, Said, Wanted
from rollout.openai.recorded import RecordedTurn, recorded_turns
from rollout.protocol import SamplingParams
from rollout.rewards import Reward
from rollout.tools.parsing import ToolCall
from rollout.trajectory import Segment

__all__ = ["Session"]

_SLICE = 64
"""New tokens of an engine call where the answer may end at a text that is not one token."""
_REMEMBERED = 64
"""Requests whose answers are given again where they are repeated."""


@dataclass(slots=True, eq=False)
class _Running:
    """A request under way, or answered."""

    task: asyncio.Task[Answer] | None = None
    waiting: int = 0
    branch: Branch | None = None
    unwanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when everybody who waited has gone."""

    @property
    def has_failed(self) -> bool:
        """Whether it ended without an answer."""
        task = self.task
        return task is not None and task.done() and (task.cancelled() or bool(task.exception()))


class Session:
    """What one agent does, from its first request to its end. All of one event loop."""

    def __init__(
        self, name: str, episode: Episode, reader: Reader, pinned: Mapping[str, Any] | None = None
    ) -> None:
        """`episode` may have pieces: an agent that is started again gets the answers that it had
        before, as long as it asks the same. `pinned` sampling parameters are not its to choose."""
        self.name, self.root = name, episode
        self.reward: Reward | None = None
        """What was said by `end`, or by the agent."""
        self.over = asyncio.Event()
        """Set by `end`: no request is answered any more."""
        self.reader, self._pinned = reader, dict(pinned or {})
        self._branches = [Branch(episode, ahead=deque(recorded_turns(episode.trajectory)))]
        for one in _below(episode):
            at = one.trajectory
            begun = RecordedTurn(context=at.prompt_tokens, first=0, segments=[], is_last=True)
            self._branches.append(Branch(one, ahead=deque(recorded_turns(at) or [begun])))
        self._running: dict[tuple[str, bytes], _Running] = {}
        """By name and identity, the newest last."""
        self._tasks: set[asyncio.Task[Answer]] = set()
        self._attached = asyncio.Event()
        self._held = 0
        self._moved = asyncio.Event()

    @property
    def samples(self) -> Sequence[Episode]:
        """Every sample of the session, the first one first."""
        return [branch.episode for branch in self._branches]

    @property
    def under_way(self) -> int:
        """Requests that are being answered."""
        return len(self._tasks)

    def attach(self, episode: Episode) -> None:
        """Go on with another `Episode` of the first sample, after the old one was aborted.

        Requests that wait since then continue.
        """
        begun = {one.trajectory.index: one for one in _below(episode)}
        for branch in self._branches[1:]:
            found = begun.get(branch.episode.trajectory.index)
            if found is None:
                found = Episode(branch.episode.trajectory, episode.services)
                episode.siblings.append(found)
            branch.episode = found
        self.root = self._branches[0].episode = episode
        self._attached.set()
        self._attached = asyncio.Event()

    def end(self, reward: Reward | None = None) -> None:
        """No more requests are answered; those that wait for an `attach` fail."""
        if reward is not None:
            self.reward = reward
        self.over.set()

    async def cut(self) -> None:
        """End every generation that runs, with what it has."""
        for branch in list(self._branches):
            await branch.episode.cut()

    async def idle(self) -> None:
        """Wait, after an abort, until no request is at the engine, or being recorded, any more."""
        while len(self._tasks) > self._held:
            self._moved.clear()
            await self._moved.wait()

    async def settle(self) -> None:
        """Wait until nothing that was asked is under way any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def answer(
        self, asked: Asked, wanted: Wanted, key: str | None = None, *, again: bool = False
    ) -> Answer:
        """Answer a request; the answer is recorded before this returns.

        `key` names the request: the same one under the same name gets the same answer, or waits
        for it. `again`: the client says that it repeats its last one, without a name. Where the
        caller is cancelled and nobody else waits, the engine is told to stop, and what it has
        sampled is recorded.

        Raises:
            ApiError: the session is over, the samples may not take it, or the template refuses it.
            InvalidArgument: the model cannot take it.
            EngineFailed: no engine gave an answer.
        """
        if self.over.is_set():
            raise self._is_over()
        identity = asked.identity()
        name = (key or "", identity)
        running = None if key is None and not again else self._running.get(name)
        if running is None or running.unwanted.is_set() or running.has_failed:
            running = _Running()
            self._remember(name, running)
            task = asyncio.create_task(self._answer(asked, identity, wanted, running))
            running.task = task
            self._tasks.add(task)
            task.add_done_callback(self._done)
        if running.task is None:
            raise RuntimeError("a request without a task")
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        except asyncio.CancelledError:
            if running.waiting == 1 and not running.task.done():
                running.unwanted.set()
                if running.branch is not None:
                    cutting = asyncio.ensure_future(running.branch.episode.cut())
                    await asyncio.shield(cutting)
            raise
        finally:
            running.waiting -= 1

    def _done(self, task: asyncio.Task[Answer]) -> None:
        self._tasks.discard(task)
        self._moved.set()
        if not task.cancelled():
            task.exception()  # whoever asked may have gone

    def _is_over(self) -> ApiError:
        return ApiError(410, f"session {self.name!r} is over", code="session_over")

    def _remember(self, name: tuple[str, bytes], running: _Running) -> None:
        self._running.pop(name, None)
        self._running[name] = running
        for old in list(self._running)[:-_REMEMBERED]:
            if self._running[old].waiting == 0:
                del self._running[old]

    async def _answer(
        self, asked: Asked, identity: bytes, wanted: Wanted, running: _Running
    ) -> Answer:
        while self.root.is_aborted:
            await self._wait_attached(running)
        params, stop = self.reader.params(self.root.services.params, wanted, self._pinned)
        branch = next((b for b in self._branches if not b.busy and b.open == identity), None)
        if branch is None:
            branch = await self._begin(asked, identity)
        running.branch, branch.busy = branch, True
        try:
            answer = await self._turn(branch, asked, wanted, params, stop, running)
        finally:
            branch.busy = False
        branch.open = None
        return answer

    async def _begin(self, asked: Asked, identity: bytes) -> Branch:
        """Find or make the branch that answers, and record what it lacks. It is busy then."""
        place = find_place(self._branches, asked, self.reader)
        branch = place.branch
        if branch is not None:
            branch.busy = True
        try:
            if branch is None:
                episode = await place.base.episode.sibling(place.prompt, text=asked.text())
                branch = Branch(episode, busy=True)
                self._branches.append(branch)
            if branch.ahead:
                branch.first = branch.ahead[0].first
            else:
                branch.first = branch.episode.trajectory.next_segment
                if place.branch is not None and len(place.added):
                    await branch.episode.observe(place.added, place.observer, place.text)
            branch.open, branch.context, branch.drift = identity, place.prompt, place.drift
            return branch
        except BaseException:
            if branch is not None:
                branch.busy = False
            raise

    async def _turn(
        self,
        branch: Branch,
        asked: Asked,
        wanted: Wanted,
        params: SamplingParams,
        stop: Sequence[str],
        running: _Running,
    ) -> Answer:
        """Sample what the turn lacks, and read it. The branch's open turn stays open on failure."""
        recorded = branch.ahead.popleft() if branch.ahead else None
        upto = None
        if recorded is not None and not recorded.is_last:
            upto = branch.first + len(recorded.segments)
        noted = {**wanted.noted, "session": self.name, "history_drift": branch.drift}
        cached: int | None = None
        while True:
            at = branch.episode.trajectory
            segments = at.segments[branch.first : upto]
            said = self._read(segments, params, stop, wanted.parse_tools)
            left = params.max_new_tokens - sum(len(one.tokens) for one in segments)
            if upto is not None or said.ended or (segments and left <= 0):
                break
            if running.unwanted.is_set():
                raise GenerationCut
            step = min(left, _SLICE) if stop else left
            used = branch.episode
            try:
                result = await used.generate(
                    max_new_tokens=at.sampled_in_turn + step, params=params, noted=noted
                )
            except EpisodeAborted:
                if branch.episode is used:
                    await self._wait_attached(running)
                continue
            cached = result.cached_tokens if cached is None else cached
            if result.finish_reason == "length" and len(result.tokens) < step:
                # The model takes no more.
                segments = at.segments[branch.first :]
                said = self._read(segments, params, stop, wanted.parse_tools)
                break
        return self._told(branch, asked, segments, said, cached)

    async def _wait_attached(self, running: _Running) -> None:
        """Wait, after an abort, for the episode that goes on. Raises ApiError where none will."""
        waits = [
            asyncio.ensure_future(one.wait())
            for one in (self._attached, self.over, running.unwanted)
        ]
        self._held += 1
        self._moved.set()
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._held -= 1
            for one in waits:
                one.cancel()
        if self.over.is_set():
            raise self._is_over()
        if running.unwanted.is_set():
            raise GenerationCut

    def _read(
        self,
        segments: Sequence[Segment],
        params: SamplingParams,
        stop: Sequence[str],
        parse_tools: bool,
    ) -> Said:
        return self.reader.read(
            _joined([one.tokens for one in segments], np.int32),
            stop_token_ids=params.stop_token_ids,
            stop=stop,
            stopped=bool(segments) and segments[-1].finish_reason == "stop",
            parse_tools=parse_tools,
        )

    def _told(
        self,
        branch: Branch,
        asked: Asked,
        segments: Sequence[Segment],
        said: Said,
        cached: int | None,
    ) -> Answer:
        at = branch.episode.trajectory
        tokens = _joined([one.tokens for one in segments], np.int32)
        tail = np.zeros(0, np.int32)
        if said.kept < len(tokens):
            # A stop text within a token: what the agent has seen of it is encoded.
            tail = self.reader.rest(tokens[: said.kept], said.text)
        calls = tuple(
            (f"call_{at.index}_{branch.first}_{i}", call)
            for i, call in enumerate(said.parsed.calls)
        )
        message = _message(said, calls)
        branch.known.append(
            Known(
                mark=asked.answered(message, said.text),
                trajectory=at,
                length=len(branch.context) + said.kept,
                tail=tail,
                stop_token=said.stop_token,
            )
        )
        versions = [int(v) for one in segments for v in one.span_versions]
        return Answer(
            index=at.index,
            rollout_id=at.rollout_id,
            turn=segments[-1].turn if segments else at.next_turn,
            prompt_tokens=branch.context,
            tokens=tokens,
            log_probs=_joined([one.log_probs for one in segments], np.float32),
            said=said,
            message=message,
            calls=calls,
            finish_reason="tool_calls" if calls else "stop" if said.ended else "length",
            versions=tuple(dict.fromkeys(versions)),
            cached_tokens=cached,
            drift=branch.drift,
        )


def _message(said: Said, calls: Sequence[tuple[str, ToolCall]]) -> Message:
    """The assistant's message, in the form of `normal_messages`."""
    message: Message = {"role": "assistant", "content": said.parsed.content}
    if calls:
        message["tool_calls"] = [
            {
                "id": name,
                "type": "function",
                "function": {"name": call.name, "arguments": call.loaded()},
            }
            for name, call in calls
        ]
    return message


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _below(episode: Episode) -> list[Episode]:
    """Every sample that was begun in an episode, or in one of those."""
    found: list[Episode] = []
    for one in episode.siblings:
        found += [one, *_below(one)]
    return found
