"""The tensors of a model folder without reading them: whoever needs a slice reads that alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ledger.errors import Corrupt, StorageFailed, explain
from trainer.weights.files import weight_files

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

    Raises NotFound where a folder holds no weights, Corrupt where a file cannot be parsed (it was
    cut short), StorageFailed where one cannot be read.
    """
    if not isinstance(paths, list):
        paths = weight_files(Path(paths))
    files: dict[str, Any] = {}
    for path in paths:
        try:
            file = safe_open(path, framework="pt")
            files |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]
        except OSError as error:
            raise StorageFailed(
                explain("reading weights", on=str(path), expected="a readable file", found=error)
            ) from error
        except SafetensorError as error:
            raise Corrupt(
                explain(
                    "reading weights",
                    on=str(path),
                    expected="a whole safetensors file",
                    found=error,
                    do="copy the model again",
                )
            ) from error
    return WeightHandles(files)
