"""Replays recorded expert choices in a Mixture-of-Experts model.

Routing replay ("R3", arXiv:2510.11370): the experts that the engine chose while sampling, or the
old policy in its forward, are chosen again in every forward of the trainer and, where activations
are recomputed, in the backward. Gate weights are computed anew from the router's scores of those
experts, so the router still learns. Where recorded gate weights are replayed as well, the experts'
outputs are multiplied by those numbers, and no gradient reaches the router.

Every MoE layer has a `RouterGuide`, which we reach through the model. A rank has the layers of its
pipeline stages, and under sequence parallelism a slice of the tokens: it takes its part of ids for
all layers and all tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ledger.errors import InvalidArgument, explain
from trainer.megatron import parallel_state, unwrap
from trainer.router_guide import Follow, Record, RouterGuide
from trainer.settings import AlgorithmSettings

__all__ = [
    "count_moe_layers",
    "finish_backward",
    "guide_routers",
    "is_moe",
    "recomputing",
    "recording",
    "replaying",
    "require_replayable",
    "routers",
    "routes_freely",
]


def guide_routers(model: Any) -> None:
    """Give every router of a new model (a chunk of it) its guide. Nothing else changes."""
    for layer in unwrap(model).decoder.layers:
        if hasattr(layer.mlp, "router"):
            before = layer.layer_number - 1
            RouterGuide(layer.mlp.router, sum(_moe_pattern(unwrap(model).config)[:before]))


def routers(model: Any) -> list[RouterGuide]:
    """The guides of a model's MoE layers on this rank, in layer order; empty for a dense model."""
    return [
        layer.mlp.router.router_replay
        for layer in unwrap(model).decoder.layers
        if hasattr(layer.mlp, "router")
    ]


def is_moe(model: Any) -> bool:
    """Whether the model has experts to route to, on this rank or another."""
    return unwrap(model).config.num_moe_experts is not None


def routes_freely(model: Any, algorithm: AlgorithmSettings) -> bool:
    """Whether the settings ask that the routers of this policy choose anew in each forward."""
    return is_moe(model) and algorithm.routing_replay == "free"


def count_moe_layers(model: Any) -> int:
    """MoE layers of the whole model, those of other pipeline stages included."""
    return sum(_moe_pattern(unwrap(model).config)) if is_moe(model) else 0


def _moe_pattern(config: Any) -> list[int]:
    """1 for each layer of the whole model that has experts, else 0, by Megatron's rule."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [int(layer % frequency == 0) for layer in range(config.num_layers)]
    return [int(has) for has in frequency]


def require_replayable(model: Any) -> None:
    """Raise InvalidArgument, naming the option, where Megatron would route without asking us."""
    config = unwrap(model).config
    for name, expected, right in (
        ("moe_router_fusion", "off: the fused kernel chooses by itself", (False, None)),
        ("moe_expert_capacity_factor", "none: tokens over the capacity are dropped", (None,)),
        ("moe_input_jitter_eps", "none: it draws random numbers in each forward", (None, 0.0)),
        ("moe_router_force_load_balancing", "off: it routes by random numbers", (False, None)),
        ("moe_router_force_biased", "none: it routes by random numbers", (None,)),
    ):
        # Some of them came with later versions of Megatron.
        found = getattr(config, name, right[0])
        if found not in right:
            raise _wrong(f"--{name.replace('_', '-')} with routing replay", expected, found)
    balancing = config.moe_router_load_balancing_type
    for kind in [balancing] if isinstance(balancing, str) else balancing:
        if kind in ("sinkhorn", "quantile_balancing"):
            raise _wrong(
                "--moe-router-load-balancing-type with routing replay",
                "a kind that takes the top-k of the scores",
                kind,
            )


@contextlib.contextmanager
def recording(model: Any, *, weights: bool = False) -> Iterator[list[tuple[Tensor, Tensor | None]]]:
    """Free routing whose choices come out: after the block, the list holds for each MoE layer of
    this rank the expert ids [n, K] (int64; row t·B + b is token t of batch row b, of this rank's
    slice of the tokens; best expert first) and, with `weights`, the gate weights (float32)."""
    recorded: list[tuple[Tensor, Tensor | None]] = []
    guides = routers(model)
    for guide in guides:
        guide.begin(Record(weights))
    try:
        yield recorded
        for guide in guides:
            if guide.recorded is None:
                raise RuntimeError(f"the router of MoE layer {guide.moe_layer} did not run")
            recorded.append(guide.recorded)
    finally:
        for guide in guides:
            guide.end()
            guide.forget()


@contextlib.contextmanager
def replaying(
    model: Any,
    expert_ids: Tensor,
    *,
    weights: Tensor | None = None,
    real_BT: Tensor | None = None,
) -> Iterator[None]:
    """Within it, one forward of `model` routes by `expert_ids` [B, T, MoE layers, K].

    Column t is the choice for token t; the layers are those of the whole model. The last token of a
    sample, which is never fed to the engine, and padding need ids too, any valid ones: in a causal
    model without capacity limits their route reaches no log-probability of a token that exists.
    `weights`, of the same shape, are float32 gate weights to be replayed. Where `real_BT` is given,
    the tokens where it is True are compared with what the routers would choose
    (`trainer.routing_agreement`).

    Where activations are recomputed in the backward, the ids stay until they are used;
    `finish_backward` says whether all were.

    Raises InvalidArgument for a wrong shape, an id that is no expert, or one expert twice in a row.
    """
    _check_ids(model, expert_ids, weights)
    guides = routers(model)
    real = None if real_BT is None else _own_tokens(model, real_BT)
    tasks = []
    for guide in guides:
        ids = expert_ids[:, :, guide.moe_layer]
        _check_choices(model, ids, guide.moe_layer)
        given = None if weights is None else _own_tokens(model, weights[:, :, guide.moe_layer])
        tasks.append(Follow(_own_tokens(model, ids).to(torch.int64), given, real))
    try:
        for guide, task in zip(guides, tasks, strict=True):
            guide.begin(task)
        yield
    except BaseException:
        for guide in guides:
            guide.forget()
        raise
    for guide in guides:
        guide.end()


@contextlib.contextmanager
def recomputing(chunks: Sequence[Any]) -> Iterator[None]:
    """Around the forwards and backwards of a step: afterwards nothing is left of them but what
    was counted; after an error not even that.

    Raises InvalidArgument where ids are left that a recomputation should have used.
    """
    try:
        yield
    except BaseException:
        for chunk in chunks:
            for guide in routers(chunk):
                guide.forget()
                guide.counts = None
        raise
    for chunk in chunks:
        finish_backward(chunk)


def finish_backward(model: Any) -> None:
    """Forget the ids that a recomputing backward has used. Harmless where there are none.

    Raises InvalidArgument where some are left: then backwards routed by the ids of others.
    """
    left = {guide.moe_layer: guide.waiting() for guide in routers(model)}
    for guide in routers(model):
        guide.forget()
    if any(left.values()):
        raise _wrong(
            "recomputed activations",
            "a recomputation for each forward of a checkpointed layer",
            f"forwards left, by MoE layer: {left}",
        )


def _own_tokens(model: Any, values_BT: Tensor) -> Tensor:
    """[B, T, …] → [n, …] for the tokens that reach this rank's routers, in Megatron's order.

    Megatron has sequence before batch; under sequence parallelism each rank of the tensor-parallel
    group has a run of the sequence.
    """
    values_TB = values_BT.transpose(0, 1)
    if unwrap(model).config.sequence_parallel:
        size = parallel_state.get_tensor_model_parallel_world_size()
        values_TB = values_TB.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
    return values_TB.flatten(0, 1).contiguous()


def _check_ids(model: Any, expert_ids: Tensor, weights: Tensor | None) -> None:
    topk = unwrap(model).config.moe_router_topk
    layers = count_moe_layers(model)
    if expert_ids.dim() != 4 or expert_ids.shape[2:] != (layers, topk):
        raise _wrong(
            "expert_ids",
            f"[B, T, {layers}, {topk}]: rows, tokens, MoE layers of the model, K",
            list(expert_ids.shape),
        )
    if weights is not None and (
        weights.shape != expert_ids.shape or weights.dtype != torch.float32
    ):
        raise _wrong(
            "gate weights",
            f"float32 {list(expert_ids.shape)}, as the ids",
            f"{weights.dtype} {list(weights.shape)}",
        )


def _check_choices(model: Any, ids_BTK: Tensor, layer: int) -> None:
    if not ids_BTK.numel():
        return
    experts = unwrap(model).config.num_moe_experts
    low, high = int(ids_BTK.min()), int(ids_BTK.max())
    if low < 0 or high >= experts:
        raise _wrong(f"expert_ids, MoE layer {layer}", f"ids in [0, {experts})", f"{low} … {high}")
    ordered = ids_BTK.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1)
    if bool(twice.any()):
        row, token = (int(i) for i in twice.nonzero()[0])
        raise _wrong(
            "expert_ids",
            f"{ids_BTK.shape[-1]} different experts a token and layer",
            f"{ids_BTK[row, token].tolist()} at row {row}, token {token}, layer {layer}",
        )


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
