"""Recording what the routers of the old policy choose, to be replayed in the steps of the rollout.

R rows of all samples of a batch, one for each token but the last of its sample; L MoE layers, K
experts a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ledger.events import RoutingRecorded
from ledger.routing import BY_POLICY, expert_dtype, routing_of
from trainer.batch import Batch
from trainer.batch_routing import Routing
from trainer.megatron import parallel_state, unwrap
from trainer.microbatch import MicroBatch
from trainer.ranks import add_up
from trainer.routing_replay import count_moe_layers, recording, routers

__all__ = ["RoutingRecorder", "routing_events"]


class RoutingRecorder:
    """Collects what the routers of this rank chose in its micro-batches of one batch."""

    def __init__(self, model: Any, batch: Batch, *, weights: bool) -> None:
        """For a chunk of the model (any); with `weights`, gate weights are kept too."""
        config = unwrap(model).config
        self._rows_B = batch.prompt_lengths_B + batch.response_lengths_B - 1
        self._ends_B = np.cumsum(self._rows_B)
        self._num_experts = int(config.num_moe_experts)
        shape = (int(self._ends_B[-1]), count_moe_layers(model), int(config.moe_router_topk))
        self._ids = np.zeros(shape, np.dtype(expert_dtype(self._num_experts)).newbyteorder("<"))
        self._weights = np.zeros(shape, np.float32) if weights else None

    @contextlib.contextmanager
    def watching(self, model: Any, micro: MicroBatch) -> Iterator[None]:
        """Around one forward of a chunk that routes freely."""
        with recording(model, weights=self._weights is not None) as layers:
            yield
        config = unwrap(model).config
        rows, width = micro.tokens_BT.shape
        first_column, columns = 0, width
        if config.sequence_parallel:
            columns = width // parallel_state.get_tensor_model_parallel_world_size()
            first_column = columns * parallel_state.get_tensor_model_parallel_rank()
        elif parallel_state.get_tensor_model_parallel_rank():
            return  # the first rank of the group saw the same tokens
        places, targets = self._places(micro)
        if micro.context is not None:
            places = micro.context.here[places]
            places, targets = places[places >= 0], targets[places >= 0]
        column = places % width - first_column
        own = (column >= 0) & (column < columns)
        # Megatron's order: sequence before batch.
        taken = column[own] * rows + places[own] // width
        for guide, (ids, weights) in zip(routers(model), layers, strict=True):
            self._ids[targets[own], guide.moe_layer] = ids.cpu().numpy()[taken]
            if self._weights is not None and weights is not None:
                self._weights[targets[own], guide.moe_layer] = weights.cpu().numpy()[taken]

    def _places(self, micro: MicroBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where the recorded tokens of a micro-batch are: in its whole rows, and among all R."""
        counts_S = self._rows_B[micro.samples]
        width = micro.tokens_BT.shape[1] if micro.context is None else micro.context.width
        starts_S = np.arange(len(counts_S)) * width
        if micro.sequence_starts is not None:
            # A part of a row may end with a sequence of padding.
            starts_S = micro.sequence_starts[: len(counts_S)].astype(np.int64)
        before_S = np.cumsum(counts_S) - counts_S
        within = np.arange(counts_S.sum()) - np.repeat(before_S, counts_S)
        first = int(self._ends_B[micro.samples.start] - self._rows_B[micro.samples.start])
        return np.repeat(starts_S, counts_S) + within, first + np.arange(counts_S.sum())

    def routing(self) -> Routing:
        """The choices of all layers for all samples, on every rank. Every rank calls it, once."""
        cuts = self._ends_B[:-1]
        weights = self._weights
        return Routing(
            expert_ids=tuple(np.split(add_up(self._ids), cuts)),
            expert_weights=None if weights is None else tuple(np.split(add_up(weights), cuts)),
            num_experts=self._num_experts,
        )


def routing_events(batch: Batch, policy_version: int) -> list[RoutingRecorded]:
    """The events of a batch whose experts the policy of a version chose, one a sample."""
    ids, weights = batch.expert_ids or (), batch.expert_weights
    return [
        routing_of(
            ids[b],
            num_experts=batch.num_experts or 0,
            index=index,
            segment=BY_POLICY,
            weights=None if weights is None else weights[b],
            policy_version=policy_version,
        )
        for b, index in enumerate(batch.indices_B.tolist())
    ]
