"""Folders of weight versions that other processes load: whole or not there, durable, few."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from ledger.errors import LedgerError, StorageFailed, explain
from ledger.weights import TensorRecord
from trainer.checkpoint_files import sync
from trainer.digests import records_of
from trainer.weights.files import copy_model_files, open_safetensors
from trainer.weights.shards import write_safetensors

__all__ = ["VersionFolders"]

_FOLDER = re.compile(r"v(\d{6,})")


class VersionFolders:
    """The versions of one branch below one folder, each a Hugging Face model folder `v000012`."""

    def __init__(
        self, base: Path, config: Mapping[str, Any], model_dir: Path, *, keep: int
    ) -> None:
        """`config` becomes config.json; `model_dir` gives the tokenizer's files. `keep` is how
        many versions stay, at least 1."""
        self.base = base
        self._config, self._model_dir, self._keep = config, model_dir, keep

    def folder(self, version: int) -> Path:
        """Where a version is, or would be."""
        return self.base / f"v{version:06d}"

    def write(self, version: int, named: Iterable[tuple[str, Tensor]]) -> list[TensorRecord]:
        """Put a version there, durably; records of what can be read from it then, sorted by name.

        It appears whole or not at all. What is there already with the same weights stays as it is:
        somebody may be reading it. Raises StorageFailed.
        """
        target = self.folder(version)
        try:
            self.base.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=self.base))
            try:
                os.chmod(work, 0o755)  # mkdtemp's is private: engines may be other users'
                written = write_safetensors(work, named, self._config)
                copy_model_files(self._model_dir, work)
                records = _records(work)
                if target.is_dir() and _records_of_remains(target) == records:
                    return records
                for path in {*written, *work.iterdir()}:
                    sync(path)
                sync(work)
                if target.exists():
                    shutil.rmtree(target)
                os.rename(work, target)
                sync(self.base)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        except LedgerError:
            raise
        except (OSError, SafetensorError) as error:
            raise StorageFailed(
                explain(
                    "putting weights where engines load them from",
                    on=str(target),
                    found=error,
                    do="check the disk of --update-weight-disk-dir; the same command goes on",
                )
            ) from error
        return records

    def remove_old(self) -> None:
        """Remove all but the newest versions, and what interrupted writes have left.

        Only the one process that writes here may call it. Raises StorageFailed.
        """
        try:
            found = sorted(
                (int(match[1]), path)
                for path in self.base.iterdir()
                if (match := _FOLDER.fullmatch(path.name))
            )
            # A reader that has opened its files keeps them; one that comes too late finds none.
            for _, path in found[: -self._keep]:
                shutil.rmtree(path)
            for path in self.base.glob(".v*"):
                shutil.rmtree(path)
        except OSError as error:
            raise StorageFailed(
                explain("removing old weights", on=str(self.base), found=error)
            ) from error


def _records(folder: Path) -> list[TensorRecord]:
    opened = open_safetensors(folder)
    return records_of((name, opened[name].get_tensor(name)) for name in sorted(opened))


def _records_of_remains(folder: Path) -> list[TensorRecord] | None:
    """Of a folder that may be damaged; None where it is."""
    with contextlib.suppress(LedgerError):
        return _records(folder)
    return None
