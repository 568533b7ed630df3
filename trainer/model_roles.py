"""The models of a step besides the policy, and the options that name their folders."""

from __future__ import annotations

__all__ = ["FLAGS", "FOLDERS"]

FLAGS = {
    "reference": "--ref-load",
    "teacher": "--opd-teacher-load",
    "critic": "--critic-load",
}
"""Role → the option that names its folder."""

FOLDERS = {role: flag[2:].replace("-", "_") for role, flag in FLAGS.items()}
"""Role → the name of that option."""
