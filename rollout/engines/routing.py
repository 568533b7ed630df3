"""Recording which experts each token was sent to, from the router modules of `transformers`.

In transformers 5 a mixture-of-experts block has a router module (`mlp.gate`) that returns
`(logits [N, experts], weights [N, topk], ids [N, topk])`: Qwen3-MoE's, whose weights are softmaxes,
and those of GLM-4.5 and DeepSeek-V3, whose weights are sigmoids times `routed_scaling_factor`, and
whose ids are in no particular order. Anything else is refused by name: a wrong guess here would
poison every replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ledger.errors import InvalidArgument, explain

__all__ = ["RoutingRecorder", "count_experts", "expert_dtype"]

ExpertIds = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


def count_experts(config: Any) -> int:
    """Experts a layer according to a model's configuration; 0 for a dense model."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        value = getattr(config, name, None)
        if value:
            return int(value)
    return 0


def expert_dtype(num_experts: int) -> np.dtype[Any]:
    """uint8 up to 256 experts, else uint16."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


class RoutingRecorder:
    """Hooks on all routers of a model; records while `recording()` is open, else costs nothing."""

    def __init__(self, model: torch.nn.Module, num_experts: int, *, keep_weights: bool) -> None:
        """Find the routers, in model order.

        Raises:
            InvalidArgument: the model has experts but no router that is recognised.
        """
        self.num_experts = num_experts
        self._keep_weights = keep_weights
        self._steps: list[tuple[Tensor, Tensor | None]] = []
        self._open = False
        routers = [
            (name, module)
            for name, module in model.named_modules()
            if type(module).__name__.lower().endswith("topkrouter")
        ]
        if not routers:
            raise self._unrecognised("no module whose class name ends in 'TopKRouter'")
        self.layers = len(routers)
        self.topk = int(getattr(routers[0][1], "top_k", 0))
        self._handles = [module.register_forward_hook(self._hook) for _, module in routers]

    @staticmethod
    def _unrecognised(found: str) -> InvalidArgument:
        import transformers

        return InvalidArgument(
            explain(
                "recording the routing of a mixture-of-experts model",
                on=f"transformers {transformers.__version__}",
                expected="router modules that return (logits, weights [N, topk], ids [N, topk])",
                found=found,
                do="use a Qwen3-MoE, GLM-4.5 or DeepSeek-V3 model and a tested transformers (5.x)",
            )
        )

    def _hook(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if not self._open:
            return
        if not (
            isinstance(output, tuple)
            and len(output) == 3
            and all(isinstance(part, Tensor) for part in output)
            and output[2].dtype in (torch.int64, torch.int32)
            and output[2].shape == output[1].shape == (output[0].shape[0], self.topk)
        ):
            shapes = [
                tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
                for part in (output if isinstance(output, tuple) else (output,))
            ]
            raise self._unrecognised(f"{type(module).__name__} returned {shapes}")
        weights = output[1].detach().float().clone() if self._keep_weights else None
        self._steps.append((output[2].detach().clone(), weights))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forward passes made inside."""
        self._steps.clear()
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def take(self, rows: int) -> tuple[ExpertIds, npt.NDArray[np.float32] | None]:
        """Give the one forward since the last `take`: ids and weights [rows, width, layers, topk].

        Raises:
            InvalidArgument: not every router ran exactly once.
        """
        if len(self._steps) != self.layers:
            raise self._unrecognised(
                f"{len(self._steps)} router calls in a forward of {self.layers} routers"
            )
        ids = torch.stack([step[0] for step in self._steps], dim=1)
        shape = (rows, ids.shape[0] // rows, self.layers, self.topk)
        found = ids.reshape(shape).cpu().numpy().astype(expert_dtype(self.num_experts))
        weights = None
        if self._keep_weights:
            stacked = torch.stack([step[1] for step in self._steps if step[1] is not None], dim=1)
            weights = stacked.reshape(shape).cpu().numpy()
        self._steps.clear()
        return found, weights

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
