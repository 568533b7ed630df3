"""Norms that live in a sequence-parallel group, where Megatron's local norm refuses to."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from trainer.megatron import (
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    WrappedTorchNorm,
)

__all__ = ["SequenceParallelNorm", "for_sequence_parallel"]


class SequenceParallelNorm:
    """torch's norm over the tokens of one rank, whose parameters say that they saw only these.

    Megatron adds up the gradients of parameters that carry `sequence_parallel` over the
    tensor-parallel group. Its own wrapper around torch's norms (torch_norm.py) would compute the
    same, but refuses the setting.
    """

    def __new__(cls, config: TransformerConfig, *args: Any, **kwargs: Any) -> torch.nn.Module:  # type: ignore[misc]
        """Made as Megatron makes the norm of a layer."""
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm: torch.nn.Module = WrappedTorchNorm(alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return norm


def for_sequence_parallel(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """The same layers with `SequenceParallelNorm` wherever Megatron's local norm stood.

    Norms of query and key heads are among them: they see whole sequences of a rank's own heads,
    and their gradients are added up over the group by name.
    """
    made = copy.deepcopy(block)
    _replace(made)
    return made


def _replace(node: Any) -> None:
    if isinstance(node, ModuleSpec):
        if node.module is WrappedTorchNorm:
            node.module = SequenceParallelNorm
        _replace(node.submodules)
    elif isinstance(node, (list, tuple)):
        for item in node:
            _replace(item)
    elif is_dataclass(node) and not isinstance(node, type):
        for field in fields(node):
            value = getattr(node, field.name)
            if value is WrappedTorchNorm:
                setattr(node, field.name, SequenceParallelNorm)
            else:
                _replace(value)
