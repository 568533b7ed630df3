"""`ledger-train` and `ledger-rollout` on one ledger, in S3 and PostgreSQL, both killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ledger import Ledger, open_ledger
from ledger.check import check_ledger
from ledger.verify import verify_ledger
from ledger.waiting import wait_for
from tests.main_job.job import SMALL
from tests.servers.postgres import postgres_server
from tests.servers.s3 import s3_server
from tests.two_commands.commands import commands

ROOT = Path(__file__).parents[2]
OPTIONS = {
    **SMALL,
    "num_rollout": 3,
    "num_steps_per_rollout": 2,
}


def words(**options: object) -> list[str]:
    """The options as a command line has them."""
    found = ["--json"]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        found += [flag] if value is True else [flag, str(value)]
    return found


def until(ledger: Ledger, seen: Callable[[], bool], what: str) -> None:
    """Return once `seen` says so of the run's events."""
    wait_for(ledger, "run", lambda: seen() or None, what=what, timeout_s=600)


def count(ledger: Ledger, kind: str, rollout_step: int) -> int:
    """Events of a kind in a rollout step."""
    table = ledger.reader("run").table(kind, ["rollout_step"])
    return table["rollout_step"].to_pylist().count(rollout_step)


def test_both_are_killed_and_every_sample_is_trained_once(tiny_dense: Path, tmp_path: Path) -> None:
    with s3_server() as s3, postgres_server() as postgres:
        uri, catalog = f"s3://{s3.bucket()}/ledger", postgres.schema()
        options = {**OPTIONS, "hf_checkpoint": tiny_dense, "save": tmp_path / "checkpoints"}
        train = words(
            **options,
            ledger=uri,
            catalog=catalog,
            rollout_by="elsewhere",
            update_weight_disk_dir=tmp_path / "weights",
        )
        sample = words(ledger=uri, catalog=catalog, rollout_timeout_minutes=10)
        with commands(tmp_path, s3.environment) as started:
            rollouts = started.start("rollout.cli", sample)
            trainer = started.start("trainer.cli", train)
            with open_ledger(
                uri, create=True, catalog=catalog, storage_options=s3.storage_options
            ) as ledger:
                until(ledger, lambda: _begun(ledger), "the run to begin")
                # Both have a rollout step left that needs the other: neither has ended by itself.
                until(ledger, lambda: count(ledger, "step_committed", 0) > 0, "a first step")
                trainer.kill()
                trainer = started.start("trainer.cli", train)
                until(ledger, lambda: count(ledger, "prompt_issued", 1) > 0, "rollout step 1")
                rollouts.kill()
                rollouts = started.start("rollout.cli", sample)
                trained, sampled = trainer.result(), rollouts.result()
                assert (sampled["weight_version"], trained["weight_version"]) == (4, 6)
                assert_complete(ledger)
    kept = {folder.name for folder in (tmp_path / "weights" / "run" / "main").iterdir()}
    assert kept == {"v000004", "v000006"}


def _begun(ledger: Ledger) -> bool:
    return any(run.head_seq for run in ledger.runs())


def assert_complete(ledger: Ledger) -> None:
    """Nothing is damaged, no rule is broken, and what was kept was trained once."""
    assert verify_ledger(ledger).ok
    assert check_ledger(ledger.reader("run", branch=None)).ok
    trained = ledger.reader("run", branch=None).sql(
        "select d.index, count(c.index) as times from sample_decided d left join "
        "(select unnest(indices) as index from step_committed) c on c.index = d.index "
        "where d.decision = 'kept' group by d.index"
    )
    assert set(trained["times"].to_pylist()) == {1}


def test_the_command_and_its_options_import_no_trainer() -> None:
    """Where rollouts are made, neither torch nor Megatron need be there until an engine asks."""
    code = """
import contextlib, sys
import rollout.cli
with contextlib.suppress(SystemExit):
    rollout.cli.main(["--help"])
import ledger.opening, rollout.beginning, rollout.published, rollout.side, rollout.taking_turns
import trainer.begin, trainer.progress
heavy = {"torch", "megatron.core", "ray", "sglang", "transformers"} & sys.modules.keys()
print(sorted(heavy), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
    assert "--rollout-only" in done.stdout
