"""Models of the tests: random weights with a few warm-up steps, made once a session.

What a fixture needs is imported inside it: the tests of the ledger alone never load torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# The same examples every time: a run that fails can be run again. HYPOTHESIS_PROFILE=search looks
# for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares expensive fixtures goes to one of the processes that `make test` runs.

    What runs in several processes, or in a cluster, is left to `make test-processes`.
    """
    for item in items:
        path = item.path.relative_to(Path(__file__).parent)
        own = {mark.args[0] for mark in item.iter_markers("xdist_group")}
        if "ranks" in own or {"ray", "two_commands", "test_launch.py"} & set(path.parts):
            item.add_marker(pytest.mark.processes)
        fixtures = getattr(item, "fixturenames", ())
        shared = "main_job" if {"dense_run", "moe_run"} & set(fixtures) else path.as_posix()
        item.add_marker(pytest.mark.xdist_group(shared))


@pytest.fixture(scope="session")
def tiny_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollout.models.tiny import make_tiny_model

    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "dense", warmup_steps=25, warmup_lr=1e-2
    )


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollout.models.tiny import make_tiny_model

    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "moe",
        moe=True,
        warmup_steps=25,
        warmup_lr=1e-2,
        wrong_share=0.2,
    )


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tiny models' tokenizer as `AutoTokenizer` loads it."""
    from transformers import AutoTokenizer

    from rollout.models.tokenizer import character_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    character_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)
