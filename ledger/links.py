"""Links beside the data: what the catalog knows of each commit, written where its segments lie.

    runs/<run>/run.json                          when the run was made, and by which ledger
    runs/<run>/producers/<name>/<epoch>.json     an epoch that was given out, before its first use
    runs/<run>/links/<first seq>-<last seq>.json the commits of that range, with their segments

From these and the segments the catalog can be made again. Each object is canonical JSON,
{"blake3": …, "body": …}: the hash is that of the body's canonical JSON, so that a flipped bit shows
also in what the chain does not cover. Ranges may overlap, since several processes export; what two
objects say of one commit must agree, except where its rows lay at the time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import sqlalchemy as sa
from blake3 import blake3

from ledger.canonical import canonical_json, canonical_text
from ledger.catalog import tables as t
from ledger.catalog.queries import segments_after
from ledger.catalog.records import SegmentInfo
from ledger.errors import Corrupt, IncompatibleFormat, NotFound, explain
from ledger.hashing import GENESIS
from ledger.segment import SegmentFile
from ledger.storage import ObjectStore

__all__ = [
    "LinkedCommit",
    "epoch_object",
    "last_told",
    "links_folder",
    "parse_links",
    "producers_folder",
    "put_epoch",
    "put_links",
    "put_run",
    "read_linked_commits",
    "read_sealed_json",
    "run_object",
    "same_commit",
    "sealed_json",
]

FORMAT = 1
"""Version of these objects."""

_LONGEST_NAME = 180
"""Characters of a quoted name; file systems take 255 bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinkedCommit:
    """A commit as its row in the catalog says, with its segments in order."""

    run_id: str
    first_seq: int
    last_seq: int
    branch: str
    producer: str
    epoch: int
    producer_seq: int
    content_hash: bytes
    chain: bytes
    committed_at: int
    """Microseconds since 1970-01-01 UTC."""
    segments: tuple[SegmentInfo, ...]


def run_object(run_id: str) -> str:
    """Path of the object that says when a run was made."""
    return f"runs/{run_id}/run.json"


def producers_folder(run_id: str) -> str:
    """Folder of the epochs that were given out."""
    return f"runs/{run_id}/producers"


def links_folder(run_id: str) -> str:
    """Folder of a run's links."""
    return f"runs/{run_id}/links"


def last_told(path: str) -> int:
    """The last seq that an object of links tells of, by its path; 0 for other objects."""
    folder, _, name = path.rpartition("/")
    _, _, last = name.removesuffix(".json").partition("-")
    return int(last) if folder.endswith("/links") and last.isdecimal() else 0


def sealed_json(body: Mapping[str, Any]) -> bytes:
    """The bytes of an object with this body, its hash beside it."""
    return _sealed(canonical_json(body))


def _sealed(text: str) -> bytes:
    return f'{{"blake3":"{blake3(text.encode()).hexdigest()}","body":{text}}}'.encode()


def read_sealed_json(path: str, data: pa.Buffer) -> dict[str, Any]:
    """The body of an object.

    Raises:
        Corrupt: it is no such object, or not the one that was written.
        IncompatibleFormat: a newer version wrote it.
    """
    try:
        whole = json.loads(data.to_pybytes())
        body, stated = whole["body"], whole["blake3"]
        found = blake3(canonical_json(body).encode()).hexdigest()
        version = body["format"]
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(
            explain(
                "an object beside the data was not understood",
                on=path,
                expected='JSON with "blake3" and "body"',
                found=f"{type(error).__name__}: {error}",
            )
        ) from error
    if found != stated:
        raise Corrupt(
            explain(
                "an object beside the data is not what was written",
                on=path,
                expected=f"a body with blake3 {stated}",
                found=f"blake3 {found}",
            )
        )
    if version != FORMAT:
        raise IncompatibleFormat(
            explain(
                "an object beside the data has a format that is not known",
                on=path,
                expected=FORMAT,
                found=version,
                do="read this ledger with the version that wrote it, or a newer one",
            )
        )
    return dict(body)


def put_run(store: ObjectStore, ledger_id: str, run_id: str, created_at: int) -> int:
    """Note durably that a run was made; the time that counts.

    It is another time than `created_at` where an earlier attempt died after it had written the
    object: then that one's.

    Raises: Corrupt where the object is there and speaks of another run or ledger.
    """
    path = run_object(run_id)
    try:
        there = read_sealed_json(path, store.read(path))
    except NotFound:
        body = {
            "format": FORMAT,
            "ledger_id": ledger_id,
            "run_id": run_id,
            "created_at": created_at,
        }
        with contextlib.suppress(Corrupt):  # taken in this moment: reading it tells by whom
            store.put([(path, sealed_json(body))])
        there = read_sealed_json(path, store.read(path))
    if (there.get("ledger_id"), there.get("run_id")) != (ledger_id, run_id):
        raise Corrupt(
            explain(
                "a run was not created: its folder is another run's",
                on=path,
                expected=f"run {run_id!r} of ledger {ledger_id}",
                found=f"run {there.get('run_id')!r} of ledger {there.get('ledger_id')}",
                do="name the run otherwise, or move that folder away",
            )
        )
    return int(there["created_at"])


def epoch_object(run_id: str, producer: str, epoch: int) -> str:
    """Path of the object that says that an epoch of a producer was given out."""
    name = quote(producer, safe="").replace(".", "%2E") or "%"
    if len(name) > _LONGEST_NAME:
        name = f"~{blake3(producer.encode()).hexdigest()}"
    return f"{producers_folder(run_id)}/{name}/{epoch}.json"


def put_epoch(store: ObjectStore, ledger_id: str, run_id: str, producer: str, epoch: int) -> None:
    """Note durably that an epoch of a producer was given out; doing so again is success."""
    body = {
        "format": FORMAT,
        "ledger_id": ledger_id,
        "run_id": run_id,
        "producer": producer,
        "epoch": epoch,
    }
    store.put([(epoch_object(run_id, producer, epoch), sealed_json(body))])


def read_linked_commits(
    connection: sa.Connection, run_id: str, after: int, most: int
) -> list[LinkedCommit]:
    """At most `most` commits that follow event `after`, with their segments, in order."""
    rows = connection.execute(
        sa.select(t.commits)
        .where(t.commits.c.run_id == run_id, t.commits.c.first_seq > after)
        .order_by(t.commits.c.first_seq)
        .limit(most)
    ).all()
    if not rows:
        return []
    parts: dict[int, list[SegmentInfo]] = {}
    for s in segments_after(connection, run_id, after, up_to=int(rows[-1].last_seq)):
        parts.setdefault(s.commit_seq, []).append(s)
    return [
        LinkedCommit(
            run_id=run_id,
            first_seq=r.first_seq,
            last_seq=r.last_seq,
            branch=r.branch,
            producer=r.producer,
            epoch=r.epoch,
            producer_seq=r.producer_seq,
            content_hash=bytes(r.content_hash),
            chain=bytes(r.chain),
            committed_at=r.committed_at,
            segments=tuple(parts.get(r.first_seq, ())),
        )
        for r in rows
    ]


def put_links(
    store: ObjectStore, ledger_id: str, commits: Sequence[LinkedCommit], previous: bytes = GENESIS
) -> str:
    """Write consecutive commits as one object; its path. `previous` is the link before them.

    Where another process wrote the range already, it must have said the same of it.

    Raises: Corrupt where it did not.
    """
    first, last = commits[0], commits[-1]
    path = f"{links_folder(first.run_id)}/{first.first_seq:020d}-{last.last_seq:020d}.json"
    body = {
        "format": FORMAT,
        "ledger_id": ledger_id,
        "run_id": first.run_id,
        "first_seq": first.first_seq,
        "last_seq": last.last_seq,
        "previous": previous.hex(),
        "commits": [_commit_body(c) for c in commits],
    }
    # Plain already: many commits a second must not cost much more than their own rows.
    data = _sealed(canonical_text(body))
    try:
        store.put([(path, data)])
    except Corrupt:
        _, there = parse_links(path, store.read(path))
        if len(there) != len(commits) or not all(map(same_commit, there, commits)):
            raise
    return path


def parse_links(path: str, data: pa.Buffer) -> tuple[dict[str, Any], list[LinkedCommit]]:
    """The body of an object of links, and its commits.

    Raises: Corrupt, IncompatibleFormat.
    """
    body = read_sealed_json(path, data)
    try:
        return body, [_commit_of(body["run_id"], c) for c in body["commits"]]
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(
            explain(
                "an object of links was not understood",
                on=path,
                found=f"{type(error).__name__}: {error}",
            )
        ) from error


def same_commit(one: LinkedCommit, other: LinkedCommit) -> bool:
    """Whether two records say the same of a commit, wherever its rows lie."""
    return _without_places(one) == _without_places(other)


def _without_places(commit: LinkedCommit) -> LinkedCommit:
    segments = tuple(dataclasses.replace(s, file=None) for s in commit.segments)
    return dataclasses.replace(commit, segments=segments)


_COMMIT = ("first_seq", "last_seq", "branch", "producer", "epoch", "producer_seq", "committed_at")
_SEGMENT = ("first_seq", "rows", "kind", "layout")
_FILE = ("path", "format", "row_offset", "rows", "size_bytes")


def _commit_body(c: LinkedCommit) -> dict[str, Any]:
    body: dict[str, Any] = {name: getattr(c, name) for name in _COMMIT}
    body["content_hash"], body["chain"] = c.content_hash.hex(), c.chain.hex()
    body["segments"] = [_segment_body(s) for s in c.segments]
    return body


def _segment_body(s: SegmentInfo) -> dict[str, Any]:
    body: dict[str, Any] = {name: getattr(s, name) for name in _SEGMENT}
    body["logical_hash"], body["chain"] = s.logical_hash.hex(), s.chain.hex()
    body["ranges"] = dict(s.ranges)
    if s.file is not None:
        place = {name: getattr(s.file, name) for name in _FILE}
        body["location"] = place | {"file_hash": s.file.file_hash.hex()}
    return body


def _commit_of(run_id: str, body: dict[str, Any]) -> LinkedCommit:
    return LinkedCommit(
        run_id=run_id,
        **{name: body[name] for name in _COMMIT},
        content_hash=bytes.fromhex(body["content_hash"]),
        chain=bytes.fromhex(body["chain"]),
        segments=tuple(_segment_of(run_id, body, s) for s in body["segments"]),
    )


def _segment_of(run_id: str, commit: dict[str, Any], body: dict[str, Any]) -> SegmentInfo:
    place = body.get("location")
    file = None
    if place is not None:
        named = {name: place[name] for name in _FILE}
        file = SegmentFile(**named, file_hash=bytes.fromhex(place["file_hash"]))
    return SegmentInfo(
        run_id=run_id,
        **{name: body[name] for name in _SEGMENT},
        branch=commit["branch"],
        commit_seq=commit["first_seq"],
        logical_hash=bytes.fromhex(body["logical_hash"]),
        chain=bytes.fromhex(body["chain"]),
        ranges={name: (low, high) for name, (low, high) in body["ranges"].items()},
        file=file,
    )
