"""Keeping the progress bars of `transformers` off a terminal that shows ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_progress_bars"]


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Turn the library's bars off inside, and back as they were afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
