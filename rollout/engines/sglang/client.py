"""One SGLang server over HTTP (its native interface, sglang 0.5.23). All of one event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from ledger.errors import EngineFailed, InvalidArgument, MissingDependency, explain
from rollout.engines.sglang.answer import Asked, parse_answer, parse_version
from rollout.engines.sglang.model import ModelFacts
from rollout.engines.sglang.request import Extras, generate_body
from rollout.engines.sglang.server import ServerFacts, read_server_facts
from rollout.protocol import GenerationRequest, GenerationResult, SamplingParams, check_request

__all__ = ["Refused", "SGLangClient", "Unreachable"]

_log = logging.getLogger(__name__)
_IN_A_THREAD_BYTES = 1 << 18
"""Answers from this size on are parsed beside the event loop."""


class Unreachable(EngineFailed):
    """The engine gave no answer: no connection, one that broke, a time-out, or HTTP 429 and 5xx."""


class Refused(EngineFailed):
    """The engine answered that it will not do it (HTTP 4xx, or success: false)."""


class SGLangClient:
    """What one server can be asked. Made, then `open`ed, which reads what the server is."""

    def __init__(
        self,
        address: str,
        model: ModelFacts,
        *,
        request_timeout_s: float | None = None,
        control_timeout_s: float = 60.0,
        connect_timeout_s: float = 10.0,
        api_key: str | None = None,
    ) -> None:
        """`address` is `http://host:port`. `request_timeout_s`: of one generation; None: no limit.

        Raises:
            MissingDependency: without aiohttp.
        """
        try:
            import aiohttp
        except ImportError as error:
            raise MissingDependency(
                explain(
                    "talking to SGLang",
                    on=address,
                    expected="the package aiohttp",
                    found=error,
                    do="pip install 'trajectory-ledger[rollout]'",
                )
            ) from error
        self._aiohttp = aiohttp
        self.address = address.rstrip("/")
        self.model = model
        self._request_timeout_s = request_timeout_s
        self._control_timeout_s = control_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: Any = None
        self._closed = False
        self._server: ServerFacts | None = None
        self.updates = 0
        """Times that this process changed the server's weights or their version."""
        self._said_unknown = False

    @property
    def server(self) -> ServerFacts:
        """What the server said of itself at `open`."""
        if self._server is None:
            raise RuntimeError(f"the client of {self.address} has not been opened")
        return self._server

    async def open(self) -> ServerFacts:
        """Read what the server is, and compare it with the model.

        Raises:
            Unreachable: it does not answer.
            InvalidArgument: it serves another model, or has defaults that change what is sampled.
        """
        self._server = read_server_facts(
            await self.server_info(), await self.model_info(), self.model, on=self.address
        )
        return self._server

    async def close(self) -> None:
        """Close the connections; requests that wait, or come later, fail with Unreachable."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # Generation.

    def extras(self) -> Extras:
        """What this server can report beside tokens and log-probabilities, and the model has."""
        return Extras(
            routed_experts=self.server.reports_experts and self.model.num_experts > 0,
            indexer_topk=self.server.reports_indexer and self.model.indexer_topk > 0,
        )

    def check(self, request: GenerationRequest, params: SamplingParams) -> None:
        """Refuse what would stop the server or be cut by it. Raises InvalidArgument."""
        check_request(
            request,
            params,
            vocab_size=self.model.vocab_size,
            max_positions=self.server.max_positions,
        )

    async def generate(
        self, request: GenerationRequest, params: SamplingParams, *, rid: str
    ) -> GenerationResult:
        """Continue one sample; the server knows it as `rid`.

        Raises:
            InvalidArgument: a request that the model cannot take; nothing was sent.
            Unreachable, Refused: as they say.
            EngineFailed: the answer breaks a promise.
        """
        self.check(request, params)
        extras = self.extras()
        asked = Asked(
            request=request,
            params=params,
            extras=extras,
            rid=rid,
            address=self.address,
            model=self.model,
        )
        body = generate_body(request, params, rid=rid, extras=extras)
        updates = self.updates
        began = time.perf_counter()
        raw = await self._send("POST", "/generate", body, self._request_timeout_s, f"request {rid}")
        time_s = time.perf_counter() - began
        steady = updates == self.updates

        def parse() -> GenerationResult:
            return parse_answer(
                self._json(raw, f"request {rid}"), asked, time_s=time_s, steady=steady
            )

        big = len(raw) >= _IN_A_THREAD_BYTES
        result = await asyncio.to_thread(parse) if big else parse()
        unknown = (result.report or {}).get("unknown_version")
        if unknown is not None and not self._said_unknown:
            self._said_unknown = True
            _log.warning(
                "engine %s does not say which weight version sampled its tokens (found: %s); they "
                "are recorded as unknown (-1)",
                self.address,
                unknown,
            )
        return result

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all of the server. A name that it does not know is no error."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        await self.call("/abort_request", body)

    # Looking after it.

    async def health(self, *, generate: bool = False, timeout_s: float | None = None) -> None:
        """Return if it serves. `generate`: it must also have run its model, which a paused one does
        not. Raises Unreachable."""
        await self._send(
            "GET",
            "/health_generate" if generate else "/model_info",
            None,
            timeout_s or self._control_timeout_s,
            "its health",
        )

    async def server_info(self) -> dict[str, Any]:
        """Its arguments, as it resolved them, and its state."""
        return _mapping(await self.call("/server_info", method="GET"), self.address, "/server_info")

    async def model_info(self) -> dict[str, Any]:
        """The model that it serves, and its `weight_version`."""
        return _mapping(await self.call("/model_info", method="GET"), self.address, "/model_info")

    async def weight_version(self) -> int:
        """The version that new requests get; UNKNOWN_VERSION where it says none."""
        return parse_version((await self.model_info()).get("weight_version"))

    async def pause(self, mode: str) -> None:
        """`/pause_generation`: 'abort', 'retract' or 'in_place'."""
        await self.call("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """`/continue_generation`."""
        await self.call("/continue_generation", {})

    async def flush_cache(self, *, timeout_s: float = 30.0) -> None:
        """Empty the prefix cache. Raises Refused where requests still run after `timeout_s`."""
        await self.call(f"/flush_cache?timeout={timeout_s:g}", {}, timeout_s=timeout_s + 10)

    async def call(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        method: str = "POST",
        changes_weights: bool = False,
    ) -> Any:
        """Any other interface of the server; its JSON, or its text where it is none.

        `changes_weights`: an answer without version spans that is under way is then of no known
        version.

        Raises:
            Unreachable: as it says.
            Refused: HTTP 4xx, or an answer with `success: false`.
        """
        self.updates += changes_weights
        raw = await self._send(method, path, body, timeout_s or self._control_timeout_s, path)
        try:
            answer = json.loads(raw)
        except ValueError:
            return raw.decode(errors="replace")
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise Refused(
                explain(
                    "asking an engine",
                    on=f"{path}, engine {self.address}",
                    expected="success",
                    found=answer.get("message") or answer.get("error") or answer,
                )
            )
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float | None,
        on: str,
    ) -> bytes:
        aiohttp = self._aiohttp
        where = f"{on}, engine {self.address}"
        if self._closed:
            raise Unreachable(
                explain("asking an engine", on=where, expected="an engine", found="given up")
            )
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # How many requests run at a time is decided elsewhere: a request for control must
                # never wait for them.
                # SGLang closes connections that idle for 5 s, perhaps just as one is used again.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            )
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        try:
            async with self._session.request(
                method,
                self.address + path,
                data=data,
                headers={"Content-Type": "application/json"} if data is not None else None,
                timeout=aiohttp.ClientTimeout(
                    total=timeout_s, sock_connect=self._connect_timeout_s
                ),
            ) as response:
                raw: bytes = await response.read()
                status: int = response.status
        except TimeoutError as error:
            raise Unreachable(
                explain(
                    "asking an engine",
                    on=where,
                    expected=f"an answer within {timeout_s:g} s"
                    if timeout_s is not None
                    else f"a connection within {self._connect_timeout_s:g} s",
                    found="none",
                )
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(
                explain(
                    "asking an engine",
                    on=where,
                    expected="an answer",
                    found=f"{type(error).__name__}: {error}",
                )
            ) from error
        if status == 200:
            return raw
        said = raw[:2000].decode(errors="replace")
        kind = Unreachable if status == 429 or status >= 500 else Refused
        raise kind(
            explain("asking an engine", on=where, expected="HTTP 200", found=f"{status}: {said}")
        )

    def _json(self, raw: bytes, on: str) -> object:
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise EngineFailed(
                explain(
                    "reading an engine's answer",
                    on=f"{on}, engine {self.address}",
                    expected="JSON",
                    found=error,
                )
            ) from error


def _mapping(answer: Any, address: str, path: str) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise InvalidArgument(
            explain(
                "asking an engine what it is",
                on=f"{address}{path}",
                expected="the JSON object of an SGLang server",
                found=type(answer).__name__,
                do="check the address: it must be an SGLang server (sglang 0.5.23), not a router",
            )
        )
    return answer
