"""Names of the off-policy corrections, as `--custom-tis-function-path` takes them."""

from __future__ import annotations

__all__ = ["correction_name"]

_SLIME = {
    "vanilla_tis_function": "tis",
    "icepop_function": "icepop",
    "compute_mis_weights": "mis",
    "compute_mis_weights_with_cp": "mis",
}
"""slime's functions, of which only the last part of the path is looked at."""


def correction_name(path: str | None) -> str:
    """'tis', 'icepop' or 'mis'; or the path itself, which is of the user's own function.

    slime chooses the correction by the path of a function; its own functions (and Miles's) mean the
    corrections that are built in here, wherever they lie.
    """
    if path is None:
        return "tis"
    return _SLIME.get(path.replace(":", ".").rpartition(".")[2], path)
