"""The weights of a loaded `transformers` model under the names its files use.

Weights are its parameters and the buffers that it saves: the bias by which a router of GLM-4.5 or
DeepSeek-V3 chooses experts is one.

In memory, transformers 5 keeps the experts of a layer fused: `experts.gate_up_proj` [E, 2F, H] and
`experts.down_proj` [E, H, F]. On disk, and for every other tool, they are
`experts.N.gate_proj.weight` [F, H], `experts.N.up_proj.weight` [F, H] and
`experts.N.down_proj.weight` [H, F]. The views here are slices of the fused storage: writing to one
writes the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ledger.errors import InvalidArgument, explain

if TYPE_CHECKING:
    from ledger.weights import TensorRecord

__all__ = ["canonical_views", "check_named", "record_views"]


def canonical_views(model: torch.nn.Module) -> dict[str, Tensor]:
    """Views of all weights by canonical name, sorted; a tied head is only the embedding.

    Raises:
        InvalidArgument: fused expert weights of a shape that is not known.
    """
    views: dict[str, Tensor] = {}
    # named_parameters leaves out later occurrences of a shared tensor: the tied lm_head.
    for name, parameter in (*model.named_parameters(), *_saved_buffers(model)):
        data = parameter.detach()
        prefix, _, leaf = name.rpartition(".")
        if prefix.endswith(".experts") and leaf in ("gate_up_proj", "down_proj"):
            if data.ndim != 3 or (leaf == "gate_up_proj" and data.shape[1] % 2):
                raise InvalidArgument(
                    explain(
                        "naming the weights of the experts",
                        on=name,
                        expected="[experts, 2 × width, hidden] or [experts, hidden, width]",
                        found=f"shape {tuple(data.shape)}",
                        do="use a tested transformers version (5.x)",
                    )
                )
            for expert in range(data.shape[0]):
                if leaf == "gate_up_proj":
                    gate, up = data[expert].chunk(2, dim=0)
                    views[f"{prefix}.{expert}.gate_proj.weight"] = gate
                    views[f"{prefix}.{expert}.up_proj.weight"] = up
                else:
                    views[f"{prefix}.{expert}.down_proj.weight"] = data[expert]
        else:
            views[name] = data
    return dict(sorted(views.items()))


def _saved_buffers(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def check_named(views: Mapping[str, Tensor], named: Mapping[str, Tensor]) -> None:
    """Compare names, shapes and dtypes of new weights with the model's, before anything is copied.

    Raises:
        InvalidArgument: names the first tensor that does not fit, and both sides.
    """
    tried, do = "loading weights into the engine", "export the weights of the same model"
    for kind, names in (
        ("missing", sorted(views.keys() - named.keys())),
        ("unexpected", sorted(named.keys() - views.keys())),
    ):
        if names:
            raise InvalidArgument(
                explain(
                    tried,
                    on=names[0],
                    expected=f"exactly the model's {len(views)} tensors",
                    found=f"{len(names)} {kind}: {', '.join(names[:5])}"
                    + (", …" if len(names) > 5 else ""),
                    do=do,
                )
            )
    for name, view in views.items():
        new = named[name]
        if new.shape != view.shape or new.dtype != view.dtype:
            raise InvalidArgument(
                explain(
                    tried,
                    on=name,
                    expected=f"{view.dtype} {tuple(view.shape)}",
                    found=f"{new.dtype} {tuple(new.shape)}",
                    do=do,
                )
            )


def record_views(views: Mapping[str, Tensor]) -> list[TensorRecord]:
    """Checksums of the parameters as they lie in the engine, sorted by name."""
    from ledger.weights import tensor_record

    return [
        tensor_record(
            name,
            str(view.dtype).removeprefix("torch."),
            tuple(view.shape),
            np.ascontiguousarray(view.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()),
        )
        for name, view in views.items()
    ]
