"""Every error that this project raises on purpose, as one tree.

    LedgerError
    ├── InvalidEvent        an event breaks its layout or an invariant (also a ValueError)
    ├── InvalidArgument     a setting or an argument cannot work (also a ValueError)
    ├── NotFound            a run, branch, version or file is not there (also a LookupError)
    │   └── NoLongerKept          rows that a rule of retention has retired
    ├── AlreadyExists       creating what is there already (also a FileExistsError)
    ├── Conflict            the catalog refuses a commit (also a RuntimeError)
    │   ├── IdempotencyConflict   same key, other content
    │   └── FencedOff             an older epoch of a producer wrote after a newer one began
    ├── Corrupt             stored bytes are not what was committed (also an OSError)
    │   └── SegmentMissing        the file of a segment is not there
    ├── StorageFailed       the store did not take or give bytes (also an OSError)
    ├── IncompatibleFormat  written by a newer version, or not a ledger (also a ValueError)
    ├── Diverged            other bits than recorded, or no finite number (also an ArithmeticError)
    ├── EngineFailed        an engine gave no answer, or one that breaks its promises
    ├── EnvironmentFailed   an environment or a tool crashed, hung, or is not as recorded
    ├── RewardFailed        a verifier gave no reward for a sample (also a RuntimeError)
    └── MissingDependency   something that must be installed first (also an ImportError)

Each is also a standard exception, so that callers need not import this module to catch it. A
message says what was tried, on what, what was expected, what was found and what to do; `explain`
builds it. All are picklable: their only state is the message.
"""

from __future__ import annotations

__all__ = [
    "AlreadyExists",
    "Conflict",
    "Corrupt",
    "Diverged",
    "EngineFailed",
    "EnvironmentFailed",
    "FencedOff",
    "IdempotencyConflict",
    "IncompatibleFormat",
    "InvalidArgument",
    "InvalidEvent",
    "LedgerError",
    "MissingDependency",
    "NoLongerKept",
    "NotFound",
    "RewardFailed",
    "SegmentMissing",
    "StorageFailed",
    "explain",
]


class LedgerError(Exception):
    """The root of every error raised on purpose."""


class InvalidEvent(LedgerError, ValueError):
    """An event does not fit its layout, or breaks an invariant. Nothing was stored."""


class InvalidArgument(LedgerError, ValueError):
    """A setting or an argument cannot work. Nothing was started."""


class NotFound(LedgerError, LookupError):
    """A run, branch, version, checkpoint or file that was asked for is not there."""


class NoLongerKept(NotFound):
    """Rows that were recorded, and that a rule of retention has retired since."""


class AlreadyExists(LedgerError, FileExistsError):
    """Something that was to be created is there already. It was left as it is."""


class Conflict(LedgerError, RuntimeError):
    """The catalog refused a commit; nothing of it is visible."""


class IdempotencyConflict(Conflict):
    """A commit with the same idempotency key but other content is already stored."""


class FencedOff(Conflict):
    """A newer epoch of the same producer has begun: this writer must stop."""


class Corrupt(LedgerError, OSError):
    """Stored bytes are not the bytes that were committed. Nothing was read from them."""


class SegmentMissing(Corrupt):
    """The file of a segment is not there: lost, or moved since its place was looked up."""


class StorageFailed(LedgerError, OSError):
    """The store did not take or give bytes. What was not acknowledged is not visible."""


class IncompatibleFormat(LedgerError, ValueError):
    """Not a ledger, or one written by a version that this one cannot read."""


class Diverged(LedgerError, ArithmeticError):
    """A recomputation or a weight transfer gave other bits than recorded, or a step's loss or
    gradients are not finite numbers."""


class EngineFailed(LedgerError, RuntimeError):
    """A rollout engine gave no answer, or one that breaks its promises. Nothing was recorded."""


class EnvironmentFailed(LedgerError, RuntimeError):
    """An environment, or a tool of it, crashed, hung, or did not answer as it is recorded to have.

    The sample failed, and is in no statistics; it does not have a reward of zero.
    """


class RewardFailed(LedgerError, RuntimeError):
    """A verifier gave no reward: too late, broken, or asked about what it cannot judge. The sample
    failed; it has no reward, which is not a reward of zero."""


class MissingDependency(LedgerError, ImportError):
    """Something must be installed before this can be used."""


def explain(
    tried: str,
    *,
    on: str | None = None,
    expected: object = None,
    found: object = None,
    do: str | None = None,
) -> str:
    """Build a message that answers the five questions a reader has at night.

    `tried` what was being done; `on` the file, row or setting it was done to; `expected` and
    `found` the two sides of the disagreement; `do` the next action that helps.
    """
    lines = [tried if on is None else f"{tried}: {on}"]
    if expected is not None:
        lines.append(f"  expected: {expected}")
    if found is not None:
        lines.append(f"  found:    {found}")
    if do is not None:
        lines.append(f"  do:       {do}")
    return "\n".join(lines)
