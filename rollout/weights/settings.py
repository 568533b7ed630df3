"""How engines get new weights: what the command line says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ledger.errors import InvalidArgument, explain

__all__ = ["CHECKS", "MODES", "PAUSE_MODES", "TRANSPORTS", "WeightUpdateSettings"]

TRANSPORTS = ("auto", "disk", "tensor", "distributed", "checkpoint_engine")
"""'auto': 'tensor' for an engine on this host, 'disk' where a folder is named, else
'distributed'."""
MODES = ("full", "delta")
PAUSE_MODES = ("retract", "abort", "in_place")
"""What happens to running requests: they go on with a cache that is computed again, they end with
what was sampled, or they go on with the cache that older weights made."""

CHECKS = ("parameters", "files")
"""What an engine's checksums are compared with; see `rollout.weights.comparison`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateSettings:
    """Raises InvalidArgument where a value is none of those that there are."""

    transport: str = "auto"
    mode: str = "full"
    """'delta': only tensors whose checksum differs from the version that the engine has."""
    buffer_size: int = 512 << 20
    """Bytes of a chunk; a tensor, or tensors that go together, may be larger."""
    pause_mode: str = "retract"
    check: str = "parameters"
    """'files': engines whose parameters cannot be computed from the published tensors are taken,
    too: they read all of every version from files that were read back before."""
    disk_dir: Path | None = None
    """Where weights are written for engines to read: a folder that they see under this path. None:
    a temporary one, for engines on this host."""
    disk_keep_files: bool = False
    """Keep the folders of versions that every engine has acknowledged."""
    timeout_s: float = 1800.0
    """For one request to an engine; after it the engine is taken for dead."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> WeightUpdateSettings:
        """From the options of the command line, by name. Raises InvalidArgument."""
        transport, folder = values["update_weight_transport"], values["update_weight_disk_dir"]
        return cls(
            transport="distributed" if transport == "nccl" else transport,
            mode=values["update_weight_mode"],
            buffer_size=values["update_weight_buffer_size"],
            pause_mode=values["pause_generation_mode"],
            check=values["update_weight_check"],
            disk_dir=None if folder is None else Path(folder).absolute(),
            disk_keep_files=values["update_weight_disk_keep_files"],
        )

    def __post_init__(self) -> None:
        """Check the values."""
        for name, choices in (
            ("transport", TRANSPORTS),
            ("mode", MODES),
            ("pause_mode", PAUSE_MODES),
            ("check", CHECKS),
        ):
            if getattr(self, name) not in choices:
                raise InvalidArgument(
                    explain(
                        "setting up weight updates",
                        on=name,
                        expected=f"one of {', '.join(choices)}",
                        found=getattr(self, name),
                    )
                )
        if self.buffer_size < 1:
            raise InvalidArgument(
                explain(
                    "setting up weight updates",
                    on="buffer_size",
                    expected="at least 1 byte",
                    found=self.buffer_size,
                )
            )
