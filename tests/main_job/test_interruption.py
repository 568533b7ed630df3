"""A job that is killed anywhere goes on with the same command, and ends as if it had not been."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trainer.saving
from ledger import open_ledger
from ledger.errors import InvalidArgument
from ledger.writer import Writer
from tests.main_job.job import command_line, identity, retrain, train

STEPS = {"num_steps_per_rollout": 2, "save_interval": 1}


class Killed(BaseException):
    """Stands for the end of the process: no `except Exception` may survive it."""


class Axe:
    """Ends the job at the n-th point it passes, counted over appends, publications and saves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int | None) -> None:
        self.points: list[str] = []
        self._at = at
        append, save = Writer.append, trainer.saving.save_checkpoint

        def guarded_append(writer: Writer, events: Any, **keywords: Any) -> Any:
            kinds = "+".join(sorted({type(e).KIND for e in events}))
            self.pass_point(f"before {kinds}")
            receipt = append(writer, events, **keywords)
            self.pass_point(f"after {kinds}")
            return receipt

        def guarded_save(*arguments: Any, **keywords: Any) -> Any:
            saved = save(*arguments, **keywords)
            self.pass_point("checkpoint written")
            return saved

        monkeypatch.setattr(Writer, "append", guarded_append)
        monkeypatch.setattr(trainer.saving, "save_checkpoint", guarded_save)

    def pass_point(self, name: str) -> None:
        self.points.append(name)
        if len(self.points) - 1 == self._at:
            raise Killed(name)


@pytest.fixture(scope="module")
def uninterrupted(
    tiny_dense: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], dict[str, Any]]:
    """The points that a whole run passes, and what it gives."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        axe = Axe(monkeypatch, None)
        result = train(tmp_path_factory.mktemp("whole") / "ledger", tiny_dense, **STEPS)
    return axe.points, result


def test_killed_at_every_point_and_started_again(
    uninterrupted: tuple[list[str], dict[str, Any]], tiny_dense: Path, tmp_path: Path
) -> None:
    points, whole = uninterrupted
    assert len(points) > 20
    for at, name in enumerate(points):
        ledger = tmp_path / str(at)
        with pytest.MonkeyPatch.context() as monkeypatch:
            Axe(monkeypatch, at)
            with pytest.raises(Killed):
                train(ledger, tiny_dense, **STEPS)
        again = train(ledger, tiny_dense, **STEPS)
        assert identity(again) == identity(whole), f"killed at point {at}: {name}"
        _assert_trained_once(ledger)


def _assert_trained_once(where: Path) -> None:
    with open_ledger(where) as ledger:
        trained = ledger.reader("run", branch=None).sql(
            "select branch, index, count(*) as n from "
            "(select branch, unnest(indices) as index from step_committed) group by all"
        )
    assert set(trained["n"].to_pylist()) == {1}


def test_a_branch_that_is_killed_goes_on_with_the_same_command(
    copied: tuple[Path, dict[str, Any]],
    dense_run: tuple[Path, dict[str, Any]],
    tmp_path: Path,
) -> None:
    ledger, _ = copied
    shutil.copytree(dense_run[0], tmp_path / "whole")
    whole = retrain(tmp_path / "whole", 1, advantage_estimator="rloo", save_interval=2)
    for at in (0, 2, 4):
        with pytest.MonkeyPatch.context() as monkeypatch:
            Axe(monkeypatch, at)
            with pytest.raises(Killed):
                retrain(ledger, 1, advantage_estimator="rloo", save_interval=2)
    again = retrain(ledger, 1, advantage_estimator="rloo", save_interval=2)
    assert identity(again) == identity(whole)
    assert again["branch"] == "v1-rloo"
    _assert_trained_once(ledger)


def test_sigkill_of_a_real_process(
    uninterrupted: tuple[list[str], dict[str, Any]], tiny_dense: Path, tmp_path: Path
) -> None:
    """SIGKILL while the second rollout is under way, then the same command to the end."""
    command = [sys.executable, "-m", "trainer.cli"]
    command += command_line(tmp_path / "ledger", tiny_dense, **STEPS)
    command.remove("--json")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "→ version 2" in line:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert again["kind"] == "resume"
    assert identity(again) == identity(uninterrupted[1])
    _assert_trained_once(tmp_path / "ledger")


def test_going_on_with_other_settings_is_refused_and_says_what_to_do(
    copied: tuple[Path, dict[str, Any]],
) -> None:
    ledger, _ = copied
    with pytest.raises(InvalidArgument) as refused:
        train(ledger, num_rollout=6, lr=3e-4)
    message = str(refused.value)
    assert "--lr 0.001" in message
    assert "--lr 0.0003" in message
    assert "--from-version" in message


def test_a_finished_run_has_nothing_left_and_a_raised_limit_goes_on(
    copied: tuple[Path, dict[str, Any]], tiny_dense: Path, tmp_path: Path
) -> None:
    ledger, before = copied
    nothing = train(ledger, num_rollout=4)
    assert nothing["steps"] == 0
    assert identity(nothing) == identity(before)
    longer = train(ledger, num_rollout=5)
    whole = train(tmp_path / "whole", tiny_dense, num_rollout=5)
    assert identity(longer) == identity(whole)


def test_a_rollout_whose_experts_the_old_policy_chose_goes_on_to_the_bit(
    tiny_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its second step, whose old log-probs are those of a replay, not of the free
    forward that chose: padding goes to other experts there, which round otherwise."""
    options = {**STEPS, "num_rollout": 1, "use_routing_replay": True}
    whole = train(tmp_path / "whole", tiny_moe, **options)
    append = Writer.append

    def guarded(writer: Writer, events: Any, **keywords: Any) -> Any:
        if any(getattr(event, "step_in_rollout", 0) for event in events):
            raise Killed
        return append(writer, events, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "append", guarded)
        with pytest.raises(Killed):
            train(tmp_path / "cut", tiny_moe, **options)
    resumed = train(tmp_path / "cut", num_rollout=1)
    assert resumed["steps"] == 2
    assert identity(resumed) == identity(whole)
