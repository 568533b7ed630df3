"""The trainer's forward: log-probabilities of the tokens that are there.

Axis suffixes: B rows, T tokens of prompt and response (padding included), V vocabulary.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ledger.errors import InvalidArgument, explain
from trainer.megatron import unwrap
from trainer.routing_replay import is_moe, recording, replaying

__all__ = ["logits_of", "recorded_routing", "token_log_probs"]


def token_log_probs(
    model: Any,
    tokens_BT: Tensor,
    *,
    temperature: float,
    expert_ids: Tensor | None = None,
    want_entropy: bool = False,
    entropy_gradient: bool = True,
    free_routing: bool = False,
    first_column: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each token after those before it, and the entropy where asked for.

    `tokens_BT` is int64 [B, T], padded on the right with any id: padding reaches no column of a
    real token. `temperature` divides the logits. Returns float32 `log_probs` [B,
    T-1-first_column]: column j is ln p(tokens[:, t+1] | tokens[:, :t+1]) at t = first_column + j;
    and the entropy of the same distributions in nats, of the same shape, or None. `first_column`
    leaves out columns that nobody wants (a prompt common to all rows) before the softmax over the
    vocabulary, the largest array here; the columns that are left keep their bits. A gradient
    flows where gradients are enabled, into the entropy only with `entropy_gradient`.

    The arithmetic is `log_softmax(logits / temperature)` and a gather, in float32, so that an
    engine which does the same on bitwise equal logits gets bitwise equal numbers.

    With experts, `expert_ids` [B, T-1, MoE layers, K] are replayed. Routing freely must be asked
    for by `free_routing=True`.

    Raises InvalidArgument where an MoE model gets neither, a dense model gets ids, or shapes, ids
    or temperature cannot be.
    """
    _check(model, tokens_BT, temperature, expert_ids, free_routing, first_column)
    routed: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if expert_ids is not None:
        routed = replaying(model, expert_ids, tokens_BT.shape)
    with routed:
        logits_BTV = logits_of(model, tokens_BT)
    scaled = logits_BTV[:, first_column:-1]
    if temperature != 1.0:
        scaled = scaled / temperature
    log_probs_BTV = torch.log_softmax(scaled.float(), dim=-1)
    targets = tokens_BT[:, first_column + 1 :, None]
    log_probs = log_probs_BTV.gather(-1, targets).squeeze(-1)
    if not want_entropy:
        return log_probs, None
    # Where only the number is wanted, a graph would hold two more arrays of logits' size.
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        return log_probs, -(log_probs_BTV.exp() * log_probs_BTV).sum(dim=-1)


def logits_of(model: Any, tokens_BT: Tensor) -> Tensor:
    """Logits [B, T, V] of a forward over right-padded rows. Routing is as the routers stand."""
    rows, width = tokens_BT.shape
    positions = torch.arange(width, device=tokens_BT.device).expand(rows, width)
    logits: Tensor = model(tokens_BT, positions, _causal_mask(width, tokens_BT.device))
    return logits


def recorded_routing(model: Any, tokens_BT: Tensor) -> Tensor:
    """The experts that free routing chooses now: int64 [B, T-1, MoE layers, K], best first.

    Without a gradient. What `token_log_probs` replays under the same weights is what is returned
    here.

    Raises InvalidArgument for a dense model.
    """
    if not is_moe(model):
        raise InvalidArgument(
            explain("recording the routing", expected="an MoE model", found="a dense model")
        )
    rows, width = tokens_BT.shape
    with torch.no_grad(), recording(model) as layers:
        logits_of(model, tokens_BT)
    by_layer = [ids.view(width, rows, -1).transpose(0, 1)[:, :-1] for ids in layers]
    return torch.stack(by_layer, dim=2)


@lru_cache(maxsize=8)
def _causal_mask(width: int, device: torch.device) -> Tensor:
    """[1, 1, T, T], True where attention is forbidden: the local attention has no own mask."""
    ones = torch.ones(1, 1, width, width, dtype=torch.bool, device=device)
    return torch.triu(ones, diagonal=1)


def _check(
    model: Any,
    tokens_BT: Tensor,
    temperature: float,
    expert_ids: Tensor | None,
    free_routing: bool,
    first_column: int,
) -> None:
    if tokens_BT.dim() != 2 or tokens_BT.dtype != torch.int64 or tokens_BT.shape[1] < 2:
        raise _wrong(
            "tokens", "int64 [B, T] with T ≥ 2", f"{tokens_BT.dtype} {tuple(tokens_BT.shape)}"
        )
    vocab_size = unwrap(model).vocab_size
    low, high = int(tokens_BT.min()), int(tokens_BT.max())
    if low < 0 or high >= vocab_size:
        raise _wrong("tokens", f"ids in [0, {vocab_size})", f"{low} … {high}")
    if not temperature > 0:
        raise _wrong("temperature", "above 0", temperature)
    if not 0 <= first_column < tokens_BT.shape[1] - 1:
        raise _wrong("first_column", f"in [0, {tokens_BT.shape[1] - 1})", first_column)
    if is_moe(model):
        if (expert_ids is None) != free_routing:
            raise _wrong(
                "expert_ids of an MoE model",
                "recorded ids, or free_routing=True",
                "neither" if expert_ids is None else "both",
                "pass the ids of the routing_recorded events",
            )
    elif expert_ids is not None:
        raise _wrong("expert_ids", "None for a dense model", tuple(expert_ids.shape))


def _wrong(on: str, expected: object, found: object, do: str | None = None) -> InvalidArgument:
    return InvalidArgument(
        explain("computing log-probabilities", on=on, expected=expected, found=found, do=do)
    )
