"""The experts that the steps of a rollout replay, where the old policy chose them.

They are chosen once, in a forward of the policy before the rollout's first step, and recorded in
the commit of that step. Whoever takes a later step of the rollout (a process that goes on after a
crash, a fork in the middle) reads them. A replay of the whole rollout sees the ledger as it stood
before that commit: it chooses again, and another choice shows as another batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ledger.errors import NotFound, explain
from ledger.events import RoutingRecorded
from ledger.views import TableSource
from trainer.batch import Batch
from trainer.batch_routing import Routing, RoutingSource, read_routing
from trainer.microbatch import Partition, cut
from trainer.ranks import data_parallel_rank, is_writer
from trainer.routing_record import RoutingRecorder, routing_events
from trainer.scoring import response_log_probs
from trainer.settings import AlgorithmSettings
from trainer.state import TrainState

__all__ = ["PolicyRouting", "engine_routing", "policy_routing"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PolicyRouting:
    """What the old policy chose for the batches of a rollout."""

    batches: list[Batch]
    """As given, with the experts."""
    events: list[RoutingRecorded]
    """To be appended with the rollout's first step, by the writer; empty where they are stored."""


def engine_routing(algorithm: AlgorithmSettings) -> RoutingSource | None:
    """What is read with a batch: the engine's choices, or, with other settings, nobody's."""
    if algorithm.routing_replay != "rollout":
        return None
    return RoutingSource(weights=algorithm.replay_routing_weights)


def policy_routing(
    state: TrainState,
    reader: TableSource,
    batches: Sequence[tuple[Batch, Partition]],
    algorithm: AlgorithmSettings,
    *,
    step_in_rollout: int,
    weight_version_in: int,
    weight_version_out: int,
) -> PolicyRouting:
    """The old policy's choices for the batches of a rollout; the numbers are the first batch's.

    Where that step is the rollout's first one and was never committed, `state` is that policy, and
    chooses now; else its choices are read. Every rank calls it.

    Raises NotFound where they should be stored and are not, NoLongerKept where a rule of retention
    has retired them, and InvalidEvent as `read_routing`.
    """
    made = _steps(reader)
    if step_in_rollout == 0 and weight_version_out not in made:
        return _choose(state, batches, algorithm, weight_version_in)
    # Back to the rollout's first step: it was taken on the branch, and from the version, that the
    # choices are recorded under. A fork at that version has made its own.
    first = weight_version_out if step_in_rollout == 0 else weight_version_in
    for _ in range(step_in_rollout - 1):
        first = _step(made, first)[0]
    version, branch = _step(made, first)
    source = RoutingSource(
        policy_version=version, branch=branch, weights=algorithm.replay_routing_weights
    )
    filled = []
    for batch, _ in batches:
        lengths_B = batch.prompt_lengths_B + batch.response_lengths_B
        routing = read_routing(reader, batch.indices_B, lengths_B, source)
        if routing is None:
            raise _missing(
                f"samples {batch.indices_B.tolist()}",
                f"routing_recorded events by the policy of version {version}",
            )
        filled.append(_with_routing(batch, routing))
    return PolicyRouting(batches=filled, events=[])


def _choose(
    state: TrainState,
    batches: Sequence[tuple[Batch, Partition]],
    algorithm: AlgorithmSettings,
    version: int,
) -> PolicyRouting:
    filled = []
    events: list[RoutingRecorded] = []
    for batch, plan in batches:
        recorder = RoutingRecorder(state.chunks[0], batch, weights=algorithm.replay_routing_weights)
        # Its log-probs are not used: padding and the last token of a sample are routed freely,
        # so experts get other numbers of tokens than in a replay, which may round otherwise.
        response_log_probs(
            state.chunks,
            batch,
            cut(batch, plan, plan.of_rank(data_parallel_rank())),
            free_routing=True,
            recorder=recorder,
        )
        filled.append(_with_routing(batch, recorder.routing()))
        if is_writer():
            events += routing_events(filled[-1], version)
    return PolicyRouting(batches=filled, events=events)


def _with_routing(batch: Batch, routing: Routing) -> Batch:
    return replace(
        batch,
        expert_ids=routing.expert_ids,
        expert_weights=routing.expert_weights,
        num_experts=routing.num_experts,
    )


def _steps(reader: TableSource) -> dict[int, tuple[int, str]]:
    """By the version that a committed step made: the version before it, and its branch."""
    columns = ["weight_version_out", "weight_version_in", "branch"]
    steps = reader.table("step_committed", columns)
    made, before, branches = (steps.column(name).to_pylist() for name in columns)
    return dict(zip(made, zip(before, branches, strict=True), strict=True))


def _step(steps: dict[int, tuple[int, str]], version: int) -> tuple[int, str]:
    if version not in steps:
        raise _missing(f"version {version}", "the step that made it, to find the old policy")
    return steps[version]


def _missing(on: str, expected: str) -> NotFound:
    return NotFound(
        explain(
            "replaying the routing of the old policy",
            on=on,
            expected=expected,
            found="none",
            do="fork at a version between two rollouts: its policy chooses anew",
        )
    )
