"""What drives the episodes, by the options of a command line."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ledger.errors import InvalidArgument, explain
from rollout.environments.from_options import environment_function
from rollout.episode import Episode, EpisodeFunction, single_turn
from rollout.openai.agent import ExternalAgent
from rollout.openai.reading import Reader
from rollout.openai.server import Endpoint
from rollout.slime.arguments import SlimeArguments
from rollout.slime.generate import SlimeGenerate
from rollout.slime.hooks import HookedEpisode, SampleHooks

__all__ = ["ServedEpisodes", "drives_episodes", "episode_function"]

_DRIVERS = (
    "environment",
    "custom_generate_function_path",
    "agent_command",
    "agent_function_path",
    "agent_from_outside",
)


class _Closing(EpisodeFunction, Protocol):
    async def close(self) -> None: ...


class ServedEpisodes:
    """Episodes of a driver that asks the endpoint, which starts with the first of them."""

    def __init__(self, endpoint: Endpoint, drive: _Closing) -> None:
        """`endpoint` has not been started."""
        self._endpoint, self._drive = endpoint, drive
        self.__name__ = getattr(drive, "__name__", "episode")
        self._starting: asyncio.Future[None] | None = None

    async def __call__(self, episode: Episode) -> None:
        """As the driver. Raises InvalidArgument too, where the endpoint cannot be started."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._endpoint.start())
        await asyncio.shield(self._starting)
        await self._drive(episode)

    async def close(self) -> None:
        """End what still runs, and stop listening."""
        await self._drive.close()
        await self._endpoint.close()


def drives_episodes(values: Mapping[str, Any]) -> bool:
    """Whether the options ask for more than one answer to a prompt, or for hooks behind it."""
    names = (*_DRIVERS, "rollout_sample_hook_path")
    return any(values[name] not in (None, False) for name in names)


def episode_function(
    values: Mapping[str, Any],
    tokenizer: Any,
    stop_token_ids: Sequence[int],
    arguments: SlimeArguments,
    *,
    vocab_size: int,
) -> EpisodeFunction:
    """What drives every episode: an environment, an agent, a custom function, or a single answer.

    Raises:
        InvalidArgument: several of them are named, or one of them cannot work.
        MissingDependency: a library behind it is not installed.
    """
    named = [name for name in _DRIVERS if values[name] not in (None, False)]
    if len(named) > 1:
        raise InvalidArgument(
            explain(
                "choosing what drives episodes",
                on=" and ".join("--" + name.replace("_", "-") for name in named),
                expected="one of them",
                found=len(named),
            )
        )
    hooks = SampleHooks(values["rollout_sample_hook_path"] or (), arguments)
    path = values["custom_generate_function_path"]
    if path is not None:
        endpoint = _endpoint(values, tokenizer)
        return ServedEpisodes(
            endpoint,
            SlimeGenerate(
                path,
                endpoint,
                arguments,
                vocab_size=vocab_size,
                hooks=hooks,
                timeout_s=values["agent_timeout_s"],
            ),
        )
    drive: EpisodeFunction
    if named and named[0].startswith("agent_"):
        endpoint = _endpoint(values, tokenizer)
        drive = ServedEpisodes(
            endpoint,
            ExternalAgent(
                endpoint,
                command=values["agent_command"],
                function_path=values["agent_function_path"],
                timeout_s=values["agent_timeout_s"],
                # Elsewhere what is aborted is dropped.
                keep_when_aborted=values["partial_rollout"] or values["fully_async"],
            ),
        )
    else:
        drive = environment_function(values, tokenizer, stop_token_ids) or single_turn
    return HookedEpisode(drive, hooks) if hooks else drive


def _endpoint(values: Mapping[str, Any], tokenizer: Any) -> Endpoint:
    reader = Reader(
        tokenizer,
        tool_format=values["tool_call_parser"],
        options=values["apply_chat_template_kwargs"],
    )
    return Endpoint(reader, host=values["openai_host"], port=values["openai_port"])
