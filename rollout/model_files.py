"""What a model folder holds, tensor by tensor, without loading a model: no torch, no engine."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ledger.errors import Corrupt, InvalidArgument, NotFound, explain
from ledger.weights import TensorRecord, tensor_record

__all__ = ["records_of_folder"]

_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_KEPT_IN_FLOAT32 = "e_score_correction_bias"
"""Last part of the names of the biases by which routers choose: they stay float32 in training."""


def records_of_folder(folder: str | Path, *, dtype: str) -> list[TensorRecord]:
    """The record of each tensor as a training in `dtype` begins with it, sorted by name.

    `dtype` is 'float32' or 'bfloat16'. A head that is tied to the embedding is left out, as
    everywhere here.

    Raises:
        NotFound: the folder has no config.json or no safetensors files.
        Corrupt: a file is cut short.
        InvalidArgument: tensors of numbers that are not floats of 16 or 32 bits.
    """
    where = Path(folder)
    try:
        config = json.loads((where / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise NotFound(
            explain("reading a model", on=str(where), expected="config.json", found=error)
        ) from error
    paths = sorted(where.glob("model*.safetensors"))
    if not paths:
        raise NotFound(
            explain(
                "reading a model",
                on=str(where),
                expected="model.safetensors, or its shards",
                found="none",
            )
        )
    tied = bool(config.get("tie_word_embeddings"))
    records = {}
    for path in paths:
        for name, stored, shape, data in _tensors(path):
            if tied and name == "lm_head.weight":
                continue
            wanted = "float32" if name.endswith(_KEPT_IN_FLOAT32) else dtype
            converted = _converted(data, stored, wanted, on=f"{path}, tensor {name}")
            records[name] = tensor_record(name, wanted, shape, converted)
    return [records[name] for name in sorted(records)]


def _tensors(path: Path) -> Iterator[tuple[str, str, tuple[int, ...], npt.NDArray[Any]]]:
    """Name, stored type, shape and bytes of each tensor of a safetensors file."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
    except ValueError as error:
        raise Corrupt(
            explain("reading a model", on=str(path), expected="a header", found=error)
        ) from error
    whole = np.frombuffer(data, np.uint8)[8 + length :]
    for name, said in header.items():
        if name == "__metadata__":
            continue
        first, last = said["data_offsets"]
        if last > len(whole):
            raise Corrupt(
                explain(
                    "reading a model",
                    on=f"{path}, tensor {name}",
                    expected=f"{last} bytes of tensors",
                    found=len(whole),
                    do="copy the model again",
                )
            )
        yield name, said["dtype"], tuple(said["shape"]), whole[first:last]


def _converted(data: npt.NDArray[Any], stored: str, wanted: str, *, on: str) -> npt.NDArray[Any]:
    """The bytes of a tensor in another type; rounded to nearest, ties to even, as torch does."""
    if _NAMES.get(stored) == wanted:
        return data
    if stored == "F32":
        wide = data.view("<u4")
    elif stored == "BF16":
        wide = data.view("<u2").astype("<u4") << np.uint32(16)
    elif stored == "F16":
        wide = data.view("<f2").astype("<f4").view("<u4")
    else:
        raise InvalidArgument(
            explain(
                "beginning a run from a model",
                on=on,
                expected=f"numbers of {', '.join(_NAMES)}",
                found=stored,
                do="save the model in one of them",
            )
        )
    if wanted == "float32":
        return wide
    rounded = (wide + np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, np.uint32(0x7FC0), rounded).astype("<u2")
