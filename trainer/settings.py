"""What a training run can be told, as frozen data. Names as in slime and Megatron.

Each class is validated where it is made, and turned into canonical JSON by `ledger.canonical`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ledger.errors import InvalidArgument, explain
from ledger.redact import redact
from trainer.settings_conditions import advantage_conditions, loss_conditions, routing_conditions

__all__ = [
    "AlgorithmSettings",
    "BatchSettings",
    "OptimizerSettings",
    "ParallelSettings",
    "algorithm_settings",
    "batch_settings",
    "layout_record",
    "optimizer_settings",
    "parallel_settings",
    "settings_record",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """How Megatron lays a model out over its ranks, and in which precision it computes.

    The data-parallel size is what remains of the ranks. Names are Megatron's own.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Model chunks of each pipeline rank (interleaved schedule); None: one, not interleaved."""
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    """None: as the tensor parallel size."""
    sequence_parallel: bool = False
    """Norms and residuals of a tensor-parallel group are split along the sequence."""
    moe_token_dispatcher_type: str = "allgather"
    make_vocab_size_divisible_by: int = 1
    """The vocabulary is padded to a multiple of this times the tensor parallel size."""
    bf16: bool = False
    """bfloat16 weights and activations, beside float32 main weights in the optimizer."""
    accumulate_allreduce_grads_in_fp32: bool = True
    """With bf16: gradients are summed and reduced in float32."""
    attention_backend: str = "auto"
    """'auto', 'local' and 'unfused': Megatron's own arithmetic, that of Hugging Face's eager
    attention; 'flash' and 'fused': torch's scaled_dot_product_attention."""
    recompute_granularity: str | None = None
    """None: keep all activations; 'full' layers or 'selective' parts are computed again."""
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    megatron: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Megatron's own configuration classes, by name (`trainer.megatron_args`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Megatron's Adam, gradient clipping and learning-rate schedule."""

    lr: float = 1e-6
    min_lr: float = 0.0
    lr_decay_style: str = "constant"
    lr_decay_iters: int | None = None
    lr_warmup_iters: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSettings:
    """How rewards become advantages, and advantages a loss."""

    advantage_estimator: str = "grpo"
    """A name in `trainer.algorithms.advantages.ESTIMATORS`."""
    policy_loss: str = "ppo_clip"
    """A name in `trainer.algorithms.losses.POLICY_LOSSES`."""
    grpo_std_normalization: bool = True
    advantage_deviation: str = "unbiased"
    """Deviation of a group: "unbiased" (n − 1) or "biased" (n)."""
    advantage_epsilon: float | None = None
    """Added to what is divided by; None: the estimator's own."""
    use_leave_one_out_baseline: bool = False
    """`grpo` and `gdpo` compare a rollout with the others of its group alone."""
    grpo_std_scope: str = "group"
    """Whose deviation `grpo` and `gdpo` divide by: "group" or "batch"."""
    single_sample_advantage: str = "zero"
    """Of a rollout that is alone in its group: "zero" or "reward"."""
    exclude_masked_rollouts: bool = False
    """A rollout without a loss token does not count in what others are compared with."""
    normalize_advantages: bool = False
    estimator_whitening: bool = True
    """`reinforce_plus_plus`, its baseline form and `gdpo` whiten, as their papers have it."""
    gamma: float = 1.0
    lambd: float = 1.0
    discount_masked_tokens: bool = False
    """γ and λ decay over tokens outside the loss, too."""
    gdpo_reward_keys: tuple[str, ...] = ()
    """Parts of the reward that `gdpo` takes; empty: all."""
    gdpo_reward_weights: tuple[float, ...] = ()
    """Their weights; empty: 1 each."""
    gdpo_whitening: str = "rollout"
    """What counts as one where `gdpo` whitens: a "rollout" or a "token"."""
    remax_baseline_key: str = "greedy_reward"
    """Part of the reward that holds the reward of the prompt's greedy rollout."""
    use_opd: bool = False
    """Add opd_kl_coef · (log π_teacher − log π) to the advantages of any estimator."""
    opd_kl_coef: float = 1.0
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    """None: as eps_clip."""
    eps_clip_c: float | None = None
    """Dual clip, above 1; None: off."""
    kl_coef: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k1"
    entropy_coef: float = 0.0
    calculate_per_token_loss: bool = False
    use_rollout_logprobs: bool = False
    """Old log-probs are the engine's instead of the trainer's before the step."""
    rollout_temperature: float = 1.0
    """Of the rollouts that this run samples. Log-probabilities are taken at the temperature that
    each sample was recorded with, whatever this says."""
    routing_replay: str = "rollout"
    """Whose choices of experts are replayed: the engine's ('rollout'), the 'old_policy's, or
    nobody's ('free'). Dense models have none."""
    replay_routing_weights: bool = False
    """The recorded gate weights are replayed too, and no gradient reaches the routers."""
    cispo_form: str = "slime"
    """'slime': the ratio clipped on both sides; 'canonical': above only."""
    tau_pos: float = 1.0
    """Temperature of SAPO's gate where the advantage is above 0."""
    tau_neg: float = 1.05
    clip_cov_ratio: float = 0.0002
    """Share of the step's loss tokens that Clip-Cov takes out."""
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    """Share of the step's loss tokens that KL-Cov penalises."""
    ppo_kl_coef: float = 1.0
    """Weight of KL-Cov's penalty."""
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    loss_aggregation: str = "rollout"
    """A name of the table in `trainer.algorithms.aggregate`."""
    loss_scale_factor: float | None = None
    """Tokens that a sample's sum is divided by, where the aggregation has such a constant."""
    use_unbiased_kl: bool = False
    """The KL in the loss is multiplied by the ratio of current to old policy."""
    use_tis: bool = False
    """An off-policy correction, see `trainer.algorithms.corrections`."""
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    custom_tis_function_path: str | None = None
    """None: truncated importance sampling; 'icepop', 'mis', or one's own."""
    mis_level: str = "token"
    """'token', 'sequence' or 'geometric'."""
    mis_mode: str = "truncate"
    """'truncate', 'clip' or 'mask'."""
    mis_upper_bound: float = 2.0
    mis_lower_bound: float | None = None
    """None: 1 / mis_upper_bound."""
    mis_veto_threshold: float | None = None
    """Ratio of a single token below which its sample is rejected; None: off."""
    mis_batch_normalize: bool = False
    use_opsm: bool = False
    """Off-policy sequence masking."""
    opsm_delta: float = 1e-4
    mask_offpolicy_in_partial_rollout: bool = False
    """Only tokens of the newest version of each sample enter the loss."""
    value_clip: float = 0.2
    """How far a value may move from what the critic said before the rollout's first step."""
    num_critic_only_steps: int = 0
    """Rollout steps, from the run's first, in which the critic alone is trained."""
    keep_old_actor: bool = False
    """Old log-probs are by the weights that the engine had, kept in the trainer."""
    reset_optimizer_states: bool = False
    """Adam's moments and step count are set to zero before each rollout step."""

    @property
    def aggregation(self) -> str:
        """How token losses become the step's: `calculate_per_token_loss` is 'token'."""
        return "token" if self.calculate_per_token_loss else self.loss_aggregation

    def __post_init__(self) -> None:
        """Check what can be checked without the registries; raises InvalidArgument."""
        # Recorded settings come back from JSON, where a tuple is a list.
        for name in ("gdpo_reward_keys", "gdpo_reward_weights"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        high = self.eps_clip if self.eps_clip_high is None else self.eps_clip_high
        for setting, expected, value, right in (
            ("--eps-clip", "within [0, 1]", self.eps_clip, 0 <= self.eps_clip <= 1),
            ("--eps-clip-high", "at least 0", high, high >= 0),
            (
                "--eps-clip-c",
                "above 1, or nothing for no dual clip",
                self.eps_clip_c,
                self.eps_clip_c is None or self.eps_clip_c > 1,
            ),
            ("--value-clip", "above 0", self.value_clip, self.value_clip > 0),
            (
                "--keep-old-actor",
                "off with --use-routing-replay: the old actor's own routing is not replayed",
                "on",
                not (self.keep_old_actor and self.routing_replay == "old_policy"),
            ),
            (
                "--keep-old-actor",
                "off with --use-rollout-logprobs: one of them says whose old log-probs are",
                "on",
                not (self.keep_old_actor and self.use_rollout_logprobs),
            ),
            (
                "--rollout-temperature",
                "above 0",
                self.rollout_temperature,
                self.rollout_temperature > 0,
            ),
            (
                "--kl-coef with --kl-loss-coef",
                "one of them at 0: the KL belongs into the reward or into the loss",
                f"{self.kl_coef} and {self.kl_loss_coef}",
                self.kl_coef == 0 or self.kl_loss_coef == 0,
            ),
            (
                "--kl-loss-coef",
                "0 without --use-kl-loss",
                self.kl_loss_coef,
                self.use_kl_loss or self.kl_loss_coef == 0,
            ),
            *advantage_conditions(self),
            *loss_conditions(self),
            *routing_conditions(self),
        ):
            if not right:
                raise InvalidArgument(
                    explain(
                        "checking the algorithm settings",
                        on=setting,
                        expected=expected,
                        found=value,
                    )
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Sizes of a step, and the identity that ties them to the rollout."""

    rollout_batch_size: int
    """Prompts (groups) of a rollout step."""
    n_samples_per_prompt: int
    global_batch_size: int
    """Rollouts of an optimizer step: its samples, siblings of one rollout counted once."""
    num_steps_per_rollout: int
    micro_batch_size: int
    """Rows of a micro-batch."""
    seq_length: int | None = None
    """Tokens a row; None: the longest sample of the step."""
    use_dynamic_batch_size: bool = False
    """Micro-batches are rows of samples one after the other, filled by tokens."""
    max_tokens_per_gpu: int | None = None
    """Tokens of such a row at most, times the context parallel size."""
    balance_data: bool = False
    """Data-parallel ranks get samples of about as many tokens each."""

    def __post_init__(self) -> None:
        """Check the batch identity; raises InvalidArgument."""
        if self.use_dynamic_batch_size != (self.max_tokens_per_gpu is not None):
            raise InvalidArgument(
                explain(
                    "checking the batch sizes",
                    on="--use-dynamic-batch-size and --max-tokens-per-gpu",
                    expected="both or neither: the first asks for micro-batches by tokens, the "
                    "second says how many",
                    found="the first alone"
                    if self.use_dynamic_batch_size
                    else f"the second alone, {self.max_tokens_per_gpu}",
                    do="add --max-tokens-per-gpu N"
                    if self.use_dynamic_batch_size
                    else "add --use-dynamic-batch-size, or give rows with --micro-batch-size",
                )
            )
        for name in (
            "rollout_batch_size",
            "n_samples_per_prompt",
            "global_batch_size",
            "num_steps_per_rollout",
            "micro_batch_size",
        ):
            if getattr(self, name) < 1:
                raise InvalidArgument(
                    explain(
                        "checking the batch sizes",
                        on=f"--{name.replace('_', '-')}",
                        expected="at least 1",
                        found=getattr(self, name),
                    )
                )
        made = self.rollout_batch_size * self.n_samples_per_prompt
        used = self.global_batch_size * self.num_steps_per_rollout
        if made != used:
            raise InvalidArgument(
                explain(
                    "checking the batch identity",
                    on="rollout_batch_size × n_samples_per_prompt = "
                    "global_batch_size × num_steps_per_rollout",
                    expected=f"{self.rollout_batch_size} × {self.n_samples_per_prompt} = {made} "
                    "rollouts made by a rollout step",
                    found=f"{self.global_batch_size} × {self.num_steps_per_rollout} = {used} "
                    "rollouts used by its optimizer steps",
                    do="change --global-batch-size or --num-steps-per-rollout so that both sides "
                    "are equal",
                )
            )


_ALWAYS = frozenset(
    [
        "advantage_estimator",
        "policy_loss",
        "grpo_std_normalization",
        "normalize_advantages",
        "eps_clip",
        "eps_clip_high",
        "eps_clip_c",
        "kl_coef",
        "use_kl_loss",
        "kl_loss_coef",
        "kl_loss_type",
        "entropy_coef",
        "calculate_per_token_loss",
        "use_rollout_logprobs",
        "rollout_temperature",
        "lr",
        "min_lr",
        "lr_decay_style",
        "lr_decay_iters",
        "lr_warmup_iters",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "clip_grad",
        "use_distributed_optimizer",
        "rollout_batch_size",
        "n_samples_per_prompt",
        "global_batch_size",
        "num_steps_per_rollout",
        "micro_batch_size",
        "seq_length",
    ]
)
"""Settings that the first version recorded. Never add to it."""


def settings_record(
    algorithm: AlgorithmSettings,
    optimizer: OptimizerSettings,
    sizes: BatchSettings,
    critic: OptimizerSettings | None = None,
) -> dict[str, dict[str, Any]]:
    """The settings of a step as it records them (`step_committed.settings`).

    `critic` are those of the critic's optimizer, where the step has one.

    A setting that came after the first version is left out where it stands at its default, so that
    a step which was recorded before it has the same text, and so the same id, when it is run again.
    A default must therefore never change.
    """
    return {
        name: {
            f.name: value
            for f in fields(settings)
            if (value := getattr(settings, f.name)) != f.default or f.name in _ALWAYS
        }
        for name, settings in (
            ("algorithm", algorithm),
            ("optimizer", optimizer),
            ("sizes", sizes),
            ("critic", critic),
        )
        if settings is not None
    }


def layout_record(parallel: ParallelSettings) -> dict[str, Any]:
    """The layout of a step as it records it (`step_committed.layout`), on the same terms;
    without secrets in what is Megatron's own."""
    always = {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    }
    default = ParallelSettings()
    return {
        f.name: redact(value) if f.name == "megatron" else value
        for f in fields(parallel)
        if (value := getattr(parallel, f.name)) != getattr(default, f.name) or f.name in always
    }


def algorithm_settings(values: Mapping[str, Any]) -> AlgorithmSettings:
    """From the options of `trainer.options`, by name."""
    chosen = {f.name: values[f.name] for f in fields(AlgorithmSettings) if f.name in values}
    chosen["grpo_std_normalization"] = not values["disable_grpo_std_normalization"]
    chosen["routing_replay"] = _routing_replay(values)
    chosen["gdpo_reward_keys"] = _listed(values.get("gdpo_reward_keys"))
    weights = _listed(values.get("gdpo_reward_weights"))
    try:
        chosen["gdpo_reward_weights"] = tuple(float(weight) for weight in weights)
    except ValueError as error:
        raise InvalidArgument(
            explain(
                "checking the algorithm settings",
                on="--gdpo-reward-weights",
                expected="numbers with commas between",
                found=values["gdpo_reward_weights"],
            )
        ) from error
    return AlgorithmSettings(**chosen)


def _routing_replay(values: Mapping[str, Any]) -> str:
    """As in slime, the engine's routing goes before the old policy's where both are asked for."""
    by_policy = values.get("use_routing_replay", False)
    by_engine = values.get("use_rollout_routing_replay")
    if by_engine is None:
        by_engine = not by_policy
    if by_engine:
        return "rollout"
    return "old_policy" if by_policy else "free"


def _listed(text: str | None) -> tuple[str, ...]:
    """The items of a text with commas between them."""
    return tuple(item.strip() for item in text.split(",")) if text else ()


def batch_settings(values: Mapping[str, Any]) -> BatchSettings:
    """From the options of `trainer.options`, by name. Checks the batch identity."""
    return BatchSettings(
        **{f.name: values[f.name] for f in fields(BatchSettings) if f.name in values}
    )


def optimizer_settings(values: Mapping[str, Any]) -> OptimizerSettings:
    """From the options of `trainer.options`, by name."""
    return OptimizerSettings(
        **{f.name: values[f.name] for f in fields(OptimizerSettings) if f.name in values}
    )


def parallel_settings(values: Mapping[str, Any]) -> ParallelSettings:
    """From the options of `trainer.options`, by name; what is none of them is Megatron's own."""
    from trainer.option_values import passed_on

    chosen = {f.name: values[f.name] for f in fields(ParallelSettings) if f.name in values}
    return ParallelSettings(**chosen, megatron=passed_on(values))
