"""Attention between queries and keys for rows of one sequence and for packed rows.

A packed row holds several sequences one after the other; none sees another, and positions begin
anew at each. Megatron's local attention refuses such rows; here each sequence goes through it
alone, so that a sequence has the same scores, bit for bit, packed or by itself.

T tokens of a row, S sequences of a packed row. Megatron's axes: s tokens, b rows, np heads of this
rank, hn channels of a head, t tokens of a packed row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ledger.errors import InvalidArgument, explain
from trainer.megatron import AttnBackend, DotProductAttention, PackedSeqParams

__all__ = ["CoreAttention", "packed_sequences"]

_TORCH_KERNEL = (AttnBackend.flash, AttnBackend.fused)


class CoreAttention(DotProductAttention):  # type: ignore[misc]  # Megatron has no types
    """Megatron's local attention, which takes packed rows too.

    With `attention_backend` flash or fused in Megatron's configuration it is computed by torch's
    `scaled_dot_product_attention` instead, which holds no scores of all pairs: faster and smaller
    from some hundreds of tokens on, equal within float32 rounding (1e-5 of a log-prob), not bit for
    bit. Causal masks only, without dropout.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[s, b, np, hn] → [s, b, np·hn]; packed: [t, np, hn] → [t, 1, np·hn]."""
        if packed_seq_params is None:
            return self._rows(query, key, value, attention_mask, attn_mask_type, attention_bias)
        lengths = _lengths_of(packed_seq_params)
        parts = [
            self._rows(q[:, None], k[:, None], v[:, None], None, attn_mask_type, attention_bias)
            for q, k, v in zip(
                *(torch.split(one, lengths) for one in (query, key, value)), strict=True
            )
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _rows(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        mask_type: Any,
        bias: Tensor | None,
    ) -> Tensor:
        if self.config.attention_backend not in _TORCH_KERNEL:
            if mask is None:
                mask = _causal_mask(query.shape[0], query.device)
            rows: Tensor = super().forward(query, key, value, mask, mask_type, bias)
            return rows
        after_product = self.scale_mask_softmax.scale
        context = functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.softmax_scale * (1.0 if after_product is None else after_product),
            enable_gqa=query.shape[2] != key.shape[2],
        )
        s, b = query.shape[:2]
        return context.permute(2, 0, 1, 3).reshape(s, b, -1)


def packed_sequences(starts: Tensor, *, over_ranks: bool = False) -> PackedSeqParams:
    """What Megatron is told of a packed row: `starts` int32 [S+1], from 0 to T, ascending.

    With `over_ranks` they are those of a row whose tokens context-parallel ranks share.

    Raises InvalidArgument for starts that do not ascend from 0: an empty sequence among them would
    be silently left out by some kernels and not by others.
    """
    lengths = starts.diff()
    if starts.dim() != 1 or len(starts) < 2 or int(starts[0]) != 0 or int(lengths.min()) < 1:
        raise InvalidArgument(
            explain(
                "packing sequences into a row",
                on="their starts",
                expected="ascending numbers from 0, and the end of the last",
                found=starts.tolist(),
            )
        )
    longest = int(lengths.max())
    packed: PackedSeqParams = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        # Some versions of TransformerEngine divide these among context-parallel ranks unasked.
        cu_seqlens_q_padded=starts if over_ranks else None,
        cu_seqlens_kv_padded=starts if over_ranks else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    # Once a row: every layer would wait for the device otherwise.
    packed.lengths = lengths.tolist()
    return packed


def _lengths_of(packed: PackedSeqParams) -> list[int]:
    known: list[int] | None = getattr(packed, "lengths", None)
    return packed.cu_seqlens_q.diff().tolist() if known is None else known


_masks: dict[torch.device, Tensor] = {}


def _causal_mask(width: int, device: torch.device) -> Tensor:
    """[1, 1, T, T] True where attention is forbidden; a view of the largest that was asked for."""
    known = _masks.get(device)
    if known is None or known.shape[-1] < width:
        ones = torch.ones(1, 1, width, width, dtype=torch.bool, device=device)
        known = _masks[device] = torch.triu(ones, diagonal=1)
    return known[:, :, :width, :width]
