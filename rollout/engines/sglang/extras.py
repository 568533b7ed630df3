"""Expert ids and indexed positions as SGLang reports them: base64 of little-endian int32.

Both come with a row for each position of the sequence but the last. Experts have a column of layers
for *every* layer of the model, by its number; a layer without experts holds zeros.
"""

from __future__ import annotations

import binascii
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ledger.routing import expert_dtype

if TYPE_CHECKING:
    from rollout.engines.sglang.answer import Asked

__all__ = ["decode_experts", "decode_indexer"]


def _int32(said: object, field: str, flag: str, asked: Asked) -> npt.NDArray[np.int32]:
    if not isinstance(said, str):
        asked.broken(field, "what was asked for, in base64", said, f"start the engine with {flag}")
    try:
        raw = binascii.a2b_base64(said, strict_mode=True)
    except ValueError as error:
        asked.broken(field, "base64", error)
    if len(raw) % 4:
        asked.broken(field, "whole int32 numbers", f"{len(raw)} bytes")
    return np.frombuffer(raw, dtype="<i4")


def decode_experts(
    said: object, new: int, asked: Asked
) -> npt.NDArray[np.uint8] | npt.NDArray[np.uint16]:
    """[C + R - 1 - routing_start, layers, topk] Experts of the layers that have some, R = `new`.

    Raises EngineFailed where anything does not fit the model: the number of bytes, an id that is no
    expert, a layer without experts that has some, or one with experts that has none.
    """
    model, field = asked.model, "meta_info.routed_experts"
    numbers = _int32(said, field, "--enable-return-routed-experts", asked)
    rows = len(asked.request.tokens) + new - 1 - asked.request.routing_start
    expected = rows * model.num_layers * model.topk
    if len(numbers) != expected:
        asked.broken(
            field,
            f"{rows} rows × {model.num_layers} layers × {model.topk} experts × 4 bytes = "
            f"{4 * expected} bytes",
            f"{4 * len(numbers)} bytes",
        )
    whole = numbers.reshape(rows, model.num_layers, model.topk)
    ids = whole
    if len(model.moe_layers) < model.num_layers:
        others = [i for i in range(model.num_layers) if i not in model.moe_layers]
        if whole[:, others].any():
            layer = others[int(whole[:, others].any(axis=(0, 2)).argmax())]
            asked.broken(field, f"zeros for layer {layer}, which has no experts", "experts")
        ids = np.ascontiguousarray(whole[:, list(model.moe_layers)])
    # One pass: as unsigned numbers, negative ones are above all experts.
    if ids.size and int(ids.view(np.uint32).max()) >= model.num_experts:
        row, layer, k = np.argwhere((ids < 0) | (ids >= model.num_experts))[0].tolist()
        asked.broken(
            f"{field}[{row}, {model.moe_layers[layer]}, {k}]",
            f"an expert in [0, {model.num_experts})",
            int(ids[row, layer, k]),
        )
    # The experts of one token differ, so that zeros alone mean that nothing was captured.
    if model.topk > 1 and not (nothing := ids[:, :, 0] | ids[:, :, 1]).all():
        row, layer = np.argwhere(nothing == 0)[0].tolist()
        asked.broken(
            f"{field}[{row}, {model.moe_layers[layer]}]", f"{model.topk} different experts", "zeros"
        )
    return ids.astype(expert_dtype(model.num_experts))


def decode_indexer(said: object, new: int, asked: Asked) -> npt.NDArray[np.int32]:
    """[C + R - 1 - routing_start, layers, topk] Positions that sparse attention chose, R = `new`.

    The server reports them from the first position on. Raises EngineFailed where the number of
    bytes is that of no whole number of layers.
    """
    model, field = asked.model, "meta_info.indexer_topk"
    numbers = _int32(said, field, "--enable-return-indexer-topk", asked)
    rows = len(asked.request.tokens) + new - 1
    a_layer = rows * model.indexer_topk
    if not a_layer or len(numbers) % a_layer or not 0 < len(numbers) // a_layer <= model.num_layers:
        asked.broken(
            field,
            f"{rows} rows × layers × {model.indexer_topk} positions × 4 bytes, of at most "
            f"{model.num_layers} layers",
            f"{4 * len(numbers)} bytes",
        )
    whole = numbers.reshape(rows, -1, model.indexer_topk)
    return whole[asked.request.routing_start :].astype(np.int32)
