"""The longer SQL of the views. `view_definitions` says what their columns mean.

Both sides of every join have an alias, floats are never compared for identity, and lambdas are
written `lambda x: …`: what DuckDB 1.5 and 2.0 both take without a warning.
"""

from __future__ import annotations

from ledger.numbering import VERSION_SPAN

__all__ = [
    "CONSUMPTION",
    "EVENT_LOG_OF",
    "GROUPS",
    "PIECES",
    "RESPONSES",
    "SAMPLES",
    "STALENESS",
    "TOKEN_COLUMNS",
    "TRAJECTORIES",
    "VERSIONS",
    "WEIGHTS",
]

EVENT_LOG_OF = "SELECT run_id, branch, seq, '{kind}' AS kind, recorded_at FROM {kind}"

# list_resize of an empty list gives n NULLs, or n copies of a value: no list of numbers is built
# by a lambda for each token. A version of -1 (unknown) becomes NULL.
PIECES = """
SELECT s.branch, s.index, s.start, s.seq, s.turn, s.tokens, 'sampled' AS source,
       s.rollout_log_probs AS log_probs,
       CASE WHEN len(s.span_versions) = 1 AND s.span_versions[1] >= 0
            THEN list_resize([]::BIGINT[], len(s.tokens), s.span_versions[1])
            ELSE flatten(list_transform(range(1, len(s.span_versions) + 1), lambda i:
                 CASE WHEN s.span_versions[i] >= 0
                      THEN list_resize([]::BIGINT[], s.span_ends[i] - s.span_starts[i],
                                       s.span_versions[i])
                      ELSE list_resize([]::BIGINT[], s.span_ends[i] - s.span_starts[i]) END)) END
         AS versions
FROM segment_generated AS s
UNION ALL
SELECT o.branch, o.index, o.start, o.seq, o.turn, o.tokens, o.source,
       list_resize([]::FLOAT[], len(o.tokens)) AS log_probs,
       list_resize([]::BIGINT[], len(o.tokens)) AS versions
FROM observation_appended AS o
"""

# Most samples have one piece: they pass without being gathered, which is what makes a scan of all
# tokens fast. Only the others are put together.
RESPONSES = """
WITH several AS (SELECT index FROM _pieces GROUP BY index HAVING count(*) > 1)
SELECT p.index, p.tokens, p.log_probs, p.versions,
       list_resize([]::UTINYINT[], len(p.tokens),
                   CASE p.source WHEN 'sampled' THEN 1 ELSE 0 END::UTINYINT) AS loss_mask,
       list_resize([]::VARCHAR[], len(p.tokens), p.source) AS sources,
       list_resize([]::INTEGER[], len(p.tokens), p.turn) AS turn_of_tokens,
       p.turn + 1 AS turns,
       CASE p.source WHEN 'sampled' THEN 1 ELSE 0 END AS segments,
       CASE p.source WHEN 'sampled' THEN 0 ELSE 1 END AS observations,
       p.start = 0 AS complete
FROM _pieces AS p ANTI JOIN several AS m ON p.index = m.index
UNION ALL
SELECT g.index,
       flatten(list_transform(g.pieces, lambda x: x.tokens)),
       flatten(list_transform(g.pieces, lambda x: x.log_probs)),
       flatten(list_transform(g.pieces, lambda x: x.versions)),
       flatten(list_transform(g.pieces, lambda x: list_resize([]::UTINYINT[], len(x.tokens),
               CASE x.source WHEN 'sampled' THEN 1 ELSE 0 END::UTINYINT))),
       flatten(list_transform(g.pieces, lambda x:
               list_resize([]::VARCHAR[], len(x.tokens), x.source))),
       flatten(list_transform(g.pieces, lambda x:
               list_resize([]::INTEGER[], len(x.tokens), x.turn))),
       g.turns, g.segments, g.observations, g.complete
FROM (
  SELECT q.index,
         list({'tokens': q.tokens, 'log_probs': q.log_probs, 'versions': q.versions,
               'source': q.source, 'turn': q.turn} ORDER BY q.start, q.seq) AS pieces,
         max(q.turn) + 1 AS turns,
         count(*) FILTER (q.source = 'sampled') AS segments,
         count(*) FILTER (q.source <> 'sampled') AS observations,
         bool_and(q.start = q.expected) AS complete
  FROM (
    SELECT p.*, coalesce(sum(len(p.tokens)) OVER (
             PARTITION BY p.index ORDER BY p.start, p.seq
             ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS expected
    FROM _pieces AS p SEMI JOIN several AS m ON p.index = m.index
  ) AS q
  GROUP BY q.index
) AS g
"""

TRAJECTORIES = """
SELECT p.run_id, p.branch, p.index, p.rollout_id, p.group_index, p.rollout_step,
       list_concat(p.tokens, r.tokens) AS tokens,
       len(p.tokens) AS prompt_length, len(r.tokens) AS response_length,
       r.loss_mask, r.log_probs AS rollout_log_probs, r.versions AS weight_versions,
       r.sources, r.turn_of_tokens, r.turns, r.segments, r.observations, r.complete,
       f.finish_reason, p.text AS prompt_text, p.label
FROM (SELECT i.run_id, i.branch, unnest(i.indices) AS index, unnest(i.rollout_ids) AS rollout_id,
             i.group_index, i.rollout_step, i.tokens, i.text, i.label
      FROM prompt_issued AS i) AS p
JOIN _responses AS r ON p.index = r.index
LEFT JOIN (SELECT s.index, arg_max(s.finish_reason, s.segment) AS finish_reason
           FROM segment_generated AS s GROUP BY s.index) AS f ON p.index = f.index
"""

# Lists of one row are unnested side by side; those of the response are shifted by the prompt.
_SHIFTED = "unnest(list_concat(list_resize([]::{type}[], prompt_length), {name})) AS {as_}"
TOKEN_COLUMNS = ",\n  ".join(
    (
        "unnest(range(len(tokens)))::INTEGER AS position",
        "unnest(list_concat(list_resize([]::INTEGER[], prompt_length),"
        " range(response_length)::INTEGER[])) AS response_position",
        "unnest(tokens) AS token",
        "unnest(list_concat(list_resize([]::VARCHAR[], prompt_length, 'prompt'), sources))"
        " AS source",
        _SHIFTED.format(type="INTEGER", name="turn_of_tokens", as_="turn"),
        "unnest(list_resize(list_concat(list_resize([]::UTINYINT[], prompt_length, 0::UTINYINT),"
        " mask), len(tokens), 0::UTINYINT)) AS loss_mask",
        _SHIFTED.format(type="FLOAT", name="rollout_log_probs", as_="rollout_log_prob"),
        "unnest(list_concat(list_resize([]::FLOAT[], prompt_length),"
        " CASE WHEN observations = 0 THEN log_probs"
        " ELSE list_transform(log_probs, lambda x, i:"
        " CASE WHEN sources[i] = 'sampled' THEN x END) END)) AS log_prob",
        "unnest(list_concat(list_resize([]::FLOAT[], prompt_length), ref_log_probs))"
        " AS ref_log_prob",
        _SHIFTED.format(type="BIGINT", name="weight_versions", as_="weight_version"),
        _SHIFTED.format(type="FLOAT", name="advantages", as_="advantage"),
    )
)

CONSUMPTION = """
SELECT c.run_id, c.branch, c.step, c.rollout_step, c.weight_version_in, c.weight_version_out,
       c.position, c.index,
       len(list_filter(c.micro_batch_offsets, lambda o: o <= c.position)) - 1 AS micro_batch
FROM (SELECT e.run_id, e.branch, e.step, e.rollout_step, e.weight_version_in,
             e.weight_version_out, e.micro_batch_offsets,
             unnest(range(len(e.indices))) AS position, unnest(e.indices) AS index
      FROM step_committed AS e) AS c
"""

STALENESS = f"""
SELECT c.run_id, c.branch, c.rollout_step, c.consumer_version, count(*) AS samples,
       avg(c.consumer_version % {VERSION_SPAN} - v.oldest) AS mean,
       max(c.consumer_version % {VERSION_SPAN} - v.oldest) AS largest,
       count(*) FILTER (v.oldest < c.consumer_version % {VERSION_SPAN}) AS older,
       count(*) FILTER (v.versions > 1) AS mixed,
       count(*) FILTER (v.unknown) AS unknown
FROM (SELECT run_id, branch, rollout_step, index,
             first_value(weight_version_in) OVER (
               PARTITION BY run_id, branch, rollout_step ORDER BY step) AS consumer_version
      FROM consumption) AS c
LEFT JOIN (SELECT s.index, bool_or(s.version = -1) AS unknown,
                  count(DISTINCT s.version) AS versions,
                  CASE WHEN bool_or(s.version = -1) THEN NULL
                       ELSE min(s.version % {VERSION_SPAN}) END AS oldest
           FROM (SELECT g.index, unnest(g.span_versions) AS version
                 FROM segment_generated AS g WHERE len(g.tokens) > 0) AS s
           GROUP BY s.index) AS v ON c.index = v.index
GROUP BY c.run_id, c.branch, c.rollout_step, c.consumer_version
"""

SAMPLES = """
SELECT p.run_id, p.branch, p.index, p.rollout_id, p.group_index, p.rollout_step, p.round,
       p.parent_index, p.text AS prompt_text, p.label, p.prompt_length,
       coalesce(g.sampled_tokens, 0) + coalesce(o.observed_tokens, 0) AS response_length,
       coalesce(g.sampled_tokens, 0) AS sampled_tokens,
       coalesce(g.segments, 0) AS segments,
       greatest(g.turn, o.turn) + 1 AS turns,
       g.finish_reason, g.weight_version_min, g.weight_version_max, g.retokenization_drift,
       r.raw_reward, r.reward, r.response_text,
       d.decision, d.reason, d.rule,
       c.step AS trained_step, c.branch AS trained_branch,
       coalesce(c.times_trained, 0) AS times_trained
FROM (SELECT i.run_id, i.branch, unnest(i.indices) AS index, unnest(i.rollout_ids) AS rollout_id,
             i.group_index, i.rollout_step, i.round, i.parent_index,
             len(i.tokens) AS prompt_length, i.text, i.label
      FROM prompt_issued AS i) AS p
LEFT JOIN (
  SELECT s.index, sum(len(s.tokens))::BIGINT AS sampled_tokens, count(*) AS segments,
         max(s.turn) AS turn, arg_max(s.finish_reason, s.segment) AS finish_reason,
         min(list_min(list_filter(s.span_versions, lambda v: v >= 0))) AS weight_version_min,
         max(list_max(s.span_versions)) FILTER (list_max(s.span_versions) >= 0)
           AS weight_version_max,
         sum(s.retokenization_drift)::BIGINT AS retokenization_drift
  FROM segment_generated AS s GROUP BY s.index) AS g ON p.index = g.index
LEFT JOIN (
  SELECT b.index, sum(len(b.tokens))::BIGINT AS observed_tokens, max(b.turn) AS turn
  FROM observation_appended AS b GROUP BY b.index) AS o ON p.index = o.index
LEFT JOIN rewards AS r ON p.index = r.index
LEFT JOIN (SELECT x.* FROM decisions AS x WHERE x.last) AS d ON p.index = d.index
LEFT JOIN (
  SELECT u.index, arg_max(u.step, u.weight_version_out) AS step,
         arg_max(u.branch, u.weight_version_out) AS branch, count(*) AS times_trained
  FROM consumption AS u GROUP BY u.index) AS c ON p.index = c.index
"""

# Equal rewards are told by max − min, which is NaN (hence not zero) when a reward is not finite;
# DuckDB 1.5 refuses a deviation over infinities, so it is not asked for one. Rewards are
# added up in order of rollout_id: the same question gives the same bits.
GROUPS = """
SELECT p.run_id, p.branch, p.group_index, p.rollout_step, p.round, p.text, p.label, p.source,
       p.source_row, len(p.indices) AS size, coalesce(b.siblings, 0) AS siblings,
       coalesce(r.rollouts, 0) AS rollouts, r.reward_mean,
       CASE WHEN r.finite THEN r.reward_std ELSE 'nan'::DOUBLE END AS reward_std,
       r.reward_min, r.reward_max,
       CASE WHEN r.finite THEN r.reward_max - r.reward_min = 0
            WHEN r.rollouts > 0 THEN false END AS zero_variance,
       coalesce(d.kept, 0) AS kept, coalesce(d.dropped, 0) AS dropped
FROM (SELECT i.* FROM prompt_issued AS i WHERE i.parent_index IS NULL) AS p
LEFT JOIN (
  SELECT i.group_index, sum(len(i.indices))::BIGINT AS siblings
  FROM prompt_issued AS i WHERE i.parent_index IS NOT NULL GROUP BY i.group_index) AS b
  ON p.group_index = b.group_index
LEFT JOIN (
  SELECT x.group_index, count(*) AS rollouts, avg(x.reward ORDER BY x.rollout_id) AS reward_mean,
         stddev_samp(x.reward ORDER BY x.rollout_id) FILTER (isfinite(x.reward)) AS reward_std,
         min(x.reward) AS reward_min, max(x.reward) AS reward_max,
         bool_and(isfinite(x.reward)) AS finite
  FROM (SELECT w.group_index, w.rollout_id, arg_max(w.reward, w.seq) AS reward
        FROM rewards AS w GROUP BY w.group_index, w.rollout_id) AS x
  GROUP BY x.group_index) AS r ON p.group_index = r.group_index
LEFT JOIN (
  SELECT y.group_index, count(*) FILTER (y.decision = 'kept') AS kept,
         count(*) FILTER (y.decision <> 'kept') AS dropped
  FROM decisions AS y WHERE y.last GROUP BY y.group_index) AS d ON p.group_index = d.group_index
"""

WEIGHTS = """
SELECT e.*, len(e.tensor_names) AS tensors, k.location AS checkpoint,
       k.format AS checkpoint_format
FROM weights_published AS e
LEFT JOIN (SELECT c.weight_version, arg_max(c.location, c.seq) AS location,
                  arg_max(c.format, c.seq) AS format
           FROM checkpoint_saved AS c GROUP BY c.weight_version) AS k
  ON e.weight_version = k.weight_version
"""

VERSIONS = """
WITH RECURSIVE edges AS MATERIALIZED (
  SELECT x.weight_version, x.parent_version FROM weights_published AS x
), tree(weight_version, depth) AS (
  SELECT w.weight_version, 0 FROM edges AS w
  WHERE w.parent_version IS NULL
     OR w.parent_version NOT IN (SELECT x.weight_version FROM edges AS x)
  UNION ALL
  SELECT w.weight_version, t.depth + 1
  FROM tree AS t JOIN edges AS w ON w.parent_version = t.weight_version
)
SELECT w.run_id, w.branch, w.weight_version, w.parent_version, w.step, s.rollout_step, t.depth,
       coalesce(k.children, 0) AS children, w.root, w.checkpoint, s.reward_mean
FROM weights AS w
LEFT JOIN tree AS t ON w.weight_version = t.weight_version
LEFT JOIN (SELECT y.parent_version, count(*) AS children
           FROM weights AS y GROUP BY y.parent_version) AS k ON w.weight_version = k.parent_version
LEFT JOIN (
  SELECT z.weight_version_out, any_value(z.rollout_step) AS rollout_step,
         avg(z.reward ORDER BY z.rollout_id) AS reward_mean
  FROM (SELECT u.weight_version_out, any_value(u.rollout_step) AS rollout_step, r.rollout_id,
               arg_max(r.reward, r.seq) AS reward
        FROM (SELECT e.weight_version_out, e.rollout_step, unnest(e.indices) AS index
              FROM step_committed AS e) AS u
        LEFT JOIN rewards AS r ON u.index = r.index
        GROUP BY u.weight_version_out, r.rollout_id) AS z
  GROUP BY z.weight_version_out) AS s ON w.weight_version = s.weight_version_out
"""
