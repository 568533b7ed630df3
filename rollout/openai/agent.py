"""The episode function that starts an agent, and waits for it: the agent asks the endpoint.

An agent is a command, a function by import path, or somebody outside who comes for the session by
himself. While the engine takes new weights, or the sample waits for the next rollout step, its
requests wait: it does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shlex
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ledger.errors import InvalidArgument, explain
from rollout.episode import Episode, EpisodeAborted
from rollout.imports import load_function
from rollout.openai.server import KEY_PREFIX, Endpoint
from rollout.openai.session import Session
from rollout.rewards import Reward, checked_reward

__all__ = ["AgentFailed", "AgentTask", "ExternalAgent"]

_OUTPUT_BYTES = 1 << 20
_KILL_GRACE_S = 5.0


class AgentFailed(Exception):
    """An agent ended badly, or not in time. Its samples are failed ones; they have no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """What an agent is given."""

    base_url: str
    """For an OpenAI client; it names the session already."""
    api_key: str
    """Names the session too, for agents that have one address for all."""
    session: str
    prompt: str
    label: str | None
    """For the reward of a function; a command is not told it."""
    metadata: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class _Hosted:
    """An agent that runs."""

    session: Session
    task: asyncio.Task[Reward | None]


class ExternalAgent:
    """An `EpisodeFunction`: one agent an episode."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        command: str | None = None,
        function_path: str | None = None,
        timeout_s: float = 1800.0,
        pinned: Mapping[str, Any] | None = None,
        keep_when_aborted: bool = True,
    ) -> None:
        """Exactly one agent: `command` (run without a shell), `function_path`, or neither of them:
        then an agent from outside claims the session and posts its reward. `timeout_s` limits an
        agent from its start to its end, waiting included.

        `keep_when_aborted`: after an abort the agent lives on, and its requests wait for the
        episode to be called again; else it is ended.

        Raises:
            InvalidArgument: both are given, or the function cannot be imported.
        """
        if command is not None and function_path is not None:
            raise InvalidArgument(
                explain(
                    "choosing the agent",
                    on="--agent-command and --agent-function-path",
                    expected="one of them",
                    found="both",
                )
            )
        if command is not None and not shlex.split(command):
            raise InvalidArgument(
                explain("choosing the agent", on="--agent-command", found="an empty command")
            )
        self._endpoint, self._command = endpoint, command
        self._function: Callable[..., Any] | None = None
        if function_path is not None:
            self._function = load_function(function_path, setting="--agent-function-path")
        self._timeout_s, self._pinned = timeout_s, pinned
        self._keep = keep_when_aborted
        self._hosted: dict[str, _Hosted] = {}
        self.__name__ = command or function_path or "agent from outside"

    async def __call__(self, episode: Episode) -> None:
        """Start the agent, or go on with the one that the sample has, and wait for its end.

        The reward is that of the agent, if it gave one.

        Raises:
            EpisodeAborted: the episode was told to stop.
            AgentFailed: the agent failed, or took too long.
        """
        name = episode.session_name
        hosted = self._hosted.get(name)
        if hosted is None:
            hosted = self._begin(episode)
        else:
            hosted.session.attach(episode)
        aborted = asyncio.ensure_future(episode.wait_aborted())
        try:
            await asyncio.wait([hosted.task, aborted], return_when=asyncio.FIRST_COMPLETED)
            if not hosted.task.done():
                await hosted.session.idle()
                if not self._keep:
                    await self._end(name)
                raise EpisodeAborted
        except asyncio.CancelledError:
            await asyncio.shield(self._end(name))
            raise
        finally:
            aborted.cancel()
        await self._end(name)
        reward = hosted.task.result()
        if not any(one.trajectory.sampled_tokens for one in hosted.session.samples):
            raise AgentFailed("the agent ended without having asked for anything")
        if reward is not None:
            episode.reward = reward

    async def close(self) -> None:
        """End every agent that still runs."""
        for name in list(self._hosted):
            await self._end(name)

    def _begin(self, episode: Episode) -> _Hosted:
        at = episode.trajectory
        name = episode.session_name
        outside = self._command is None and self._function is None
        params = episode.services.params
        pinned = self._pinned
        if pinned is None:
            # What is trained on is sampled as the run says, whatever the agent asks for.
            pinned = {
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
            }
        session = self._endpoint.open(name, episode, pinned=pinned, claimable=outside)
        given = AgentTask(
            base_url=f"{self._endpoint.url}/sessions/{name}/v1",
            api_key=KEY_PREFIX + name,
            session=name,
            prompt=at.text,
            label=at.label,
            metadata=at.metadata,
        )
        hosted = _Hosted(session, asyncio.create_task(self._run(session, given)))
        self._hosted[name] = hosted
        return hosted

    async def _end(self, name: str) -> None:
        """End an agent, and its session; what it asked for and was sampled is recorded."""
        hosted = self._hosted.pop(name, None)
        if hosted is None:
            return
        hosted.task.cancel()
        await asyncio.wait([hosted.task])
        await self._endpoint.shut(hosted.session.name)

    async def _run(self, session: Session, given: AgentTask) -> Reward | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._command is not None:
                    found = await self._run_command(given)
                elif self._function is not None:
                    found = await self._run_function(given)
                else:
                    await session.over.wait()
                    found = None
        except TimeoutError as error:
            raise AgentFailed(f"the agent did not end within {self._timeout_s} s") from error
        # A reward that was posted is the agent's own word, whatever it returns.
        return session.reward if session.reward is not None else found

    async def _run_function(self, given: AgentTask) -> Reward | None:
        if self._function is None:
            return None
        try:
            if inspect.iscoroutinefunction(self._function):
                found = await self._function(given)
            else:
                found = await asyncio.to_thread(self._function, given)
        except Exception as error:
            # Whatever it is: it must not be taken for a refusal of ours, which ends the run.
            raise AgentFailed(f"{type(error).__name__}: {error}") from error
        return None if found is None else _checked(found)

    async def _run_command(self, given: AgentTask) -> Reward | None:
        """Run the command with the task on its standard input, as JSON.

        Its reward is the number under `reward` of the last line of its output, where that is a JSON
        object.
        """
        told = {
            "base_url": given.base_url,
            "api_key": given.api_key,
            "session": given.session,
            "prompt": given.prompt,
            "metadata": dict(given.metadata),
        }
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": given.base_url,
            "OPENAI_API_KEY": given.api_key,
            "LEDGER_SESSION": given.session,
        }
        process = await asyncio.create_subprocess_exec(
            *shlex.split(self._command or ""),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        try:
            out, err = await process.communicate(json.dumps(told).encode())
        finally:
            await _end_process(process)
        if process.returncode != 0:
            last = err[-_OUTPUT_BYTES:].decode(errors="replace").strip().splitlines()[-1:]
            raise AgentFailed(f"the agent ended with status {process.returncode}: {''.join(last)}")
        return _reward_in(out[-_OUTPUT_BYTES:].decode(errors="replace"))


async def _end_process(process: asyncio.subprocess.Process) -> None:
    """End a process and those that it started, politely first. Pipes are closed with it."""
    if process.returncode is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_GRACE_S):
                await asyncio.shield(asyncio.ensure_future(process.wait()))
                return


def _reward_in(output: str) -> Reward | None:
    lines = output.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    if not isinstance(found, Mapping) or found.get("reward") is None:
        return None
    return _checked(Reward(value=found["reward"], parts=found.get("parts") or {}))


def _checked(found: object) -> Reward:
    try:
        return checked_reward(found, on="what the agent said")
    except InvalidArgument as error:
        raise AgentFailed(str(error)) from error
