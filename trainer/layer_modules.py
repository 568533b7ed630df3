"""Modules that Megatron's layers are built with here, where its own do not fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ledger.errors import InvalidArgument, explain
from trainer.megatron import (
    MLASelfAttention,
    TransformerConfig,
    gather_from_tensor_model_parallel_region,
    get_bias_dropout_add,
    scatter_to_sequence_parallel_region,
)
from trainer.packed_attention import CoreAttention

__all__ = [
    "LatentAttention",
    "LatentSelfAttention",
    "NormedResidual",
    "RMSNorm",
    "gather_latent",
]


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with the arguments by which Megatron builds a norm.

    Under sequence parallelism each rank sees a part of the sequence; Megatron adds up the gradients
    of the weights that say so. (Its own wrapper around torch's norms refuses that.)
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        own_eps: float | None = None,
        **_: Any,
    ) -> None:
        """`own_eps` is used instead of the `eps` that the layer passes."""
        super().__init__(hidden_size, eps=eps if own_eps is None else own_eps)
        weight: Any = self.weight
        weight.data = weight.data.to(config.params_dtype)
        weight.sequence_parallel = config.sequence_parallel


class NormedResidual(torch.nn.Module):
    """residual + RMSNorm(output): what GLM-4 puts in place of residual + output.

    Stands in the place of Megatron's bias-dropout-add, which a layer calls with (training, fused)
    for the function that adds.
    """

    def __init__(self, config: TransformerConfig) -> None:
        """A norm over the hidden size."""
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """The function (output and its bias, residual, dropout) → hidden states."""
        return partial(self._add, get_bias_dropout_add(training, fused))

    def _add(
        self,
        add: Callable[..., Tensor],
        output_with_bias: tuple[Tensor, Tensor | None],
        residual: Tensor,
        dropout: float,
    ) -> Tensor:
        output, bias = output_with_bias
        if bias is not None:
            output = output + bias
        return add((self.norm(output), None), residual, dropout)


class LatentAttention(CoreAttention):
    """The core of latent attention, whose values are narrower than its keys.

    Megatron states both widths, for TransformerEngine; its local attention takes them from its
    inputs, and that of its output from kv_channels, which is set to the values' width.
    """

    def __init__(
        self, *, k_channels: int | None = None, v_channels: int | None = None, **arguments: Any
    ) -> None:
        """The arguments of Megatron's attention, and the two widths where they are stated."""
        config = arguments["config"]
        if v_channels not in (None, config.kv_channels):
            raise InvalidArgument(
                explain(
                    "building latent attention",
                    on="kv_channels",
                    expected=f"the width of the values, {v_channels}",
                    found=config.kv_channels,
                )
            )
        super().__init__(**arguments)


class LatentSelfAttention(MLASelfAttention):  # type: ignore[misc]  # Megatron has no types
    """Megatron's latent attention with the projections and norms that its spec names.

    0.19 derives them anew, and takes a configuration without a low rank of the queries for one that
    norms queries inside their projection, which DeepSeek's models do not.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Megatron 0.19 calls it with the spec's modules; 0.16 builds these by itself."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        norms = ("q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in (*names, *norms)}


def gather_latent(down_projection: Any, _: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """A hook on the down projection of keys and values: all of its columns, for this rank's tokens.

    Megatron gathers the columns that tensor-parallel ranks computed; each rank's heads then
    use the positional ones. Their gradient is a sum over the heads of all ranks, but the gather's
    backward keeps this rank's share alone (0.16.1, multi_latent_attention.py, k_pos_emb). Handed
    over with the sequence divided, the same columns take Megatron's other way, which adds up.
    """
    columns, bias = output
    if down_projection.tp_group.size() == 1:
        return output
    if not down_projection.config.sequence_parallel:
        raise InvalidArgument(
            explain(
                "running latent attention on several tensor-parallel ranks",
                on="--sequence-parallel",
                expected="on",
                found="off",
            )
        )
    whole = gather_from_tensor_model_parallel_region(columns)
    return scatter_to_sequence_parallel_region(whole), bias
