"""How often recorded experts are those that the routers would choose now: metrics of a step.

Compared is each recorded choice with the top-k of the same router's scores in the replayed forward
of the step: what this layer would choose for the same input, all layers before it being routed as
recorded. So one layer's disagreement does not make that of the next, and no second forward is
needed. Tokens are those whose experts were recorded, prompts included; padding and the last token
of a sample are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from trainer.megatron import parallel_state, unwrap
from trainer.parallel import device
from trainer.ranks import world_size
from trainer.router_guide import COUNTED
from trainer.routing_replay import count_moe_layers, is_moe, routers

__all__ = ["agreement_metrics", "take_counts"]


def take_counts(chunks: Sequence[Any]) -> npt.NDArray[np.int64] | None:
    """[MoE layers, 4] What the routers counted since the last call, of all layers and tokens.

    The columns are `trainer.router_guide.COUNTED`. Every rank calls it, and gets the same numbers:
    they are whole, so no order of adding up changes them. None for a dense model, and where no
    forward compared anything.
    """
    if not is_moe(chunks[0]):
        return None
    counts = torch.zeros(
        count_moe_layers(chunks[0]), len(COUNTED), dtype=torch.int64, device=device()
    )
    # Without sequence parallelism all ranks of a tensor-parallel group see the same tokens.
    sees_alone = (
        unwrap(chunks[0]).config.sequence_parallel
        or parallel_state.get_tensor_model_parallel_rank() == 0
    )
    for chunk in chunks:
        for guide in routers(chunk):
            if guide.counts is not None and sees_alone:
                counts[guide.moe_layer] += guide.counts
            guide.counts = None
    if world_size() > 1:
        dist.all_reduce(counts)
    found = counts.cpu().numpy()
    return found if found.any() else None


def agreement_metrics(counts: npt.NDArray[np.int64] | None, topk: int) -> dict[str, float]:
    """Metrics of a step by name; none where nothing was counted.

    `routing_agreement_layer_<i>`: share of the recorded experts of MoE layer i (from 0, dense
    layers left out) that are among the `topk` that its router would choose. `routing_agreement`:
    the mean of that over layers. `routing_agreement_set`, `routing_agreement_order`: share of
    tokens and layers with the same set of experts, and with the same order too.
    """
    if counts is None:
        return {}
    tokens, experts, same_set, same_order = counts.astype(np.float64).T
    by_layer = experts / (tokens * topk)
    return {
        "routing_agreement": float(by_layer.mean()),
        "routing_agreement_set": float((same_set / tokens).mean()),
        "routing_agreement_order": float((same_order / tokens).mean()),
    } | {f"routing_agreement_layer_{i}": float(share) for i, share in enumerate(by_layer)}
