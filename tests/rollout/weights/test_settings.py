"""What the command line says of weight updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ledger.errors import InvalidArgument
from rollout.engines.sglang.settings import sglang_settings
from rollout.weights import WeightUpdateSettings
from trainer.options import OPTIONS


def values(**changes: Any) -> dict[str, Any]:
    """Options of the command line by name, with their defaults."""
    return {**{option.name: option.default for option in OPTIONS}, **changes}


def test_the_options_are_those_of_slime_and_miles() -> None:
    settings = WeightUpdateSettings.of(values())
    assert settings == WeightUpdateSettings()
    settings = WeightUpdateSettings.of(
        values(
            update_weight_transport="nccl",
            update_weight_mode="delta",
            update_weight_disk_dir="weights",
            pause_generation_mode="abort",
        )
    )
    assert settings.transport == "distributed"
    assert (settings.mode, settings.pause_mode) == ("delta", "abort")
    # Engines have another working directory.
    assert settings.disk_dir == Path.cwd() / "weights"


@pytest.mark.parametrize("name", ["transport", "mode", "pause_mode", "check", "buffer_size"])
def test_a_value_that_there_is_not_is_refused(name: str) -> None:
    wrong: Any = 0 if name == "buffer_size" else "other"
    with pytest.raises(InvalidArgument, match=name):
        WeightUpdateSettings(**{name: wrong})


def test_engines_sleep_only_where_the_next_update_wakes_them() -> None:
    sleeping = values(engine="sglang", offload_rollout=True, rollout_num_gpus=1)
    assert sglang_settings(sleeping).arguments["enable-memory-saver"] is True
    for change in (
        {"rollout_engine_urls": ["http://a:1"]},
        {"fully_async": True},
        {"update_weights_interval": 2},
        {"rollout_by": "elsewhere"},
    ):
        flag = "--" + next(iter(change)).replace("_", "-")
        with pytest.raises(InvalidArgument, match=f"--offload-rollout, {flag}"):
            sglang_settings({**sleeping, **change})
