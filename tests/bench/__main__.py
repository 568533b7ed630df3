"""`make bench`: the ledger against the raw limit and today's habits, in one table of ratios.

Ratios are taken within one run, between things that are timed in turns, from medians: a loaded
machine then slows both sides. Absolute speeds are shown for orientation only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from tests.bench.figures import Figure, print_table

DEMO = Path("demo-out/ledger-smollm2")
CACHE = Path(".bench-cache")
PARTS = (
    "append",
    "commits",
    "scan",
    "query",
    "size",
    "grown",
    "keep",
    "peers",
    "share",
    "batch",
    "train",
    "tokens",
    "writers",
    "idle",
    "engines",
)


def main() -> int:
    """Run the parts that were asked for and print the table."""
    given = _parser().parse_args()
    console = Console(stderr=given.json, width=None if sys.stdout.isatty() else 170)
    parts = given.only or PARTS
    recorded: Path | None = given.ledger or (DEMO if DEMO.is_dir() else None)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="ledger-bench-", dir=given.dir) as folder:
        for name in parts:
            part = _parts(given.quick, recorded, given.cache, given.lengths)[name]
            began = time.perf_counter()
            with console.status(f"measuring: {name}"):
                figures += part(Path(folder) / name)
            console.print(f"{name}: {time.perf_counter() - began:.0f} s", style="dim")
    notes = notes_on(figures, recorded if {"share", "size"} & set(parts) else DEMO)
    if given.quick:
        notes.append("--quick: small data and few repetitions; judge goals by a whole run.")
    if given.json:
        shown = [dataclasses.asdict(f) | {"met": f.met} for f in figures]
        print(json.dumps({"figures": shown, "notes": notes}, sort_keys=True))
    else:
        print_table(figures, notes, console)
    return 0


def _parts(
    quick: bool, recorded: Path | None, cache: Path, lengths: Path | None
) -> dict[str, Callable[[Path], Iterator[Figure]]]:
    # Heavy imports only for what is measured.
    def append(folder: Path) -> Iterator[Figure]:
        from tests.bench.appends import append_figures

        return append_figures(folder, quick=quick)

    def commits(folder: Path) -> Iterator[Figure]:
        from tests.bench.appends import commit_figures
        from tests.bench.writers import writer_figures

        yield from commit_figures(folder / "one", quick=quick)
        yield from writer_figures(folder / "many", quick=quick)

    def scan(folder: Path) -> Iterator[Figure]:
        from tests.bench.scans import scan_figures

        return scan_figures(folder, quick=quick)

    def query(folder: Path) -> Iterator[Figure]:
        from tests.bench.mismatch import mismatch_figures

        return mismatch_figures(folder, quick=quick)

    def size(folder: Path) -> Iterator[Figure]:
        from tests.bench.sealed import recorded_size, sealed_figures

        yield from sealed_figures(folder, quick=quick)
        if recorded is not None:
            yield from recorded_size(recorded, folder / "recorded")

    def grown(folder: Path) -> Iterator[Figure]:
        from tests.bench.grown import grown_figures

        return grown_figures(folder, cache, quick=quick)

    def keep(folder: Path) -> Iterator[Figure]:
        from tests.bench.keeping import keeping_figures

        return keeping_figures(folder, quick=quick)

    def peers(folder: Path) -> Iterator[Figure]:
        from tests.bench.peers import peer_figures

        return peer_figures(folder, quick=quick)

    def share(folder: Path) -> Iterator[Figure]:
        from tests.bench.share import recorded_share, tiny_share

        yield from tiny_share(folder / "tiny", quick=quick)
        if recorded is not None:
            yield from recorded_share(recorded, folder / "recorded", quick=quick)

    def batch(folder: Path) -> Iterator[Figure]:
        from tests.bench.batches import batch_figures

        return batch_figures(folder, quick=quick)

    def train(folder: Path) -> Iterator[Figure]:
        from tests.bench.trainer_step import trainer_figures

        return trainer_figures(folder, quick=quick)

    def tokens(folder: Path) -> Iterator[Figure]:
        from tests.bench.tokens import token_figures

        return token_figures(folder, lengths, quick=quick)

    def writers(folder: Path) -> Iterator[Figure]:
        from tests.bench.crowds import crowd_figures

        return crowd_figures(folder, quick=quick)

    def idle(folder: Path) -> Iterator[Figure]:
        from tests.bench.idle import idle_figures
        from tests.bench.simulated import write_lengths

        used = write_lengths(cache, lengths)
        return idle_figures(folder, used, quick=quick)

    def engines(folder: Path) -> Iterator[Figure]:
        from tests.bench.engines import engine_figures

        return engine_figures(folder, lengths, quick=quick)

    parts = (append, commits, scan, query, size, grown, keep, peers, share, batch, train)
    parts += (tokens, writers, idle, engines)
    return {part.__name__: part for part in parts}


def notes_on(figures: list[Figure], recorded: Path | None) -> list[str]:
    """What is said under the table: how to read it, and each goal that was missed, with why."""
    notes = [
        "ratio: time of what is compared with ÷ time of the ledger (or the habit), more is better; "
        "with a goal of ≤ what it says. Medians of runs in turns; every write is synced, file and "
        "directory.",
        "The ledger computes while the disk writes: on a machine whose cores are taken its ratios "
        f"fall. Load now: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.",
    ]
    missed = [f for f in figures if f.met is False]
    notes += [
        f"goal missed: {f.group}: {f.name}: {f.shown()}, wanted {f.wanted()}{_why(f)}"
        for f in missed
    ]
    if recorded is None:
        notes.append(
            "The share of a step at the demo's size, and the sealed size of real text, are taken "
            "from a finished demo: run `make demo` first (it is looked for in "
            f"{DEMO}), or name its ledger with --ledger."
        )
    return notes


_OVERLAP = (
    "besides writing, an append encodes, checks and hashes twice: that goes on while the disk "
    "writes, if a core is free; the catalog's commit comes after the last byte"
)
_OPENING = (
    "each small file is opened, hashed and parsed, half a millisecond of Python; under load the "
    "wall time is a multiple of the CPU time in the note"
)
_WHY = {
    "tokens and": _OVERLAP,
    "routing,": _OVERLAP,
    "small commits": "the catalog's transaction syncs once more, and its Python costs more than a "
    "sync of a fast disk",
    "group commit": "the syncs are shared, the Python of each append is not: the interpreter runs "
    "one thread at a time, and the links beside the data are made by one of them",
    "4 processes": "one process commits at a time, and the Python of a commit, which writing a "
    "file does not have, shares the cores among all of them",
    "1,000 steps": _OPENING,
    "100 steps": _OPENING,
    "the same": _OPENING,
    "the 20 largest": "the sums are numpy's, on the files' memory; gathering samples of several "
    "pieces comes on top, and DuckDB hands work between threads, which waits for a free core",
    "a reader's table": "ten thousand pieces are put into one table anew; following does not",
    "into torch": "opening the ledger is included: the catalog's connection and first statements",
    "SQL into torch": "what is per token is copied once, but a copy of so few bytes takes a "
    "millisecond; catalog, DuckDB's query and the checks of every piece are some milliseconds of "
    "Python, whatever the size",
    "ledger, in the packed step": "a step of seconds, without generation; four appends and a query "
    "cost what they cost in a step of minutes",
    "ledger": "the steps were recorded under the load of then, the ledger's part measured under "
    "the load of now; each append costs some milliseconds of Python and three syncs one after "
    "another, whatever its size",
}


def _why(figure: Figure) -> str:
    """The known cause, by how the figure's name begins."""
    for begin, cause in _WHY.items():
        if figure.name.startswith(begin):
            return f" ({cause})"
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="smaller data, fewer repetitions")
    parser.add_argument(
        "--only", action="append", choices=PARTS, metavar="NAME", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--ledger", type=Path, metavar="DIR", help=f"a finished run's ledger (default: {DEMO})"
    )
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="response lengths in tokens, one a line, for the simulations (default: a log-normal "
        "trace, which is written to the cache)",
    )
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="disk to measure (default: the temporary folder)"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        default=CACHE,
        help=f"where large ledgers are kept for the next run of the same code (default: {CACHE})",
    )
    return parser


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
