"""The trainer's forward: log-probabilities of the tokens that are there.

Axis suffixes: B rows, T tokens of prompt and response (padding included), n the response tokens of
a micro-batch, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ledger.errors import InvalidArgument, explain
from trainer.context_parallel import put_together
from trainer.kept_sets import log_probs_over_sets
from trainer.megatron import ColumnParallelLinear, parallel_state, unwrap
from trainer.microbatch import MicroBatch
from trainer.packed_attention import packed_sequences
from trainer.parallel import device
from trainer.routing_replay import is_moe, recording, replaying
from trainer.transformer_engine import uses_engine
from trainer.vocab_parallel import exclude_padding, log_probs_over_ranks

__all__ = [
    "log_probs_at",
    "logits_of",
    "micro_output",
    "recorded_routing",
    "token_log_probs",
]


def micro_output(model: Any, micro: MicroBatch, *, free_routing: bool = False) -> Tensor:
    """What `model` (one pipeline stage of it) gives for a micro-batch.

    The last stage gives logits: [B, T, V] where rows are samples; [n, V] of the response tokens
    alone where they are packed, so that nobody multiplies prompts by the vocabulary. The other
    stages give hidden states for the next one. Experts are those recorded; the model's own routers
    choose only with `free_routing=True` (for a reference model, which has routers of its own).
    In a forward with a gradient the recorded ones are compared with what the routers would choose
    (`trainer.routing_agreement`).

    Raises InvalidArgument where an MoE model gets neither, a dense model gets ids, or shapes or ids
    cannot be.
    """
    tokens_BT = torch.from_numpy(micro.tokens_BT).to(device())
    expert_ids = None if free_routing else _on_device(micro.expert_ids)
    _check_tokens(model, tokens_BT)
    _check_routing(model, expert_ids, free_routing)
    routed: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if expert_ids is not None:
        routed = replaying(
            model,
            expert_ids,
            weights=_on_device(micro.expert_weights),
            real_BT=_on_device(micro.routed_BT) if torch.is_grad_enabled() else None,
        )
    with routed:
        if micro.sequence_starts is not None:
            return _packed_output(model, tokens_BT, micro, micro.sequence_starts)
        return logits_of(model, tokens_BT)


def _packed_output(
    model: Any, tokens_BT: Tensor, micro: MicroBatch, starts: npt.NDArray[np.int32]
) -> Tensor:
    width = tokens_BT.shape[1]
    if starts[-1] < width:  # padding is a sequence of its own, which nobody reads
        starts = np.append(starts, np.int32(width))
    packed = packed_sequences(
        torch.from_numpy(starts).to(tokens_BT.device), over_ranks=micro.context is not None
    )
    positions = torch.from_numpy(micro.positions_BT).to(tokens_BT.device)
    chunk = unwrap(model)
    columns_n = torch.from_numpy(micro.columns_n).to(tokens_BT.device)
    # A head that gathers the hidden states of its ranks has all columns only afterwards.
    early = chunk.post_process and not chunk.config.sequence_parallel
    with _only_columns(chunk.output_layer, columns_n) if early else contextlib.nullcontext():
        output = model(tokens_BT, positions, None, packed_seq_params=packed)
    output = _without_padding(model, output)
    if not chunk.post_process:
        return output
    return output[0] if early else output[0].index_select(0, columns_n)


@contextlib.contextmanager
def _only_columns(head: torch.nn.Module, columns_n: Tensor) -> Iterator[None]:
    """Within it, the head gets the hidden states [T, 1, h] of these columns alone."""

    def chosen(_: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].index_select(0, columns_n), *args[1:])

    handle = head.register_forward_pre_hook(chosen)
    try:
        yield
    finally:
        handle.remove()


def _on_device(values: npt.NDArray[Any] | None) -> Tensor | None:
    if values is None:
        return None
    # torch has few operations on uint16.
    small = values.astype(np.int32) if values.dtype == np.uint16 else values
    return torch.from_numpy(small).to(device())


def log_probs_at(
    logits: Tensor,
    micro: MicroBatch,
    *,
    want_entropy: bool = False,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability [n] of each response token, and the entropy [n] of what it was drawn from.

    `logits` are what `micro_output` gave. Both float32, the entropy in nats, or None where it is
    not asked for. Only the columns that are about response tokens go through the softmax, the
    largest array here. A gradient flows where gradients are enabled, into the entropy only with
    `entropy_gradient`.

    The arithmetic is `log_softmax(logits / temperature)` and a gather, in float32, so that an
    engine which does the same on bitwise equal logits gets bitwise equal numbers. The temperature
    is the one recorded with each sample, whatever the options of this run say; where the ids that
    top-p and top-k left are recorded, the softmax is over them alone.

    Of a part of a micro-batch, its context-parallel group puts the numbers together: all n.
    """
    log_probs_n, entropy_n = _own_log_probs(logits, micro, want_entropy, entropy_gradient)
    return (
        put_together(log_probs_n, micro),
        None if entropy_n is None else put_together(entropy_n, micro),
    )


def _own_log_probs(
    logits: Tensor, micro: MicroBatch, want_entropy: bool, entropy_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    targets_n = torch.from_numpy(micro.targets_n).to(logits.device)
    logits_nV = logits
    if micro.sequence_starts is None:
        columns_n = torch.from_numpy(micro.columns_n).to(logits.device)
        logits_nV = logits.flatten(0, 1).index_select(0, columns_n)
    temperature = _temperature(micro.temperatures_n, logits_nV)
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        log_probs_n, over_ranks_n = log_probs_over_ranks(
            (logits_nV / temperature).float(),
            targets_n,
            kept=micro.kept_sets,
            entropy_gradient=want_entropy and entropy_gradient,
        )
        return log_probs_n, over_ranks_n if want_entropy else None
    if micro.kept_sets is not None:
        with_entropy = want_entropy and entropy_gradient
        scaled_nV = (logits_nV / temperature).float()
        log_probs_n, entropy_n = log_probs_over_sets(
            scaled_nV, targets_n, micro.kept_sets, want_entropy=with_entropy
        )
        if want_entropy and not with_entropy:
            _, entropy_n = log_probs_over_sets(
                scaled_nV.detach(), targets_n, micro.kept_sets, want_entropy=True
            )
        return log_probs_n, entropy_n
    return _log_probs(logits_nV, targets_n, temperature, want_entropy, entropy_gradient)


def _temperature(temperatures_n: npt.NDArray[np.float64], logits_nV: Tensor) -> float | Tensor:
    """One number where all tokens have the same, which an engine divides by too; else [n, 1]."""
    if len(temperatures_n) == 0:
        return 1.0
    if (temperatures_n == temperatures_n[0]).all():
        return float(temperatures_n[0])
    return torch.from_numpy(temperatures_n).to(logits_nV.device, torch.float32)[:, None]


def _log_probs(
    logits_nV: Tensor,
    targets_n: Tensor,
    temperature: float | Tensor,
    want_entropy: bool,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    if isinstance(temperature, Tensor) or temperature != 1.0:
        logits_nV = logits_nV / temperature
    log_probs_nV = torch.log_softmax(logits_nV.float(), dim=-1)
    log_probs_n = log_probs_nV.gather(-1, targets_n.unsqueeze(-1)).squeeze(-1)
    if not want_entropy:
        return log_probs_n, None
    # Where only the number is wanted, a graph would hold two more arrays of logits' size.
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        return log_probs_n, -(log_probs_nV.exp() * log_probs_nV).sum(dim=-1)


def token_log_probs(
    model: Any,
    tokens_BT: Tensor,
    *,
    temperature: float,
    expert_ids: Tensor | None = None,
    want_entropy: bool = False,
    entropy_gradient: bool = True,
    free_routing: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each token after those before it, and the entropy where asked for.

    For a model on one rank. `tokens_BT` is int64 [B, T], padded on the right with any id: padding
    reaches no column of a real token. Returns float32 [B, T-1] twice, or None for the entropy:
    column t is about tokens[:, t+1]. The arithmetic is that of `log_probs_at`. With experts,
    `expert_ids` [B, T-1, MoE layers, K] are replayed; routing freely must be asked for by
    `free_routing=True`.

    Raises InvalidArgument where an MoE model gets neither, a dense model gets ids, or shapes, ids
    or temperature cannot be.
    """
    _check_tokens(model, tokens_BT)
    _check_routing(model, expert_ids, free_routing)
    if not temperature > 0:
        raise _wrong("temperature", "above 0", temperature)
    routed: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if expert_ids is not None:
        # The last token of a row has no recorded experts: nothing is predicted from it.
        whole = torch.cat([expert_ids, expert_ids[:, -1:]], dim=1)
        routed = replaying(model, whole)
    with routed:
        logits_BTV = logits_of(model, tokens_BT)
    rows, width = tokens_BT.shape
    log_probs, entropy = _log_probs(
        logits_BTV[:, :-1].flatten(0, 1),
        tokens_BT[:, 1:].flatten(),
        temperature,
        want_entropy,
        entropy_gradient,
    )
    shape = (rows, width - 1)
    return log_probs.view(shape), None if entropy is None else entropy.view(shape)


def logits_of(model: Any, tokens_BT: Tensor) -> Tensor:
    """Logits [B, T, V] of a forward over right-padded rows. Routing is as the routers stand."""
    rows, width = tokens_BT.shape
    positions = torch.arange(width, device=tokens_BT.device).expand(rows, width)
    config = unwrap(model).config
    # TransformerEngine's attention masks by itself, and over tokens of other ranks.
    own_mask = config.context_parallel_size > 1 or uses_engine(config)
    mask = None if own_mask else _causal_mask(width, tokens_BT.device)
    logits: Tensor = model(tokens_BT, positions, mask)
    return _without_padding(model, logits)


def _without_padding(model: Any, output: Tensor) -> Tensor:
    """The output of a chunk; where it is logits, those of rows that pad the vocabulary excluded."""
    chunk = unwrap(model)
    rows = chunk.trajectory_architecture.vocab_size
    if chunk.vocab_size == rows or not chunk.post_process:
        return output
    if not isinstance(chunk.output_layer, ColumnParallelLinear):
        return output  # the values of a critic
    return exclude_padding(output, rows)


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
    by_layer = [ids.view(width, rows, -1).transpose(0, 1)[:, :-1] for ids, _ in layers]
    return torch.stack(by_layer, dim=2)


@lru_cache(maxsize=8)
def _causal_mask(width: int, device: torch.device) -> Tensor:
    """[1, 1, T, T], True where attention is forbidden: the local attention has no own mask."""
    ones = torch.ones(1, 1, width, width, dtype=torch.bool, device=device)
    return torch.triu(ones, diagonal=1)


def _check_tokens(model: Any, tokens_BT: Tensor) -> None:
    if tokens_BT.dim() != 2 or tokens_BT.dtype != torch.int64 or tokens_BT.shape[1] < 2:
        raise _wrong(
            "tokens", "int64 [B, T] with T ≥ 2", f"{tokens_BT.dtype} {tuple(tokens_BT.shape)}"
        )
    vocab_size = unwrap(model).trajectory_architecture.vocab_size
    low, high = int(tokens_BT.min()), int(tokens_BT.max())
    if low < 0 or high >= vocab_size:
        raise _wrong("tokens", f"ids in [0, {vocab_size})", f"{low} … {high}")


def _check_routing(model: Any, expert_ids: Tensor | None, free_routing: bool) -> None:
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
