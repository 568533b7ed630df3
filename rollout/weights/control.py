"""The endpoints of one SGLang engine that have to do with its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ledger.errors import EngineFailed, explain

__all__ = ["Answer", "EngineControl", "EngineInfo", "RankChecksums"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What an endpoint said."""

    ok: bool
    message: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """How an engine was started, and which version it says it has."""

    version: str
    """Of SGLang."""
    weight_version: str
    """As the engine says it, 'default' where nobody has named it."""
    model_path: str
    """What its weights were last read from."""
    device: str
    tp_size: int
    dp_size: int
    pp_size: int
    ep_size: int
    arguments: Mapping[str, Any] = field(repr=False)
    """Everything it was started with."""


@dataclass(frozen=True, slots=True)
class RankChecksums:
    """Of the parameters that one process of an engine holds."""

    tp_rank: int
    tp_size: int
    checksums: Mapping[str, str]


@dataclass(slots=True, eq=False)
class EngineControl:
    """One engine by its address. All calls come from one event loop.

    Every call raises EngineFailed where there is no answer: the engine is gone, or took longer than
    `timeout_s`. An answer that says no is an Answer.
    """

    address: str
    """http://host:port"""
    local: bool = False
    """Whether the engine shares this host's memory."""
    name: str = "sglang"
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with every request, such as the authorization."""
    timeout_s: float = 1800.0
    _session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Ask an endpoint; `body` is JSON."""
        return await self._ask("POST", path, body or {})

    async def pause(self, mode: str) -> Answer:
        """Stop generating, and take new requests without serving them."""
        return await self.post("/pause_generation", {"mode": mode})

    async def resume(self) -> Answer:
        """Generate again."""
        return await self.post("/continue_generation", {})

    async def info(self) -> EngineInfo:
        """How it was started, and its label."""
        server = (await self._ask("GET", "/server_info")).body
        model = (await self._ask("GET", "/model_info")).body
        try:
            return EngineInfo(
                version=str(server["version"]),
                weight_version=str(model["weight_version"]),
                model_path=str(model["model_path"]),
                device=str(server["device"]),
                tp_size=int(server["tp_size"]),
                dp_size=int(server["dp_size"]),
                pp_size=int(server["pp_size"]),
                ep_size=int(server["ep_size"]),
                arguments=server,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._failed(
                "/server_info and /model_info",
                "what SGLang 0.5.23 says of itself",
                f"{type(error).__name__}: {error}",
            ) from error

    async def weight_version(self) -> str:
        """The label of what it serves."""
        answer = await self._ask("GET", "/model_info")
        return str(answer.body.get("weight_version"))

    async def checksums(self) -> tuple[list[RankChecksums], str]:
        """Of every parameter on every rank; and the engine's one checksum over them."""
        answer = await self.post("/weights_checker", {"action": "checksum", "selector": "target"})
        try:
            if not answer.ok:
                raise ValueError(answer.message)
            ranks = []
            for rank in answer.body["ranks"]:
                place = rank["parallelism_info"][0]
                sums = {str(name): str(value) for name, value in rank["checksums"].items()}
                ranks.append(RankChecksums(int(place["tp_rank"]), int(place["tp_size"]), sums))
            return ranks, str(answer.body["per_engine_checksum"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise self._failed(
                "/weights_checker",
                "checksums by rank and parameter",
                f"{type(error).__name__}: {error}",
            ) from error

    async def close(self) -> None:
        """Give the connections back."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=dict(self.headers),
                timeout=aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=10.0),
            )
        try:
            async with self._session.request(method, self.address + path, json=body) as response:
                text = await response.text()
                found: Any = {}
                if "json" in response.content_type:
                    found = await response.json()
                answered = found if isinstance(found, dict) else {"value": found}
                ok = response.status == 200 and answered.get("success", True) is True
                message = str(answered.get("message") or text[:2000])
                return Answer(ok, f"{response.status}: {message}", answered)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            raise self._failed(
                path,
                f"an answer within {self.timeout_s:g} s",
                f"{type(error).__name__}: {error}",
            ) from error

    def _failed(self, path: str, expected: str, found: str) -> EngineFailed:
        return EngineFailed(
            explain(
                "asking an engine",
                on=self.address + path,
                expected=expected,
                found=found,
                do="look into the engine's log; start it again where it has ended",
            )
        )
