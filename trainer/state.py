"""What a training step turns into the next: weights, Adam's moments, schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ledger.canonical import json_digest
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
    unwrap,
)
from trainer.megatron_args import passed_on
from trainer.model import build_chunks, read_config
from trainer.optimizer_slots import MAIN, MOMENTS, inner_optimizers, slots_of
from trainer.parallel import seed_everything
from trainer.ranks import all_gather_object
from trainer.settings import OptimizerSettings, ParallelSettings
from trainer.weights import Placement, assemble, export_weights, import_weights, place
from trainer.weights.handles import open_files
from trainer.weights.placement import chunks_of
from trainer.weights.transfer import Destination, local_values

__all__ = [
    "MAIN",
    "MOMENTS",
    "TrainState",
    "check_settings",
    "create_state",
    "load_weights",
    "make_optimizer",
    "make_scheduler",
    "records_on_every_rank",
    "state_around",
    "widened",
]


@dataclass(slots=True, eq=False)
class TrainState:
    """Weights, optimizer, scheduler and random generators of one policy: this rank's part of them.

    A step is `zero_grad`, forward and backward over `chunks` (what Megatron's schedules take),
    then `optimizer_step`. Between the first and the last, the process's generators are this
    state's; outside a step nobody's draws can change it, and it changes nobody's. Digests and
    records are under canonical Hugging Face names and about the whole model, so they do not depend
    on how Megatron lays the weights out: what names or exports tensors is collective, and records
    come out equal on every rank.
    """

    chunks: list[Any]
    """Megatron's DistributedDataParallel around each chunk of the pipeline that is here."""
    optimizer: Any
    """Megatron's optimizer (FP32Optimizer, or a chain of them with experts)."""
    scheduler: OptimizerParamScheduler
    hf_config: Mapping[str, Any]
    parallel: ParallelSettings
    settings: OptimizerSettings
    placement: Placement
    """Where the canonical tensors are."""
    generators: dict[str, Tensor]
    """States of the generators between steps, as `trainer.digests.random_state` names them."""
    critic: TrainState | None = None
    """The critic beside the policy, where the estimator takes values; see `trainer.critic`."""
    _outside: dict[str, Tensor] | None = None
    """During a step: the states that the process's generators get back after it."""

    @property
    def model(self) -> GPTModel:
        """The first chunk of this rank, unwrapped: what does not differ between chunks is read
        from it."""
        return unwrap(self.chunks[0])

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

    def leave_step(self) -> None:
        """End a step without an update: weights, moments and schedule stay; gradients are lost."""
        if self._outside is not None:
            restore_random_state(self._outside)
            self._outside = None

    def reset_optimizer(self) -> None:
        """Set Adam's moments and its step count to zero; the schedule stays."""
        for inner in self.inner_optimizers():
            for held in inner.state.values():
                for value in held.values():
                    if isinstance(value, Tensor):
                        value.zero_()
            for group in inner.param_groups:
                if "step" in group:
                    group["step"] = 0

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def steps(self) -> int:
        """Optimizer steps that made this state, from the schedule."""
        return int(self.scheduler.num_steps)

    def export_weights(self, *, to: Destination = 0) -> Iterator[tuple[str, Tensor]]:
        """As `trainer.weights.export_weights`: views, valid until the next optimizer step."""
        return export_weights(self.chunks, to=to, placement=self.placement)

    def tensor_records(self) -> list[TensorRecord]:
        """A record of each weight, sorted by name."""
        return records_on_every_rank(self.export_weights(to="spread"))

    def gradient_records(self) -> list[TensorRecord]:
        """A record of each gradient (main_grad), sorted by name. Before `optimizer_step`."""
        self._complete_gradients()
        local = self.placement.local
        return records_on_every_rank(
            assemble(
                self.placement,
                lambda key: _main_grad(local[key]),
                to="spread",
                dtype=self._gradient_dtype(),
            )
        )

    def _gradient_dtype(self) -> torch.dtype:
        dtypes = {buffer.grad_dtype for chunk in self.chunks for buffer in _buffers(chunk)}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def _complete_gradients(self) -> None:
        """With a distributed optimizer each data-parallel rank has the sums of its own run of the
        gradients; put them into everybody's buffers. What the optimizer reads stays as it is."""
        if not self.settings.use_distributed_optimizer:
            return
        for chunk in self.chunks:
            for bucket_group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group = bucket_group.intra_distributed_optimizer_instance_group
                if dist.get_world_size(group) == 1:
                    continue
                for bucket in bucket_group.buckets:
                    runs = bucket.grad_data.chunk(dist.get_world_size(group))
                    mine = runs[dist.get_rank(group)].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)

    def moments(self, *, to: Destination = 0) -> Iterator[tuple[str, Tensor]]:
        """What the optimizer keeps beside the weights, by `<kind>.<canonical name>`, float32.

        Adam's moments, `exp_avg` and `exp_avg_sq`, and the main weights where the model's are of
        16 bits; no moments before a first step. Comes out as `export_weights` does.
        """
        slots = slots_of(self.optimizer)
        local = self.placement.local
        for kind in self.kept_kinds():
            for name, tensor in assemble(
                self.placement,
                lambda key, kind=kind: slots[id(local[key])].whole(kind),  # type: ignore[misc]
                to=to,
                dtype=torch.float32,
            ):
                yield f"{kind}.{name}", tensor

    def kept_kinds(self) -> list[str]:
        """The kinds of tensors that `moments` gives. Collective."""
        kinds = list(MOMENTS) if self.adam_step() else []
        slots = slots_of(self.optimizer)
        if any(all_gather_object(any(slot.has_main for slot in slots.values()))):
            kinds.append(MAIN)
        return kinds

    def load_moments(self, named: Mapping[str, Any], step: int) -> None:
        """Make the optimizer's state what `moments` gave, at Adam's step `step`.

        `named` are tensors of the whole model or handles, as in `import_weights`; without any the
        optimizer has not stepped. Not collective: each rank takes its own runs.

        Raises KeyError where one is missing.
        """
        self._forget_moments(step)
        for kind in (*MOMENTS, MAIN):
            of_kind = {
                name.removeprefix(f"{kind}."): value
                for name, value in named.items()
                if name.startswith(f"{kind}.")
            }
            if of_kind:
                wholes = local_values(self.placement, of_kind, dtype=torch.float32)
                self._load_kind(kind, wholes, step)

    def load_local_moments(self, by_kind: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """As `load_moments`, from tensors by kind and key, each in the shape of this rank's own."""
        self._forget_moments(step)
        for kind, wholes in by_kind.items():
            self._load_kind(kind, wholes.items(), step)

    def _forget_moments(self, step: int) -> None:
        for inner in inner_optimizers(self.optimizer):
            inner.state.clear()
            for group in inner.param_groups:
                if "step" in group:
                    # Fused implementations on a GPU keep it in the group.
                    group["step"] = step

    def _load_kind(self, kind: str, wholes: Iterable[tuple[str, Tensor]], step: int) -> None:
        slots = slots_of(self.optimizer)
        for key, whole in wholes:
            slot = slots[id(self.placement.local[key])]
            if slot.held is None:
                continue
            if kind == MAIN:
                with torch.no_grad():
                    slot.held.copy_(slot.run(whole))
                continue
            held = slot.inner.state[slot.held]
            held[kind] = slot.run(whole).clone()
            if not any("step" in group for group in slot.inner.param_groups):
                held["step"] = torch.tensor(float(step), dtype=torch.float32)

    def optimizer_digest(self) -> bytes:
        """blake3 (32 bytes) over Adam's moments and step count, and the scheduler."""
        return self.optimizer_digest_from(self.moment_records())

    def moment_records(self) -> list[TensorRecord]:
        """A record of each tensor of `moments`."""
        return records_on_every_rank(self.moments(to="spread"))

    def optimizer_digest_from(self, moments: list[TensorRecord]) -> bytes:
        """As `optimizer_digest`, from records of the moments that were made already."""
        return optimizer_root(moments, self.adam_step(), self.scheduler.state_dict())

    def random_state_digest(self) -> bytes:
        """blake3 (32 bytes) of the states of all generators; of those of all ranks where they
        differ from each other."""
        roots = all_gather_object(random_state_root(self.generators))
        if len(set(roots)) == 1:
            return roots[0]
        return json_digest({"ranks": [root.hex() for root in roots]})

    def adam_step(self) -> int:
        """How often Adam stepped: one number, the same for all parameters of all ranks."""
        counts: set[int] = set()
        for inner in inner_optimizers(self.optimizer):
            counts |= {int(one["step"]) for one in inner.state.values() if "step" in one}
            counts |= {
                int(group["step"])
                for group in inner.param_groups
                if "step" in group and group["params"]
            }
        counts = set().union(*all_gather_object(counts))
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
        return inner_optimizers(self.optimizer)


def records_on_every_rank(named: Iterable[tuple[str, Tensor]]) -> list[TensorRecord]:
    """Records of tensors that the ranks assembled between them, sorted by name, on all of them."""
    mine = records_of(named)
    return sorted(
        (record for records in all_gather_object(mine) for record in records),
        key=lambda record: record.name,
    )


def _main_grad(parameter: Any) -> Tensor:
    """The accumulated gradient, which Megatron's DDP hangs on the parameter."""
    gradient: Tensor = parameter.main_grad
    return gradient


def _buffers(chunk: Any) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def create_state(
    model_dir: str | Path,
    parallel: ParallelSettings,
    optimizer: OptimizerSettings,
    *,
    seed: int,
    load: bool = True,
) -> TrainState:
    """A fresh state from a Hugging Face model folder, and the generators seeded.

    After `trainer.parallel.initialize`. The result is a function of the folder, the settings and
    `seed`. With `load=False` the weights are whatever memory held: for a checkpoint that is loaded
    next.

    Raises NotFound, Corrupt or InvalidArgument where the folder or the settings cannot be used.
    """
    check_settings(optimizer)
    hf_config = read_config(model_dir)
    chunks = build_chunks(hf_config, parallel, trainable=True)
    if load:
        load_weights(chunks, model_dir)
    for chunk in chunks:
        chunk.train()
    state = state_around(chunks, hf_config, parallel, optimizer)
    seed_everything(seed)
    state.generators = random_state()
    return state


def state_around(
    model: Any,
    hf_config: Mapping[str, Any],
    parallel: ParallelSettings,
    optimizer: OptimizerSettings,
) -> TrainState:
    """The state of a model whose weights are loaded: gradients, optimizer, schedule at the
    beginning; its generators are as the process's are now.

    `model` is a rank's only chunk, or the list of its chunks.
    """
    check_settings(optimizer)
    bare = chunks_of(model)
    config = unwrap(bare[0]).config
    chunks = [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp_config(parallel, optimizer),
            module=chunk,
            # The gradients of later chunks are ready at once; smaller buckets gain nothing there.
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(bare)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = (
        chunks[0].no_sync if len(chunks) == 1 else [chunk.no_sync for chunk in chunks]
    )
    if chunks[0].ddp_config.overlap_grad_reduce and len(chunks) > 1:
        config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    megatron_optimizer = make_optimizer(optimizer, chunks, parallel)
    return TrainState(
        chunks=chunks,
        optimizer=megatron_optimizer,
        scheduler=make_scheduler(optimizer, megatron_optimizer),
        hf_config=hf_config,
        parallel=parallel,
        settings=optimizer,
        placement=place(chunks),
        generators=random_state(),
    )


def ddp_config(
    parallel: ParallelSettings, optimizer: OptimizerSettings
) -> DistributedDataParallelConfig:
    """Megatron's settings of how gradients are gathered and reduced."""
    options: dict[str, Any] = {
        "overlap_grad_reduce": False,
        "grad_reduce_in_fp32": parallel.bf16 and parallel.accumulate_allreduce_grads_in_fp32,
        "use_distributed_optimizer": optimizer.use_distributed_optimizer,
    }
    options |= passed_on(DistributedDataParallelConfig, parallel.megatron)
    return DistributedDataParallelConfig(**options)


def load_weights(model: Any, model_dir: str | Path) -> None:
    """Copy the weights of a model folder into a model: its only chunk, or the list of its chunks.

    Each rank reads its own shards. Floats of another width become those of the model: widening is
    exact, bfloat16 rounds to the nearest. Raises as `open_files` and `import_weights`.
    """
    import_weights(model, open_files(model_dir), convert=True)


def widened(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with floats of 16 bits as float32, which is exact."""
    return {
        name: tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
        for name, tensor in named.items()
    }


def make_optimizer(
    settings: OptimizerSettings, chunks: list[Any], parallel: ParallelSettings
) -> Any:
    """Megatron's optimizer over the parameters of `chunks`, without any state yet.

    With bfloat16 weights, its main weights are the model's, widened.
    """
    options: dict[str, Any] = {
        "optimizer": "adam",
        "lr": settings.lr,
        "min_lr": settings.min_lr,
        "weight_decay": settings.weight_decay,
        "adam_beta1": settings.adam_beta1,
        "adam_beta2": settings.adam_beta2,
        "adam_eps": settings.adam_eps,
        # Megatron takes no norm where it does not clip; a limit that no norm reaches gives the
        # norm.
        "clip_grad": settings.clip_grad if settings.clip_grad > 0 else math.inf,
        "params_dtype": torch.bfloat16 if parallel.bf16 else torch.float32,
        "bf16": parallel.bf16,
        "use_distributed_optimizer": settings.use_distributed_optimizer,
    }
    options |= passed_on(OptimizerConfig, parallel.megatron)
    config = OptimizerConfig(**options)
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


def _wrong(on: str, expected: object, found: object) -> InvalidArgument:
    return InvalidArgument(
        explain("setting up the optimizer", on=on, expected=expected, found=found)
    )
