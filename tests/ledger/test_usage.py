"""What a ledger takes on disk: every byte counted once, and a forecast that comes true."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ledger import Ledger, open_ledger
from ledger.cli import main
from ledger.compact import compact, plan_compaction
from ledger.retention import Rule, apply_retention, plan_retention
from ledger.usage import measure_usage
from tests.ledger import factory


def on_disk(folder: Path) -> tuple[int, int]:
    """Bytes of hot and of sealed files."""
    run = folder / "runs"
    return (
        sum(p.stat().st_size for p in run.rglob("*.arrow")),
        sum(p.stat().st_size for p in run.rglob("*.parquet")),
    )


def train(ledger: Ledger, versions: range) -> None:
    """One version after the other, each with the same number of tokens."""
    random = np.random.default_rng(0)
    with ledger.writer("r", producer=f"p{versions.start}") as writer:
        for version in versions:
            writer.append([factory.weights(version, version - 1 if version else None, None)])
            writer.append([factory.checkpoint(version, None)])
            made = []
            for index in range(4 * version, 4 * version + 4):
                tokens = random.integers(0, 50, 2000).astype(np.int32)
                made.append(factory.segment(index, tokens, rollout_step=version))
            writer.append(made)


def test_every_byte_is_counted_once(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    factory.write_story(folder).close()
    with open_ledger(folder) as ledger:
        usage = measure_usage(ledger)
        hot, _ = on_disk(folder)
        assert usage.size_bytes == sum(s.hot_bytes for s in usage.by_kind) == hot
        for shares in (usage.by_kind, usage.by_version, usage.by_run):
            assert abs(sum(s.size_bytes for s in shares) - hot) <= len(shares)
            assert sum(s.rows for s in shares) == 102
        assert (usage.checkpoints, usage.checkpoint_bytes) == (3, 120)
        tokens = ledger.reader(factory.RUN, None).sql(
            "SELECT sum(len(tokens)) AS n FROM segment_generated"
        )
        assert usage.tokens == tokens["n"].to_pylist()[0]
        assert usage.forecast is None
        names = [s.name for s in usage.by_version]
        assert names == ["none yet", "0", "1", "2", "3"]
        report = compact(ledger, plan_compaction(ledger))
        usage = measure_usage(ledger)
        sealed = sum(f.after_bytes for f in report.files)
        assert sum(s.sealed_bytes for s in usage.by_kind) == sealed
        assert usage.unreferenced_bytes == sum(f.before_bytes for f in report.files)
        apply_retention(ledger, plan_retention(ledger, Rule("signal_recorded", before_version=1)))
        (signals,) = [s for s in measure_usage(ledger).by_kind if s.name == "signal_recorded"]
        assert signals.retired_rows == 8


def test_a_forecast_comes_true(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    with open_ledger(folder, create=True) as ledger:
        ledger.create_run("r")
        train(ledger, range(4))
        before = measure_usage(ledger, forecast=4)
        train(ledger, range(4, 8))
        after = measure_usage(ledger)
        assert before.forecast is not None
        grown = after.size_bytes - before.size_bytes
        assert before.forecast.hot_bytes == pytest.approx(grown, rel=0.05)
        assert before.forecast.checkpoint_bytes == 4 * 40
        assert after.core_bytes_per_token == pytest.approx(8, rel=0.5)
        # Compaction saves what was said.
        compact(ledger, plan_compaction(ledger))
        sealed = measure_usage(ledger)
        saved = after.size_bytes - sealed.size_bytes
        assert after.compaction_saves == pytest.approx(saved, rel=0.1)
        assert sealed.compaction_saves <= 0.05 * saved


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], story_path: Path) -> None:
    folder = Path(shutil.copytree(story_path, tmp_path / "copy"))
    for by, says in (("kind", "segment_generated"), ("version", "none yet"), ("run", "run ")):
        assert main(["du", "--ledger", str(folder), "--by", by, "--forecast", "100"]) == 0
        shown = capsys.readouterr().out
        assert says in shown
        assert "the next 100 versions (as the last 4)" in shown
        assert "bytes per sampled token" in shown
    assert main(["du", "--ledger", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"] == 3
