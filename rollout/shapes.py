"""The shapes of rollout: what is waited for, what is cut, how far generation runs ahead."""

from __future__ import annotations

from dataclasses import dataclass

from ledger.errors import InvalidArgument, explain
from rollout.settings import RolloutSettings

__all__ = ["UNUSED_HANDLERS", "RolloutShape"]

UNUSED_HANDLERS = ("drop", "retry")
"""What becomes of the prompt of a group that got too old; names as in Miles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutShape:
    """How the coordinator runs; names as in slime and Miles. Raises InvalidArgument where made.

    Without `partial_rollout` and `fully_async` a rollout step waits for what it asked for, and
    what runs on when enough groups are kept is aborted and dropped.
    """

    partial_rollout: bool = False
    """What runs on when enough groups are kept is cut, and goes on in the next rollout step."""
    fully_async: bool = False
    """Generation goes on while the trainer trains."""
    max_weight_staleness: int | None = None
    """Versions from the oldest that sampled a token of a group to the one that consumes it, at
    most; None: no bound."""
    async_max_concurrent_samples: int | None = None
    """Samples on their way at a time, with `fully_async`; None: as the other limits let."""
    async_data_buffer_capacity_factor: float = 3.0
    """Rollout batches that are finished or on their way at most, with `fully_async`."""
    async_unused_samples_handler: str = "retry"
    """'retry': the prompt of a group that got too old is issued again; 'drop': it is not."""
    max_sample_retries: int = 2
    """How often the prompt of a group that failed is issued again."""
    versions_per_rollout: int = 1
    """Weight versions that the training of a rollout step makes."""
    abort_grace_s: float = 10.0
    """Seconds that a driver which is not at the engine has to notice that it was told to stop."""

    def __post_init__(self) -> None:
        """Check what cannot be."""
        bound, factor = self.max_weight_staleness, self.async_data_buffer_capacity_factor
        for on, good, expected, found in (
            ("--max-weight-staleness", bound is None or bound >= 0, "0 or more", bound),
            ("--async-data-buffer-capacity-factor", factor >= 1, "at least 1", factor),
            (
                "--async-max-concurrent-samples",
                (self.async_max_concurrent_samples or 1) >= 1,
                "at least 1",
                self.async_max_concurrent_samples,
            ),
            (
                "--async-unused-samples-handler",
                self.async_unused_samples_handler in UNUSED_HANDLERS,
                f"one of {', '.join(UNUSED_HANDLERS)}",
                self.async_unused_samples_handler,
            ),
            (
                "--max-sample-retries",
                self.max_sample_retries >= 0,
                "0 or more",
                self.max_sample_retries,
            ),
        ):
            if not good:
                raise InvalidArgument(
                    explain("choosing the shape of rollout", on=on, expected=expected, found=found)
                )

    def groups_ahead(self, batch: int, *, consumer_version: int, engine_version: int) -> int:
        """Groups that may be finished or on their way, waiting for `consumer_version` and later.

        A group that is issued now is sampled by `engine_version` at the oldest; as the
        (n+1)-th that waits it is consumed n // batch rollout steps after `consumer_version`, where
        groups are consumed in the order of their issue. Both versions are local numbers. This is
        AReaL's capacity, (max_staleness + version + 1) · batch − (accepted + running), with what
        is accepted counted from the next batch on, and for any number of versions a rollout step.
        """
        most = int(self.async_data_buffer_capacity_factor * batch)
        if self.max_weight_staleness is None:
            return most
        left = self.max_weight_staleness - (consumer_version - engine_version)
        return max(0, min(most, (left // self.versions_per_rollout + 1) * batch))

    def room(
        self,
        settings: RolloutSettings,
        *,
        consumer_version: int,
        engine_version: int,
        waiting_groups: int,
        running_samples: int,
    ) -> int:
        """Groups that may be issued now: the least that each limit lets.

        `waiting_groups` are finished or on their way; versions are local numbers.
        """
        ahead = self.groups_ahead(
            settings.rollout_batch_size,
            consumer_version=consumer_version,
            engine_version=engine_version,
        )
        room = ahead - waiting_groups
        if self.async_max_concurrent_samples is not None:
            left = self.async_max_concurrent_samples - running_samples
            room = min(room, -(-left // settings.n_samples_per_prompt))
        return max(room, 0)
