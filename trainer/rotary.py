"""Rotary positions of a model, as its Hugging Face configuration states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.hf_config import integer, number, require, unsupported

__all__ = ["Llama3Scaling", "Rotary", "YarnScaling", "read_rotary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, as Llama 3.1 does.

    Where "low" ends is fixed in Megatron: wavelengths above 8192 / 1, smoothly from 8192 / 4.
    """

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071), of models with latent attention."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Which dimensions of a head turn with the position, and how fast."""

    theta: float
    fraction: float = 1.0
    """Share of a head's dimensions that turn; they are its first."""
    interleaved: bool = False
    """Pairs are neighbours (0, 1), (2, 3), …; else halves (0, d/2), (1, d/2 + 1), …"""
    scaling: Llama3Scaling | YarnScaling | None = None


def read_rotary(
    hf_config: Mapping[str, Any], *, latent: bool, interleaved: bool, default_fraction: float
) -> Rotary:
    """Transformers 5 writes rope_parameters; before, rope_theta with an optional rope_scaling.

    Raises InvalidArgument, naming the key, for a scaling that Megatron cannot compute.
    """
    stated: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        found = hf_config.get(key) or {}
        if not isinstance(found, Mapping):
            raise unsupported(key, "an object", found)
        stated |= found
    for key in ("rope_theta", "partial_rotary_factor"):
        if stated.get(key) is None:
            stated[key] = hf_config.get(key)
    fraction = number(stated, "partial_rotary_factor", default=default_fraction)
    if fraction > 1 or (latent and fraction != 1):
        raise unsupported(
            "partial_rotary_factor", "1, with latent attention" if latent else "at most 1", fraction
        )
    return Rotary(
        theta=number(stated, "rope_theta"),
        fraction=fraction,
        interleaved=interleaved,
        scaling=_scaling(stated, latent=latent),
    )


def _scaling(stated: Mapping[str, Any], *, latent: bool) -> Llama3Scaling | YarnScaling | None:
    kind = stated.get("rope_type") or stated.get("type") or "default"
    if kind == "default":
        return None
    if kind == "llama3" and not latent:
        for key, value in (
            ("low_freq_factor", 1),
            ("high_freq_factor", 4),
            ("original_max_position_embeddings", 8192),
        ):
            if stated.get(key) != value:
                raise unsupported(
                    f"{key} of rope_type llama3",
                    f"{value}, which is fixed in Megatron-Core",
                    stated.get(key),
                )
        return Llama3Scaling(factor=number(stated, "factor"))
    if kind == "yarn" and latent:
        require(stated, "truncate", (True,))
        if stated.get("attention_factor") is not None:
            raise unsupported("attention_factor", "nothing: it follows", stated["attention_factor"])
        mscales = [stated.get("mscale") or 0.0, stated.get("mscale_all_dim") or 0.0]
        if bool(mscales[0]) != bool(mscales[1]):
            raise unsupported("mscale and mscale_all_dim", "both or neither", mscales)
        return YarnScaling(
            factor=number(stated, "factor"),
            original_max_position_embeddings=integer(stated, "original_max_position_embeddings"),
            beta_fast=number(stated, "beta_fast", default=32.0),
            beta_slow=number(stated, "beta_slow", default=1.0),
            mscale=float(mscales[0]) or 1.0,
            mscale_all_dim=float(mscales[1]),
        )
    expected = "default, or yarn" if latent else "default, or llama3"
    raise unsupported("rope_type", expected, kind)
