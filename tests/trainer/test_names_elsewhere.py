"""Options by the names of other frameworks: what stands for them here."""

from __future__ import annotations

import pytest

from trainer.cli import build_parser, main
from trainer.names_elsewhere import ELSEWHERE


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--get-mismatch-metrics"], "--get-mismatch-metrics: leave it out"),
        (["--disable-rewards-normalization"], ": --advantage-estimator reinforce"),
        (["--load", "folder"], "--load: leave it out: the same command goes on"),
        (["actor_rollout_ref.actor.clip_ratio_high=0.28"], ".clip_ratio_high: --eps-clip-high"),
        (["+algorithm.adv_estimator=grpo"], ": --advantage-estimator"),
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
