"""The HTTP side: routes, whose session a request belongs to, streams, clients that go away."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from ledger.errors import EngineFailed, InvalidArgument, LedgerError, explain
from rollout.episode import Episode, GenerationCut
from rollout.openai.errors import ApiError, bad_request, no_session
from rollout.openai.reading import Answer, Reader
from rollout.openai.requests import Call, read_chat, read_completion, read_generate
from rollout.openai.responses import (
    chat_answer,
    chat_beginning,
    chat_chunks,
    completion_answer,
    completion_chunks,
    generate_answer,
    server_sent,
)
from rollout.openai.session import Session
from rollout.rewards import checked_reward

__all__ = ["KEY_PREFIX", "Endpoint"]

KEY_PREFIX = "sk-"
"""API keys begin so: some clients take no other ones."""
_BODY_LIMIT_BYTES = 256 << 20


class Endpoint:
    """Serves the sessions that are open. It knows no user: bind it where only agents reach it.

    A request names its session in the base URL (`/sessions/<session>/v1`), by the header
    `X-Session-Id` or `X-SMG-Routing-Key`, or by its API key (`Bearer sk-<session>`), in this order.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        keep_alive_s: float = 10.0,
    ) -> None:
        """`model` is the name that /v1/models says. Port 0: a free one. A stream that waits for its
        answer gets a comment each `keep_alive_s`."""
        self.sessions: dict[str, Session] = {}
        self._reader, self._model = reader, model
        self._host, self._port, self._keep_alive_s = host, port, keep_alive_s
        self._runner: web.AppRunner | None = None
        self._claimable: dict[str, None] = {}

    async def start(self) -> None:
        """Listen. Raises InvalidArgument where the address cannot be had."""
        app = web.Application(client_max_size=_BODY_LIMIT_BYTES, middlewares=[_refusals])
        for prefix in ("", "/sessions/{session}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/v1/completions", self._completion)
            app.router.add_post(f"{prefix}/generate", self._generate)
            app.router.add_get(f"{prefix}/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/sessions", self._list)
        app.router.add_post("/v1/sessions/claim", self._claim)
        app.router.add_get("/v1/sessions/{session}", self._show)
        app.router.add_post("/v1/sessions/{session}/reward", self._reward)
        # A client that goes away cancels its handler.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise InvalidArgument(
                explain(
                    "starting the OpenAI endpoint",
                    on=f"{self._host}:{self._port}",
                    found=str(error),
                    do="choose another --openai-host or --openai-port",
                )
            ) from error
        self._port = self._runner.addresses[0][1]

    @property
    def url(self) -> str:
        """Where it listens, without a path."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def open(
        self,
        name: str,
        episode: Episode,
        *,
        pinned: Mapping[str, Any] | None = None,
        claimable: bool = False,
    ) -> Session:
        """Serve a session. `claimable`: an agent from outside may ask for it.

        Raises:
            InvalidArgument: a session of that name is open.
        """
        if name in self.sessions:
            raise InvalidArgument(explain("opening a session", on=name, found="it is open already"))
        session = Session(name, episode, self._reader, pinned)
        self.sessions[name] = session
        if claimable:
            self._claimable[name] = None
        return session

    async def shut(self, name: str) -> None:
        """Close a session: what is under way is recorded, later requests are refused."""
        session = self.sessions.pop(name, None)
        self._claimable.pop(name, None)
        if session is not None:
            session.end()
            await session.cut()
            await session.settle()

    async def close(self) -> None:
        """Close every session, and stop listening."""
        for name in list(self.sessions):
            await self.shut(name)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _session(self, request: web.Request) -> Session:
        found = request.match_info.get("session") or request.headers.get("X-Session-Id")
        found = found or request.headers.get("X-SMG-Routing-Key")
        if not found:
            kind, _, key = request.headers.get("Authorization", "").partition(" ")
            if kind.lower() == "bearer" and key:
                found = key.strip().removeprefix(KEY_PREFIX)
        session = self.sessions.get(found or "")
        if session is None:
            raise no_session(found)
        return session

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        call = read_chat(await _json(request), self._reader)
        return await self._serve(
            request, session, call, "chatcmpl", chat_answer, chat_chunks, chat_beginning
        )

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        call = read_completion(await _json(request), self._reader)
        return await self._serve(
            request, session, call, "cmpl", completion_answer, completion_chunks, None
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await _json(request)
        session = self._session(request)
        call = read_generate(body, self._reader)

        def whole(*given: Any) -> Any:
            yield generate_answer(*given)

        return await self._serve(request, session, call, "gen", generate_answer, whole, None)

    async def _serve(
        self,
        request: web.Request,
        session: Session,
        call: Call,
        kind: str,
        told: Callable[..., Any],
        chunks: Callable[..., Any],
        beginning: Callable[..., Any] | None,
    ) -> web.StreamResponse:
        headers = request.headers
        key = headers.get("X-Request-Id") or headers.get("Idempotency-Key")
        # Sent by the official clients with what they send again by themselves.
        again = headers.get("x-stainless-retry-count", "0") not in ("", "0")
        wanted = call.wanted
        if key is not None:
            wanted = dataclasses.replace(wanted, noted={**wanted.noted, "request": key})
        created = int(time.time())
        asking = session.answer(call.asked, wanted, key, again=again)
        if not call.stream:
            answer = await asking
            name = _name(kind, answer)
            return web.json_response(
                told(name, created, call, answer, self._reader), headers=_headers(session, answer)
            )
        return await self._stream(request, session, asking, call, kind, created, chunks, beginning)

    async def _stream(
        self,
        request: web.Request,
        session: Session,
        asking: Any,
        call: Call,
        kind: str,
        created: int,
        chunks: Callable[..., Any],
        beginning: Callable[..., Any] | None,
    ) -> web.StreamResponse:
        """Nothing is told before it is recorded, so that the pieces come at once, at the end."""
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Session-Id": session.name,
            }
        )
        task = asyncio.ensure_future(asking)
        try:
            done, _ = await asyncio.wait([task], timeout=self._keep_alive_s)
            if done and task.exception() is not None:
                await task  # a refusal has a status of its own as long as nothing was sent
            await response.prepare(request)
            while not done:
                await response.write(b": the answer is not there yet\n\n")
                done, _ = await asyncio.wait([task], timeout=self._keep_alive_s)
            answer: Answer = await task
            name = _name(kind, answer)
            if beginning is not None:
                await response.write(server_sent(beginning(name, created, call)))
            for chunk in chunks(name, created, call, answer, self._reader):
                await response.write(server_sent(chunk))
            await response.write(server_sent("[DONE]"))
        except (ApiError, LedgerError, GenerationCut) as error:
            if not response.prepared:
                raise
            await response.write(server_sent(_refusal(error).body()))
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "ledger"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "sessions": len(self.sessions)})

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"sessions": [_shown(one) for one in self.sessions.values()]})

    async def _claim(self, request: web.Request) -> web.Response:
        """Give an agent from outside a session that nobody has yet."""
        name = next(iter(self._claimable), None)
        if name is None:
            raise ApiError(404, "no session waits for an agent", code="no_session")
        del self._claimable[name]
        at = self.sessions[name].root.trajectory
        return web.json_response(
            _shown(self.sessions[name])
            | {
                "api_key": KEY_PREFIX + name,
                "base_url": f"{self.url}/sessions/{name}/v1",
                "prompt": at.text,
                "metadata": dict(at.metadata),
            }
        )

    async def _show(self, request: web.Request) -> web.Response:
        return web.json_response(_shown(self._session(request)))

    async def _reward(self, request: web.Request) -> web.Response:
        """An agent from outside has finished: `{"reward": number, "parts": {name: number}}`."""
        session = self._session(request)
        body = await _json(request)
        try:
            reward = checked_reward(_reward_of(body), on=f"the reward of session {session.name}")
        except InvalidArgument as error:
            raise bad_request("reward", str(error)) from error
        session.end(reward)
        return web.json_response(_shown(session))


def _reward_of(body: Mapping[str, Any]) -> Any:
    from rollout.rewards import Reward

    return Reward(value=body.get("reward"), parts=body.get("parts") or {})  # type: ignore[arg-type]


def _shown(session: Session) -> dict[str, Any]:
    return {
        "session": session.name,
        "rollout_id": session.root.trajectory.rollout_id,
        "samples": [
            {
                "index": episode.trajectory.index,
                "prompt_tokens": len(episode.trajectory.prompt_tokens),
                "response_length": episode.trajectory.response_length,
                "segments": episode.trajectory.next_segment,
            }
            for episode in session.samples
        ],
        "under_way": session.under_way,
        "over": session.over.is_set(),
        "reward": None if session.reward is None else session.reward.value,
    }


def _name(kind: str, answer: Answer) -> str:
    return f"{kind}-{answer.index}-{answer.turn}"


def _headers(session: Session, answer: Answer) -> dict[str, str]:
    return {
        "X-Session-Id": session.name,
        "X-Sample-Index": str(answer.index),
        "X-History-Drift": str(answer.drift),
    }


async def _json(request: web.Request) -> Mapping[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise bad_request(None, f"the body is no JSON: {error}") from error
    if not isinstance(body, Mapping):
        raise bad_request(None, "the body must be a JSON object")
    return body


def _refusal(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GenerationCut):
        return ApiError(499, "the client had gone away", kind="cancelled")
    if isinstance(error, InvalidArgument):
        too_long = "positions" in str(error)  # as `rollout.protocol.check_request` says it
        return bad_request(None, str(error), "context_length_exceeded" if too_long else None)
    if isinstance(error, EngineFailed):
        return ApiError(503, str(error), kind="server_error", code="engine_failed")
    return ApiError(500, str(error), kind="server_error", code=type(error).__name__)


@web.middleware
async def _refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except (ApiError, LedgerError, GenerationCut) as error:
        refusal = _refusal(error)
    except web.HTTPException as error:
        refusal = ApiError(error.status, error.reason)
    return web.json_response(refusal.body(), status=refusal.status)
