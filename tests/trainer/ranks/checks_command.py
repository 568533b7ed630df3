"""Checks of the commands over two ranks, in processes that have started Megatron already."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ledger.writer import Writer
from replay.cli import main as replay_main
from trainer import parallel
from trainer.cli import main as train_main
from trainer.processes import claim_failure, leave_ranks


class Killed(BaseException):
    """Stands for the end of rank 0: no `except Exception` may survive it."""


@contextlib.contextmanager
def _launched() -> Iterator[None]:
    """As torchrun would have started this rank."""
    told = {
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": str(dist.get_rank()),
        "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
    }
    os.environ.update(told)
    parallel.shutdown()
    try:
        yield
    finally:
        leave_ranks()
        parallel.shutdown()
        for name in told:
            del os.environ[name]


def _run(command: Any, words: list[str]) -> tuple[int, str, str]:
    printed, errors = io.StringIO(), io.StringIO()
    with _launched(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = command(words)
    return code, printed.getvalue(), errors.getvalue()


def train(words: list[str]) -> tuple[int, str, str]:
    """`ledger-train`: exit status, what it printed, its errors."""
    return _run(train_main, words)


def replay(words: list[str]) -> tuple[int, str, str]:
    """`ledger-replay`, alike."""
    return _run(replay_main, words)


def train_until(words: list[str], kind: str, times: int) -> str:
    """`ledger-train`, whose rank 0 ends as if killed before the n-th append of an event `kind`."""
    append, left = Writer.append, times

    def guarded(writer: Writer, events: Any, **keywords: Any) -> Any:
        nonlocal left
        if kind in {type(event).KIND for event in events}:
            left -= 1
            if not left:
                raise Killed
        return append(writer, events, **keywords)

    Writer.append = guarded  # type: ignore[method-assign]
    try:
        with _launched(), contextlib.redirect_stderr(io.StringIO()):
            try:
                return f"ended with {train_main(words)}"
            except Killed:
                claim_failure(137)
                return "killed"
    finally:
        Writer.append = append  # type: ignore[method-assign]
        sys.stdout.flush()
