"""The tensors of a model folder without reading them: whoever needs a slice reads that alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.weights.files import open_file, open_safetensors

__all__ = ["WeightHandles", "open_files"]


class WeightHandles(Mapping[str, Any]):
    """Name → safetensors' handle of a tensor, which reads what it is sliced by.

    The files stay open as long as this object lives.
    """

    def __init__(self, files: Mapping[str, Any]) -> None:
        """`files`: name of each tensor → the open file that holds it."""
        self._files = files

    def __getitem__(self, name: str) -> Any:
        return self._files[name].get_slice(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def open_files(paths: str | Path | list[Path]) -> WeightHandles:
    """The tensors of a model folder, or of safetensors files.

    Raises NotFound where a file is missing, Corrupt where one cannot be parsed (it was cut short)
    or does not hold what the index of its folder says, StorageFailed where one cannot be read.
    """
    if not isinstance(paths, list):
        return WeightHandles(open_safetensors(paths))
    files: dict[str, Any] = {}
    for path in paths:
        file = open_file(path.parent, path)
        files |= dict.fromkeys(file.keys(), file)
    return WeightHandles(files)
