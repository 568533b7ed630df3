"""Where the versions of a branch lie for engines in other processes."""

from __future__ import annotations

from pathlib import Path

from ledger.errors import InvalidArgument, explain
from ledger.store import Ledger
from trainer.begin import Standing

__all__ = ["version_folder"]


def version_folder(ledger: Ledger, standing: Standing) -> Path:
    """Where the versions of a branch are put: below --update-weight-disk-dir, or in the ledger.

    Raises InvalidArgument where the ledger is in no folder and none was named.
    """
    base = standing.values["update_weight_disk_dir"]
    if not base and ledger.root is None:
        raise InvalidArgument(
            explain(
                "training on rollouts made elsewhere",
                on="--update-weight-disk-dir",
                expected="a folder that the rollouts' process sees too: this ledger is in none",
                found="nothing",
                do="name one on a disk that both processes reach under the same path",
            )
        )
    # absolute(): rollouts may run in another folder.
    root = Path(base).absolute() if base else (ledger.root or Path()) / "weights"
    return root / standing.run_id / standing.branch
