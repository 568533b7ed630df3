"""Rollout steps for a trainer in another process: each with the weights that it has published.

The two take turns. Which version a rollout step is sampled with depends on what is committed and on
the settings alone, so the samples are those that the trainer's own process would have made, and a
process that is killed goes on as if it had not been.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from ledger.decisions import Decisions
from ledger.encode import events_of
from ledger.errors import Diverged, NotFound, explain
from ledger.evaluations import Evaluation
from ledger.events import EvalScored, WeightsLoaded
from ledger.waiting import wait_for
from ledger.weights import TensorRecord, first_difference, weights_root
from rollout.published import Published, PublishedTensors, PublishedVersions

if TYPE_CHECKING:
    from ledger.store import Ledger
    from ledger.writer import Writer

__all__ = ["RolloutsInTurn", "Turns", "load_version"]

_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


class _Outcome(Protocol):
    @property
    def mean_reward(self) -> float: ...

    @property
    def tokens(self) -> int: ...


class Side(Protocol):
    """What makes rollout steps and evaluations: as `rollout.side.LocalRolloutSide`."""

    @property
    def name(self) -> str: ...

    @property
    def evaluations(self) -> Sequence[Evaluation]: ...

    @property
    def records_weights(self) -> bool:
        """Whether it records itself what its engines took."""

    def rollout(self, rollout_step: int, consumer_version: int | None) -> _Outcome: ...

    def evaluate(self, version: int, name: str) -> EvalScored: ...

    def load_weights(
        self, version: int, named: Iterable[tuple[str, Any]]
    ) -> list[TensorRecord]: ...

    def release(self, version: int) -> None: ...


@dataclass(slots=True)
class Turns:
    """What a process did."""

    rollout_steps: int = 0
    tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    """Mean raw reward of each rollout step of this process."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds by stage."""

    def spent(self, stage: str, since: float) -> None:
        """Add the seconds since `since` (time.perf_counter) to a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - since


def load_version(side: Side, published: Published, writer: Writer, *, anew: bool) -> None:
    """Give the engine a version, compare its own checksums, record that, and let it go on.

    `anew`: the engine was just started. Nothing reaches the engine before every byte was compared
    with what was published. Raises what `read_version` raises, and Diverged where the engine holds
    something else afterwards: then it serves nothing.
    """
    began = time.perf_counter()
    found = side.load_weights(published.version, PublishedTensors(published))
    difference = first_difference(published.records, found)
    if difference is not None:
        raise Diverged(
            explain(
                "loading the engine",
                on=f"version {published.version}, engine {side.name}",
                expected="the checksums that were published",
                found=difference,
                do="start the command again",
            )
        )
    if not side.records_weights:
        loaded = WeightsLoaded(
            weight_version=published.version,
            engine=side.name,
            transport="disk",
            pause_mode="idle",
            sent_tensors=len(found),
            sent_bytes=sum(prod(one.shape) * _SIZES[one.dtype] for one in found),
            root=weights_root(found),
            compared="blake3 of every tensor as the engine holds it",
            transfer_time_s=time.perf_counter() - began,
            reason="restored" if anew else "published",
            cache_flushed=True,
        )
        writer.append([loaded])
    side.release(published.version)


@dataclass(slots=True, kw_only=True)
class RolloutsInTurn:
    """The rollout steps of one branch, from where it stands."""

    ledger: Ledger
    run_id: str
    branch: str
    writer: Writer
    side: Side
    versions: PublishedVersions
    num_rollout: int
    rollouts: int
    """Rollouts that are kept in a complete rollout step."""
    eval_interval: int | None
    alone: bool
    """Whether nobody trains: every rollout step is sampled with the newest version there is."""
    timeout_s: float | None
    """As in `ledger.waiting.wait_for`."""
    doing: Callable[[str], None]
    say: Callable[[str], None]
    turns: Turns = field(default_factory=Turns)
    loaded: int | None = None
    """The version that the engine has; None: not known."""
    _evaluated: set[tuple[int, Evaluation]] = field(default_factory=set)

    def run(self) -> Turns:
        """Make what is missing up to `num_rollout` rollout steps. Raises whatever fails."""
        scored = self.ledger.reader(self.run_id, branch=None).table("eval_scored")
        self._evaluated.update(
            (e.weight_version, Evaluation.of(e)) for e in events_of(scored, EvalScored)
        )
        decisions = Decisions(self.ledger, self.run_id, self.branch)
        decisions.read()
        fork = self.ledger.branch(self.run_id, self.branch).fork_version
        _, first = self.versions.first()
        for rollout_step in range(first, self.num_rollout):
            if decisions.kept(rollout_step) >= self.rollouts:
                continue
            self._load(rollout_step)
            if self.loaded == fork or self._is_due(rollout_step):
                self._evaluate()
            began = time.perf_counter()
            self.doing(f"rollout {rollout_step}")
            made = self.side.rollout(
                rollout_step, self.versions.before(rollout_step, whole_interval=False)
            )
            seconds = time.perf_counter() - began
            self.turns.spent("rollout", began)
            self.turns.rollout_steps += 1
            self.turns.tokens += made.tokens
            self.turns.rewards.append(made.mean_reward)
            self.say(
                f"rollout {rollout_step:>4} by version {self.loaded:<4} reward "
                f"{made.mean_reward:.4g}  {made.tokens / max(seconds, 1e-9):,.0f} tokens/s"
            )
        if self.eval_interval is not None:
            self._load(self.num_rollout, last=True)
            self._evaluate()
        return self.turns

    def _load(self, rollout_step: int, *, last: bool = False) -> None:
        """Wait for the version of a rollout step, and load it where the engine has another."""
        began = time.perf_counter()

        def look() -> int | None:
            if self.alone:
                return self.versions.newest()
            return self.versions.before(rollout_step, whole_interval=not last)

        version = wait_for(
            self.ledger,
            self.run_id,
            look,
            what=f"the weights of rollout step {rollout_step}",
            timeout_s=self.timeout_s,
            standing=lambda: f"the newest version is {self.versions.newest()}",
            do="start `ledger-train --rollout-by elsewhere` for this ledger and branch, or look at "
            "what it says; the same command goes on here",
            tell=self.doing,
        )
        self.turns.spent("wait", began)
        if version == self.loaded:
            return
        began = time.perf_counter()
        self.doing(f"loading version {version}")
        # Until a trainer that has gone on has put its version there again.
        wait_for(
            self.ledger,
            self.run_id,
            lambda: self._try_load(version),
            what=f"the folder of version {version}",
            timeout_s=self.timeout_s,
            whole_run=False,
            standing=lambda: (
                "it is in none of: " + ", ".join(map(str, self.versions.version(version).folders))
            ),
            do="both commands must see --update-weight-disk-dir under one path",
            tell=self.doing,
        )
        self.turns.spent("load", began)

    def _try_load(self, version: int) -> bool | None:
        try:
            load_version(
                self.side, self.versions.version(version), self.writer, anew=self.loaded is None
            )
        except NotFound:
            return None
        self.loaded = version
        return True

    def _is_due(self, rollout_step: int) -> bool:
        return self.eval_interval is not None and rollout_step % self.eval_interval == 0

    def _evaluate(self) -> None:
        if self.eval_interval is None or self.loaded is None:
            return
        for one in self.side.evaluations:
            if (self.loaded, one) in self._evaluated:
                continue
            began = time.perf_counter()
            self.doing(f"evaluation {one.name} of version {self.loaded}")
            event = self.side.evaluate(self.loaded, one.name)
            self.writer.append([event])
            self._evaluated.add((self.loaded, one))
            self.say(
                f"evaluation {one.name} of version {self.loaded}: mean reward "
                f"{event.mean_reward:.3f} on {len(event.rewards)} responses"
            )
            self.turns.spent("evaluation", began)
