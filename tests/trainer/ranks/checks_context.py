"""Two context-parallel ranks on CPUs, with an attention that gathers in TransformerEngine's place.

Everything but the kernel runs as it would on GPUs: the ranks' tokens, Megatron's rotary positions
of them, its schedule and its averages over ranks, and what is put together.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.trainer.ranks import checks_critic, checks_layouts, checks_packed, checks_routing
from trainer import parallel
from trainer.context_parallel import context_part, own_places
from trainer.cpu_shim import model_on_cpu
from trainer.megatron import parallel_state
from trainer.microbatch import MicroBatch
from trainer.packed_attention import CoreAttention
from trainer.settings import ParallelSettings

CP2 = ParallelSettings(context_parallel_size=2)


class _Gather(torch.autograd.Function):
    """[t, …] of each rank → [ranks, t, …]; the gradient is the sum of what all ranks say."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous()
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return total[parallel_state.get_context_parallel_rank()]


class GatheredAttention(CoreAttention):
    """Attention over the whole sequences, of which the part of this rank is taken."""

    def __init__(self, *, config: Any, cp_comm_type: str | None = None, **other: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # Megatron's local attention refuses more
        super().__init__(config=alone, **other)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        assert attention_mask is None
        size = parallel_state.get_context_parallel_world_size()
        starts = np.array([0, len(query) * size])
        if packed_seq_params is not None:
            starts = packed_seq_params.cu_seqlens_q.numpy()
            assert packed_seq_params.max_seqlen_q == np.diff(starts).max()
            assert packed_seq_params.cu_seqlens_q_padded.tolist() == starts.tolist()
        places = torch.from_numpy(
            np.concatenate([own_places(starts, rank, size) for rank in range(size)])
        )
        order = places.argsort()
        query, key, value = (_Gather.apply(one).flatten(0, 1)[order] for one in (query, key, value))
        whole = super().forward(
            query, key, value, None, attn_mask_type, attention_bias, packed_seq_params
        )
        rank = parallel_state.get_context_parallel_rank()
        return whole[places.chunk(size)[rank]]


@contextlib.contextmanager
def _over_context(layout: ParallelSettings = CP2) -> Iterator[None]:
    """The groups of context-parallel ranks, and then again those of a pair without a layout."""

    def allowed(*_: Any, **__: Any) -> None:
        """What a GPU with TransformerEngine would be allowed."""

    parallel.shutdown()
    with (
        patch("trainer.parallel.check_layout", allowed),
        patch("trainer.parallel.require_engine", allowed),
        patch("trainer.layer_specs.context_attention", lambda: GatheredAttention),
        model_on_cpu(),  # Megatron moves the places of this rank's positions to the GPU
    ):
        parallel.initialize(layout, seed=0, num_threads=1, deterministic=True, timeout_minutes=0.5)
        yield
        parallel.shutdown()
    # What the pair thinks it has: if the above raises, the pair is killed.
    parallel.initialize(
        ParallelSettings(), seed=0, num_threads=1, deterministic=True, timeout_minutes=0.5
    )


def take_step(folder: Path, layout: ParallelSettings) -> dict[str, Any]:
    """A packed step."""
    with _over_context(layout):
        return checks_packed.take_step(folder, layout)


def take_steps(folder: Path, algorithm: dict[str, Any]) -> dict[str, Any]:
    """Padded steps."""
    with _over_context():
        return checks_layouts.take_steps(
            folder, CP2, {"use_distributed_optimizer": True}, algorithm
        )


def take_routed_step(folder: Path, algorithm: dict[str, Any]) -> dict[str, Any]:
    """A step with routing replay."""
    with _over_context():
        return checks_routing.take_step(folder, CP2, algorithm)


def take_critic_steps(folder: Path) -> dict[str, Any]:
    """Steps with a critic."""
    with _over_context():
        return checks_critic.take_steps(folder, CP2)


def linear_model(
    micro: MicroBatch, weights_hV: Tensor, embedding_Vh: Tensor, packed: bool
) -> dict[str, Any]:
    """Loss and gradient of a model of one linear layer over the tokens that are here."""
    from trainer.forward import log_probs_at

    if parallel_state.get_context_parallel_world_size() > 1:
        micro = context_part(micro, int(parallel_state.get_context_parallel_rank()), 2)
    head = weights_hV.clone().requires_grad_()
    logits = embedding_Vh[torch.from_numpy(micro.tokens_BT)] @ head
    if packed:
        logits = logits[0][torch.from_numpy(micro.columns_n)]
    log_probs_n, entropy_n = log_probs_at(logits, micro, want_entropy=True)
    assert entropy_n is not None
    # No sum over tokens: it would not tell which tokens another rank has.
    loss = (log_probs_n.cumsum(0) ** 2).sum() - (entropy_n * log_probs_n).sum()
    loss.backward()
    gradient = head.grad
    assert gradient is not None
    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(gradient)
    return {
        "loss": float(loss.detach()),
        "log_probs": log_probs_n.detach(),
        "entropy": entropy_n.detach(),
        "gradient": gradient,
    }


def linear_models(cases: list[tuple[MicroBatch, bool]], *weights: Tensor) -> list[dict[str, Any]]:
    """`linear_model` for each."""
    with _over_context():
        return [linear_model(micro, *weights, packed) for micro, packed in cases]
