"""Appends to a ledger that others create and append to at the same moment.

python -m tests.ledger.append_child FOLDER NUMBER APPENDS
"""

from __future__ import annotations

import contextlib
import sys

from ledger import open_ledger
from ledger.errors import AlreadyExists
from tests.ledger import factory


def main(folder: str, number: int, appends: int, catalog: str | None = None) -> None:
    with open_ledger(folder, create=True, catalog=catalog) as ledger:
        with contextlib.suppress(AlreadyExists):
            ledger.create_run("r")
        with ledger.writer("r", producer=f"p{number}") as writer:
            for turn in range(appends):
                first = 2 * (number * appends + turn)
                writer.append(
                    [
                        factory.score(first, 1.0),
                        factory.score(first + 1, 0.0),
                        factory.decide(first, "kept", rollout_step=turn),
                    ]
                )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
