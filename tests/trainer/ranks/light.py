"""A command of several ranks that needs no Megatron: for tests of what starts ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from trainer.processes import (
    ElsewhereFailed,
    claim_failure,
    failure_code,
    from_writer,
    join_ranks,
    leave_ranks,
    wait_for_others,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Tell the others a word; or, with 'fail N', end rank N with status 3."""
    words = list(sys.argv[1:] if argv is None else argv)
    rank = os.environ["RANK"]
    join_ranks(1.0)
    heard = from_writer(f"{words[0]} from rank {rank} of {os.environ['WORLD_SIZE']}")
    if words[0] == "fail" and words[1] == rank:
        if claim_failure(3):
            print(f"rank {rank} has had enough", file=sys.stderr)
        return 3
    try:
        wait_for_others("end")
    except ElsewhereFailed:
        return failure_code()
    leave_ranks()
    if rank == "1":
        print(heard)
    return 0


if __name__ == "__main__":
    sys.exit(main())
