"""Whose choices of experts the steps of a rollout replay, and how far they are the routers' own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from ledger.errors import InvalidArgument, NotFound
from ledger.routing import BY_POLICY, expert_ids_of, expert_weights_of
from tests.trainer.memory import MemoryReader, prompt, routing, score, segment
from tests.trainer.test_step import NUMBERS, content, plan_of, sample_tokens
from tests.trainer.tiny_policy import make_folder, start
from trainer.batch import Batch, load_batch
from trainer.batch_routing import RoutingSource
from trainer.compare import compare_steps
from trainer.forward import recorded_routing
from trainer.settings import (
    AlgorithmSettings,
    BatchSettings,
    OptimizerSettings,
    ParallelSettings,
    algorithm_settings,
)
from trainer.state import TrainState, create_state
from trainer.step import StepResult, run_step
from trainer.stepping import PlannedStep, take_rollout

LAYERS, TOP_K, EXPERTS = 2, 2, 4
SIZES = BatchSettings(
    rollout_batch_size=2,
    n_samples_per_prompt=2,
    global_batch_size=4,
    num_steps_per_rollout=1,
    micro_batch_size=2,
    seq_length=10,
)
HALVES = dataclasses.replace(SIZES, global_batch_size=2, num_steps_per_rollout=2)
ROLLOUT = AlgorithmSettings()
BY_OLD_POLICY = AlgorithmSettings(routing_replay="old_policy")
FREE = AlgorithmSettings(routing_replay="free")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("moe"), moe=True)


def make_state(folder: Path, *, recompute: bool = False, **optimizer: Any) -> TrainState:
    start()
    layout = ParallelSettings()
    if recompute:
        layout = ParallelSettings(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
    return create_state(folder, layout, OptimizerSettings(lr=1e-2, **optimizer), seed=1)


def events_of_samples(*, choices: dict[int, np.ndarray] | None = None, **more: Any) -> list[Any]:
    """The samples of the step tests, without the tool's token, and the engine's routing of them."""
    made: list[Any] = [prompt([0, 1], [1, 2, 3], group=0), prompt([2, 3], [5, 6, 7], group=1)]
    for index, row in enumerate(sample_tokens()):
        made += [segment(index, row[3:], group_index=index // 2), score(index, index in (0, 3))]
        if choices is not None:
            extra = {name: values[index].tobytes() for name, values in more.items()}
            made.append(routing(index, choices[index], num_experts=EXPERTS, **extra))
    return made


def some_choices(seed: int = 0) -> dict[int, np.ndarray]:
    """Of each sample, any two experts a token and layer."""
    random = np.random.default_rng(seed)
    return {
        index: random.permuted(np.tile(np.arange(EXPERTS), (len(row) - 1, LAYERS, 1)), axis=2)[
            ..., :TOP_K
        ]
        for index, row in enumerate(sample_tokens())
    }


def free_choices(state: TrainState) -> dict[int, np.ndarray]:
    return {
        index: recorded_routing(state.model, torch.tensor([row]))[0].numpy()
        for index, row in enumerate(sample_tokens())
    }


def one_step(
    state: TrainState, batch: Batch, algorithm: AlgorithmSettings = ROLLOUT, **numbers: Any
) -> StepResult:
    return run_step(state, batch, plan_of(batch, SIZES), algorithm, SIZES, **(NUMBERS | numbers))


def planned(first: int = 0, count: int = 2) -> list[PlannedStep]:
    """Steps of two samples each, from version 5 on."""
    return [
        PlannedStep(
            step=5 + i,
            rollout_step=2,
            step_in_rollout=i,
            weight_version_in=5 + i,
            weight_version_out=6 + i,
            indices=np.array([2 * i, 2 * i + 1]),
        )
        for i in range(first, first + count)
    ]


def take(
    state: TrainState,
    events: list[Any],
    plans: list[PlannedStep],
    algorithm: AlgorithmSettings = BY_OLD_POLICY,
    *,
    of_side: int = 0,
) -> list[StepResult]:
    """Of the last `of_side` rows of routing, say that they are of branch 'side'."""
    reader: Any = MemoryReader(events)
    if of_side:
        table = reader.tables["routing_recorded"]
        branches = ["main"] * (table.num_rows - of_side) + ["side"] * of_side
        place = table.column_names.index("branch")
        changed = table.set_column(place, "branch", pa.array(branches))
        reader.tables["routing_recorded"] = changed
    taken = take_rollout(state, reader, plans, algorithm, HALVES)
    return [result for _, _, result in taken]


@contextmanager
def router_inputs(model: Any) -> Iterator[list[torch.Tensor]]:
    """The hidden states that each router gets, in the order of calls."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.router.register_forward_pre_hook(lambda _m, args: seen.append(args[0].detach()))
        for layer in model.decoder.layers
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def router_gradients(state: TrainState) -> list[float]:
    """Largest element of the gradient of each router in the last step."""
    return [
        float(layer.mlp.router.weight.main_grad.abs().max()) for layer in state.model.decoder.layers
    ]


def test_agreement_is_with_what_each_router_would_choose(folder: Path) -> None:
    """Counted again from the hidden states that reached the routers."""
    state, choices = make_state(folder), some_choices()
    weights = [layer.mlp.router.weight.detach().clone() for layer in state.model.decoder.layers]
    batch = load_batch(MemoryReader(events_of_samples(choices=choices)), range(4))
    with router_inputs(state.model) as seen:
        metrics = one_step(state, batch).metrics
    alike, same_set, same_order = np.zeros((3, LAYERS))
    rows = sum(len(ids) for ids in choices.values())
    for call, hidden in enumerate(seen):
        layer, micro = call % LAYERS, call // LAYERS
        top = torch.topk(hidden @ weights[layer].T, TOP_K).indices.numpy()  # [T, B, K]
        for row in range(2):
            ids = choices[2 * micro + row][:, layer]
            for found, wanted in zip(top[: len(ids), row].tolist(), ids.tolist(), strict=True):
                alike[layer] += len(set(found) & set(wanted))
                same_set[layer] += set(found) == set(wanted)
                same_order[layer] += found == wanted
    assert len(seen) == 2 * LAYERS
    assert 0 < same_order.sum() < same_set.sum() < rows * LAYERS
    for layer in range(LAYERS):
        share = alike[layer] / (rows * TOP_K)
        assert metrics[f"routing_agreement_layer_{layer}"] == share
    assert metrics["routing_agreement"] == pytest.approx(alike.sum() / (rows * TOP_K * LAYERS))
    assert metrics["routing_agreement_set"] == pytest.approx(same_set.sum() / (rows * LAYERS))
    assert metrics["routing_agreement_order"] == pytest.approx(same_order.sum() / (rows * LAYERS))


def test_agreement_is_1_where_the_routers_are_those_that_chose(folder: Path) -> None:
    state = make_state(folder)
    choices = free_choices(state)
    batch = load_batch(MemoryReader(events_of_samples(choices=choices)), range(4))
    metrics = one_step(state, batch).metrics
    names = [name for name in metrics if name.startswith("routing_")]
    assert len(names) == 3 + LAYERS
    assert {metrics[name] for name in names} == {1.0}
    turned = {index: ids[..., ::-1] for index, ids in choices.items()}
    batch = load_batch(MemoryReader(events_of_samples(choices=turned)), range(4))
    metrics = one_step(make_state(folder), batch).metrics
    assert (metrics["routing_agreement_set"], metrics["routing_agreement_order"]) == (1.0, 0.0)


@pytest.mark.parametrize("algorithm", [ROLLOUT, FREE], ids=["replayed", "free"])
def test_recomputed_activations_change_no_bit(folder: Path, algorithm: AlgorithmSettings) -> None:
    events = events_of_samples(choices=None if algorithm == FREE else some_choices())
    batch = load_batch(MemoryReader(events), range(4))
    plain = one_step(make_state(folder), batch, algorithm)
    again = one_step(make_state(folder, recompute=True), batch, algorithm)
    assert plain.metrics == again.metrics
    assert plain.step_committed.gradient_digest == again.step_committed.gradient_digest
    assert plain.weights.root == again.weights.root


def test_the_old_policy_chooses_once_for_all_steps_of_the_rollout(folder: Path) -> None:
    events = events_of_samples(choices=some_choices())  # the engine's, which nobody asks for
    state = make_state(folder)
    free = free_choices(state)
    first, second = take(state, events, planned())
    assert second.routing == []
    assert [e.index for e in first.routing] == [0, 1, 2, 3]
    for event, row in zip(first.routing, sample_tokens(), strict=True):
        assert (event.segment, event.policy_version) == (BY_POLICY, 5)
        assert (event.rows, event.num_experts, event.dtype) == (len(row) - 1, EXPERTS, "uint8")
        assert expert_ids_of(event).tolist() == free[event.index].tolist()
    assert first.metrics["routing_agreement_order"] == 1.0
    assert second.metrics["routing_agreement"] <= 1.0
    assert json.loads(first.step_committed.settings)["algorithm"]["routing_replay"] == "old_policy"
    stored = [*events, *first.routing]
    source = RoutingSource(policy_version=5)
    batch = load_batch(MemoryReader(stored), [0, 1], routing=source)
    assert batch.expert_ids is not None
    alone = run_step(
        make_state(folder),
        batch,
        plan_of(batch, HALVES),
        BY_OLD_POLICY,
        HALVES,
        **(NUMBERS | {"rollout_step": 2}),
    )
    assert content(alone) == content(first)


def test_steps_are_taken_again_from_what_was_recorded(folder: Path) -> None:
    events = events_of_samples()
    state = make_state(folder)
    first, second = take(state, events, planned())
    committed = [first.step_committed, second.step_committed]
    stored = [*events, *first.routing, *first.signals, *second.signals, *committed]
    again = take(make_state(folder), stored, planned())
    assert [result.routing for result in again] == [[], []]
    for was, now in zip([first, second], again, strict=True):
        assert (
            compare_steps(was.step_committed, now.step_committed, was.weights, now.weights) is None
        )
        assert content(was) == content(now)
    # Other routers would choose otherwise now: what was recorded is replayed all the same.
    changed = make_state(folder)
    with torch.no_grad():
        for layer in changed.model.decoder.layers:
            layer.mlp.router.weight.neg_()
    replayed = take(changed, stored, planned(count=1))[0]
    assert replayed.metrics["routing_agreement"] < 1.0
    # Another branch that forked at the same version chose for itself.
    of_side = [
        event.evolve(expert_ids=bytes([3, 2] * event.rows * LAYERS)) for event in first.routing
    ]
    (beside, _) = take(make_state(folder), [*stored, *of_side], planned(), of_side=len(of_side))
    assert content(beside) == content(first)
    # From the middle of the rollout, as a fork at version 6 does.
    middle = make_state(folder)
    take(middle, stored, planned(count=1))
    (alone,) = take(middle, stored, planned(first=1, count=1))
    assert content(alone) == content(second)
    with pytest.raises(NotFound, match=r"(?s)samples \[0, 1\].*policy of version 5"):
        take(make_state(folder), [*events, *committed], planned())
    with pytest.raises(NotFound, match="version 6"):
        take(make_state(folder), [*events, *first.routing], planned(first=1, count=1))


def test_free_routing_is_asked_for_and_recorded_as_such(folder: Path) -> None:
    events = events_of_samples(choices=some_choices())
    (free,) = take(make_state(folder), events, planned(count=1), FREE)
    assert json.loads(free.step_committed.settings)["algorithm"]["routing_replay"] == "free"
    assert not any(name.startswith("routing_") for name in free.metrics)
    assert free.routing == []
    (replayed,) = take(make_state(folder), events, planned(count=1), ROLLOUT)
    assert "routing_replay" not in json.loads(replayed.step_committed.settings)["algorithm"]
    assert free.step_committed.gradient_digest != replayed.step_committed.gradient_digest
    with pytest.raises(InvalidArgument, match="never free in silence"):
        take(make_state(folder), events_of_samples(), planned(count=1), ROLLOUT)
    with pytest.raises(InvalidArgument, match="a batch without experts"):
        one_step(make_state(folder), load_batch(MemoryReader(events), range(4)), FREE)


def test_recorded_gate_weights_are_replayed_and_the_routers_get_no_gradient(folder: Path) -> None:
    algorithm = AlgorithmSettings(routing_replay="old_policy", replay_routing_weights=True)
    events = events_of_samples()
    state = make_state(folder)
    first, second = take(state, events, planned(), algorithm)
    learning = make_state(folder)
    (plain, _) = take(learning, events, planned())
    for event in first.routing:
        weights = expert_weights_of(event)
        assert weights is not None
        assert np.allclose(weights.sum(axis=2), 1.0, atol=1e-6)
        assert (np.diff(weights, axis=2) <= 0).all()  # best first
    # Under the weights that recorded them they are the routers' own, to the bit.
    assert first.step_committed.loss == plain.step_committed.loss
    assert first.step_committed.micro_batch_digests == plain.step_committed.micro_batch_digests
    assert set(router_gradients(state)) == {0.0}
    assert 0.0 not in router_gradients(learning)
    committed = [first.step_committed, second.step_committed]
    stored = [*events, *first.routing, *committed]
    again = take(make_state(folder), stored, planned(), algorithm)
    assert [content(result) for result in again] == [content(first), content(second)]
    # Routers that choose and weigh otherwise change nothing any more.
    changed = make_state(folder)
    with torch.no_grad():
        for layer in changed.model.decoder.layers:
            layer.mlp.router.weight.neg_()
    replayed = take(changed, stored, planned(count=1), algorithm)[0]
    assert replayed.step_committed.micro_batch_digests == first.step_committed.micro_batch_digests
    assert replayed.metrics["routing_agreement"] < 1.0


def test_what_cannot_be_replayed_is_refused(folder: Path) -> None:
    choices = some_choices()
    events = events_of_samples(choices=choices)
    batch = load_batch(MemoryReader(events), range(4))
    with_weights = AlgorithmSettings(replay_routing_weights=True)
    assert batch.expert_ids is not None
    weights = tuple(np.full(ids.shape, 0.5, np.float32) for ids in batch.expert_ids)
    weighed = dataclasses.replace(batch, expert_weights=weights)
    fewer = dataclasses.replace(batch, expert_ids=tuple(i[:, :1] for i in batch.expert_ids))
    other = dataclasses.replace(batch, num_experts=8)
    for broken, algorithm, optimizer, message in (
        (batch, with_weights, {}, "(?s)recorded gate weights.*--record-routing-weights"),
        (weighed, with_weights, {"weight_decay": 0.1}, "--weight-decay 0.1"),
        (fewer, ROLLOUT, {}, r"(?s)2 MoE layers, top 2 of 4 experts.*1 layers"),
        (other, ROLLOUT, {}, "top 2 of 8 experts"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            one_step(make_state(folder, **optimizer), broken, algorithm)
    one_step(make_state(folder), weighed, with_weights)
    with pytest.raises(InvalidArgument, match="free routing"):
        AlgorithmSettings(routing_replay="free", replay_routing_weights=True)
    with pytest.raises(InvalidArgument, match="the old actor's own routing"):
        AlgorithmSettings(routing_replay="old_policy", keep_old_actor=True)
    with pytest.raises(InvalidArgument, match="rollout, old_policy or free"):
        AlgorithmSettings(routing_replay="engine")
    state = make_state(folder)
    for name, value in (
        ("moe_router_fusion", True),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_input_jitter_eps", 0.1),
        ("moe_router_force_load_balancing", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
    ):
        was = getattr(state.model.config, name)
        setattr(state.model.config, name, value)
        with pytest.raises(InvalidArgument, match="--" + name.replace("_", "-")):
            one_step(state, batch)
        setattr(state.model.config, name, was)


def test_the_options_are_slimes(folder: Path) -> None:
    for given, mode in (
        ({}, "rollout"),
        ({"use_routing_replay": True}, "old_policy"),
        ({"use_rollout_routing_replay": True}, "rollout"),
        ({"use_rollout_routing_replay": False}, "free"),
        # In slime the engine's routing implies the other.
        ({"use_routing_replay": True, "use_rollout_routing_replay": True}, "rollout"),
        ({"use_routing_replay": True, "use_rollout_routing_replay": False}, "old_policy"),
    ):
        values = {"disable_grpo_std_normalization": False, **given}
        assert algorithm_settings(values).routing_replay == mode


def test_two_micro_batches_in_flight_are_recomputed_by_their_own_ids(folder: Path) -> None:
    """Forwards of both before the backwards, as one stage of a pipeline has them."""
    from trainer.forward import token_log_probs
    from trainer.routing_replay import finish_backward, recomputing, routers

    rows = [torch.tensor([row]) for row in sample_tokens()]
    ids = [torch.from_numpy(each)[None] for each in some_choices().values()]
    gradients = []
    for recompute in (False, True):
        state = make_state(folder, recompute=recompute)
        model = state.model
        with recomputing([model]):
            first = token_log_probs(model, rows[0], temperature=1.0, expert_ids=ids[0])[0]
            second = token_log_probs(model, rows[2], temperature=1.0, expert_ids=ids[2])[0]
            waiting = {router.waiting() for router in routers(model)}
            assert waiting == ({2} if recompute else {0})
            first.sum().backward()
            third = token_log_probs(model, rows[3], temperature=1.0, expert_ids=ids[3])[0]
            second.sum().backward()
            third.sum().backward()
        gradients.append([p.main_grad.clone() for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)

    def forward(number: int) -> torch.Tensor:
        found, _ = token_log_probs(model, rows[number], temperature=1.0, expert_ids=ids[number])
        return found.sum()

    def in_the_wrong_order() -> None:
        with recomputing([model]):
            _, second = forward(0), forward(2)
            second.backward()

    # It would use the ids of another; their number gives it away here.
    with pytest.raises(InvalidArgument, match="6 tokens, as ids were given"):
        in_the_wrong_order()
    assert {router.waiting() for router in routers(model)} == {0}
    with pytest.raises(InvalidArgument, match="forwards left"), recomputing([model]):
        forward(0)
    loss = forward(0)
    loss.backward(retain_graph=True)
    with pytest.raises(InvalidArgument, match="it would choose freely"):
        loss.backward()
    finish_backward(model)
