"""Options by the names of other frameworks: what stands for them here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer.cli import build_parser, main
from trainer.names_elsewhere import ELSEWHERE, unknown_options

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--get-mismatch-metrics"], "--get-mismatch-metrics: leave it out"),
        (["--disable-rewards-normalization"], ": --advantage-estimator reinforce"),
        (["--load", "folder"], "--load: leave it out: the same command goes on"),
        (["actor_rollout_ref.actor.clip_ratio_high=0.28"], ".clip_ratio_high: --eps-clip-high"),
        (["+algorithm.adv_estimator=grpo"], ": --advantage-estimator"),
        (["actor_rollout_ref.rollout.n=8"], ".rollout.n: --n-samples-per-prompt"),
        (["actor_rollout_ref.rollout.val_kwargs.n=8"], ".n: --n-samples-per-eval-prompt"),
        (["async_training.staleness_threshold=0.5"], "_threshold: --max-weight-staleness"),
        (["async_training.partial_rollout=True"], ".partial_rollout: --partial-rollout\n"),
        (["++grpo.async_grpo.enabled=true"], ".enabled: --fully-async"),
        (["--model_name_or_path", "m"], "_path: --hf-checkpoint"),
        (["--use-tiss"], "perhaps --use-tis"),
        (["--use-kl", "--beta", "0.1"], "--beta: --use-kl-loss --kl-loss-coef"),  # not shortened
        (["--quite-another-thing", "3"], "no option here stands for it"),
        (["--wandb-key", "secret"], "--wandb-key: WANDB_API_KEY in the environment"),
        (["word"], "word: no option here stands for it"),
    ],
)
def test_an_unknown_option_is_refused_with_what_stands_for_it(words, told, capsys) -> None:
    assert main(["--num-rollout", "1", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("ledger-train: reading the command line")
    assert told in said
    assert "secret" not in said


def test_no_name_elsewhere_is_an_option_here() -> None:
    flags = build_parser()._option_string_actions
    assert not [name for name in ELSEWHERE if "--" + name.replace("_", "-") in flags]


def test_the_names_elsewhere_that_docs_rollouts_lists_are_answered() -> None:
    """Each option of another framework in the table of docs/rollouts.md is told what it is here."""
    page = (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")
    rows = page.partition("## Names elsewhere")[2].partition("\n\nWhat differs")[0].splitlines()
    cells = [row.split("|")[1:-1] for row in rows if row.startswith("| `--")]
    named = [
        (ours.strip(" `"), name)
        for ours, *theirs in cells
        for cell in theirs
        for name in re.findall(r"`([a-z_.]+)`", cell)
        if name not in ("fully_async_rollout", "fully_async_policy", "drop")  # no options
    ]
    known = build_parser()._option_string_actions
    assert len(named) > 8
    for ours, name in named:
        assert f"{name}: {ours}" in str(unknown_options([f"{name}=1"], known)), name
