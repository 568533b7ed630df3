"""On which kind of file system a file lies: SQLite needs one whose locks and memory maps hold."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

__all__ = ["NETWORK", "OVERRIDE", "filesystem_of", "network_filesystem"]

NETWORK = frozenset(
    (
        *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "glusterfs", "gpfs", "lustre"),
        *("ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "smb2", "smb3", "smbfs", "wekafs"),
        *("fuse.ceph", "fuse.davfs2", "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys"),
        *("fuse.juicefs", "fuse.mountpoint-s3", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
    )
)
"""Kinds that several hosts can have mounted at once."""

OVERRIDE = "LEDGER_SQLITE_ON_NETWORK"
"""Set to 1 by who knows that only one host ever opens the ledger, and that locks hold there."""

_OCTAL = re.compile(r"\\([0-7]{3})")


def filesystem_of(path: str, mountinfo: str) -> str | None:
    """The kind of file system that an absolute path without links is on.

    `mountinfo` is the text of /proc/self/mountinfo: of the mounts whose mount point is a folder
    above the path the deepest counts, and of several on one point the last. None: none is.
    """
    wanted = PurePosixPath(path)
    best: tuple[int, str] | None = None
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if not dash or len(fields) < 5 or not after:
            continue
        point = PurePosixPath(_OCTAL.sub(lambda m: chr(int(m[1], 8)), fields[4]))
        depth = len(point.parts)
        if wanted.is_relative_to(point) and (best is None or depth >= best[0]):
            best = depth, after.split(" ")[0]
    return None if best is None else best[1]


def network_filesystem(path: Path) -> str | None:
    """The kind of network file system that `path` is on, or will be; None where it is on none.

    None too where the system does not tell, and where LEDGER_SQLITE_ON_NETWORK is 1.
    """
    if os.environ.get(OVERRIDE) == "1":
        return None
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return None
    kind = filesystem_of(os.path.realpath(path), mountinfo)
    return kind if kind in NETWORK else None
