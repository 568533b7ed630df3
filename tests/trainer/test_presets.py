"""Presets, other frameworks' spellings, and what is said or refused at the start of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ledger import open_ledger
from ledger.errors import InvalidArgument
from tests.trainer.advantage_cases import EVERY, advantages
from trainer.algorithms import losses
from trainer.algorithms.check import WITHOUT_KL, check_algorithm
from trainer.algorithms.losses import POLICY_LOSSES
from trainer.algorithms.notes import COMPARED, algorithm_notes
from trainer.algorithms.unused import _BY_LOSS
from trainer.begin import find_standing
from trainer.option_values import validate
from trainer.options import OPTIONS
from trainer.options.advantages import OPTIONS as ADVANTAGE_OPTIONS
from trainer.presets import ESTIMATOR_SPELLINGS, PRESETS, spelled_out
from trainer.settings import AlgorithmSettings, algorithm_settings


def settings_of(**explicit) -> AlgorithmSettings:
    return algorithm_settings(validate(spelled_out(explicit)))


def test_the_option_offers_exactly_the_presets():
    (option,) = [o for o in ADVANTAGE_OPTIONS if o.name == "preset"]
    assert option.choices is not None
    assert set(option.choices) == set(PRESETS)


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("name", EVERY)
def test_every_preset_makes_settings_that_can_work(preset, name):
    settings = settings_of(preset=preset, advantage_estimator=name)
    check_algorithm(settings)
    assert settings.advantage_estimator == name


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_names_options_that_exist_and_changes_each(preset):
    known = {o.name: o.default for o in OPTIONS}
    for default in PRESETS[preset]:
        assert known[default.option] != default.value
        assert set(default.when) <= set(known)
        assert ":" in default.source


def test_presets_against_numbers():
    """Rewards 1, 0, 0, 0: mean 1/4, unbiased deviation 1/2; the others of a 0 are 1, 0, 0."""
    rewards = [1.0, 0.0, 0.0, 0.0]

    def given(preset, rewards=rewards):
        settings = settings_of(preset=preset)
        names = [o.name for o in ADVANTAGE_OPTIONS if o.name in AlgorithmSettings.__slots__]
        said = {n: getattr(settings, n) for n in names if n != "advantage_estimator"}
        return advantages("grpo", rewards, **said)

    one = pytest.approx
    assert given("slime") == one([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert given("trl")[0] == one(0.75 / (0.5 + 1e-4), abs=1e-7)
    assert given("verl")[0] == one(0.75 / (0.5 + 1e-6), abs=1e-7)
    # NeMo-RL: the 1 stands against three zeros, which have no deviation to divide by; a 0 against
    # 1, 0, 0 with mean 1/3 and deviation sqrt(1/3).
    assert given("nemo-rl") == one([1, *[-(1 / 3) / 3**-0.5] * 3], abs=1e-5)
    # A lone rollout: verl takes its reward as it is.
    assert given("verl", [2.0]) == one([2.0], abs=1e-5)
    assert given("slime", [2.0]).tolist() == [0.0]


def test_what_is_given_wins_over_the_preset():
    settings = settings_of(preset="verl", eps_clip_c=5.0, single_sample_advantage="zero")
    assert (settings.eps_clip_c, settings.single_sample_advantage) == (5.0, "zero")
    assert settings.loss_aggregation == "token"
    assert not settings_of(preset="trl", use_tis=False).use_tis
    # TRL's correction makes no sense where old log-probs are the engine's own.
    assert not settings_of(preset="trl", use_rollout_logprobs=True).use_tis


def test_a_preset_may_depend_on_the_estimator_and_the_loss():
    assert settings_of(preset="verl", advantage_estimator="gae").normalize_advantages
    assert not settings_of(preset="verl").normalize_advantages
    gspo = settings_of(preset="verl", advantage_estimator="gspo")
    assert (gspo.policy_loss, gspo.loss_aggregation) == ("gspo", "seq-mean-token-mean")
    assert settings_of(preset="verl", policy_loss="gmpo").loss_aggregation == "seq-mean-token-mean"
    # Its dual clip is of PPO alone.
    assert gspo.eps_clip_c is None
    assert settings_of(preset="verl").eps_clip_c == 3.0
    with_kl = settings_of(preset="verl", use_kl_loss=True)
    assert (with_kl.kl_loss_coef, with_kl.kl_loss_type) == (0.001, "low_var_kl")
    assert settings_of(preset="verl").kl_loss_coef == 0.0


@pytest.mark.parametrize("spelling", sorted(ESTIMATOR_SPELLINGS))
def test_spellings_of_others_mean_what_they_stand_for(spelling):
    settings = settings_of(advantage_estimator=spelling)
    for option, value in ESTIMATOR_SPELLINGS[spelling].items():
        assert getattr(settings, option) == value
    assert settings.advantage_estimator in EVERY
    assert settings.policy_loss in POLICY_LOSSES


def test_slimes_spelling_beside_another_loss_is_refused():
    assert settings_of(advantage_estimator="gspo", policy_loss="gspo").policy_loss == "gspo"
    with pytest.raises(InvalidArgument, match="--policy-loss gspo, which it stands for"):
        settings_of(advantage_estimator="gspo", policy_loss="cispo")


def test_a_new_run_records_what_came_of_preset_and_spelling(tmp_path):
    said = {"preset": "verl", "advantage_estimator": "gspo", "advantage_epsilon": 0.5}
    with open_ledger(tmp_path / "ledger", create=True) as ledger:
        standing = find_standing(ledger, {**said, "ledger": str(tmp_path)})
    recorded = json.loads(standing.settings_json)
    assert recorded["advantage_estimator"] == "grpo"
    assert recorded["policy_loss"] == "gspo"
    assert recorded["loss_aggregation"] == "seq-mean-token-mean"
    assert recorded["single_sample_advantage"] == "reward"
    assert recorded["advantage_epsilon"] == 0.5
    # Said again it stands for the same: a run that is continued is not refused.
    assert {**standing.explicit, "ledger": None} == {**said, "ledger": None}
    assert spelled_out(spelled_out(said)) == spelled_out(said)


def test_another_preset_takes_back_what_the_first_has_set():
    recorded = validate(spelled_out({"preset": "verl", "mis_upper_bound": 5.0}))
    assert recorded["eps_clip_c"] == 3.0
    again = spelled_out({"preset": "slime", "gdpo_whitening": "token"}, recorded)
    assert again["eps_clip_c"] is None
    assert again["loss_aggregation"] == "rollout"
    assert again["gdpo_whitening"] == "token"
    assert "mis_upper_bound" not in again
    # What was given beside the first preset is not its own.
    recorded["eps_clip_c"] = 7.0
    assert "eps_clip_c" not in spelled_out({"preset": "slime"}, recorded)
    assert spelled_out({"preset": "verl"}, recorded)["eps_clip_c"] == 3.0


def test_parts_and_weights_of_gdpo_are_lists_with_commas():
    settings = settings_of(gdpo_reward_keys="right, ended", gdpo_reward_weights="1,0.5")
    assert settings.gdpo_reward_keys == ("right", "ended")
    assert settings.gdpo_reward_weights == (1.0, 0.5)
    with pytest.raises(InvalidArgument, match="numbers with commas"):
        settings_of(gdpo_reward_keys="right", gdpo_reward_weights="much")
    with pytest.raises(InvalidArgument, match="as many as --gdpo-reward-keys"):
        settings_of(gdpo_reward_keys="right", gdpo_reward_weights="1,2")
    with pytest.raises(InvalidArgument, match="each once"):
        settings_of(gdpo_reward_keys="right,right")


@pytest.mark.parametrize("name", EVERY)
def test_one_sample_a_prompt_has_a_clear_statement(name):
    (note,) = algorithm_notes(AlgorithmSettings(advantage_estimator=name), n_samples_per_prompt=1)
    assert f"--n-samples-per-prompt 1 with --advantage-estimator {name}: " in note
    teaches_nothing = "advantage is 0" in note
    assert teaches_nothing == (name in COMPARED)
    assert not algorithm_notes(AlgorithmSettings(advantage_estimator=name), n_samples_per_prompt=2)


def test_one_sample_with_its_reward_and_with_a_filter():
    settings = AlgorithmSettings(single_sample_advantage="reward")
    alone, filtered = algorithm_notes(
        settings, n_samples_per_prompt=1, group_filter="check_reward_nonzero_std"
    )
    assert "its own reward" in alone
    assert "--dynamic-sampling-filter-path" in filtered


def test_a_setting_that_the_estimator_does_not_look_at_is_said():
    settings = AlgorithmSettings(advantage_estimator="rloo", gamma=0.9, lambd=0.5)
    given = {"gamma", "lambd", "lr"}
    assert algorithm_notes(settings, n_samples_per_prompt=8, given=given) == [
        "--advantage-estimator rloo does not look at --gamma, --lambd"
    ]
    # What a preset or a recorded run sets was not asked for here.
    assert not algorithm_notes(settings, n_samples_per_prompt=8)
    settings = AlgorithmSettings(advantage_estimator="ppo", gamma=0.9, lambd=0.5)
    assert not algorithm_notes(settings, n_samples_per_prompt=8, given=given)


def test_what_nothing_looks_at_is_said_wherever_it_was_given():
    settings = AlgorithmSettings(
        policy_loss="vanilla",
        tau_pos=2.0,
        eps_clip=0.1,
        opsm_delta=0.1,
        tis_clip=3.0,
        opd_kl_coef=2.0,
    )
    given = {
        "tau_pos",
        "eps_clip",
        "opsm_delta",
        "tis_clip",
        "opd_kl_coef",
        "critic_lr",
        "ref_load",
    }
    assert algorithm_notes(settings, n_samples_per_prompt=8, given=given) == [
        "--policy-loss vanilla does not look at --tau-pos",
        "without --use-tis nothing looks at --tis-clip",
        "without --use-opsm nothing looks at --opsm-delta",
        "without --kl-coef or --use-kl-loss nothing looks at --ref-load",
        "without a teacher in the advantages nothing looks at --opd-kl-coef",
        "without a critic nothing looks at --critic-lr",
    ]


def test_every_setting_of_one_loss_alone_is_known_to_be_so():
    """A setting of one estimator or loss that is missing in the tables would be passed over."""
    source = "".join(path.read_text("utf-8") for path in Path(losses.__file__).parent.glob("*.py"))
    assert set(re.findall(r"settings\.([a-z]\w*)", source)) - {"policy_loss"} == _BY_LOSS.keys()


def test_groups_that_are_cut_between_steps_are_said():
    (note,) = algorithm_notes(AlgorithmSettings(), n_samples_per_prompt=4, global_batch_size=6)
    assert "--global-batch-size 6 cuts groups of 4 samples" in note
    assert not algorithm_notes(AlgorithmSettings(), n_samples_per_prompt=4, global_batch_size=8)


@pytest.mark.parametrize("name", EVERY)
def test_a_kl_that_an_estimator_would_leave_out_is_refused(name):
    settings = AlgorithmSettings(advantage_estimator=name, kl_coef=0.1)
    if name in WITHOUT_KL:
        with pytest.raises(InvalidArgument, match=r"--kl-coef 0\.1"):
            check_algorithm(settings)
    else:
        check_algorithm(settings)


def test_distillation_is_not_added_to_itself():
    with pytest.raises(InvalidArgument, match="--use-opd"):
        check_algorithm(
            AlgorithmSettings(advantage_estimator="on_policy_distillation", use_opd=True)
        )
