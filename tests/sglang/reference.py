"""What transformers says of the same weights: log-probabilities and experts."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["chosen_experts", "go_on", "log_probs", "model_of"]


@cache
def model_of(folder: Path) -> Any:
    """The model, float32, evaluating."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


@torch.no_grad()
def log_probs(
    folder: Path, tokens: npt.NDArray[np.int32], *, temperature: float = 1.0
) -> npt.NDArray[np.float32]:
    """[T, V] Row t: natural log-probabilities of the token at t + 1."""
    logits = model_of(folder)(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    found: npt.NDArray[np.float32] = torch.log_softmax(logits / temperature, dim=-1).numpy()
    return found


def go_on(folder: Path, tokens: Tensor, kept: Any) -> Any:
    """The model's output for [1, T] tokens behind those whose keys and values are in `kept`."""
    model = model_of(folder)
    # The argument was renamed within transformers 5.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(tokens, **{name: kept})


@torch.no_grad()
def chosen_experts(
    folder: Path, tokens: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """[T, L, K] the experts that each token is sent to, the likeliest first; and [T, L] the margin.

    The margin is the least distance between two router logits whose order decides that choice:
    where it is within rounding, two right implementations may differ.
    """
    model = model_of(folder)
    topk = model.config.num_experts_per_tok
    found = model(
        torch.from_numpy(tokens.astype(np.int64))[None], output_router_logits=True
    ).router_logits
    ranked = [layer.double().sort(dim=-1, descending=True) for layer in found]
    experts = torch.stack([one.indices[:, :topk] for one in ranked], dim=1)
    values = torch.stack([one.values[:, : topk + 1] for one in ranked], dim=1)
    margins = (values[..., :-1] - values[..., 1:]).min(dim=-1).values
    return experts.numpy(), margins.numpy()
