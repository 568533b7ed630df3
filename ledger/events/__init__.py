"""The events: what happened, as frozen records. One module a subject.

`EVENTS` (in `ledger.fields`) maps each stable name to its class once this package is imported.
"""

from ledger.events.rollout import (
    UNKNOWN_VERSION,
    EvalScored,
    IndexerRecorded,
    ObservationAppended,
    PromptIssued,
    PromptsLeftOut,
    RoutingRecorded,
    SampleDecided,
    SampleScored,
    SegmentGenerated,
)
from ledger.events.run import (
    BranchForked,
    GapRecorded,
    RowsRetired,
    RunResumed,
    RunStarted,
    TrainingStarted,
)
from ledger.events.training import (
    CheckpointSaved,
    SignalRecorded,
    StepCommitted,
    WeightsLoaded,
    WeightsPublished,
)
from ledger.fields import EVENTS, Column, Event

__all__ = [
    "EVENTS",
    "UNKNOWN_VERSION",
    "BranchForked",
    "CheckpointSaved",
    "Column",
    "EvalScored",
    "Event",
    "GapRecorded",
    "IndexerRecorded",
    "ObservationAppended",
    "PromptIssued",
    "PromptsLeftOut",
    "RoutingRecorded",
    "RowsRetired",
    "RunResumed",
    "RunStarted",
    "SampleDecided",
    "SampleScored",
    "SegmentGenerated",
    "SignalRecorded",
    "StepCommitted",
    "TrainingStarted",
    "WeightsLoaded",
    "WeightsPublished",
]
