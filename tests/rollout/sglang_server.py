"""A test server that answers its client as SGLang 0.5.23 does, and misbehaves when told.

The shapes of its answers are those that a real server gave; tests/sglang proves them on real ones.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from aiohttp import web

from rollout.engines.sglang.client import SGLangClient
from rollout.engines.sglang.model import ModelFacts

DENSE = ModelFacts(
    model_type="qwen3", vocab_size=64, max_positions=128, num_layers=3, end_token_ids=(63,)
)
MOE = ModelFacts(
    model_type="qwen3_moe",
    vocab_size=64,
    max_positions=128,
    num_layers=3,
    num_experts=8,
    topk=2,
    moe_layers=(1, 2),
)


def experts(model: ModelFacts, rows: int) -> np.ndarray:
    """[rows, layers, topk] int32, zeros for layers without experts."""
    made = np.zeros((rows, model.num_layers, model.topk), np.int32)
    position = np.arange(rows)[:, None, None]
    for layer in model.moe_layers:
        made[:, layer : layer + 1] = (position + layer + np.arange(model.topk)) % model.num_experts
    return made


class FakeSGLang:
    """One server. `change(body, answer)` returns what is answered in place of `answer`."""

    def __init__(self, model: ModelFacts = DENSE, *, weight_version: str = "7") -> None:
        self.model = model
        self.weight_version = weight_version
        self.info: dict[str, Any] = {
            "version": "0.5.23",
            "max_req_input_len": 122,
            "enable_deterministic_inference": True,
            "enable_return_routed_experts": model.num_experts > 0,
            "tp_size": 1,
            "dp_size": 1,
        }
        self.preferred: dict[str, Any] | None = None
        self.lengths: dict[int, int] = {}
        """Tokens by seed; others get max_new_tokens."""
        self.change: Callable[[dict[str, Any], Any], Any] = lambda _, answer: answer
        self.before: Callable[[dict[str, Any]], Awaitable[web.StreamResponse | None]] | None = None
        self.hold: asyncio.Event | None = None
        """Requests run until it is set, or until they are aborted with `tokens_when_cut`."""
        self.tokens_when_cut = 3
        self.deaf = 0
        """Aborts that are forgotten."""
        self.healthy = self.runs_its_model = True
        self.bodies: list[dict[str, Any]] = []
        self.running: dict[str, asyncio.Event] = {}
        self.aborts: list[str] = []
        self.calls: list[str] = []
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> FakeSGLang:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/health_generate", self._health)
        app.router.add_post("/{name}", self._other)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def client(self, **options: Any) -> SGLangClient:
        return SGLangClient(self.address, self.model, **options)

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def _model_info(self, _: web.Request) -> web.Response:
        if not self.healthy:
            return web.Response(status=503)
        return web.json_response(
            {
                "model_path": "somewhere",
                "model_type": self.model.model_type,
                "is_generation": True,
                "weight_version": self.weight_version,
                "preferred_sampling_params": self.preferred,
            }
        )

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy and self.runs_its_model else 503)

    async def _other(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        return web.json_response({"success": request.path != "/refused", "message": "said no"})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.aborts.append("*" if body.get("abort_all") else body["rid"])
        if self.deaf:
            self.deaf -= 1
            return web.Response()
        for rid, event in self.running.items():
            if body.get("abort_all") or rid.startswith(body["rid"]):
                event.set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        rid = body["rid"]
        if rid in self.running:
            return web.json_response(
                {"error": {"message": f"Duplicate request ID detected: {rid}"}}, status=400
            )
        cut = self.running[rid] = asyncio.Event()
        try:
            if self.before is not None:
                early = await self.before(body)
                if early is not None:
                    return early
            if self.hold is not None:
                waits = [asyncio.ensure_future(e.wait()) for e in (self.hold, cut)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for one in waits:
                        one.cancel()
            answer = self.change(body, self.answer(body, aborted=cut.is_set()))
        finally:
            del self.running[rid]
        if isinstance(answer, web.StreamResponse):
            return answer
        return web.json_response(answer)

    def answer(self, body: dict[str, Any], *, aborted: bool = False) -> dict[str, Any]:
        """What a whole and honest server says."""
        params = body["sampling_params"]
        context, limit = body["input_ids"], params["max_new_tokens"]
        stop = params["stop_token_ids"]
        new = min(limit, self.lengths.get(params["sampling_seed"], limit))
        free = [i for i in range(self.model.vocab_size) if i not in (*stop, 63)]
        place = len(context)
        ids = [
            free[(params["sampling_seed"] * 31 + (place + t) * 7) % len(free)] for t in range(new)
        ]
        finish: dict[str, Any] = {"type": "length", "length": new}
        if new < limit:
            ids[-1] = stop[0] if stop else 63
            finish = {"type": "stop", "matched": ids[-1]}
        if aborted:
            ids = ids[: self.tokens_when_cut]
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        new = len(ids)
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(context),
            "completion_tokens": new,
            "cached_tokens": 0,
            "num_retractions": 0,
            "e2e_latency": 0.01,
            "dp_rank": None,
            "weight_version": self.weight_version,
            "weight_versions": [{"version": self.weight_version, "start": 0, "end": new}],
            "input_token_logprobs": [],
            "output_token_logprobs": [[-0.5 - t / 8, one, None] for t, one in enumerate(ids)],
            "output_token_logprobs_length": new,
        }
        if body.get("return_routed_experts"):
            whole = experts(self.model, max(0, len(context) + new - 1))
            kept = whole[body["routed_experts_start_len"] :]
            meta["routed_experts"] = base64.b64encode(kept.tobytes()).decode()
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = [[one, (one + 1) % 63] for one in ids]
            meta["output_token_sampling_logprobs"] = [-0.25] * new
        return {"text": "", "output_ids": ids, "meta_info": meta}
