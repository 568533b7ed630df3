"""The rules of `ledger check`: each a query for the rows that break an invariant.

Each query gives branch, seq, index (NULL where the event is not about a sample) and `what`, a
sentence with expected and found. Lists are compared by their lengths and elements, never floats for
identity.
"""

from __future__ import annotations

import dataclasses

from ledger.numbering import VERSION_SPAN

__all__ = ["RULES", "Rule"]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One query for violations."""

    invariant: str
    kind: str
    sql: str
    needs: tuple[str, ...] = ()
    """Kinds whose rows it misses where they are not there: it says nothing of samples whose rows
    of these retention has retired."""


def _rows(invariant: str, kind: str, wrong: str, what: str, index: str = "NULL::BIGINT") -> Rule:
    """A rule over single rows of one event: `wrong` is the condition, `what` the sentence."""
    return Rule(
        invariant,
        kind,
        f"SELECT e.branch, e.seq, {index} AS index, {what} AS what FROM {kind} AS e WHERE {wrong}",
    )


_RESPONSE = ("segment_generated", "observation_appended")
"""The kinds that a response is put together from."""

_I = (
    _rows(
        "I",
        "segment_generated",
        "len(e.rollout_log_probs) <> len(e.tokens)",
        "format('{} log-probs for {} tokens', len(e.rollout_log_probs), len(e.tokens))",
        "e.index",
    ),
    _rows(
        "I",
        "segment_generated",
        "list_count(e.rollout_log_probs) < len(e.rollout_log_probs)"
        " OR list_count(e.tokens) < len(e.tokens)",
        "'a sampled token without id or log-prob'",
        "e.index",
    ),
    _rows(
        "I",
        "segment_generated",
        "len(list_filter(e.tokens, lambda t: t < 0)) > 0",
        "format('token id {} is below zero', list_min(e.tokens))",
        "e.index",
    ),
    _rows(
        "I",
        "segment_generated",
        "NOT isfinite(e.temperature) OR e.temperature < 0 OR NOT (e.top_p > 0 AND e.top_p <= 1)"
        " OR (e.top_k < 1 AND e.top_k <> -1) OR e.logprob_mode NOT IN ('full', 'processed')"
        " OR NOT isfinite(e.logprob_temperature) OR e.logprob_temperature <= 0",
        "format('sampling parameters cannot be: temperature {}, top_p {}, top_k {}, mode {},"
        " divided by {}', e.temperature, e.top_p, e.top_k, e.logprob_mode,"
        " e.logprob_temperature)",
        "e.index",
    ),
    Rule(
        "I",
        "segment_generated",
        "SELECT s.branch, s.seq, s.index,"
        " format('sampled by version {}, which was never published', v.version) AS what\n"
        "FROM segment_generated AS s, unnest(list_distinct(s.span_versions)) AS v(version)\n"
        "WHERE v.version <> -1\n"
        "  AND v.version NOT IN (SELECT w.weight_version FROM weights_published AS w)",
    ),
    Rule(
        "I",
        "segment_generated",
        "SELECT s.branch, s.seq, s.index,"
        " 'the sample was never issued with a prompt' AS what\n"
        "FROM segment_generated AS s ANTI JOIN (\n"
        "  SELECT unnest(p.indices) AS index FROM prompt_issued AS p) AS i ON s.index = i.index",
    ),
    Rule(
        "I",
        "prompt_issued",
        "SELECT arg_max(i.branch, i.seq) AS branch, max(i.seq) AS seq, i.index,"
        " format('the sample was issued {} times', count(*)) AS what\n"
        "FROM (SELECT p.branch, p.seq, unnest(p.indices) AS index FROM prompt_issued AS p) AS i\n"
        "GROUP BY i.index HAVING count(*) > 1",
    ),
    Rule(
        "I",
        "signal_recorded",
        "SELECT s.branch, s.seq, s.index,"
        " 'tokens that entered a loss have no known weight version' AS what\n"
        "FROM signal_recorded AS s JOIN (\n"
        "  SELECT g.index FROM segment_generated AS g\n"
        "  WHERE list_contains(g.span_versions, -1) GROUP BY g.index) AS u ON s.index = u.index\n"
        "JOIN trajectories AS t ON s.index = t.index\n"
        "WHERE len(list_filter(list_zip(s.loss_mask, t.weight_versions, t.sources), lambda x:\n"
        "      x[1] = 1 AND x[2] IS NULL AND x[3] = 'sampled')) > 0",
        _RESPONSE,
    ),
    _rows(
        "I",
        "routing_recorded",
        "octet_length(e.expert_ids)::HUGEINT <> e.rows::HUGEINT * e.layers * e.topk"
        " * CASE e.dtype WHEN 'uint8' THEN 1 WHEN 'uint16' THEN 2 ELSE -1 END",
        "format('{} bytes of expert ids for {} rows of {} layers of {} {}',"
        " octet_length(e.expert_ids), e.rows, e.layers, e.topk, e.dtype)",
        "e.index",
    ),
    Rule(
        "I",
        "routing_recorded",
        "SELECT e.branch, e.seq, e.index, format('segment {}: routing rows {} to {} overlap those"
        " before, which end at {}', e.segment, e.start, e.start + e.rows, e.reached) AS what\n"
        "FROM (SELECT r.*, max(r.start + r.rows) OVER (\n"
        "    PARTITION BY r.index, r.policy_version ORDER BY r.start, r.seq\n"
        "    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached\n"
        "  FROM (SELECT o.branch, o.seq, o.index, o.segment, o.start, o.rows, o.policy_version\n"
        "    FROM routing_recorded AS o) AS r) AS e\n"
        "WHERE e.start < e.reached",
    ),
    Rule(
        "I",
        "routing_recorded",
        "SELECT r.branch, r.seq, r.index, format('{} routing rows for {} tokens of prompt and"
        " response: expected {} at most, the last token is never fed', r.ends,"
        " t.prompt_length + t.response_length, t.prompt_length + t.response_length - 1) AS what\n"
        "FROM (SELECT o.index, max(o.start + o.rows) AS ends,\n"
        "        arg_max(o.branch, o.start + o.rows) AS branch,\n"
        "        arg_max(o.seq, o.start + o.rows) AS seq\n"
        "  FROM routing_recorded AS o GROUP BY o.index) AS r\n"
        "JOIN trajectories AS t ON r.index = t.index\n"
        "WHERE r.ends > t.prompt_length + t.response_length - 1",
        _RESPONSE,
    ),
)

_II = (
    _rows(
        "II",
        "signal_recorded",
        "len(list_filter(e.loss_mask, lambda m: m IS NULL OR m > 1)) > 0",
        "format('a mask of {}: expected 0 or 1', list_max(e.loss_mask))",
        "e.index",
    ),
    _rows(
        "II",
        "signal_recorded",
        "len(e.log_probs) <> len(e.loss_mask) OR len(e.advantages) <> len(e.loss_mask)"
        " OR coalesce(len(e.ref_log_probs) <> len(e.loss_mask), false)"
        " OR coalesce(len(e.values) <> len(e.loss_mask), false)"
        " OR coalesce(len(e.returns) <> len(e.loss_mask), false)",
        "format('a mask of {} tokens, but {} log-probs and {} advantages', len(e.loss_mask),"
        " len(e.log_probs), len(e.advantages))",
        "e.index",
    ),
    Rule(
        "II",
        "signal_recorded",
        "SELECT s.branch, s.seq, s.index,"
        " format('a mask of {} tokens for a response of {}', len(s.loss_mask),"
        " coalesce(t.response_length, 0)) AS what\n"
        "FROM signal_recorded AS s LEFT JOIN trajectories AS t ON s.index = t.index\n"
        "WHERE len(s.loss_mask) <> coalesce(t.response_length, 0)",
        _RESPONSE,
    ),
    Rule(
        "II",
        "signal_recorded",
        "SELECT s.branch, s.seq, s.index,"
        " 'mask 1 on a token that nobody sampled' AS what\n"
        "FROM signal_recorded AS s JOIN trajectories AS t ON s.index = t.index\n"
        "WHERE t.observations > 0 AND len(list_filter(list_zip(s.loss_mask, t.loss_mask),"
        " lambda x: x[1] = 1 AND x[2] = 0)) > 0",
        _RESPONSE,
    ),
    Rule(
        "II",
        "segment_generated",
        "SELECT s.branch, s.seq, t.index,"
        " format('the pieces of the response have a hole or overlap: {} tokens in {} pieces',"
        " t.response_length, t.segments + t.observations) AS what\n"
        "FROM trajectories AS t JOIN (\n"
        "  SELECT g.index, min(g.seq) AS seq, arg_min(g.branch, g.seq) AS branch\n"
        "  FROM _pieces AS g GROUP BY g.index) AS s ON t.index = s.index\n"
        "WHERE NOT t.complete",
        _RESPONSE,
    ),
    Rule(
        "II",
        "step_committed",
        "SELECT c.branch, e.seq, c.index,"
        " format('trained, but its last decision is {}', coalesce(d.decision, 'missing')) AS what\n"
        "FROM consumption AS c\n"
        "JOIN step_committed AS e ON c.branch = e.branch AND c.step = e.step\n"
        "LEFT JOIN (SELECT x.index, x.decision FROM decisions AS x WHERE x.last) AS d\n"
        "  ON c.index = d.index\n"
        "WHERE d.decision IS DISTINCT FROM 'kept'",
    ),
    Rule(
        "II",
        "step_committed",
        "SELECT c.branch, e.seq, c.index, 'trained without a recorded signal' AS what\n"
        "FROM consumption AS c\n"
        "JOIN step_committed AS e ON c.branch = e.branch AND c.step = e.step\n"
        "ANTI JOIN signal_recorded AS s\n"
        "  ON c.branch = s.branch AND c.step = s.step AND c.index = s.index",
        ("signal_recorded",),
    ),
    Rule(
        "II",
        "sample_scored",
        "SELECT arg_max(r.branch, r.seq) AS branch, max(r.seq) AS seq, max(r.index) AS index,\n"
        "  format('samples of rollout {} have {} different rewards', r.rollout_id,"
        " count(DISTINCT r.reward)) AS what\n"
        "FROM rewards AS r GROUP BY r.rollout_id HAVING count(DISTINCT r.reward) > 1",
    ),
    *(
        Rule(
            "II",
            kind,
            f"SELECT e.branch, e.seq, e.index,"
            f" format('rollout {{}} and group {{}}; issued as rollout {{}} of group {{}}',"
            f" e.rollout_id, e.group_index, p.rollout_id, p.group_index) AS what\n"
            f"FROM {kind} AS e JOIN (\n"
            f"  SELECT unnest(i.indices) AS index, unnest(i.rollout_ids) AS rollout_id,\n"
            f"         i.group_index FROM prompt_issued AS i) AS p ON e.index = p.index\n"
            f"WHERE e.rollout_id <> p.rollout_id OR e.group_index <> p.group_index",
        )
        for kind in ("segment_generated", "sample_scored", "sample_decided")
    ),
    Rule(
        "II",
        "sample_decided",
        "SELECT d.branch, d.seq, d.index,"
        " format('{} behind {}, which was final', d.decision, f.decision) AS what\n"
        "FROM sample_decided AS d JOIN sample_decided AS f"
        " ON d.index = f.index AND d.branch = f.branch\n"
        "WHERE f.seq < d.seq AND f.decision <> 'recycled'",
    ),
    Rule(
        "II",
        "prompt_issued",
        "SELECT s.branch, s.seq, s.index,"
        " format('begun as a sibling of sample {} in rollout {} and group {}; that sample is {}',"
        " s.parent_index, s.rollout_id, s.group_index, CASE WHEN p.index IS NULL THEN"
        " 'not issued before it' ELSE format('of rollout {} and group {}', p.rollout_id,"
        " p.group_index) END) AS what\n"
        "FROM (SELECT i.branch, i.seq, i.parent_index, i.group_index, unnest(i.indices) AS index,\n"
        "        unnest(i.rollout_ids) AS rollout_id\n"
        "  FROM prompt_issued AS i WHERE i.parent_index IS NOT NULL) AS s\n"
        "LEFT JOIN (SELECT i.seq, i.group_index, unnest(i.indices) AS index,\n"
        "        unnest(i.rollout_ids) AS rollout_id FROM prompt_issued AS i) AS p\n"
        "  ON s.parent_index = p.index AND p.seq < s.seq\n"
        "WHERE p.index IS NULL OR p.rollout_id <> s.rollout_id OR p.group_index <> s.group_index",
    ),
)

_III = (
    _rows(
        "III",
        "segment_generated",
        "len(e.span_starts) <> len(e.span_versions) OR len(e.span_ends) <> len(e.span_versions)"
        " OR coalesce(e.span_starts[1], 0) <> 0 OR coalesce(e.span_ends[-1], 0) <> len(e.tokens)"
        " OR e.span_starts[2:] IS DISTINCT FROM e.span_ends[:-2]"
        " OR len(list_filter(list_zip(e.span_starts, e.span_ends), lambda x:"
        " coalesce(x[1] > x[2] OR (x[1] = x[2] AND len(e.tokens) > 0), true))) > 0",
        "format('spans {} to {} do not cover {} tokens without hole or overlap',"
        " e.span_starts::VARCHAR, e.span_ends::VARCHAR, len(e.tokens))",
        "e.index",
    ),
    _rows(
        "III",
        "segment_generated",
        "len(list_filter(list_zip(e.span_versions, e.span_versions[2:]), lambda x:"
        " x[2] <> -1 AND x[2] < x[1])) > 0",
        "format('versions {} fall within one generation', e.span_versions::VARCHAR)",
        "e.index",
    ),
    Rule(
        "III",
        "segment_generated",
        "SELECT s.branch, s.seq, s.index, format('sampled by version {} before its publication"
        " (seq {})', v.version, w.seq) AS what\n"
        "FROM segment_generated AS s, unnest(list_distinct(s.span_versions)) AS v(version)\n"
        "JOIN weights_published AS w ON v.version = w.weight_version WHERE s.seq < w.seq",
    ),
    Rule(
        "III",
        "sample_decided",
        "SELECT d.branch, d.seq, d.index, format('staleness {}: tokens of version {} are consumed"
        " at version {}', d.staleness, v.oldest, d.consumer_version) AS what\n"
        "FROM sample_decided AS d JOIN (\n"
        f"  SELECT g.index, min(list_min(g.span_versions) % {VERSION_SPAN}) AS oldest\n"
        "  FROM segment_generated AS g WHERE len(g.tokens) > 0 GROUP BY g.index\n"
        "  HAVING NOT bool_or(list_contains(g.span_versions, -1))) AS v ON d.index = v.index\n"
        "WHERE d.decision = 'kept' AND d.consumer_version IS NOT NULL\n"
        f"  AND d.staleness IS DISTINCT FROM d.consumer_version % {VERSION_SPAN} - v.oldest",
        ("segment_generated",),
    ),
    Rule(
        "III",
        "step_committed",
        "SELECT e.branch, e.seq, NULL::BIGINT AS index,"
        " format('made version {} from {}, but that was never published as such',"
        " e.weight_version_out, e.weight_version_in) AS what\n"
        "FROM step_committed AS e ANTI JOIN weights_published AS w\n"
        "  ON e.branch = w.branch AND e.weight_version_out = w.weight_version\n"
        "  AND e.weight_version_in = w.parent_version AND e.step = w.step",
    ),
    Rule(
        "III",
        "weights_published",
        "SELECT max(w.branch) AS branch, max(w.seq) AS seq, NULL::BIGINT AS index,"
        " format('version {} was published {} times', w.weight_version, count(*)) AS what\n"
        "FROM weights_published AS w GROUP BY w.weight_version HAVING count(*) > 1",
    ),
)

_IV = (
    _rows(
        "IV",
        "weights_published",
        "len(e.tensor_names) = 0 OR len(e.tensor_dtypes) <> len(e.tensor_names)"
        " OR len(e.tensor_shapes) <> len(e.tensor_names)"
        " OR len(e.tensor_checksums) <> len(e.tensor_names)"
        " OR list_sort(list_distinct(e.tensor_names)) IS DISTINCT FROM e.tensor_names",
        "format('version {}: {} sorted names once each, {} dtypes, {} shapes, {} checksums"
        " expected to agree', e.weight_version, len(e.tensor_names), len(e.tensor_dtypes),"
        " len(e.tensor_shapes), len(e.tensor_checksums))",
    ),
    _rows(
        "IV",
        "weights_published",
        "e.shard_ranges IS NOT NULL AND NOT json_valid(e.shard_ranges)",
        "'the shard ranges are not JSON'",
    ),
    _rows(
        "IV",
        "step_committed",
        "NOT json_valid(e.layout)",
        "'the layout of the training is not JSON'",
    ),
    _rows(
        "IV",
        "step_committed",
        "len(e.micro_batch_offsets) <> len(e.micro_batch_ranks) + 1"
        " OR e.micro_batch_offsets[1] <> 0 OR e.micro_batch_offsets[-1] <> len(e.indices)"
        " OR list_sort(e.micro_batch_offsets) IS DISTINCT FROM e.micro_batch_offsets",
        "format('micro-batches {} on ranks {} do not divide {} samples',"
        " e.micro_batch_offsets::VARCHAR, e.micro_batch_ranks::VARCHAR, len(e.indices))",
    ),
    Rule(
        "IV",
        "weights_loaded",
        "SELECT l.branch, l.seq, NULL::BIGINT AS index,"
        " format('version {}: what engine {} took are not the published weights',"
        " l.weight_version, coalesce(l.engine_address, l.engine)) AS what\n"
        "FROM weights_loaded AS l JOIN weights_published AS w\n"
        "  ON l.weight_version = w.weight_version WHERE l.root <> w.root",
    ),
    Rule(
        "III",
        "segment_generated",
        "SELECT s.branch, s.seq, s.index,"
        " format('sampled by version {} on engine {}, which had not taken it by then',"
        " s.version, s.engine_address) AS what\n"
        "FROM (\n"
        "  SELECT g.branch, g.seq, g.index, g.engine_address,\n"
        "         unnest(list_distinct(g.span_versions)) AS version\n"
        "  FROM segment_generated AS g\n"
        "  WHERE g.engine_address IN (SELECT engine_address FROM weights_loaded)\n"
        ") AS s LEFT JOIN (\n"
        "  SELECT engine_address, weight_version, min(seq) AS seq\n"
        "  FROM weights_loaded GROUP BY engine_address, weight_version\n"
        ") AS l ON s.engine_address = l.engine_address AND s.version = l.weight_version\n"
        "WHERE s.version <> -1 AND (l.seq IS NULL OR l.seq > s.seq)",
    ),
    Rule(
        "IV",
        "checkpoint_saved",
        "SELECT c.branch, c.seq, NULL::BIGINT AS index,"
        " format('version {}: the weights of the checkpoint are not the published ones',"
        " c.weight_version) AS what\n"
        "FROM checkpoint_saved AS c JOIN weights_published AS w\n"
        "  ON c.weight_version = w.weight_version WHERE c.weights_root <> w.root",
    ),
)

_ONCE = (
    Rule(
        "once",
        "step_committed",
        "SELECT c.branch, max(e.seq) AS seq, c.index,"
        " format('trained {} times on one branch: steps {}', count(*),"
        " list_sort(list(c.step))::VARCHAR) AS what\n"
        "FROM consumption AS c\n"
        "JOIN step_committed AS e ON c.branch = e.branch AND c.step = e.step\n"
        "GROUP BY c.branch, c.index HAVING count(*) > 1",
    ),
    Rule(
        "once",
        "step_committed",
        "SELECT c.branch, max(e.seq) AS seq, max(c.index) AS index,"
        " format('samples of rollout {} trained in several steps of one branch, so its reward"
        " counted more than once: {}', i.rollout_id,"
        " list_sort(list(DISTINCT c.step))::VARCHAR) AS what\n"
        "FROM consumption AS c\n"
        "JOIN step_committed AS e ON c.branch = e.branch AND c.step = e.step\n"
        "JOIN (SELECT unnest(p.indices) AS index, unnest(p.rollout_ids) AS rollout_id\n"
        "      FROM prompt_issued AS p) AS i ON c.index = i.index\n"
        "GROUP BY c.branch, i.rollout_id\n"
        "HAVING count(DISTINCT c.step) > 1 AND count(DISTINCT c.index) > 1",
    ),
)

RULES: tuple[Rule, ...] = _I + _II + _III + _IV + _ONCE
