"""Appends to a ledger as fast as it can, until it is killed.

python -m tests.ledger.copy_child FOLDER
"""

from __future__ import annotations

import itertools
import sys

from ledger import open_ledger
from tests.ledger import factory

if __name__ == "__main__":
    with open_ledger(sys.argv[1], create=True) as ledger:
        ledger.create_run("run")
        with ledger.writer("run", producer="p") as writer:
            for turn in itertools.count():
                writer.append(
                    [
                        factory.score(turn, 1.0),
                        factory.decide(turn, "kept", rollout_step=turn),
                    ]
                )
                if turn == 20:
                    print("writing", flush=True)
