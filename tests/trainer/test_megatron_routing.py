"""Recorded expert choices are replayed in the forward and in the backward, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ledger.errors import InvalidArgument
from tests.trainer.megatron_models import MOE, Tiny, random_tokens
from tests.trainer.test_megatron_model import bits, build

Models = Callable[[str], Tiny]
ROWS, WIDTH, LAYERS, TOP_K, EXPERTS = 3, 14, 2, 2, 8


@contextmanager
def observed_maps(model: Any) -> Iterator[list[Tensor]]:
    """The routing maps [T·B, experts] that the routers hand on, in order of their calls."""
    maps: list[Tensor] = []
    hooks = [
        layer.mlp.router.register_forward_hook(lambda _m, _i, out: maps.append(out[1].clone()))
        for layer in model.decoder.layers
    ]
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()


def randomise_routers(model: Any) -> None:
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for layer in model.decoder.layers:
            weight = layer.mlp.router.weight
            weight.copy_(torch.randn(weight.shape, generator=generator))


def as_map(ids: Tensor, layer: int) -> Tensor:
    """[T-1, B, experts] of ids [B, T-1, layers, K]."""
    chosen = ids[:, :, layer].transpose(0, 1)
    return torch.zeros(*chosen.shape[:2], EXPERTS, dtype=torch.bool).scatter(-1, chosen, True)


@pytest.mark.parametrize("kind", MOE)
def test_free_routing_chooses_what_hugging_face_chooses(tiny: Models, kind: str) -> None:
    from trainer.model import recorded_routing

    tokens, chosen = random_tokens(ROWS, WIDTH), []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: chosen.append(out[2]))
        for layer in tiny(kind).model.model.layers
    ]
    with torch.no_grad():
        tiny(kind).model(tokens)
    for hook in hooks:
        hook.remove()
    theirs = torch.stack([ids.view(ROWS, WIDTH, TOP_K)[:, :-1] for ids in chosen], dim=2)
    ours = recorded_routing(build(tiny(kind)), tokens)
    assert ours.shape == (ROWS, WIDTH - 1, LAYERS, TOP_K)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", MOE)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_replay_under_the_same_weights_gives_the_same_log_probs(
    tiny: Models, kind: str, dtype: torch.dtype
) -> None:
    from trainer.model import recorded_routing, token_log_probs

    model, tokens = build(tiny(kind)), random_tokens(ROWS, WIDTH)
    ids = recorded_routing(model, tokens).to(dtype)
    with torch.no_grad():
        free, _ = token_log_probs(model, tokens, temperature=1.0, free_routing=True)
        replayed, _ = token_log_probs(model, tokens, temperature=1.0, expert_ids=ids)
    print(f"{kind}: largest difference {float((free - replayed).abs().max()):.2e}")
    assert torch.allclose(free, replayed, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", MOE)
def test_replay_holds_after_the_routers_changed(tiny: Models, kind: str) -> None:
    from trainer.model import recorded_routing, token_log_probs

    model, tokens = build(tiny(kind), trainable=True), random_tokens(ROWS, WIDTH)
    ids = recorded_routing(model, tokens)
    randomise_routers(model)
    assert not torch.equal(recorded_routing(model, tokens).sort(-1).values, ids.sort(-1).values)
    with observed_maps(model) as maps:
        log_probs, _ = token_log_probs(model, tokens, temperature=1.0, expert_ids=ids)
    for layer, found in enumerate(maps):
        real = found.view(WIDTH, ROWS, EXPERTS)[:-1]
        assert torch.equal(real, as_map(ids, layer))
    log_probs.sum().backward()
    for layer in model.decoder.layers:
        assert layer.mlp.router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", MOE)
def test_a_recomputing_backward_replays_too(tiny: Models, kind: str) -> None:
    from trainer.model import recorded_routing, token_log_probs
    from trainer.routing_replay import finish_backward, routers

    tokens = random_tokens(ROWS, WIDTH)
    gradients = []
    for recompute in (False, True):
        model = build(tiny(kind), trainable=True)
        ids = recorded_routing(model, tokens)
        randomise_routers(model)
        if recompute:
            model.config.recompute_granularity = "full"
            model.config.recompute_method = "uniform"
            model.config.recompute_num_layers = 1
        with observed_maps(model) as maps:
            for _ in range(2):
                log_probs, _ = token_log_probs(model, tokens, temperature=1.0, expert_ids=ids)
                log_probs.sum().backward()
        finish_backward(model)
        assert len(maps) == (8 if recompute else 4)
        for call, found in enumerate(maps):
            layer = call % 2 if not recompute else (0, 1, 1, 0)[call % 4]
            real = found.view(WIDTH, ROWS, EXPERTS)[:-1]
            assert torch.equal(real, as_map(ids, layer)), call
        assert all(router.waiting() == 0 for router in routers(model))
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_ids_of_padding_reach_no_real_token(tiny: Models) -> None:
    from trainer.model import recorded_routing, token_log_probs

    model, tokens = build(tiny("qwen3_moe")), random_tokens(ROWS, WIDTH)
    ids = recorded_routing(model, tokens)
    real, other = 9, ids.clone()
    other[:, real:] = (ids[:, real:] + 3) % EXPERTS
    with torch.no_grad():
        ours, _ = token_log_probs(model, tokens, temperature=1.0, expert_ids=ids)
        padded, _ = token_log_probs(model, tokens, temperature=1.0, expert_ids=other)
    # Another number of tokens on an expert is another shape of its product, so bits may differ.
    assert torch.allclose(ours[:, :real], padded[:, :real], rtol=0, atol=1e-6)
    assert not torch.allclose(ours[:, real:], padded[:, real:], rtol=0, atol=1e-3)


def test_one_model_is_not_driven_by_another(tiny: Models) -> None:
    from trainer.megatron import RouterReplay
    from trainer.model import recorded_routing, token_log_probs

    policy, reference = build(tiny("qwen3_moe")), build(tiny("qwen3_moe"))
    assert RouterReplay.global_router_replay_instances == []
    tokens = random_tokens(ROWS, WIDTH)
    ids = recorded_routing(policy, tokens)
    swapped = (ids + 1) % EXPERTS
    with torch.no_grad():
        first, _ = token_log_probs(reference, tokens, temperature=1.0, free_routing=True)
        token_log_probs(policy, tokens, temperature=1.0, expert_ids=swapped)
        second, _ = token_log_probs(reference, tokens, temperature=1.0, free_routing=True)
    assert torch.equal(bits(first), bits(second))
    assert torch.equal(recorded_routing(policy, tokens), ids)


def test_wrong_or_missing_ids_are_refused_and_leave_no_trace(tiny: Models) -> None:
    from trainer.forward import logits_of
    from trainer.model import recorded_routing, token_log_probs
    from trainer.routing_replay import routers

    model, tokens = build(tiny("qwen3_moe")), random_tokens(ROWS, WIDTH)
    ids = recorded_routing(model, tokens)
    beyond, twice = ids.clone(), ids.clone()
    beyond[0, 0, 0, 0] = EXPERTS
    twice[1, 2, 1, :] = 4
    for broken, message in (
        (ids[:, :-1], r"(?s)39 tokens.*42"),
        (ids[:, :, :1], "MoE layers"),
        (beyond, r"in \[0, 8\)"),
        (twice, "row 1, token 2, layer 1"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            token_log_probs(model, tokens, temperature=1.0, expert_ids=broken)
    with pytest.raises(InvalidArgument, match="free_routing"):
        token_log_probs(model, tokens, temperature=1.0)
    with pytest.raises(InvalidArgument, match="both"):
        token_log_probs(model, tokens, temperature=1.0, expert_ids=ids, free_routing=True)
    # Nothing is left of them: a forward outside of any block routes freely.
    with torch.no_grad():
        after = torch.log_softmax(logits_of(model, tokens), dim=-1)
        free, _ = token_log_probs(model, tokens, temperature=1.0, free_routing=True)
    found = after[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    assert torch.allclose(found, free, rtol=0, atol=1e-6)
    assert all(router.waiting() == 0 for router in routers(model))
