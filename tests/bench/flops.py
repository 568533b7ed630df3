"""Floating-point operations of a model, and what devices can do: for the utilisation of a step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from ledger.errors import InvalidArgument, explain

__all__ = ["ModelShape", "forward_flops", "peak_flops", "step_flops"]

PEAKS_TFLOPS: dict[str, dict[str, float]] = {
    # Dense (without sparsity), from NVIDIA's data sheets: H100 (2023), H200 (2024), B200/HGX
    # (2025), A100 (2021), L40S and L4 (2023), A10 (2021); RTX 4090: Ada architecture white paper,
    # appendix A, bf16 with float32 accumulation. Longer names before those they contain.
    "H100 PCIe": {"bf16": 756.0, "fp32": 51.0},
    "H100 NVL": {"bf16": 835.0, "fp32": 60.0},
    "H100": {"bf16": 989.4, "fp32": 66.9},
    "H200 NVL": {"bf16": 835.0, "fp32": 60.0},
    "H200": {"bf16": 989.4, "fp32": 66.9},
    "B200": {"bf16": 2250.0, "fp32": 75.0},
    "A100": {"bf16": 312.0, "fp32": 19.5},
    "L40S": {"bf16": 362.0, "fp32": 91.6},
    "L4": {"bf16": 121.0, "fp32": 30.3},
    "A10": {"bf16": 125.0, "fp32": 31.2},
    "RTX 4090": {"bf16": 165.2, "fp32": 82.6},
}
"""Words of a device's name → 10^12 operations a second by type of number."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What decides the operations of a decoder. Sizes as in Hugging Face's configuration."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of all layers: attention and SwiGLU."""
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)


def forward_flops(
    shape: ModelShape, lengths: Sequence[int], responses: Sequence[int] | None = None
) -> float:
    """Operations of a forward over sequences of these lengths: 2 a parameter and token, and
    4 · layers · heads · head_dim a pair of tokens.

    The convention of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): every pair counts,
    also those that the causal mask forbids; lookups, norms and softmaxes do not count. The head
    counts for all tokens, or for `responses` alone where it is given. What a model computes twice,
    or for padding, does not count: it is utilisation of the model, not of the hardware.
    """
    tokens = float(sum(lengths))
    pairs = float(sum(length * length for length in lengths))
    headed = tokens if responses is None else float(sum(responses))
    heads = shape.num_attention_heads * shape.head_dim
    return (
        2 * shape.layer_parameters * tokens
        + 2 * shape.hidden_size * shape.vocab_size * headed
        + 4 * shape.num_hidden_layers * heads * pairs
    )


def step_flops(
    shape: ModelShape, lengths: Sequence[int], responses: Sequence[int] | None = None
) -> float:
    """Operations of forward and backward: the backward takes twice the forward's."""
    return 3 * forward_flops(shape, lengths, responses)


def peak_flops(device: str, kind: str, given_tflops: float | None = None) -> float:
    """Operations a second that a device can do in 'bf16' or 'fp32'; `given_tflops` wins.

    Raises InvalidArgument for a device that is not in the table and has no given peak.
    """
    if given_tflops is not None:
        return given_tflops * 1e12
    for name, peaks in PEAKS_TFLOPS.items():
        if re.search(rf"\b{name}\b", device):
            return peaks[kind] * 1e12
    raise InvalidArgument(
        explain(
            "looking up what a device can do",
            on=repr(device),
            expected=f"one of {', '.join(PEAKS_TFLOPS)}",
            found="none of them in its name",
            do="give the peak of its data sheet, dense, by --peak-tflops",
        )
    )
