"""What is different here from where a run was recorded, of what can decide bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ledger.environment import describe_environment

__all__ = ["differences"]

_PACKAGES = ("torch", "megatron-core", "numpy", "transformers", "transformer-engine", "triton")
_PLAIN = ("python", "machine", "cpu", "gpu_driver")


def differences(recorded: Mapping[str, Any]) -> list[str]:
    """One line for each difference between the recorded environment and this process's."""
    here = describe_environment()
    lines = [
        f"{name}: recorded with {recorded.get(name)!r}, here {here.get(name)!r}"
        for name in _PLAIN
        if recorded.get(name) != here.get(name)
    ]
    packages = recorded.get("packages", {})
    lines += [
        f"package {name}: recorded with {packages.get(name)}, here {here['packages'].get(name)}"
        for name in _PACKAGES
        if packages.get(name) != here["packages"].get(name)
    ]
    flags = recorded.get("flags", {})
    lines += [
        f"environment variable {name}: recorded with {flags.get(name)!r}, here "
        f"{here['flags'].get(name)!r}"
        for name in sorted({*flags, *here["flags"]})
        if flags.get(name) != here["flags"].get(name)
    ]
    return lines
