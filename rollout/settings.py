"""What a rollout can be told, as frozen data. Names as in slime."""

from __future__ import annotations

from dataclasses import dataclass

from ledger.errors import InvalidArgument, explain
from rollout.protocol import SamplingParams
from rollout.slime.arguments import SlimeArguments

__all__ = ["RolloutSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Sizes, sampling and filtering of a rollout step. Raises InvalidArgument where made."""

    run_seed: int
    rollout_batch_size: int
    """Groups to keep."""
    n_samples_per_prompt: int
    over_sampling_batch_size: int | None = None
    """Groups asked for by each round after the first; None: as rollout_batch_size."""
    dynamic_sampling_filter_path: str = "check_reward_nonzero_std"
    """A name in `rollout.filters`, 'none', or an import path."""
    max_rounds: int = 32
    """Rounds of a step before it gives up."""
    rollout_max_response_len: int = 16
    rollout_temperature: float = 1.0
    rollout_top_p: float = 1.0
    rollout_top_k: int = -1
    rollout_logprob_mode: str = "full"
    """'full' or 'processed'; see `SamplingParams.logprob_mode`."""
    greedy_baseline_key: str | None = None
    """One more sample a prompt is taken greedily; its reward is a part, under this name, of the
    rewards of the others. None: no such sample."""
    rollout_stop_token_ids: tuple[int, ...] | None = None
    """None: what the prompt source and the tokenizer say."""

    arguments: SlimeArguments | None = None
    """What custom filters get as slime's `args`; None: these settings."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in (
            "rollout_batch_size",
            "n_samples_per_prompt",
            "over_sampling_batch_size",
            "max_rounds",
            "rollout_max_response_len",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgument(
                    explain(
                        "checking the rollout settings",
                        on="--rollout-max-rounds"
                        if name == "max_rounds"
                        else f"--{name.replace('_', '-')}",
                        expected="at least 1",
                        found=value,
                    )
                )
        self.sampling(())  # checks the sampling parameters

    def groups_of_round(self, round_number: int) -> int:
        """Groups that round `round_number` (from 0) issues."""
        if round_number == 0 or self.over_sampling_batch_size is None:
            return self.rollout_batch_size
        return self.over_sampling_batch_size

    def sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """The parameters that go to the engine."""
        return SamplingParams(
            temperature=self.rollout_temperature,
            top_p=self.rollout_top_p,
            top_k=self.rollout_top_k,
            max_new_tokens=self.rollout_max_response_len,
            stop_token_ids=stop_token_ids,
            logprob_mode=self.rollout_logprob_mode,
        )
