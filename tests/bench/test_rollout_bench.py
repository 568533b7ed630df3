"""The simulations of rollouts measure what they say, and run in their short form."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest

from tests.bench.crowds import crowd_figures
from tests.bench.engines import Capacity, Offer, engine_figures
from tests.bench.idle import SHAPES, Load, idle_figures, run_shape
from tests.bench.simulated import (
    LONGEST_TOKENS,
    default_lengths,
    read_lengths,
    run_simulated,
    write_lengths,
)
from tests.bench.tokens import token_figures


def test_waiting_takes_no_time_and_work_takes_what_it_takes() -> None:
    async def waits() -> tuple[float, list[str]]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        order: list[str] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            order.append(name)

        async def worker() -> None:
            await asyncio.to_thread(time.sleep, 0.05)
            order.append("thread")

        await asyncio.gather(sleeper("b", 3600.0), sleeper("a", 60.0), worker())
        return loop.time() - began, order

    took, order = run_simulated(waits(), counts_work=False)
    # Nobody's clock jumps while a thread works.
    assert order == ["thread", "a", "b"]
    assert took == pytest.approx(3600.0)
    took, order = run_simulated(waits(), counts_work=True)
    assert order == ["thread", "a", "b"]
    assert took > 3600.0


def test_lengths_are_given_or_written_out(tmp_path: Path) -> None:
    path = write_lengths(tmp_path, None)
    assert read_lengths(path) == default_lengths() == read_lengths(None)
    assert max(default_lengths()) == LONGEST_TOKENS
    assert 2 * np.median(default_lengths()) < 3100
    assert write_lengths(tmp_path / "unused", path) == path
    path.write_text("0\n")
    with pytest.raises(ValueError, match="at least 1"):
        read_lengths(path)


def test_asynchronous_rollouts_hide_the_tail(tmp_path: Path) -> None:
    # Every eighth answer is ten times as long.
    load = Load(
        lengths=[100, 110, 120, 130, 140, 150, 160, 1500],
        batch=2,
        samples=4,
        running=8,
        update_s=0.1,
        warm=1,
        steps=2,
    )
    found = {name: run_shape(load, shape, tmp_path / name) for name, shape in SHAPES.items()}
    # All wait for the long one, then for the trainer.
    synchronous = 1500 * load.token_s + load.train_s + load.update_s
    assert found["synchronous"].step_s == pytest.approx(synchronous, rel=0.01)
    assert found["asynchronous"].step_s < found["partial"].step_s < synchronous
    assert found["synchronous"].idle == pytest.approx(1 - load.train_s / synchronous, rel=0.02)


def test_what_saturates_follows_from_what_was_measured() -> None:
    offer = Offer(samples=2.0, tokens=4000.0)
    found = Capacity(append_s=0.01, sample_s=0.001, commit_s=0.0005, store_bytes_per_s=3.2e6)
    assert found.writer(offer) == 500.0
    assert found.store(offer) == 100.0
    # 8 engines a writer: 16 samples a second, 0.163 in an append: 16 commits a second and writer.
    assert found.catalog(offer, 8) == pytest.approx(8 / (16 * 0.0005))
    # 250 engines: 500 samples a second, 10 an append: 50 commits a second.
    assert found.catalog(offer, 250) == pytest.approx(250 / (50 * 0.0005))
    assert found.catalog(offer, 500) == float("inf")
    slower = dataclasses.replace(found, append_s=0.02)
    assert slower.catalog(offer, 250) == pytest.approx(250 / (25 * 0.0005))


def test_every_part_runs_in_its_short_form(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("40\n60\n20\n200\n")
    figures = [
        *token_figures(tmp_path / "tokens", lengths, quick=True),
        *crowd_figures(tmp_path / "crowds", quick=True),
        *idle_figures(tmp_path / "idle", lengths, quick=True),
        *engine_figures(tmp_path / "engines", lengths, quick=True),
    ]
    goals = {figure.name: figure.wanted() for figure in figures if figure.goal is not None}
    assert goals == {
        "time of a rollout step": "≤ 1.00%",
        "asynchronous, training 90% of generation": "≤ 1.1",
        "asynchronous, training 50% of generation": "≤ 1.1",
    }
    saturated = [f for f in figures if "saturates first" in f.note]
    assert [f.name.split(" for ")[0] for f in saturated] == ["one writer", "a writer"]
    assert all(f.ratio is not None and f.ratio > 0 for f in saturated)
