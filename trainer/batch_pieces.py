"""Puts the pieces of samples together: prompts, segments, observations, checked for holes.

All pieces are brought into the order of samples and starts; their tokens, one after the other,
then *are* the flat batch, and whatever is per piece is repeated by lengths. Everything is Arrow
and numpy: what is per token is copied once, from the mapped files into the batch, which takes a
small part of the time of a query over list columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ledger.errors import InvalidEvent, NotFound, explain
from ledger.events import UNKNOWN_VERSION
from ledger.views import TableSource
from trainer.batch_lists import joined, views_of
from trainer.batch_rows import positions_of, select_rows

__all__ = ["Pieces", "read_pieces"]

_PROMPT, _SEGMENT, _OBSERVATION = 0, 1, 2
_PROMPT_COLUMNS = ("group_index", "indices", "rollout_ids", "tokens")
_SHARED_COLUMNS = ("index", "rollout_id", "start", "tokens")
_BY_VIEW = ("tokens", "rollout_log_probs")
"""Columns of a value a token, which are copied once, into the batch."""
_SEGMENT_COLUMNS = (
    *_SHARED_COLUMNS,
    "segment",
    "rollout_log_probs",
    "span_starts",
    "span_ends",
    "span_versions",
    "logprob_temperature",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "logprob_mode",
    "finish_reason",
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pieces:
    """What the events say about the sequences of B samples; fields as in `Batch`."""

    group_index_B: npt.NDArray[np.int64]
    rollout_id_B: npt.NDArray[np.int64]
    prompt_lengths_B: npt.NDArray[np.int64]
    response_lengths_B: npt.NDArray[np.int64]
    tokens_T: npt.NDArray[np.int32]
    sampled_N: npt.NDArray[np.uint8]
    rollout_log_probs_N: npt.NDArray[np.float32]
    weight_versions_N: npt.NDArray[np.int64]
    logprob_temperatures_B: npt.NDArray[np.float64]
    logprob_processed_B: npt.NDArray[np.bool_]
    truncated_B: npt.NDArray[np.bool_]
    kept_ids_K: npt.NDArray[np.int32] | None
    kept_lengths_N: npt.NDArray[np.int64] | None


def read_pieces(reader: TableSource, indices_B: npt.NDArray[np.int64]) -> Pieces:
    """Read and join the pieces of the samples; raises as `load_batch` does."""
    sources, table = _ordered_pieces(reader, indices_B)
    n_samples = len(indices_B)
    position_P = _numbers(table, "position", np.int64)
    kind_P = _numbers(table, "kind", np.int64)
    start_P = _numbers(table, "start", np.int64)
    lengths_P = _numbers(table, "n_tokens", np.int64)
    row_P = _numbers(table, "row", np.int64)
    prompt_P, segment_P = kind_P == _PROMPT, kind_P == _SEGMENT

    prompts_B = np.bincount(position_P[prompt_P], minlength=n_samples)
    segments_B = np.bincount(position_P[segment_P], minlength=n_samples)
    for name, counts_B in (("prompt_issued", prompts_B), ("segment_generated", segments_B)):
        if (counts_B == 0).any():
            raise NotFound(
                explain(
                    "loading the batch of a step",
                    on=f"samples {indices_B[counts_B == 0].tolist()}",
                    expected=f"a {name} event of each on this branch",
                    found="none",
                )
            )
    if (prompts_B > 1).any():
        raise _invalid(indices_B, int(prompts_B.argmax()), "one prompt", f"{prompts_B.max()}")
    _check_tiling(indices_B, position_P, prompt_P, start_P, lengths_P)

    prompt_lengths_B = lengths_P[prompt_P]
    response_lengths_B = np.bincount(
        position_P[~prompt_P], weights=lengths_P[~prompt_P], minlength=n_samples
    ).astype(np.int64)
    if (prompt_lengths_B == 0).any():
        empty = int(prompt_lengths_B.argmin())
        raise _invalid(indices_B, empty, "a prompt of one token or more", "an empty one")

    sampled_N = np.repeat(segment_P[~prompt_P], lengths_P[~prompt_P])
    tokens_T = _tokens(sources, kind_P, row_P)
    log_probs_S = views_of(sources[_SEGMENT].column("rollout_log_probs"), row_P[segment_P])
    log_prob_lengths_P = np.zeros(len(lengths_P), np.int64)
    log_prob_lengths_P[segment_P] = [len(one) for one in log_probs_S]
    versions = _token_versions(table, indices_B, position_P, segment_P, lengths_P)
    wrong = np.flatnonzero(segment_P & (log_prob_lengths_P != lengths_P))
    if len(wrong):
        raise _invalid(
            indices_B,
            int(position_P[wrong[0]]),
            f"{lengths_P[wrong[0]]} log-probs in the segment at offset {start_P[wrong[0]]}",
            f"{log_prob_lengths_P[wrong[0]]}",
        )
    rollout_log_probs_N = _where_sampled(joined(log_probs_S, np.float32), sampled_N, np.nan)
    weight_versions_N = _where_sampled(versions, sampled_N, UNKNOWN_VERSION)

    last_B = np.zeros(n_samples, np.int64)
    last_B[position_P[segment_P]] = np.flatnonzero(segment_P)
    per_sample: dict[str, npt.NDArray[Any]] = {}
    for column, dtype in (("logprob_temperature", np.float64), ("processed", np.bool_)):
        values_P = _numbers(table, column, dtype)
        per_sample[column] = values_P[last_B]
        differs = np.flatnonzero(segment_P & (values_P != values_P[last_B][position_P]))
        if len(differs):
            raise _invalid(
                indices_B,
                int(position_P[differs[0]]),
                f"one {column} in all segments",
                f"{values_P[differs[0]]} and {values_P[last_B][position_P[differs[0]]]}",
            )
    rollout_P = _numbers(table, "rollout_id", np.int64)
    rollout_id_B = rollout_P[prompt_P]
    strangers = np.flatnonzero(rollout_P != rollout_id_B[position_P])
    if len(strangers):
        position = int(position_P[strangers[0]])
        raise _invalid(
            indices_B, position, f"rollout_id {rollout_id_B[position]}", rollout_P[strangers[0]]
        )
    kept_ids_K, kept_lengths_N = _kept_sets(
        table, tokens_T, indices_B, position_P, segment_P, lengths_P
    )
    return Pieces(
        group_index_B=_numbers(table, "group_index", np.int64)[prompt_P],
        rollout_id_B=rollout_id_B,
        prompt_lengths_B=prompt_lengths_B,
        response_lengths_B=response_lengths_B,
        tokens_T=tokens_T,
        sampled_N=sampled_N.view(np.uint8),
        rollout_log_probs_N=rollout_log_probs_N,
        weight_versions_N=weight_versions_N,
        logprob_temperatures_B=per_sample["logprob_temperature"],
        logprob_processed_B=per_sample["processed"],
        truncated_B=_numbers(table, "truncated", np.bool_)[last_B],
        kept_ids_K=kept_ids_K,
        kept_lengths_N=kept_lengths_N,
    )


def _tokens(
    sources: list[pa.Table], kind_P: npt.NDArray[np.int64], row_P: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """The tokens of all pieces in their order, copied once, from the files' memory."""
    views: list[npt.NDArray[Any]] = [np.empty(0, np.int32)] * len(kind_P)
    for kind, source in enumerate(sources):
        places = np.flatnonzero(kind_P == kind)
        for place, view in zip(
            places.tolist(), views_of(source.column("tokens"), row_P[places]), strict=True
        ):
            views[place] = view
    return joined(views, np.int32)


def _where_sampled(
    values: npt.NDArray[Any], sampled_N: npt.NDArray[np.bool_], fill: float
) -> npt.NDArray[Any]:
    """[N] The values in the places that were sampled, `fill` in the others."""
    if len(values) == len(sampled_N):
        return values
    whole_N = np.full(len(sampled_N), fill, values.dtype)
    whole_N[sampled_N] = values
    return whole_N


def _ordered_pieces(
    reader: TableSource, indices_B: npt.NDArray[np.int64]
) -> tuple[list[pa.Table], pa.Table]:
    """The tables of each kind of piece, and one row a piece: each sample's prompt, then its
    response by start. Columns that a kind of piece does not have are NULL. Its tokens are left
    where they are: in `row` of their table."""
    sources = [
        reader.table("prompt_issued", _PROMPT_COLUMNS),
        reader.table("segment_generated", _SEGMENT_COLUMNS),
        reader.table("observation_appended", _SHARED_COLUMNS),
    ]
    table = pa.concat_tables(
        [
            _prompt_pieces(sources[_PROMPT], indices_B),
            _response_pieces(sources[_SEGMENT], _SEGMENT, indices_B),
            _response_pieces(sources[_OBSERVATION], _OBSERVATION, indices_B),
        ],
        promote_options="default",
    )
    segment, start, kind, position = (
        _numbers(table, name, np.int64) for name in ("segment", "start", "kind", "position")
    )
    # Of pieces with one start (an aborted call gives an empty segment) the one with tokens is last.
    filled = _numbers(table, "n_tokens", np.int64) > 0
    order = np.lexsort((segment, filled, start, kind != _PROMPT, position))
    return sources, table.combine_chunks().take(pa.array(order))


def _prompt_pieces(table: pa.Table, indices_B: npt.NDArray[np.int64]) -> pa.Table:
    """The prompt of each sample: one row for each sample of a group that is asked for."""
    groups = np.asarray(pc.list_value_length(table.column("indices")).to_numpy(), np.int64)
    members = pc.list_flatten(table.column("indices"))
    wanted = np.flatnonzero(select_rows(members, indices_B))
    rows = np.repeat(np.arange(len(groups)), groups)[wanted]
    rollout_ids = pc.list_flatten(table.column("rollout_ids"))
    n = len(wanted)
    return pa.table(
        {
            "position": positions_of(members.to_numpy()[wanted], indices_B),
            "kind": np.full(n, _PROMPT, np.int64),
            "start": np.zeros(n, np.int64),
            "rollout_id": rollout_ids.to_numpy()[wanted],
            "group_index": table.column("group_index").to_numpy()[rows],
            "row": rows,
            "n_tokens": _list_lengths(table)[rows],
        }
    )


def _response_pieces(table: pa.Table, kind: int, indices_B: npt.NDArray[np.int64]) -> pa.Table:
    chosen = select_rows(table.column("index"), indices_B)
    rows = np.flatnonzero(chosen)
    few = table.drop_columns([name for name in _BY_VIEW if name in table.column_names])
    few = few.filter(pa.array(chosen)).combine_chunks()
    columns = {
        "position": positions_of(few.column("index").to_numpy(), indices_B),
        "kind": np.full(few.num_rows, kind, np.int64),
        "start": few.column("start").cast(pa.int64()),
        "rollout_id": few.column("rollout_id"),
        "row": rows,
        "n_tokens": _list_lengths(table)[rows],
    }
    if kind == _SEGMENT:
        own = _SEGMENT_COLUMNS[len(_SHARED_COLUMNS) : -2]
        columns |= {name: few.column(name) for name in own if name not in _BY_VIEW}
        columns["processed"] = pc.not_equal(few.column("logprob_mode"), "full")
        columns["truncated"] = pc.equal(few.column("finish_reason"), "length")
    return pa.table(columns)


def _check_tiling(
    indices_B: npt.NDArray[np.int64],
    position_P: npt.NDArray[np.int64],
    prompt_P: npt.NDArray[np.bool_],
    start_P: npt.NDArray[np.int64],
    lengths_P: npt.NDArray[np.int64],
) -> None:
    """Each piece of a response begins where the one before ends. Pieces are in order."""
    response_lengths_P = np.where(prompt_P, 0, lengths_P)
    ends_P = np.cumsum(response_lengths_P)
    begins_P = ends_P - response_lengths_P
    # What came before the sample's first piece, its prompt, is subtracted.
    expected_P = begins_P - begins_P[prompt_P][position_P]
    wrong = np.flatnonzero(~prompt_P & (start_P != expected_P))
    if len(wrong):
        piece = wrong[0]
        what = "a hole" if start_P[piece] > expected_P[piece] else "an overlap"
        raise _invalid(
            indices_B,
            int(position_P[piece]),
            f"the next piece of the response at offset {expected_P[piece]}",
            f"{what}: it starts at offset {start_P[piece]}",
        )


def _token_versions(
    table: pa.Table,
    indices_B: npt.NDArray[np.int64],
    position_P: npt.NDArray[np.int64],
    segment_P: npt.NDArray[np.bool_],
    lengths_P: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """The version of each sampled token, from the spans; they must tile each segment."""
    starts_S, n_spans_P = _lists(table, "span_starts", np.int64)
    ends_S, n_ends_P = _lists(table, "span_ends", np.int64)
    versions_S, n_versions_P = _lists(table, "span_versions", np.int64)
    uneven = np.flatnonzero((n_spans_P != n_ends_P) | (n_spans_P != n_versions_P))
    if len(uneven):
        raise _invalid(
            indices_B,
            int(position_P[uneven[0]]),
            "as many span starts as ends and versions",
            f"{n_spans_P[uneven[0]]}, {n_ends_P[uneven[0]]}, {n_versions_P[uneven[0]]}",
        )
    piece_S = np.repeat(np.arange(len(lengths_P)), n_spans_P)
    first_S = np.concatenate([[True], piece_S[1:] != piece_S[:-1]])[: len(piece_S)]
    expected_S = np.where(first_S, 0, np.concatenate([[0], ends_S[:-1]])[: len(ends_S)])
    covered_P = np.zeros(len(lengths_P), np.int64)
    covered_P[piece_S] = ends_S  # the last span of each piece stays
    wrong_spans = np.flatnonzero((starts_S != expected_S) | (ends_S < starts_S))
    wrong_pieces = np.flatnonzero(segment_P & (covered_P != lengths_P))
    if len(wrong_spans) or len(wrong_pieces):
        piece = int(piece_S[wrong_spans[0]] if len(wrong_spans) else wrong_pieces[0])
        here = piece_S == piece
        raise _invalid(
            indices_B,
            int(position_P[piece]),
            f"weight-version spans that cover 0..{lengths_P[piece]} without hole or overlap",
            f"starts {starts_S[here].tolist()}, ends {ends_S[here].tolist()}",
        )
    return np.repeat(versions_S, ends_S - starts_S)


def _kept_sets(
    table: pa.Table,
    tokens_T: npt.NDArray[np.int32],
    indices_B: npt.NDArray[np.int64],
    position_P: npt.NDArray[np.int64],
    segment_P: npt.NDArray[np.bool_],
    lengths_P: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.int64] | None]:
    """Ids [K] that top-p and top-k left, all sets one after the other, and the length of each
    token's set [N], 0 where it has none; (None, None) where no segment has sets."""
    ids_K, n_ids_P = _lists(table, "rollout_top_p_token_ids", np.int32)
    offsets, n_offsets_P = _lists(table, "rollout_top_p_token_offsets", np.int64)
    if not len(offsets):
        return None, None
    with_sets_P = n_offsets_P > 0
    uneven = np.flatnonzero(with_sets_P & (n_offsets_P != lengths_P + 1))
    # Differences within each piece: those across a border between two are left out.
    differences = np.diff(offsets)
    borders = np.cumsum(n_offsets_P[with_sets_P])[:-1] - 1
    lengths = np.delete(differences, borders)
    if not len(uneven):
        piece = np.repeat(np.flatnonzero(with_sets_P), lengths_P[with_sets_P])
        sums_P = np.bincount(piece, weights=lengths, minlength=len(lengths_P)).astype(np.int64)
        uneven = np.flatnonzero(sums_P != n_ids_P)
    if len(uneven):
        raise _invalid(
            indices_B,
            int(position_P[uneven[0]]),
            f"offsets of {lengths_P[uneven[0]]} sets that end at {n_ids_P[uneven[0]]} ids",
            f"{n_offsets_P[uneven[0]]} offsets",
        )
    response_P = table.column("kind").to_numpy() != _PROMPT
    lengths_N = np.zeros(int(lengths_P[response_P].sum()), np.int64)
    has_set_N = np.repeat((segment_P & with_sets_P)[response_P], lengths_P[response_P])
    lengths_N[has_set_N] = lengths
    tokens_N = tokens_T[np.repeat(response_P, lengths_P)]
    owner_K = np.repeat(np.arange(len(lengths_N)), lengths_N)
    found_N = np.zeros(len(lengths_N), bool)
    found_N[owner_K[ids_K == tokens_N[owner_K]]] = True
    lost = np.flatnonzero(has_set_N & ~found_N)
    if len(lost):
        sample_N = np.repeat(position_P[response_P], lengths_P[response_P])
        raise _invalid(
            indices_B,
            int(sample_N[lost[0]]),
            f"token {tokens_N[lost[0]]} among the ids that top-p and top-k left where it was "
            "sampled",
            ids_K[owner_K == lost[0]].tolist(),
        )
    return ids_K, lengths_N


def _invalid(
    indices_B: npt.NDArray[np.int64], position: int, expected: object, found: object
) -> InvalidEvent:
    return InvalidEvent(
        explain(
            "putting the pieces of a sample together",
            on=f"sample {indices_B[position]}",
            expected=expected,
            found=found,
            do="look at `ledger sql` on segment_generated and observation_appended of this index",
        )
    )


def _list_lengths(table: pa.Table) -> npt.NDArray[np.int64]:
    """Of the tokens of every row."""
    return np.asarray(pc.list_value_length(table.column("tokens")).to_numpy(), np.int64)


def _numbers(table: pa.Table, column: str, dtype: Any) -> npt.NDArray[Any]:
    """A column as numpy; NULL (in rows that do not have it) becomes 0."""
    array = table.column(column).combine_chunks()
    if array.null_count:
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype)


def _lists(
    table: pa.Table, column: str, dtype: Any
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """A list column as (values of all rows, length of each row); NULL is an empty row."""
    array = table.column(column).combine_chunks()
    if array.null_count:
        lengths = np.asarray(array.value_lengths().fill_null(0).to_numpy(), np.int64)
    else:
        offsets: npt.NDArray[np.int64] = np.asarray(array.offsets.to_numpy(), np.int64)
        lengths = offsets[1:] - offsets[:-1]
    values = array.flatten()  # leaves out what lies under a NULL
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype), lengths
