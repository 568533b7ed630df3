"""The four invariants, checked on the rows of an append before anything of it is stored.

    I    every sampled token has a log-prob, a seed, sampling parameters and a weight version
    II   every token that enters a loss was sampled, and is masked in
    III  versions are published before they are cited, and spans of versions follow each other
    IV   weights are named by names, shapes, dtypes and checksums, and their root says so

Log-probs themselves are stored as the engine gave them, NaN, infinities and positive values
included: the ledger records what happened.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
from blake3 import blake3

from ledger.columns import Rows
from ledger.events import UNKNOWN_VERSION
from ledger.lookup import PIECE_KINDS, pieces_of
from ledger.routing import BY_POLICY, repeated_expert
from ledger.weights import TensorRecord, weights_root

__all__ = [
    "DECISIONS",
    "FINISH_REASONS",
    "LOGPROB_MODES",
    "OBSERVERS",
    "Lookup",
    "check_rows",
    "check_tables",
]

LOGPROB_MODES = ("full", "processed")
FINISH_REASONS = ("stop", "length", "abort")
OBSERVERS = ("tool", "environment", "user", "system")
DECISIONS = ("kept", "filtered", "aborted", "surplus", "stale", "recycled", "failed")
BRANCH_DATA = ("recorded", "fresh")


class Lookup(Protocol):
    """What a check asks of the events that are stored already."""

    def published(self, versions: Sequence[int]) -> set[int]:
        """Those of `versions` that have been published."""

    def pieces(self, indices: np.ndarray) -> pa.Table:
        """Pieces of the responses of the samples `indices`: index, start, length, sampled."""


def check_tables(tables: Mapping[str, pa.Table], lookup: Lookup) -> None:
    """Check the tables of one append, by kind; they may cite each other and what is stored.

    Raises:
        InvalidEvent: naming event, row, field, expected and found.
    """
    known = _KnownVersions(tables, lookup)
    for kind, table in tables.items():
        rows = Rows(kind, table)
        check = _CHECKS.get(kind)
        if check is not None:
            check(rows)
        if kind == "segment_generated":
            _check_span_versions(rows, known)
        elif kind == "step_committed":
            known.require(rows, "weight_version_in")
        elif kind == "routing_recorded":
            known.require(rows, "policy_version")
        elif kind == "weights_loaded":
            known.require(rows, "weight_version")
        elif kind == "signal_recorded":
            _check_masks(rows, tables, lookup)


def check_rows(tables: Mapping[str, pa.Table]) -> None:
    """The part of `check_tables` that needs nothing but the rows. Raises: InvalidEvent."""
    for kind, table in tables.items():
        check = _CHECKS.get(kind)
        if check is not None:
            check(Rows(kind, table))


def _check_prompt(rows: Rows) -> None:
    rows.same_length("indices", "rollout_ids")
    rows.at_least("tokens", 0)
    tokens, offsets = rows.flat("tokens")
    found = rows.scalars("prompt_id")
    raw = tokens.astype("<i4", copy=False).view(np.uint8)
    for row, prompt_id in enumerate(found):
        wanted = blake3(raw[offsets[row] * 4 : offsets[row + 1] * 4].data).digest()
        if wanted != prompt_id:
            rows.refuse(row, "prompt_id", f"blake3 of the ids: {wanted.hex()}", prompt_id.hex())


def _check_segment(rows: Rows) -> None:
    rows.one_of("logprob_mode", LOGPROB_MODES)
    rows.one_of("finish_reason", FINISH_REASONS)
    for name in ("sampling_seed", "start", "segment", "turn"):
        rows.at_least(name, 0)
    rows.at_least("tokens", 0)
    rows.same_length("tokens", "rollout_log_probs")
    rows.same_length("tokens", "sampler_log_probs")
    rows.same_length("span_starts", "span_ends")
    rows.same_length("span_starts", "span_versions")
    rows.unique("index", "segment")
    _check_spans(rows)
    _check_kept_sets(rows)


def _check_kept_sets(rows: Rows) -> None:
    """Offsets of the sets that top-p left: one more than tokens, from 0 to the number of ids."""
    name = "rollout_top_p_token_offsets"
    if not rows.has(name):
        return
    ids, bounds = rows.flat("rollout_top_p_token_ids")
    offsets, places = rows.flat(name)
    lengths = rows.lengths("tokens")
    for row in np.flatnonzero((np.diff(places) > 0) | (np.diff(bounds) > 0)).tolist():
        mine = offsets[places[row] : places[row + 1]]
        count = int(bounds[row + 1] - bounds[row])
        if len(mine) != lengths[row] + 1:
            rows.refuse(row, name, f"{lengths[row] + 1}: one more than tokens", len(mine))
        if mine[0] != 0 or mine[-1] != count or (np.diff(mine) < 1).any():
            rows.refuse(row, name, f"from 0 up to {count}, one id a set or more", mine.tolist())
    if len(ids):
        rows.at_least("rollout_top_p_token_ids", 0)


def _check_spans(rows: Rows) -> None:
    """Spans must follow each other without a hole or an overlap, from 0 to the last token."""
    starts, offsets = rows.flat("span_starts")
    ends, _ = rows.flat("span_ends")
    lengths = rows.lengths("tokens")
    counts = np.diff(offsets)
    empty = (counts == 0) & (lengths > 0)
    if empty.any():
        row = int(empty.argmax())
        rows.refuse(row, "span_starts", f"spans over all {lengths[row]} tokens", "no span")
    owner = np.repeat(np.arange(rows.count), counts)
    expected_starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    first = np.zeros(len(starts), bool)
    first[offsets[:-1][counts > 0]] = True
    expected_starts = np.where(first, 0, expected_starts)
    wrong = starts != expected_starts
    if wrong.any():
        at = int(wrong.argmax())
        rows.refuse(
            int(owner[at]), "span_starts", f"a span from {expected_starts[at]}", int(starts[at])
        )
    # A segment without tokens may name the version that sampled none of them.
    shrunk = (ends < starts) | ((ends == starts) & (lengths[owner] > 0))
    if shrunk.any():
        at = int(shrunk.argmax())
        rows.refuse(
            int(owner[at]), "span_ends", f"an end above its start {starts[at]}", int(ends[at])
        )
    last = ends[offsets[1:][counts > 0] - 1]
    short = last != lengths[counts > 0]
    if short.any():
        row = int(np.flatnonzero(counts > 0)[short.argmax()])
        rows.refuse(
            row, "span_ends", f"a last span that ends at {lengths[row]}", int(last[short.argmax()])
        )


def _check_span_versions(rows: Rows, known: _KnownVersions) -> None:
    known.require(rows, "span_versions")
    versions, offsets = rows.flat("span_versions")
    owner = np.repeat(np.arange(rows.count), np.diff(offsets))
    falls = (versions[1:] < versions[:-1]) & (owner[1:] == owner[:-1])
    falls &= versions[1:] != UNKNOWN_VERSION
    if falls.any():
        at = int(falls.argmax()) + 1
        rows.refuse(
            int(owner[at]), "span_versions", f"a version from {versions[at - 1]}", int(versions[at])
        )


def _check_observation(rows: Rows) -> None:
    rows.one_of("source", OBSERVERS)
    rows.at_least("tokens", 0)
    rows.at_least("start", 0)
    rows.at_least("turn", 0)


def _check_routing(rows: Rows) -> None:
    for name in ("rows", "layers", "topk", "num_experts"):
        rows.at_least(name, 0 if name == "rows" else 1)
    rows.at_least("start", 0)
    shape = [rows.numbers(name) for name in ("rows", "layers", "topk")]
    cells = shape[0] * shape[1] * shape[2]
    experts = rows.numbers("num_experts")
    data, weights = rows.scalars("expert_ids"), rows.scalars("weights")
    for row, dtype in enumerate(rows.scalars("dtype")):
        wanted = "uint8" if experts[row] <= 256 else "uint16"
        if dtype != wanted:
            rows.refuse(row, "dtype", f"{wanted} for {experts[row]} experts", dtype)
        size = int(cells[row]) * np.dtype(dtype).itemsize
        if len(data[row]) != size:
            found = f"{len(data[row])} bytes"
            rows.refuse(row, "expert_ids", f"{cells[row]} ids of {dtype}: {size} bytes", found)
        if weights[row] is not None and len(weights[row]) != int(cells[row]) * 4:
            found = f"{len(weights[row])} bytes"
            rows.refuse(row, "weights", f"{cells[row]} float32 values", found)
        if not size:
            continue
        ids = np.frombuffer(data[row], dtype).reshape([int(n[row]) for n in shape])
        if experts[row] <= np.iinfo(dtype).max and int(ids.max()) >= experts[row]:
            rows.refuse(row, "expert_ids", f"ids below {experts[row]}", int(ids.max()))
        _check_choices(rows, row, ids)
    _check_recorders(rows)


def _check_choices(rows: Rows, row: int, ids: np.ndarray) -> None:
    """Of the first, the middle and the last token: all of them would take longer than to store.

    A layer that nobody captured is zero for every token, and one of these shows it. The trainer
    looks at every token.
    """
    sampled = sorted({0, len(ids) // 2, len(ids) - 1})
    found = repeated_expert(ids[sampled])
    if found is None:
        return
    token, layer = sampled[found[0]], found[1]
    index, segment = rows.numbers("index")[row], rows.numbers("segment")[row]
    position = rows.numbers("start")[row] + token
    of_layer = "all zero: nobody captured this layer" if not ids[:, layer].any() else "this token"
    rows.refuse(
        row,
        "expert_ids",
        f"{ids.shape[2]} different experts of each token and layer",
        f"{ids[token, layer].tolist()}: sample {index}, segment {segment}, layer {layer} "
        f"({of_layer}), position {position}",
    )


def _check_recorders(rows: Rows) -> None:
    """Of one recorder, each engine call reports once, and what it reports overlaps nothing."""
    policy = rows.numbers("policy_version", null=UNKNOWN_VERSION)
    segment = rows.numbers("segment")
    wrong = (policy == UNKNOWN_VERSION) == (segment == BY_POLICY)
    if wrong.any():
        row = int(wrong.argmax())
        rows.refuse(
            row,
            "segment",
            f"the engine call that reported the routing, or {BY_POLICY} beside the policy_version "
            "that chose it",
            f"segment {segment[row]}, policy_version {rows.scalars('policy_version')[row]}",
        )
    index, start, count = (rows.numbers(n) for n in ("index", "start", "rows"))
    order = np.lexsort((segment, start, policy, index))
    for before, row in itertools.pairwise(order.tolist()):
        if index[before] != index[row] or policy[before] != policy[row]:
            continue
        if start[row] < start[before] + count[before]:
            rows.refuse(
                row,
                "start",
                f"{start[before] + count[before]} or more: sample {index[row]}, segment "
                f"{segment[before]} has rows up to there",
                f"{start[row]}, segment {segment[row]}: an overlap",
            )


def _check_indexer(rows: Rows) -> None:
    for name in ("rows", "layers", "topk"):
        rows.at_least(name, 0 if name == "rows" else 1)
    rows.at_least("start", 0)
    cells = rows.numbers("rows") * rows.numbers("layers") * rows.numbers("topk")
    for row, data in enumerate(rows.scalars("positions")):
        if len(data) != int(cells[row]) * 4:
            rows.refuse(row, "positions", f"{cells[row]} int32 positions", f"{len(data)} bytes")
    rows.unique("index", "segment")


def _check_score(rows: Rows) -> None:
    rows.same_length("part_names", "part_values")


def _check_decision(rows: Rows) -> None:
    rows.one_of("decision", DECISIONS)
    staleness = rows.numbers("staleness", null=0)
    if (staleness < 0).any():
        row = int((staleness < 0).argmax())
        rows.refuse(row, "staleness", "0 or above", int(staleness[row]))


def _check_signal(rows: Rows) -> None:
    for name in ("log_probs", "advantages", "ref_log_probs", "values", "returns"):
        rows.same_length("loss_mask", name)
    mask, offsets = rows.flat("loss_mask")
    wrong = mask > 1
    if wrong.any():
        at = int(wrong.argmax())
        row = int(np.searchsorted(offsets, at, "right")) - 1
        rows.refuse(row, "loss_mask", "0 or 1", int(mask[at]))
    rows.unique("index", "step")


_SIGNAL_LOG_PROBS = ("log_probs", "ref_log_probs", "teacher_log_probs")


def _check_masks(rows: Rows, tables: Mapping[str, pa.Table], lookup: Lookup) -> None:
    """A mask is as long as the stored response, and 1 only where a segment sampled the token.

    Where nothing was sampled there is no log-probability either: a number there, 0.0 above all, is
    taken for a probability of 1 by whoever averages over it.
    """
    indices = rows.numbers("index")
    pieces = [lookup.pieces(indices)]
    pieces += [pieces_of(kind, tables[kind]) for kind in PIECE_KINDS if kind in tables]
    table = pa.concat_tables(pieces).combine_chunks()
    owners, starts, lengths = (table.column(n).to_numpy() for n in ("index", "start", "length"))
    sampled = table.column("sampled").to_numpy()
    mask, offsets = rows.flat("loss_mask")
    log_probs = {name: rows.flat(name) for name in _SIGNAL_LOG_PROBS}
    order = np.lexsort((starts, owners))
    first = np.searchsorted(owners[order], indices, "left")
    last = np.searchsorted(owners[order], indices, "right")
    for row, index in enumerate(indices):
        end = 0
        of_row = mask[offsets[row] : offsets[row + 1]]
        for piece in order[first[row] : last[row]]:
            start, length = int(starts[piece]), int(lengths[piece])
            if start != end:
                what = "an unbroken response"
                rows.refuse(row, "index", what, f"sample {index} has a piece at {start}, not {end}")
            end = start + length
            if not sampled[piece] and of_row[start:end].any():
                at = start + int(of_row[start:end].argmax())
                rows.refuse(row, "loss_mask", "0 where nothing was sampled", f"1 at token {at}")
            if sampled[piece]:
                continue
            for name, (values, bounds) in log_probs.items():
                there = values[bounds[row] : bounds[row + 1]][start:end]
                numbers = np.flatnonzero(~np.isnan(there))
                if len(numbers):
                    found = f"{there[numbers[0]]} at token {start + numbers[0]}"
                    rows.refuse(row, name, "NaN where nothing was sampled", found)
        if end != len(of_row):
            what = f"{end} values, one for each token of the stored response of sample {index}"
            rows.refuse(row, "loss_mask", what, f"{len(of_row)} values")


def _check_step(rows: Rows) -> None:
    rows.same_length("metric_names", "metric_values")
    rows.same_length("micro_batch_ranks", "micro_batch_digests")
    samples = rows.lengths("indices")
    indices, at_index = rows.flat("indices")
    cuts, at_cut = rows.flat("micro_batch_offsets")
    ranks = rows.lengths("micro_batch_ranks")
    for row in range(rows.count):
        own = indices[at_index[row] : at_index[row + 1]]
        values, counts = np.unique(own, return_counts=True)
        if (counts > 1).any():
            twice = int(values[(counts > 1).argmax()])
            rows.refuse(row, "indices", "each sample once", f"sample {twice} more than once")
        edges = cuts[at_cut[row] : at_cut[row + 1]]
        if (
            len(edges) != ranks[row] + 1
            or edges[0] != 0
            or edges[-1] != samples[row]
            or (np.diff(edges) < 0).any()
        ):
            wanted = f"{ranks[row] + 1} offsets that rise from 0 to {samples[row]}"
            rows.refuse(row, "micro_batch_offsets", wanted, edges.tolist()[:20])


def _check_weights(rows: Rows) -> None:
    lists = ("tensor_names", "tensor_dtypes", "tensor_shapes", "tensor_checksums")
    for name in lists[1:]:
        rows.same_length(lists[0], name)
    roots = rows.scalars("root")
    for row, columns in enumerate(zip(*(rows.scalars(n) for n in lists), strict=True)):
        names = columns[0]
        for before, name in itertools.pairwise(names):
            if name <= before:
                rows.refuse(row, lists[0], "sorted, unique names", f"{name!r} after {before!r}")
        records = [
            TensorRecord(name, dtype, tuple(shape), checksum)
            for name, dtype, shape, checksum in zip(*columns, strict=True)
        ]
        root = weights_root(records)
        if root != roots[row]:
            rows.refuse(row, "root", f"the root of these tensors: {root.hex()}", roots[row].hex())
    rows.at_least("weight_version", 0)


def _check_fork(rows: Rows) -> None:
    rows.one_of("data", BRANCH_DATA)
    rows.at_least("fork_seq", 0)


def _check_checkpoint(rows: Rows) -> None:
    rows.same_length("files", "file_hashes")
    rows.same_length("files", "file_sizes")


_CHECKS: dict[str, Callable[[Rows], None]] = {
    "prompt_issued": _check_prompt,
    "segment_generated": _check_segment,
    "observation_appended": _check_observation,
    "routing_recorded": _check_routing,
    "indexer_recorded": _check_indexer,
    "sample_scored": _check_score,
    "sample_decided": _check_decision,
    "signal_recorded": _check_signal,
    "step_committed": _check_step,
    "weights_published": _check_weights,
    "branch_forked": _check_fork,
    "checkpoint_saved": _check_checkpoint,
}


class _KnownVersions:
    """Versions that an append may cite: those stored, and those that it publishes itself."""

    def __init__(self, tables: Mapping[str, pa.Table], lookup: Lookup) -> None:
        published = tables.get("weights_published")
        self._new = [] if published is None else published.column("weight_version").to_pylist()
        self._lookup = lookup

    def require(self, rows: Rows, field: str) -> None:
        nullable = field == "policy_version"
        if nullable:
            versions = rows.numbers(field, null=UNKNOWN_VERSION)
            offsets = np.arange(rows.count + 1)
        else:
            versions, offsets = rows.flat(field)
        cited = np.unique(versions)
        unknown_allowed = [UNKNOWN_VERSION] if nullable or field == "span_versions" else []
        left = [int(v) for v in cited if v not in self._new and v not in unknown_allowed]
        missing = sorted(set(left) - self._lookup.published(left)) if left else []
        if missing:
            at = int((versions == missing[0]).argmax())
            row = int(np.searchsorted(offsets, at, "right")) - 1
            rows.refuse(row, field, "a weight version that was published", missing[0])
