"""An engine over HTTP that has weights and nothing else: it takes them as SGLang does, fuses them
by its own code, and misbehaves when told to.

It is written after SGLang 0.5.23's endpoints; tests/sglang holds the same against the real server.
"""

from __future__ import annotations

import base64
import hashlib
import io
import pickle
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["WeightEngine", "tiny_weights"]

HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD_DIM, WIDTH, VOCABULARY = 8, 4, 2, 2, 6, 70
CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_VALUE_HEADS}


def tiny_weights(seed: int) -> dict[str, Tensor]:
    """Canonical tensors of a dense model of one layer, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (KEY_VALUE_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (KEY_VALUE_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "model.layers.0.mlp.gate_proj.weight": (WIDTH, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (WIDTH, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, WIDTH),
        "model.norm.weight": (HIDDEN,),
    }
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


class WeightEngine:
    """Serve with `async with`; then `address` is where."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights.items()}
        self.initial = dict(self.weights)
        self.label: str | None = "default"
        self.paused = False
        self.open = False
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.dies_at: str | None = None
        """An endpoint at which it ends, without an answer."""
        self.refuses: dict[str, str] = {}
        """Endpoint → message of an answer 400."""
        self.spoils: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
        """What becomes of a tensor on its way in."""
        self.arguments: dict[str, Any] = {"quantization": None}
        self.running = 0
        """Requests in the batch; with some the cache is not emptied."""
        self.address = ""
        self.before: Callable[[str], Awaitable[None]] | None = None
        """Awaited before an endpoint answers."""

    async def __aenter__(self) -> WeightEngine:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    def start_again(self) -> None:
        """As a new process at the same address: the weights it was started with, and no label."""
        self.weights, self.label = dict(self.initial), "default"
        self.paused = self.open = False
        self.dies_at = None

    def called(self) -> list[str]:
        return [path for path, _ in self.calls]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        body = await request.json() if request.can_read_body else {}
        self.calls.append((path, body))
        if self.before is not None:
            await self.before(path)
        if self.dies_at is not None and path == self.dies_at:
            self.dies_at = "gone"
        if self.dies_at == "gone":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if path in self.refuses:
            return self._said(False, self.refuses[path])
        handler = getattr(self, path.strip("/"), None)
        if handler is None:
            return web.Response(status=404)
        answer = handler(body)
        assert isinstance(answer, web.Response)
        return answer

    def _said(self, success: bool, message: str = "Success", **more: Any) -> web.Response:
        return web.json_response(
            {"success": success, "message": message, **more}, status=200 if success else 400
        )

    def server_info(self, body: Mapping[str, Any]) -> web.Response:
        sizes = {"tp_size": 1, "dp_size": 1, "pp_size": 1, "ep_size": 1}
        return web.json_response({"version": "0", "device": "cpu", **sizes, **self.arguments})

    def model_info(self, body: Mapping[str, Any]) -> web.Response:
        label = {} if self.label is None else {"weight_version": self.label}
        return web.json_response({"model_path": "initial", **label})

    def pause_generation(self, body: Mapping[str, Any]) -> web.Response:
        self.paused = True
        return web.json_response({"status": "ok"})

    def continue_generation(self, body: Mapping[str, Any]) -> web.Response:
        self.paused = False
        return web.json_response({"status": "ok"})

    def release_memory_occupation(self, body: Mapping[str, Any]) -> web.Response:
        assert self.paused
        self.weights = {name: torch.zeros_like(one) for name, one in self.weights.items()}
        return web.Response()

    def resume_memory_occupation(self, body: Mapping[str, Any]) -> web.Response:
        return web.Response()

    def flush_cache(self, body: Mapping[str, Any]) -> web.Response:
        return web.Response(status=400 if self.running else 200)

    def begin_weight_update(self, body: Mapping[str, Any]) -> web.Response:
        if self.open:
            return self._said(False, "a weight-update session is already open")
        self.open = True
        return self._said(True)

    def end_weight_update(self, body: Mapping[str, Any]) -> web.Response:
        if not self.open:
            return self._said(False, "no weight-update session is open")
        self.open = False
        return self._said(True)

    def update_weights_from_tensor(self, body: Mapping[str, Any]) -> web.Response:
        if not self.open:
            return self._said(False, "must run between begin and end")
        [payload] = body["serialized_named_tensors"]
        found = pickle.load(io.BytesIO(base64.b64decode(payload)))
        self._take({name: tensor.clone() for name, tensor in found}, body)
        return self._said(True)

    def update_weights_from_disk(self, body: Mapping[str, Any]) -> web.Response:
        folder = Path(body["model_path"])
        if body["model_path"] == "initial":
            self._take(self.initial, body)
            return self._said(True)
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            return self._said(False, f"no weights in {folder}")
        for file in files:
            self._take(load_file(file), body)
        return self._said(True)

    def update_weight_version(self, body: Mapping[str, Any]) -> web.Response:
        self.label = body["new_version"]
        return self._said(True)

    def _take(self, found: Mapping[str, Tensor], body: Mapping[str, Any]) -> None:
        assert self.paused
        for name, tensor in found.items():
            assert self.weights[name].shape == tensor.shape
            self.weights[name] = self.spoils(name, tensor)
        if body.get("weight_version") is not None:
            self.label = body["weight_version"]

    def weights_checker(self, body: Mapping[str, Any]) -> web.Response:
        sums = {name: _sum(tensor) for name, tensor in self.parameters().items()}
        place = {"role": "target", "tp_rank": 0, "tp_size": 1}
        rank = {"checksums": sums, "per_gpu_checksum": "of all", "parallelism_info": [place]}
        return self._said(True, ranks=[rank], per_engine_checksum=_whole(sums))

    def parameters(self) -> dict[str, Tensor]:
        """What it computes with: one rank."""
        left = dict(self.weights)
        layer = "model.layers.0."
        made = {
            "self_attn.qkv_proj": [f"self_attn.{one}_proj" for one in "qkv"],
            "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
        }
        fused = {
            f"{layer}{name}.weight": torch.cat([left.pop(f"{layer}{one}.weight") for one in parts])
            for name, parts in made.items()
        }
        embedding = left.pop("model.embed_tokens.weight")
        rows = torch.zeros(128 - VOCABULARY, HIDDEN, dtype=embedding.dtype)
        return {**left, **fused, "model.embed_tokens.weight": torch.cat([embedding, rows])}


def _sum(tensor: Tensor) -> str:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def _whole(sums: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(sums.values()).encode()).hexdigest()
