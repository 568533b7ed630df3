"""A reward that another server gives."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from time import sleep
from urllib.parse import urlsplit

from ledger.errors import InvalidArgument, RewardFailed, explain
from rollout.rewards import Reward, ScoredSample, checked_reward

__all__ = ["RemoteReward"]

TRIES = 5


class RemoteReward:
    """Asks a server as slime's remote_rm does: POST {prompt, response, label}, a JSON number back.

    A number, or an object whose numbers become parts and whose 'score' or 'reward' is the reward.
    """

    name = "remote_rm"
    version = "remote"

    def __init__(
        self, url: str | None, *, limit_s: float = 10.0, wait: Callable[[float], None] = sleep
    ) -> None:
        """`limit_s` is the time for one try. Raises InvalidArgument without an http address."""
        if url is None or urlsplit(url).scheme not in ("http", "https"):
            raise InvalidArgument(
                explain(
                    "making a reward",
                    on="--rm-type remote_rm",
                    expected="--rm-url with the http address of a reward server",
                    found=url,
                )
            )
        self._url, self._limit_s, self._wait = url, limit_s, wait

    def __call__(self, sample: ScoredSample) -> Reward:
        """Ask about one sample; what fails for a moment is asked again.

        Raises RewardFailed: no answer after some tries, a refusal, or one that is no number.
        """
        body = json.dumps(
            {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        )
        request = urllib.request.Request(
            self._url, body.encode(), {"Content-Type": "application/json"}
        )
        why: object = None
        for number in range(TRIES):
            if number:
                self._wait(min(2.0**number / 2, 30.0))
            try:
                with urllib.request.urlopen(request, timeout=self._limit_s) as answer:
                    return self._reward(json.loads(answer.read()), sample)
            except urllib.error.HTTPError as error:
                with error:
                    why = f"HTTP {error.code}: {error.read(200).decode(errors='replace')}"
                if error.code < 500 and error.code not in (408, 429):
                    break
            except (OSError, ValueError) as error:
                why = f"{type(error).__name__}: {error}"
        raise RewardFailed(
            explain(
                "asking a reward server",
                on=f"{urlsplit(self._url).netloc}, sample {sample.index}",
                expected="a JSON number",
                found=why,
            )
        )

    def _reward(self, found: object, sample: ScoredSample) -> Reward:
        if isinstance(found, dict):
            numbers = {k: v for k, v in found.items() if isinstance(v, (int, float))}
            value = numbers.pop("score", numbers.pop("reward", None))
            found = Reward(value=value, parts=numbers) if value is not None else found
        return checked_reward(found, on=f"--rm-url, sample {sample.index}")
