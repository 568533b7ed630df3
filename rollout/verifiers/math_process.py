"""The process that math-verify runs in: one JSON request a line in, one JSON answer a line out.

math-verify limits its time by signals, which only a main thread gets, and takes what it could not
read in time for a wrong answer. Here it has no limit of its own: whoever asked ends the process.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any, TextIO

__all__ = ["judge", "main"]

MEMORY_BYTES = 4 << 30
"""Address space of the process: a power tower must not take the machine."""


def judge(response: str, label: str) -> dict[str, Any]:
    """Whether `response` gives the answer `label`: {'right': bool, 'read': bool}.

    The label is read as a whole, the response as math-verify finds answers in texts. 'read' says
    whether there was any. {'label': …} where the label itself cannot be read.
    """
    from math_verify import parse, verify

    boxed = label if "\\boxed" in label else f"\\boxed{{{label.strip().strip('$')}}}"
    gold = parse(boxed, parsing_timeout=None)
    if not gold:
        return {"label": label}
    answer = parse(response, parsing_timeout=None)
    right = bool(answer) and verify(gold, answer, timeout_seconds=None)
    return {"right": bool(right), "read": bool(answer)}


def main(requests: TextIO, answers: TextIO, limit_s: int) -> None:
    """Answer until the requests end. A request that takes `limit_s` seconds ends the process."""
    import math_verify

    logging.disable(logging.WARNING)  # it warns once that its limits are off
    print(json.dumps({"ready": math_verify.__name__}), file=answers, flush=True)
    for line in requests:
        asked = json.loads(line)
        signal.alarm(limit_s)  # nobody may be there any more to end it
        try:
            found = judge(asked["response"], asked["label"])
        except (Exception, MemoryError) as error:
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.alarm(0)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # What the libraries print must not be taken for an answer.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(sys.stdin, replies, int(sys.argv[1]))
