"""The tensors of a version, kept on this side until every engine has the next one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ledger.errors import InvalidArgument, explain
from ledger.weights import TensorRecord, tensor_record, weights_root
from rollout.weights.parameters import together

__all__ = ["StagedVersion", "bytes_of", "chunks", "record_of", "stage"]


@dataclass(frozen=True, slots=True, eq=False)
class StagedVersion:
    """One version under canonical Hugging Face names. Nothing changes it."""

    version: int
    tensors: Mapping[str, Tensor]
    """Contiguous, in this process's memory; where a version has the bits of its base, theirs."""
    records: Mapping[str, TensorRecord]

    @property
    def root(self) -> bytes:
        """As `ledger.weights.weights_root`."""
        return weights_root(self.records.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each tensor."""
        return {name: record.shape for name, record in self.records.items()}

    def size_bytes(self, names: Iterable[str] | None = None) -> int:
        """Bytes of the tensors of these names; None: of all."""
        return sum(self.tensors[name].nbytes for name in (self.tensors if names is None else names))

    def changed_from(self, base: StagedVersion) -> list[str]:
        """Names of the tensors whose checksums differ, and of those that must be sent with them."""
        changed = {
            name for name, record in self.records.items() if base.records.get(name) != record
        }
        return sorted({member for name in changed for member in together(name, self.records)})


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: uint8 [n], sharing its memory."""
    return tensor.reshape(-1).view(torch.uint8)


def record_of(name: str, tensor: Tensor) -> TensorRecord:
    """Of a contiguous tensor in this process's memory."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return tensor_record(name, kind, tensor.shape, bytes_of(tensor).numpy())


def stage(
    version: int, named: Iterable[tuple[str, Any]], base: StagedVersion | None = None
) -> StagedVersion:
    """Copy tensors into this process's memory, with their checksums (blake3).

    A tensor that has the bits of `base`'s is not copied. Tensors may share memory with a model that
    trains on: afterwards they are not needed any more.

    Raises InvalidArgument where one name comes twice, or where names, shapes or dtypes are not
    those of `base`.
    """
    tensors: dict[str, Tensor] = {}
    records: dict[str, TensorRecord] = {}
    for name, tensor in named:
        if name in records:
            raise _refused(version, name, "one tensor of each name", "a second one")
        here = tensor.detach().to("cpu").contiguous()
        record = record_of(name, here)
        if base is None or base.records.get(name) != record:
            tensors[name] = here.clone() if here.data_ptr() == tensor.data_ptr() else here
        else:
            tensors[name] = base.tensors[name]
        records[name] = record
    if base is not None:
        _check_same_model(version, records, base.records)
    return StagedVersion(version, dict(sorted(tensors.items())), dict(sorted(records.items())))


def chunks(staged: StagedVersion, names: Sequence[str], size_bytes: int) -> Iterator[list[str]]:
    """Cut names, in order, into lists of at most `size_bytes`; what goes together stays together.

    A list is larger only where the tensors that go together are. Without names there is one empty
    list, so that a version of which nothing changed is still sent as such.
    """
    wanted = set(names)
    done: set[str] = set()
    chunk: list[str] = []
    filled = 0
    for name in names:
        if name in done:
            continue
        group = [one for one in together(name, staged.records) if one in wanted]
        done.update(group)
        size = staged.size_bytes(group)
        if chunk and filled + size > size_bytes:
            yield chunk
            chunk, filled = [], 0
        chunk += group
        filled += size
    yield chunk


def _check_same_model(
    version: int, records: Mapping[str, TensorRecord], base: Mapping[str, TensorRecord]
) -> None:
    for name in sorted(records.keys() | base.keys()):
        new, old = records.get(name), base.get(name)
        if new is None or old is None:
            raise _refused(
                version,
                name,
                f"the {len(base)} tensors of the version before",
                "it is missing" if new is None else "one that was not there",
            )
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise _refused(
                version,
                name,
                f"{old.dtype} {list(old.shape)}, as before",
                f"{new.dtype} {list(new.shape)}",
            )


def _refused(version: int, name: str, expected: str, found: str) -> InvalidArgument:
    return InvalidArgument(
        explain(
            "staging weights for the engines",
            on=f"version {version}, tensor {name}",
            expected=expected,
            found=found,
            do="export the weights of the same model",
        )
    )
