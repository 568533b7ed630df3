"""Replays recorded expert choices in a Mixture-of-Experts model, through Megatron's RouterReplay.

Routing replay ("R3"): the experts that the engine chose while sampling are chosen again in the
trainer's forward and, where activations are recomputed, in the backward. Gate weights are
computed anew from the router's scores of those experts, so the router still learns.

Megatron keeps one RouterReplay object in each router. We reach them through the model: Megatron's
own global list mixes the routers of all models of a process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ledger.errors import InvalidArgument, explain
from trainer.megatron import RouterReplay, RouterReplayAction, unwrap

__all__ = ["finish_backward", "is_moe", "recording", "replaying", "routers"]


def routers(model: Any) -> list[RouterReplay]:
    """The replay objects of a model's MoE layers, in layer order; empty for a dense model."""
    return [
        layer.mlp.router.router_replay
        for layer in unwrap(model).decoder.layers
        if hasattr(layer.mlp, "router")
    ]


def is_moe(model: Any) -> bool:
    """Whether the model has experts to route to."""
    return unwrap(model).config.num_moe_experts is not None


@contextlib.contextmanager
def recording(model: Any) -> Iterator[list[Tensor]]:
    """Free routing whose choices come out: after the block, the list holds for each MoE layer the
    expert ids [T·B, K] (int64; row t·B + b is token t of batch row b; best expert first)."""
    recorded: list[Tensor] = []
    instances = routers(model)
    for instance in instances:
        instance.set_router_replay_action(RouterReplayAction.RECORD)
    try:
        yield recorded
        recorded.extend(instance.get_recorded_indices() for instance in instances)
    finally:
        for instance in instances:
            instance.clear_indices()
            instance.clear_router_replay_action()


@contextlib.contextmanager
def replaying(model: Any, expert_ids: Tensor, tokens_shape: torch.Size) -> Iterator[None]:
    """Within it, one forward of `model` routes by `expert_ids` [B, T, layers, K].

    Column t is the choice for token t. The last token of a sample, which is never fed to the
    engine, and padding need ids too, any valid ones: in a causal model without capacity limits
    their route reaches no log-probability of a token that exists.

    Where activations are recomputed in the backward, the ids stay until `finish_backward`.

    Raises InvalidArgument for a wrong shape, an id that is no expert, or one expert twice in a row.
    """
    instances = routers(model)
    per_layer = _by_layer(model, expert_ids, tokens_shape, len(instances))
    recompute = unwrap(model).config.recompute_granularity is not None and torch.is_grad_enabled()
    for instance, ids in zip(instances, per_layer, strict=True):
        if recompute:
            instance.set_target_indices(ids)
        else:
            # set_target_indices would also queue them for a recomputation that never comes.
            instance.target_topk_idx = ids
        instance.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    try:
        yield
    except BaseException:
        finish_backward(model)
        raise
    for instance in instances:
        if recompute:
            instance.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        else:
            instance.target_topk_idx = None
            instance.clear_router_replay_action()


def finish_backward(model: Any) -> None:
    """Forget the ids that a recomputing backward was to use. Harmless where there are none."""
    for instance in routers(model):
        instance.clear_indices()
        instance.clear_router_replay_action()


def _by_layer(
    model: Any, expert_ids: Tensor, tokens_shape: torch.Size, layers: int
) -> list[Tensor]:
    config = unwrap(model).config
    rows, width = tokens_shape
    expected = (rows, width, layers, config.moe_router_topk)
    if tuple(expert_ids.shape) != expected:
        raise _wrong("expert_ids", f"shape {expected}: [B, T, MoE layers, K]", expert_ids.shape)
    ids = expert_ids.to(torch.int64)
    if ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= config.num_moe_experts:
            raise _wrong("expert_ids", f"ids in [0, {config.num_moe_experts})", f"{low} … {high}")
        ordered = ids.sort(dim=-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1)
        if bool(twice.any()):
            row, token, layer = (int(i) for i in twice.nonzero()[0])
            raise _wrong(
                "expert_ids",
                f"{config.moe_router_topk} different experts a token and layer",
                f"{ids[row, token, layer].tolist()} at row {row}, token {token}, layer {layer}",
            )
    return [
        ids[:, :, layer].transpose(0, 1).reshape(rows * width, -1).contiguous()
        for layer in range(layers)
    ]


def _wrong(on: str, expected: object, found: object) -> InvalidArgument:
    return InvalidArgument(
        explain(
            "replaying recorded routing",
            on=on,
            expected=expected,
            found=found,
            do="compare the routing_recorded events of these samples with the model",
        )
    )
