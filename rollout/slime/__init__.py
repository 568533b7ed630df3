"""Functions that were written for slime, by import path and with slime's signatures.

Names and meanings are those of slime (and of Miles where it has them); what such a function returns
is checked as strictly as the answer of an engine, because it is recorded as one.
"""

from __future__ import annotations

from rollout.slime.arguments import SlimeArguments, slime_arguments
from rollout.slime.sample import Sample

__all__ = ["Sample", "SlimeArguments", "slime_arguments"]
