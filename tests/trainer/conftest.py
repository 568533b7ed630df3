"""Fixtures that start Megatron once for all tests: its imports cost seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import pytest

from tests.trainer.megatron_models import Tiny, make
from tests.trainer.ranks.pair import Pair
from trainer.settings import ParallelSettings


@pytest.fixture(scope="session")
def megatron() -> Iterator[ParallelSettings]:
    """Process groups of one rank, one thread, deterministic; gives the layout."""
    from trainer import parallel

    layout = ParallelSettings()
    parallel.initialize(layout, seed=0, num_threads=1, deterministic=True)
    yield layout
    parallel.shutdown()


@pytest.fixture(scope="session")
def tiny(
    megatron: ParallelSettings, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Tiny]:
    """Kind → Hugging Face model and folder, made once."""
    return lru_cache(lambda kind: make(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pair]:
    """Two processes in one world; tests that use it belong to the xdist group "ranks"."""
    pair = Pair()
    yield pair
    pair.close()
