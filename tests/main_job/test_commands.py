"""The command lines of the main job as a person uses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ledger.cli
import replay.cli
import trainer.cli
from ledger import open_ledger
from ledger.encode import events_of
from ledger.errors import InvalidArgument
from ledger.events import BranchForked, RunStarted

Run = tuple[Path, dict[str, Any]]


def test_help_is_grouped_as_users_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        trainer.cli.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    groups = (
        "ledger:",
        "checkpoint:",
        "rollout:",
        "algorithm:",
        "batch:",
        "parallelism:",
        "optimizer:",
    )
    places = [text.index(f"\n{group}") for group in groups]
    assert places == sorted(places)
    for flag in ("--eps-clip-high", "--kl-loss-type", "--n-samples-per-prompt", "--from-version"):
        assert flag in text
    # Megatron-Core's own settings are several hundred: they have a help of their own.
    assert "--moe-grouped-gemm" not in text
    with pytest.raises(SystemExit) as stopped:
        trainer.cli.main(["--help-megatron"])
    assert stopped.value.code == 0
    whole = capsys.readouterr().out
    assert "--moe-grouped-gemm" in whole
    assert "--eps-clip-high" in whole


def test_errors_are_texts_on_standard_error_with_exit_code_2(
    dense_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [
        ["--ledger", str(dense_run[0]), "--from-version", "99"],
        ["--ledger", str(tmp_path / "none"), "--from-version", "0"],
        ["--ledger", str(tmp_path / "new"), "--hf-checkpoint", str(tmp_path / "no-model")],
        ["--ledger", str(tmp_path / "new")],
    ]
    for command in commands:
        assert trainer.cli.main(command) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("ledger-train: ")
        assert "Traceback" not in shown.err


def test_verify_prints_each_step_and_json_says_the_same(
    dense_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--ledger", str(dense_run[0])]
    assert replay.cli.main(["verify", *where]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("every bit as recorded" in line for line in lines) == 4
    assert "4 steps from version 0 reproduced bit for bit" in lines[-1]
    assert replay.cli.main(["verify", *where, "--from-version", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["start_version"], report["steps"], report["reproduced"]) == (2, 2, True)
    assert replay.cli.main(["verify", *where, "--from-version", "9"]) == 2
    assert "0–4" in capsys.readouterr().err


def test_verify_with_nothing_to_run_again_does_not_claim_steps(
    dense_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--ledger", str(dense_run[0])]
    assert replay.cli.main(["verify", *where, "--from-version", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("checkpoint of version 4")
    assert "only the checkpoint of version 4 was compared" in lines[1]
    assert "reproduced" not in lines[1]


def test_verify_starts_with_the_settings_of_the_branch(
    copied: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[dict[str, Any]] = []

    def initialize(_: Any, **given: Any) -> None:
        started.append(given)
        raise InvalidArgument("started")

    monkeypatch.setattr("trainer.parallel.initialize", initialize)
    with open_ledger(copied[0]) as opened:
        (run,) = events_of(opened.reader("run").table("run_started"), RunStarted)
        mine = json.loads(run.settings) | {
            "num_threads": 7,
            "rollout_seed": 5,
            "deterministic_mode": False,
        }
        fork = BranchForked(
            branch="other",
            parent_branch="main",
            fork_seq=opened.run("run").head_seq,
            weight_version=4,
            settings=json.dumps(mine),
            data="recorded",
        )
        opened.fork("run", fork, producer="test").close()
    for branch in ("main", "other"):
        code = replay.cli.main(["verify", "--ledger", str(copied[0]), "--branch", branch])
        assert code == 2
    capsys.readouterr()
    recorded = json.loads(run.settings)
    assert started == [
        {
            "seed": recorded["rollout_seed"],
            "num_threads": recorded["num_threads"],
            "deterministic": recorded["deterministic_mode"],
        },
        {"seed": 5, "num_threads": 7, "deterministic": False},
    ]


def test_verify_of_experts(moe_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.cli.main(["verify", "--ledger", str(moe_run[0])]) == 0
    assert "2 steps from version 0" in capsys.readouterr().out


def test_the_tree_shows_both_branches_and_the_picture_is_one(
    copied: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = ["--ledger", str(copied[0])]
    arguments = [*where, "--from-version", "2", "--advantage-estimator", "rloo", "--json"]
    assert trainer.cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["branch"] == "v2-rloo"
    assert ledger.cli.main(["log", *where]) == 0
    tree = capsys.readouterr().out
    assert "(main)" in tree
    assert "(v2-rloo)" in tree
    picture = tmp_path / "out" / "rewards.png"
    assert replay.cli.main(["plot", *where, "--output", str(picture)]) == 0
    assert capsys.readouterr().out.strip() == str(picture)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 10_000
