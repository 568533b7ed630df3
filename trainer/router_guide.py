"""What one router of a Mixture-of-Experts model is told: choose, say what it chose, or follow.

Megatron's router asks an object of the class RouterReplay for its top-k. Megatron's own object
replays what was set last, in a mode that is set from outside; ours takes the task of one forward,
knows by itself which calls are recomputations of which forward, and counts on the way how often the
router would have chosen alike.

n tokens that reach this router (its slice of the sequence under sequence parallelism), K experts a
token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ledger.errors import InvalidArgument, explain
from trainer.megatron import RouterReplay

__all__ = ["COUNTED", "Follow", "Record", "RouterGuide"]

COUNTED = ("tokens", "experts", "same_set", "same_order")
"""What `RouterGuide.counts` counts."""


@dataclass(frozen=True, slots=True, eq=False)
class Follow:
    """Route by these ids."""

    ids_nK: Tensor
    """int64."""
    weights_nK: Tensor | None
    """float32 gate weights in place of the router's own; None: the router's scores of the ids."""
    real_n: Tensor | None
    """bool: tokens that are compared with what the router would choose; None: nothing is."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Choose freely and keep what was chosen."""

    weights: bool
    """Keep the gate weights too."""


class RouterGuide(RouterReplay):  # type: ignore[misc]
    """The guide of one router, installed in place of Megatron's RouterReplay.

    A forward under activation checkpointing runs without a gradient inside a pass that has one; its
    task is kept and used again when the backward recomputes it. Backwards come in the order of the
    forwards, also where a pipeline has several micro-batches in flight, so the tasks are a queue.
    """

    def __init__(self, router: Any, moe_layer: int) -> None:
        """Take the place of the router's replay object; `moe_layer` counts from 0 in the model."""
        super().__init__()
        # Megatron's list mixes the routers of all models of a process.
        RouterReplay.global_router_replay_instances.remove(self)
        self.moe_layer = moe_layer
        self.recorded: tuple[Tensor, Tensor | None] | None = None
        """[n, K] ids and gate weights of the last forward under `Record`."""
        self.counts: Tensor | None = None
        """int64 [4] Over real tokens: how many; experts chosen alike; tokens with the same set of
        experts; tokens with the same order too."""
        self._task: Follow | Record | None = None
        self._training = False
        self._queue: deque[Follow] = deque()
        self._followed = False
        self._applied: Follow | Record | None = None
        self._layer_number = getattr(router, "layer_number", None)
        router.router_replay = self
        router.register_forward_hook(self._after_router)

    def begin(self, task: Follow | Record) -> None:
        """The next forward of this router is under `task`."""
        self._task = task
        self._training = torch.is_grad_enabled()
        self.recorded = None

    def end(self) -> None:
        """The forward is over. What follows is its recomputation, or free."""
        if self._training and isinstance(self._task, Follow):
            self._followed = True
        self._task = None

    def waiting(self) -> int:
        """Forwards whose recomputation has not come yet."""
        return len(self._queue)

    def forget(self) -> None:
        """Drop what a recomputation was to use. `counts` stay."""
        self._task = self._applied = self.recorded = None
        self._followed = False
        self._queue.clear()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What Megatron's router calls: scores [n, experts] → scores and ids of the top-k [n, K].

        Raises InvalidArgument where other tokens arrive than there are ids, or a router runs again
        without a forward that it could be recomputing.
        """
        if default_compute_topk is None:
            raise TypeError("Megatron calls it with its own top-k")

        def chosen() -> Tensor:
            """Ids of the free choice, best first: newer versions of Megatron do not sort them where
            there is no gradient."""
            with torch.no_grad():
                values, ids = default_compute_topk(scores, topk, num_groups, group_topk)
            return ids.gather(1, values.argsort(dim=1, descending=True, stable=True))

        task = self._task
        if task is None:
            if not self._followed:
                return default_compute_topk(scores, topk, num_groups, group_topk)
            task = self._recomputed()
        elif isinstance(task, Record):
            ids = chosen()
            self.recorded = (ids, None)
            self._applied = task
            # As in a replay, so that one gives the same bits.
            return scores.gather(1, ids), ids
        elif self._training and not torch.is_grad_enabled():
            self._queue.append(task)
        if len(task.ids_nK) != len(scores):
            raise self._wrong(f"{len(task.ids_nK)} tokens, as ids were given", len(scores))
        if self._task is not None and task.real_n is not None:
            self._count(task.ids_nK, task.real_n, chosen())
        self._applied = task
        return scores.gather(1, task.ids_nK), task.ids_nK

    def _recomputed(self) -> Follow:
        if not self._queue:
            raise self._wrong("a forward that is being recomputed", "none: it would choose freely")
        return self._queue.popleft()

    def _count(self, ids_nK: Tensor, real_n: Tensor, chosen_nK: Tensor) -> None:
        alike_nK = (ids_nK.unsqueeze(2) == chosen_nK.unsqueeze(1)).any(dim=2)
        if self.counts is None:
            self.counts = torch.zeros(len(COUNTED), dtype=torch.int64, device=real_n.device)
        self.counts += torch.stack(
            [
                real_n.sum(),
                alike_nK[real_n].sum(),
                (alike_nK.all(dim=1) & real_n).sum(),
                ((ids_nK == chosen_nK).all(dim=1) & real_n).sum(),
            ]
        )

    def _after_router(self, _router: Any, _inputs: Any, output: Any) -> Any:
        """Keep the gate weights, or put the recorded ones in their place."""
        task, self._applied = self._applied, None
        if isinstance(task, Record) and task.weights and self.recorded is not None:
            ids = self.recorded[0]
            self.recorded = (ids, output[0].detach().gather(1, ids).float())
        if not isinstance(task, Follow) or task.weights_nK is None:
            return output
        probs, chosen = output
        rows = torch.arange(len(probs), device=probs.device).unsqueeze(1)
        given = torch.zeros_like(probs)
        given[rows, task.ids_nK] = task.weights_nK.to(probs.dtype)
        return given, chosen

    def _wrong(self, expected: object, found: object) -> InvalidArgument:
        return InvalidArgument(
            explain(
                "replaying recorded routing",
                on=f"the router of MoE layer {self.moe_layer}",
                expected=expected,
                found=found,
            )
        )
