"""The views that users ask: what each is, its columns, and the SQL that derives it from the events.

Each view is declared once, with a meaning for every column; the DuckDB view, its comments and
`ledger views` derive from here. A column that passes an event's column through takes its meaning
from the event's own declaration. The SQL runs on DuckDB 1.5 and 2.0.

A view sees one reader: one run, one branch with its ancestors (or all branches), up to one sequence
number. `index` is unique in a run, so samples are joined by it alone; steps are numbered on their
branch, so they are joined by branch and step.
"""

from __future__ import annotations

import dataclasses

from ledger.fields import EVENTS
from ledger.view_sql import (
    CONSUMPTION,
    EVENT_LOG_OF,
    GROUPS,
    PIECES,
    RESPONSES,
    SAMPLES,
    STALENESS,
    TOKEN_COLUMNS,
    TRAJECTORIES,
    VERSIONS,
    WEIGHTS,
)

__all__ = ["PLACE", "VIEWS", "View", "ViewColumn", "event_columns"]

PLACE = {
    "run_id": "The run.",
    "branch": "The branch that the event was appended to.",
    "seq": "Sequence number of the event in its run.",
}
"""The columns that every event has besides its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class ViewColumn:
    """One column of a view and its meaning."""

    name: str
    doc: str


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """One view: its SQL, the events and views that the SQL reads, and what its columns mean."""

    name: str
    doc: str
    sql: str
    uses: tuple[str, ...]
    """Names of events and views in `sql`; they are registered first."""
    columns: tuple[ViewColumn, ...]
    public: bool = True
    """False for a building block of other views."""
    per_token: bool = False
    """Whether a row is a token: given a tokenizer, the view has a column `text` as well."""


def event_columns(kind: str) -> tuple[ViewColumn, ...]:
    """The columns of an event's table: place first, then its own in the order of their ids.

    Where an event names its run or branch itself, that is its place, and one column.
    """
    own = tuple(ViewColumn(c.name, c.doc) for c in EVENTS[kind].COLUMNS if c.name not in PLACE)
    return tuple(ViewColumn(name, doc) for name, doc in PLACE.items()) + own


def _passed(kind: str, *names: str) -> tuple[ViewColumn, ...]:
    """Columns passed through from `kind`, with their meaning there."""
    docs = {c.name: c.doc for c in event_columns(kind)}
    return tuple(ViewColumn(name, docs[name]) for name in names)


def _made(**docs: str) -> tuple[ViewColumn, ...]:
    """Columns that the SQL computes."""
    return tuple(ViewColumn(name, doc) for name, doc in docs.items())


def _extended(
    name: str, doc: str, kind: str, computed: dict[str, tuple[str, str]], tail: str = ""
) -> View:
    """All columns of one event and some computed from them: name → (SQL, meaning)."""
    extra = "".join(f",\n       {sql} AS {column}" for column, (sql, _) in computed.items())
    return View(
        name,
        doc,
        f"SELECT e.*{extra}\nFROM {kind} AS e {tail}".rstrip(),
        (kind,),
        event_columns(kind)
        + _made(**{column: meaning for column, (_, meaning) in computed.items()}),
    )


_SAMPLE = _passed("segment_generated", "index", "rollout_id", "group_index", "rollout_step")
_PLACED = _made(run_id=PLACE["run_id"], branch="The branch that issued the sample's prompt.")
_EACH_TOKEN = (
    _PLACED
    + _SAMPLE
    + _made(
        position="Position in the whole sequence, from 0.",
        response_position="Position in the response, from 0; NULL in the prompt.",
        token="Token id.",
        source="'prompt', 'sampled', or the source of the observation.",
        turn="Turn within the episode; NULL in the prompt.",
        loss_mask="1 where the step's loss used the token; else 0.",
        rollout_log_prob="Natural log-probability by the engine; NULL where nothing was sampled.",
        log_prob="Natural log-probability by the trainer's policy before the step; NULL where "
        "nothing was sampled or the sample was not trained.",
        ref_log_prob="The same by the reference policy.",
        weight_version="The version that sampled it; NULL where nobody sampled or nobody knows.",
        advantage="Advantage of the token in the step.",
    )
)

_ALL = (
    _extended(
        "prompts",
        "One row a group: the prompt that was given out.",
        "prompt_issued",
        {
            "prompt_length": ("len(e.tokens)", "Tokens of the prompt."),
            "group_size": ("len(e.indices)", "Samples of the group."),
        },
    ),
    _extended(
        "segments",
        "One row an engine call: its new tokens, log-probabilities and versions.",
        "segment_generated",
        {
            "length": ("len(e.tokens)", "New tokens."),
            "weight_version_min": (
                "list_min(list_filter(e.span_versions, lambda v: v >= 0))",
                "Oldest version that sampled a token; NULL where the engine did not say.",
            ),
            "weight_version_max": (
                "list_max(list_filter(e.span_versions, lambda v: v >= 0))",
                "Newest version that sampled a token.",
            ),
        },
    ),
    View(
        "_pieces",
        "One row a piece of a response: segments and observations alike.",
        PIECES,
        ("segment_generated", "observation_appended"),
        (),
        public=False,
    ),
    View(
        "_responses", "One row a sample: its pieces in order.", RESPONSES, ("_pieces",), (), False
    ),
    View(
        "trajectories",
        "One row a sample: prompt and response as one sequence, assembled from all its pieces.",
        TRAJECTORIES,
        ("prompt_issued", "segment_generated", "_responses"),
        _PLACED
        + _SAMPLE
        + _made(
            tokens="[T] Prompt, then response.",
            prompt_length="Tokens of the prompt.",
            response_length="R: tokens of the response.",
            loss_mask="[R] 1 where a token was sampled, 0 in observations. What a step used is "
            "in signals.",
            rollout_log_probs="[R] Natural log-probability by the engine; NULL in observations.",
            weight_versions="[R] Version that sampled each token; NULL where nobody did or the "
            "engine did not say.",
            sources="[R] 'sampled', or the source of the observation.",
            turn_of_tokens="[R] Turn of each token.",
            turns="Number of turns.",
            segments="Number of engine calls.",
            observations="Number of observations.",
            complete="Whether the pieces join without hole or overlap.",
            finish_reason="Of the last engine call: 'stop', 'length' or 'abort'.",
            prompt_text="The prompt as text.",
            label="What the verifier compares with.",
        ),
    ),
    View(
        "rewards",
        "One row a scored sample: its last score.",
        "SELECT e.*,\n"
        "       CASE WHEN len(list_distinct(e.part_names)) = len(e.part_names)\n"
        "            THEN map(e.part_names, e.part_values) END AS parts,\n"
        "       l.times_scored\n"
        "FROM sample_scored AS e\n"
        "JOIN (SELECT index, max(seq) AS seq, count(*) AS times_scored\n"
        "      FROM sample_scored GROUP BY index) AS l\n"
        "  ON e.index = l.index AND e.seq = l.seq",
        ("sample_scored",),
        event_columns("sample_scored")
        + _made(
            parts="The parts as a map from name to value.",
            times_scored="How often the sample was scored.",
        ),
    ),
    View(
        "decisions",
        "One row a decision: what became of a sample, by which rule.",
        "SELECT e.*, e.seq = max(e.seq) OVER (PARTITION BY e.index) AS last\n"
        "FROM sample_decided AS e",
        ("sample_decided",),
        event_columns("sample_decided") + _made(last="Whether no later decision replaced it."),
    ),
    View(
        "consumption",
        "One row a sample and step: what entered each step, in training order.",
        CONSUMPTION,
        ("step_committed",),
        _passed("step_committed", "run_id", "branch", "step", "rollout_step")
        + _passed("step_committed", "weight_version_in", "weight_version_out")
        + _made(
            position="Place in the step's training order, from 0.",
            index="The sample.",
            micro_batch="Micro-batch of the step, from 0.",
        ),
    ),
    View(
        "samples",
        "One row a sample: what it is, what it earned, and what became of it.",
        SAMPLES,
        (
            "prompt_issued",
            "segment_generated",
            "observation_appended",
            "rewards",
            "decisions",
            "consumption",
        ),
        _PLACED
        + _SAMPLE
        + _made(
            round="0, then 1, 2, … where a filter made the step ask for more prompts.",
            parent_index=_passed("prompt_issued", "parent_index")[0].doc,
            prompt_text="The prompt as text.",
            label="What the verifier compares with.",
            prompt_length="Tokens of the prompt.",
            response_length="Tokens of the response, observations included.",
            sampled_tokens="Tokens that the engine sampled.",
            segments="Number of engine calls.",
            turns="Number of turns.",
            finish_reason="Of the last engine call.",
            weight_version_min="Oldest version that sampled a token; NULL where nobody knows.",
            weight_version_max="Newest version that sampled a token.",
            retokenization_drift="Positions at which decoding and encoding gives other ids.",
            raw_reward="What the verifier said, last.",
            reward="What the estimator gets.",
            response_text="The text that was judged.",
            decision="The last decision; NULL while pending.",
            reason="Why, in a few words.",
            rule="The filter or setting that decided.",
            trained_step="The last step that trained it; NULL where none did.",
            trained_branch="The branch of that step.",
            times_trained="Steps that trained it, on all branches that this reader sees.",
        ),
    ),
    View(
        "groups",
        "One row a group. Samples of one rollout_id share a reward, and it counts once.",
        GROUPS,
        ("prompt_issued", "rewards", "decisions"),
        _made(run_id=PLACE["run_id"], branch=_PLACED[1].doc)
        + _passed("prompt_issued", "group_index", "rollout_step", "round", "text", "label")
        + _passed("prompt_issued", "source", "source_row")
        + _made(
            size="Samples issued with the prompt.",
            siblings="Samples that began in their episodes besides.",
            rollouts="Rollouts that have a reward.",
            reward_mean="Mean reward over rollouts.",
            reward_std="Deviation, unbiased; NULL below two rewards, NaN if one is not finite.",
            reward_min="Smallest reward.",
            reward_max="Largest reward.",
            zero_variance="Whether all rewards are equal; NULL before the first.",
            kept="Samples whose last decision is 'kept'.",
            dropped="Samples with any other last decision.",
        ),
    ),
    _extended(
        "signals",
        "One row a sample and step: what the step computed for each token.",
        "signal_recorded",
        {
            "length": ("len(e.loss_mask)", "R: tokens of the response."),
            "trained_tokens": ("list_sum(e.loss_mask)::BIGINT", "Tokens with mask 1."),
        },
    ),
    _extended(
        "steps",
        "One row an optimizer step.",
        "step_committed",
        {
            "batch_size": ("len(e.indices)", "Samples of the step."),
            "micro_batches": ("len(e.micro_batch_ranks)", "Micro-batches of the step."),
            "metrics": (
                "CASE WHEN len(list_distinct(e.metric_names)) = len(e.metric_names) "
                "THEN map(e.metric_names, e.metric_values) END",
                "The metrics as a map from name to value: metrics['entropy'].",
            ),
        },
    ),
    View(
        "weights",
        "One row a weight version: how it was published, and its last checkpoint.",
        WEIGHTS,
        ("weights_published", "checkpoint_saved"),
        event_columns("weights_published")
        + _made(
            tensors="Number of tensors.",
            checkpoint="Folder of the last checkpoint; NULL where there is none.",
            checkpoint_format="Its format.",
        ),
    ),
    View(
        "versions",
        "The tree of weight versions.",
        VERSIONS,
        ("weights", "step_committed", "rewards"),
        _made(run_id=PLACE["run_id"], branch="The branch that made it.")
        + _passed("weights_published", "weight_version", "parent_version", "step")
        + _made(
            rollout_step="The outer iteration that its step trained on.",
            depth="Updates since the first version.",
            children="Versions made from it.",
            root=_passed("weights_published", "root")[0].doc,
            checkpoint="Folder of its checkpoint; NULL where there is none.",
            reward_mean="Mean reward of the rollouts that trained it; each counts once.",
        ),
    ),
    View(
        "engine_weights",
        "One row an engine and weight version that it took: how, how long it took, and how much "
        "of the version was sent.",
        "SELECT e.*, CASE WHEN e.base_version IS NULL THEN 'full' ELSE 'delta' END AS mode,\n"
        "       e.sent_bytes / nullif(w.size_bytes, 0) AS sent_share,\n"
        "       e.pause_time_s + e.transfer_time_s + e.check_time_s AS time_s\n"
        "FROM weights_loaded AS e LEFT JOIN weights_published AS w\n"
        "  ON e.weight_version = w.weight_version",
        ("weights_loaded", "weights_published"),
        event_columns("weights_loaded")
        + _made(
            mode="'full', or 'delta' where only tensors that differ from base_version were sent.",
            sent_share="Bytes that were sent, as a share of the version's.",
            time_s="Seconds from the pause to the end of the comparison.",
        ),
    ),
    View(
        "staleness",
        "One row a rollout step that was trained on: how many weight versions lie between what "
        "sampled its tokens and what trained on them first.",
        STALENESS,
        ("consumption", "segment_generated"),
        _passed("step_committed", "run_id", "branch", "rollout_step")
        + _made(
            consumer_version="The version before the first step of the rollout step.",
            samples="Samples that it trained on.",
            mean="Mean over samples of the versions from the oldest that sampled a token to "
            "consumer_version, by local numbers; of those whose versions are all known.",
            largest="The largest of them.",
            older="Samples with a token of an older version than consumer_version.",
            mixed="Samples whose tokens are of several versions.",
            unknown="Samples with a token whose version no engine said.",
        ),
    ),
    View(
        "tokens",
        "One row a token of a trajectory. Columns of the trainer are those of the last step that "
        "trained the sample; trained_tokens has all steps.",
        "SELECT run_id, branch, index, rollout_id, group_index, rollout_step, "
        + TOKEN_COLUMNS
        + ", step, step_branch\nFROM (\n"
        "  SELECT t.*, s.step, s.branch AS step_branch, s.loss_mask AS mask, s.log_probs,\n"
        "         s.ref_log_probs, s.advantages\n"
        "  FROM trajectories AS t LEFT JOIN _last_signals AS s ON t.index = s.index\n)",
        ("trajectories", "_last_signals"),
        _EACH_TOKEN
        + _made(
            step="The last step that trained the sample; NULL where none did.",
            step_branch="The branch of that step.",
        ),
        per_token=True,
    ),
    View(
        "_last_signals",
        "The last signal of each sample.",
        "SELECT e.* FROM signal_recorded AS e\n"
        "JOIN (SELECT index, max(seq) AS seq FROM signal_recorded GROUP BY index) AS l\n"
        "  ON e.index = l.index AND e.seq = l.seq",
        ("signal_recorded",),
        (),
        public=False,
    ),
    View(
        "trained_tokens",
        "One row a token and step: everything of the sequences that entered a step.",
        "SELECT run_id, branch, index, rollout_id, group_index, rollout_step, "
        + TOKEN_COLUMNS
        + ", step, step_branch\nFROM (\n"
        "  SELECT t.*, s.step, s.branch AS step_branch, s.loss_mask AS mask, s.log_probs,\n"
        "         s.ref_log_probs, s.advantages\n"
        "  FROM signal_recorded AS s JOIN trajectories AS t ON t.index = s.index\n)",
        ("trajectories", "signal_recorded"),
        _EACH_TOKEN + _made(step="The step.", step_branch="The branch of the step."),
        per_token=True,
    ),
    View(
        "mismatch",
        "One row a signal and span of one weight version: how far the trainer's log-probs lie "
        "from the engine's, over the tokens in the loss. Answers what trained_tokens answers, "
        "without a row a token.",
        "SELECT m.run_id, m.branch, m.seq, m.step, m.index, m.weight_version, m.tokens,\n"
        "       m.total, m.total / nullif(m.tokens, 0) AS mean, m.largest, m.not_finite\n"
        "FROM _mismatch AS m",
        ("_mismatch",),
        _passed("signal_recorded", "run_id", "branch", "seq", "step", "index")
        + _made(
            weight_version="The version that sampled the span; NULL where nobody knows.",
            tokens="Tokens with mask 1 whose difference is a finite number: those compared.",
            total="Sum of the absolute differences of the two log-probs; for means over rows.",
            mean="Mean absolute difference; NULL where no token was compared.",
            largest="Largest absolute difference.",
            not_finite="Tokens with mask 1 that cannot be compared: NaN or infinite.",
        ),
    ),
    _extended(
        "routing",
        "One row an engine call of a mixture of experts, or a forward of the trainer's old policy:"
        " which experts each token was sent to.",
        "routing_recorded",
        {
            "recorded_by": (
                "CASE WHEN e.policy_version IS NULL THEN 'engine' ELSE 'old_policy' END",
                "'engine' or 'old_policy'.",
            ),
            "size_bytes": ("octet_length(e.expert_ids)", "Bytes of the expert ids."),
        },
    ),
    View(
        "events",
        "One row an event of any kind, in order.",
        "\nUNION ALL\n".join(EVENT_LOG_OF.format(kind=kind) for kind in sorted(EVENTS)),
        tuple(sorted(EVENTS)),
        _made(
            run_id=PLACE["run_id"],
            branch=PLACE["branch"],
            seq=PLACE["seq"],
            kind="Stable name of the event.",
            recorded_at="When it was appended.",
        ),
    ),
)

VIEWS: dict[str, View] = {view.name: view for view in _ALL}
"""Every view by its name, building blocks included."""
