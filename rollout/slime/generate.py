"""slime's custom generate functions as episode functions.

The function asks the engine through the endpoint, which records every answer before it gives it:
`args.sglang_router_ip` and `sglang_router_port` name the session of its sample. What it returns is
then laid over what is recorded. Where it asked another engine, what it returned is all there is,
and is recorded as it stands if it is complete.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ledger.errors import InvalidArgument
from ledger.events import UNKNOWN_VERSION
from ledger.numbering import SAMPLE_SPAN, local_number
from ledger.seeds import sample_seed
from rollout.episode import Episode, EpisodeAborted
from rollout.imports import load_function
from rollout.openai.server import Endpoint
from rollout.openai.session import Session
from rollout.protocol import GenerationResult
from rollout.records import sample_decided
from rollout.rewards import Reward, checked_reward
from rollout.slime.arguments import SlimeArguments
from rollout.slime.convert import pending_sample
from rollout.slime.hooks import SampleHooks
from rollout.slime.returned import (
    Returned,
    ReturnedWrong,
    Run,
    as_list,
    check,
    left,
    matching,
    runs,
)

__all__ = ["SlimeGenerate"]

_SETTING = "--custom-generate-function-path"


@dataclass(slots=True, eq=False)
class _Hosted:
    """A function that runs."""

    session: Session
    task: asyncio.Task[Any]


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """Whoever sampled what no engine of ours did."""

    name: str
    version: str = "custom"


class SlimeGenerate:
    """An `EpisodeFunction`: `async (args, sample, sampling_params[, evaluation])` by its path."""

    def __init__(
        self,
        path: str,
        endpoint: Endpoint,
        arguments: SlimeArguments,
        *,
        vocab_size: int,
        hooks: SampleHooks | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        """`endpoint` has been started; `timeout_s` limits a call, waiting for the engine included.

        Raises InvalidArgument where `path` names no function.
        """
        self._function = load_function(path, setting=_SETTING)
        self.__name__ = path
        self._endpoint, self._arguments = endpoint, arguments
        self._vocab_size, self._timeout_s = vocab_size, timeout_s
        self._hooks = hooks or SampleHooks((), arguments)
        self._hosted: dict[str, _Hosted] = {}

    async def __call__(self, episode: Episode) -> None:
        """Call the function, or go on with the call that the sample has, and wait for its end.

        Raises:
            EpisodeAborted: the episode was told to stop; requests of the function wait.
            ReturnedWrong: it returned something that cannot be recorded.
            Exception: what the function raised. In both cases the sample failed.
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
                raise EpisodeAborted
        except asyncio.CancelledError:
            await asyncio.shield(self._end(name))
            raise
        finally:
            aborted.cancel()
        await self._end(name)
        await self._accept(episode, hosted.session, hosted.task.result())

    async def close(self) -> None:
        """End every function that still runs."""
        for name in list(self._hosted):
            await self._end(name)

    def _begin(self, episode: Episode) -> _Hosted:
        where = urlsplit(self._endpoint.url)
        name = episode.session_name
        params = episode.services.params
        # slime's functions ask http://{ip}:{port}/generate: the session stands in the "ip", and
        # what they put behind it becomes the end of its name.
        arguments = self._arguments.replaced(
            sglang_router_ip=f"{where.netloc}/sessions/{name}", sglang_router_port=where.port
        )
        session = self._endpoint.open(
            f"{name}:{where.port}",
            episode,
            pinned={
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
            },
        )
        hosted = _Hosted(session, asyncio.create_task(self._run(episode, session, arguments)))
        self._hosted[name] = hosted
        return hosted

    async def _end(self, name: str) -> None:
        hosted = self._hosted.pop(name, None)
        if hosted is None:
            return
        hosted.task.cancel()
        await asyncio.wait([hosted.task])
        await self._endpoint.shut(hosted.session.name)

    async def _run(self, episode: Episode, session: Session, arguments: SlimeArguments) -> Any:
        sample = pending_sample(episode.trajectory, session.name)
        given: dict[str, Any] = {}
        if "evaluation" in inspect.signature(self._function).parameters:
            given["evaluation"] = episode.services.evaluation
        call = self._function(arguments, sample, self._sampling_params(episode), **given)
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await call if inspect.isawaitable(call) else call
        except TimeoutError as error:
            raise ReturnedWrong(f"{self.__name__} took more than {self._timeout_s:g} s") from error
        except InvalidArgument as error:
            # Of one sample: it must not end the run as a refusal of ours does.
            raise ReturnedWrong(f"{self.__name__}: {error}") from error
        return [
            await self._hooks.apply(
                one, episode.trajectory.rollout_step, evaluation=episode.services.evaluation
            )
            for one in as_list(found, self.__name__)
        ]

    def _sampling_params(self, episode: Episode) -> dict[str, Any]:
        """As slime's functions get them."""
        params = episode.services.params
        return {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "max_new_tokens": params.max_new_tokens,
            "stop": None,
            "stop_token_ids": list(params.stop_token_ids),
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "sampling_seed": self._seed(episode, 0),
        }

    def _seed(self, episode: Episode, turn: int) -> int:
        at = episode.trajectory
        return sample_seed(
            episode.services.run_seed,
            at.rollout_step,
            local_number(at.group_index, SAMPLE_SPAN),
            local_number(at.index, SAMPLE_SPAN),
            turn,
        )

    async def _accept(self, episode: Episode, session: Session, samples: Sequence[Any]) -> None:
        """Check what came back, add what is not recorded, and decide what was left out."""
        on = self.__name__
        found = [check(one, vocab_size=self._vocab_size, on=on) for one in samples]
        for one in found:
            if one.status in ("failed", "aborted"):
                raise ReturnedWrong(f"{on} returned a sample with status {one.status}")
        kept = [one for one in found if not getattr(one.sample, "remove_sample", False)]
        if not kept:
            raise ReturnedWrong(f"{on} removed every sample of the rollout (remove_sample)")
        reward = self._reward(kept)
        free = {one.trajectory.index: one for one in session.samples}
        asked = any(one.trajectory.sampled_tokens for one in free.values())
        for one in kept:
            at = matching(one, [branch.trajectory for branch in free.values()])
            if at is not None:
                await self._add(free.pop(at.index), left(one, at, on), one)
                continue
            if asked:
                raise ReturnedWrong(
                    f"{on} returned tokens that begin with none of the sequences that the engine "
                    "answered: return the ids that the answers named, never a text encoded anew"
                )
            root = free.get(episode.trajectory.index)
            if root is None or not np.array_equal(root.trajectory.prompt_tokens, one.prompt):
                text = episode.services.tokenizer.decode(one.prompt.tolist())
                await self._add(await episode.sibling(one.prompt, text=text), runs(one, 0), one)
            else:
                await self._add(free.pop(root.trajectory.index), runs(one, 0), one)
        await self._leave_out(episode, list(free.values()))
        if reward is not None:
            episode.reward = reward
        metadata = getattr(kept[0].sample, "metadata", None)
        if isinstance(metadata, dict):
            # For the reward function; a process that goes on calls this function again.
            episode.trajectory.metadata = metadata

    async def _add(self, episode: Episode, rest: Sequence[Run], one: Returned) -> None:
        """Record what a returned sample has behind what is recorded."""
        while rest and not rest[-1].sampled:
            # Behind the last sampled token: nothing would be learned of it.
            rest = rest[:-1]
        for run in rest:
            if run.log_probs is not None:
                await self._adopt(episode, run, one, last=run is rest[-1])
            elif run.sampled:
                raise ReturnedWrong(
                    f"{self.__name__}: {len(run.tokens)} tokens that were sampled, and that the "
                    "endpoint did not answer, without rollout_log_probs"
                )
            else:
                text = episode.services.tokenizer.decode(run.tokens.tolist())
                await episode.observe(run.tokens, "environment", text)

    async def _adopt(self, episode: Episode, run: Run, one: Returned, *, last: bool) -> None:
        at, params = episode.trajectory, episode.services.params
        size = len(run.tokens)
        reason = "length" if last and one.status == "truncated" else "stop"
        result = GenerationResult(
            index=at.index,
            tokens=run.tokens,
            log_probs=np.asarray(run.log_probs, np.float32),
            sampler_log_probs=None,
            logprob_mode=params.logprob_mode,
            logprob_temperature=params.logprob_temperature,
            finish_reason=reason,
            span_starts=np.array([0], np.int32),
            span_ends=np.array([size], np.int32),
            span_versions=np.array([_version(one.sample)], np.int64),
        )
        await episode.adopt(
            result,
            engine=_Elsewhere(self.__name__),
            params=params,
            seed=self._seed(episode, at.next_turn),
        )

    async def _leave_out(self, episode: Episode, unused: Sequence[Episode]) -> None:
        """Decide the samples that were recorded, and not returned."""
        events = [
            sample_decided(
                one.trajectory,
                rollout_step=one.trajectory.rollout_step,
                decision="filtered",
                reason="the custom function did not return it",
                rule=self.__name__,
            )
            for one in unused
            if one.trajectory.sampled_tokens
        ]
        if events:
            await episode.services.sink.append(events)

    def _reward(self, kept: Sequence[Returned]) -> Reward | None:
        """The reward that the function gave; None where it gave none."""
        given = [
            one.sample.reward for one in kept if getattr(one.sample, "reward", None) is not None
        ]
        if not given:
            return None
        if len(given) != len(kept) or any(one != given[0] for one in given):
            raise ReturnedWrong(
                f"{self.__name__} gave the samples of one rollout different rewards; they share it"
            )
        found, parts = given[0], {}
        if isinstance(found, dict):
            key = self._arguments.reward_key
            if key not in found:
                raise ReturnedWrong(f"{self.__name__}: a reward without {key!r} (--reward-key)")
            parts = {k: v for k, v in found.items() if k != key and isinstance(v, (int, float))}
            found = found[key]
        try:
            return checked_reward(Reward(value=found, parts=parts), on=self.__name__)
        except InvalidArgument as error:
            raise ReturnedWrong(str(error)) from error


def _version(sample: Any) -> int:
    """The version that sampled it, where the function names a single one."""
    names = set(map(str, getattr(sample, "weight_versions", None) or ()))
    name = names.pop() if len(names) == 1 else ""
    return int(name) if name.isdecimal() else UNKNOWN_VERSION
