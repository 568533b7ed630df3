"""What a training step turns into the next: weights, Adam's moments, schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ledger.errors import Diverged, InvalidArgument, explain
from ledger.weights import TensorRecord
from trainer.cpu_shim import optimizer_on_cpu
from trainer.digests import (
    optimizer_root,
    random_state,
    random_state_root,
    records_of,
    restore_random_state,
)
from trainer.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    OptimizerConfig,
    OptimizerParamScheduler,
    finalize_model_grads,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from trainer.model import build_model, read_config
from trainer.parallel import seed_everything
from trainer.settings import OptimizerSettings, ParallelSettings
from trainer.weights import (
    TensorPart,
    export_weights,
    import_weights,
    parts_of,
    read_safetensors,
)

__all__ = [
    "MOMENTS",
    "TrainState",
    "check_settings",
    "create_state",
    "load_weights",
    "make_optimizer",
    "make_scheduler",
    "state_around",
    "widened",
]

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's moments, by their names in the optimizer's state."""


@dataclass(slots=True, eq=False)
class TrainState:
    """Weights, optimizer, scheduler and random generators of one policy.

    A step is `zero_grad`, forward and backward over `chunks` (what Megatron's schedules take),
    then `optimizer_step`. Between the first and the last, the process's generators are this
    state's; outside a step nobody's draws can change it, and it changes nobody's. Digests and
    records are under canonical Hugging Face names, so they do not depend on how Megatron lays the
    weights out.
    """

    model: GPTModel
    chunks: list[Any]
    """Megatron's DistributedDataParallel around the model, one a pipeline chunk."""
    optimizer: Any
    """Megatron's optimizer (FP32Optimizer, or a chain of them with experts)."""
    scheduler: OptimizerParamScheduler
    hf_config: Mapping[str, Any]
    parallel: ParallelSettings
    settings: OptimizerSettings
    parts: tuple[TensorPart, ...]
    """The canonical tensors, sorted by name."""
    generators: dict[str, Tensor]
    """States of the generators between steps, as `trainer.digests.random_state` names them."""
    critic: TrainState | None = None
    """The critic beside the policy, where the estimator takes values; see `trainer.critic`."""
    _outside: dict[str, Tensor] | None = None
    """During a step: the states that the process's generators get back after it."""

    @property
    def config(self) -> Any:
        """Megatron's TransformerConfig, which its schedules read (calculate_per_token_loss, …)."""
        return self.model.config

    def zero_grad(self) -> None:
        """Begin a step: forget all gradients, put this state's generators in place."""
        if self._outside is None:
            self._outside = random_state()
        restore_random_state(self.generators)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_step(self) -> tuple[bool, float, float]:
        """Clip, update the weights, advance the schedule.

        Returns (True, norm of all gradients before clipping, learning rate of this step). The
        gradients must be complete (`finalize_model_grads` ran, which Megatron's schedules do);
        they are scaled in place, so take `gradient_records` first.

        Raises Diverged where the norm is not finite. The weights are spoiled then: drop this state.
        """
        learning_rate = self.learning_rate
        with optimizer_on_cpu():
            ok, grad_norm, _ = self.optimizer.step()
        if not ok or not math.isfinite(grad_norm):
            raise Diverged(
                explain(
                    "stepping the optimizer",
                    on="norm of the gradients",
                    expected="a finite number",
                    found=grad_norm,
                    do="go back to the last committed version; lower --lr or --clip-grad",
                )
            )
        self.scheduler.step(increment=1)
        self.generators = random_state()
        if self._outside is not None:
            restore_random_state(self._outside)
            self._outside = None
        return bool(ok), float(grad_norm), learning_rate

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def steps(self) -> int:
        """Optimizer steps that made this state, from the schedule."""
        return int(self.scheduler.num_steps)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `trainer.weights.export_weights`: views, valid until the next optimizer step."""
        return export_weights(self.model)

    def tensor_records(self) -> list[TensorRecord]:
        """A record of each weight, sorted by name."""
        return records_of(self.export_weights())

    def gradient_records(self) -> list[TensorRecord]:
        """A record of each gradient (main_grad), sorted by name. Before `optimizer_step`."""
        wholes = {name: _main_grad(parameter) for name, parameter in self._parameters().items()}
        return records_of(self._cut(wholes))

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Adam's moments, `exp_avg.<name>` and `exp_avg_sq.<name>`; none before a first step."""
        states = self.adam_states()
        for moment in MOMENTS:
            held = {name: s[moment] for name, s in states.items() if moment in s}
            if held:
                for name, tensor in self._cut(held):
                    yield f"{moment}.{name}", tensor

    def optimizer_digest(self) -> bytes:
        """blake3 (32 bytes) over Adam's moments and step count, and the scheduler."""
        return self.optimizer_digest_from(records_of(self.moments()))

    def optimizer_digest_from(self, moments: list[TensorRecord]) -> bytes:
        """As `optimizer_digest`, from records of the moments that were made already."""
        return optimizer_root(moments, self.adam_step(), self.scheduler.state_dict())

    def random_state_digest(self) -> bytes:
        """blake3 (32 bytes) of the states of all generators."""
        return random_state_root(self.generators)

    def adam_states(self) -> dict[str, dict[str, Any]]:
        """Megatron's parameter name → its state in torch's Adam (empty before the first step)."""
        names = {id(parameter): name for name, parameter in self._parameters().items()}
        return {
            names[id(parameter)]: inner.state.get(parameter, {})
            for inner in self.inner_optimizers()
            for group in inner.param_groups
            for parameter in group["params"]
        }

    def adam_step(self) -> int:
        """How often Adam stepped: one number, the same for all parameters."""
        counts = {int(state["step"]) for state in self.adam_states().values() if "step" in state}
        for inner in self.inner_optimizers():
            # Fused implementations on a GPU keep it in the group.
            counts |= {int(group["step"]) for group in inner.param_groups if "step" in group}
        if len(counts) > 1:
            raise Diverged(
                explain(
                    "reading the optimizer's step count",
                    expected="one number for all parameters",
                    found=sorted(counts),
                )
            )
        return counts.pop() if counts else 0

    def inner_optimizers(self) -> list[torch.optim.Optimizer]:
        """torch's optimizers inside Megatron's, in its order."""
        chained = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [one.optimizer for one in chained if one.optimizer is not None]

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.model.named_parameters())

    def _cut(self, wholes: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            if part.trained:
                yield part.name, part.take(wholes[part.parameter])


def _main_grad(parameter: Any) -> Tensor:
    """The accumulated gradient, which Megatron's DDP hangs on the parameter."""
    gradient: Tensor = parameter.main_grad
    return gradient


def create_state(
    model_dir: str | Path,
    parallel: ParallelSettings,
    optimizer: OptimizerSettings,
    *,
    seed: int,
) -> TrainState:
    """A fresh state from a Hugging Face model folder, and the generators seeded.

    After `trainer.parallel.initialize`. The result is a function of the folder, the settings and
    `seed`.

    Raises NotFound, Corrupt or InvalidArgument where the folder or the settings cannot be used.
    """
    check_settings(optimizer)
    hf_config = read_config(model_dir)
    model = build_model(hf_config, parallel, trainable=True)
    load_weights(model, model_dir)
    model.train()
    state = state_around(model, hf_config, parallel, optimizer)
    seed_everything(seed)
    state.generators = random_state()
    return state


def state_around(
    model: GPTModel,
    hf_config: Mapping[str, Any],
    parallel: ParallelSettings,
    optimizer: OptimizerSettings,
) -> TrainState:
    """The state of a model whose weights are loaded: gradients, optimizer, schedule at the
    beginning; its generators are as the process's are now."""
    check_settings(optimizer)
    chunks = [
        DistributedDataParallel(
            config=model.config,
            ddp_config=DistributedDataParallelConfig(
                overlap_grad_reduce=False,
                use_distributed_optimizer=optimizer.use_distributed_optimizer,
            ),
            module=model,
        )
    ]
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.no_sync_func = chunks[0].no_sync
    megatron_optimizer = make_optimizer(optimizer, chunks)
    return TrainState(
        model=model,
        chunks=chunks,
        optimizer=megatron_optimizer,
        scheduler=make_scheduler(optimizer, megatron_optimizer),
        hf_config=hf_config,
        parallel=parallel,
        settings=optimizer,
        parts=parts_of(model),
        generators=random_state(),
    )


def load_weights(model: Any, model_dir: str | Path) -> None:
    """Copy the weights of a model folder into a model. Narrower floats are widened, which is exact.

    Raises as `read_safetensors` and `import_weights`.
    """
    import_weights(model, widened(read_safetensors(model_dir)))


def widened(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with floats of 16 bits as float32, which is exact."""
    return {
        name: tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
        for name, tensor in named.items()
    }


def make_optimizer(settings: OptimizerSettings, chunks: list[Any]) -> Any:
    """Megatron's optimizer over the parameters of `chunks`, without any state yet."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        # Megatron takes no norm where it does not clip; a limit that no norm reaches gives the
        # norm.
        clip_grad=settings.clip_grad if settings.clip_grad > 0 else math.inf,
        params_dtype=torch.float32,
        use_distributed_optimizer=settings.use_distributed_optimizer,
    )
    with optimizer_on_cpu():
        return get_megatron_optimizer(
            # Megatron's own rule: biases and norms are not decayed.
            config,
            chunks,
            config_overrides=get_standard_config_overrides(config),
        )


def make_scheduler(settings: OptimizerSettings, optimizer: Any) -> OptimizerParamScheduler:
    """Megatron's schedule of learning rate and weight decay, at its beginning."""
    decay = settings.lr_decay_iters
    if decay is None:
        decay = settings.lr_warmup_iters + 1  # never read where the rate stays constant
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=decay,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def check_settings(settings: OptimizerSettings) -> None:
    """Raises InvalidArgument for settings that cannot work."""
    styles = ("constant", "linear", "cosine", "inverse-square-root")
    if settings.lr_decay_style not in styles:
        raise _wrong("--lr-decay-style", f"one of {', '.join(styles)}", settings.lr_decay_style)
    if settings.lr_decay_style != "constant" and settings.lr_decay_iters is None:
        raise _wrong("--lr-decay-iters", f"a number, for {settings.lr_decay_style}", "nothing")
    if settings.lr_decay_iters is not None and not (
        0 <= settings.lr_warmup_iters < settings.lr_decay_iters
    ):
        raise _wrong(
            "--lr-warmup-iters",
            f"below --lr-decay-iters {settings.lr_decay_iters}",
            settings.lr_warmup_iters,
        )
    if settings.lr_warmup_iters < 0:
        raise _wrong("--lr-warmup-iters", "0 or more", settings.lr_warmup_iters)
    if not 0 <= settings.lr < math.inf:
        raise _wrong("--lr", "a finite number, at least 0", settings.lr)
    if not 0 <= settings.min_lr <= settings.lr:
        raise _wrong("--min-lr", f"between 0 and --lr {settings.lr}", settings.min_lr)
    if settings.use_distributed_optimizer:
        raise _wrong("--use-distributed-optimizer", "off: this version trains on one rank", "on")


def _wrong(on: str, expected: object, found: object) -> InvalidArgument:
    return InvalidArgument(
        explain("setting up the optimizer", on=on, expected=expected, found=found)
    )
