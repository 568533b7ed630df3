"""A picture of the rewards of a run: every branch, by weight version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ledger.errors import InvalidArgument, NotFound, StorageFailed, explain
from ledger.store import Ledger

__all__ = ["plot_rewards"]

_TRAINING = """
    select w.branch, w.weight_version, avg(r.raw_reward) as reward
    from (
        select index, unnest(span_versions) as weight_version
        from segment_generated where segment = 0
    ) as s
    join rewards as r on r.index = s.index
    join weights_published as w on w.weight_version = s.weight_version
    group by all order by all
"""
_EVALUATION = """
    select w.branch, e.weight_version, e.source, len(e.source_rows) as prompts, e.verifier,
           any_value(e.mean_reward) as reward
    from eval_scored as e
    join weights_published as w on w.weight_version = e.weight_version
    group by all order by all
"""
_FORKS = "select branch, weight_version from branch_forked order by all"


def _kind(row: dict[str, Any]) -> tuple[str, int, str]:
    """What an evaluation measures on."""
    return row["source"], row["prompts"], row["verifier"]


def plot_rewards(ledger: Ledger, run_id: str, output: Path) -> Path:
    """Write a picture of mean rewards by weight version; the file's ending chooses the format.

    Points are the mean raw reward of all samples that a version generated in training, dropped ones
    included; lines are evaluations. Versions of a forked branch are placed by their distance from
    the run's first version, so that branches lie above each other.

    Raises:
        InvalidArgument: the file's ending is of no format that can be written.
        NotFound: the run has neither rewards nor evaluations.
        StorageFailed: the folder cannot be made, or the file cannot be written.
    """
    _require_format(output)
    reader = ledger.reader(run_id, branch=None)
    training = reader.sql(_TRAINING).to_pylist()
    evaluation = reader.sql(_EVALUATION).to_pylist()
    if not training and not evaluation:
        raise NotFound(
            explain(
                "drawing the rewards",
                on=f"run {run_id!r}",
                expected="scored samples or evaluations",
                found="none",
                do="train first: ledger-train",
            )
        )
    parents = {v.weight_version: v.parent_version for v in ledger.versions(run_id)}
    forks = {row["branch"]: row["weight_version"] for row in reader.sql(_FORKS).to_pylist()}

    def depth(version: int) -> int:
        steps = 0
        at = parents[version]
        while at is not None:
            steps, at = steps + 1, parents[at]
        return steps

    branches = ["main", *forks]
    colours = dict(zip(branches, plt.get_cmap("tab10").colors * 10, strict=False))
    figure, axes = plt.subplots(figsize=(9, 5), dpi=120)
    for branch in branches:
        points = [r for r in training if r["branch"] == branch]
        axes.scatter(
            [depth(r["weight_version"]) for r in points],
            [r["reward"] for r in points],
            s=22,
            alpha=0.55,
            color=colours[branch],
            label=f"{branch}: training samples" if points else None,
        )
        measured = [r for r in evaluation if r["branch"] == branch]
        # Only like is joined by a line: the same prompts and the same verifier.
        for kind in sorted({_kind(r) for r in measured}):
            line = [r for r in measured if _kind(r) == kind]
            if branch in forks:
                left = [r for r in evaluation if r["weight_version"] == forks[branch]]
                line = [r for r in left if _kind(r) == kind and r not in line] + line
            axes.plot(
                [depth(r["weight_version"]) for r in line],
                [r["reward"] for r in line],
                # A branch lies over the one it left: dashed and smaller, so that both show.
                marker="o" if branch == "main" else "s",
                markersize=8 if branch == "main" else 5,
                linewidth=3 if branch == "main" else 1.6,
                linestyle="-" if branch == "main" else "--",
                color=colours[branch],
                label=f"{branch}: evaluation on {kind[1]} prompts",
            )
    for branch, version in forks.items():
        axes.axvline(depth(version), color=colours[branch], linestyle=":", linewidth=1)
    axes.set_xlabel("optimizer steps since the first version")
    axes.set_ylabel("mean reward")
    if all(0 <= r["reward"] <= 1 for r in [*training, *evaluation]):
        axes.set_ylim(-0.02, 1.02)
    axes.set_title(f"{run_id}: mean reward by weight version")
    axes.grid(alpha=0.25)
    axes.legend(loc="best", fontsize=8)
    figure.tight_layout()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output)
    except OSError as error:
        raise StorageFailed(
            explain(
                "writing the picture",
                on=f"--output {output}",
                expected="a folder that can be made, and a file that can be written",
                found=f"{type(error).__name__}: {error}",
            )
        ) from error
    finally:
        plt.close(figure)
    return output


def _require_format(output: Path) -> None:
    """Raises InvalidArgument unless matplotlib writes the format that the file's ending names."""
    # pgf needs a TeX installation.
    known = sorted(set(FigureCanvasAgg.get_supported_filetypes()) - {"pgf"})
    ending = output.suffix.lower().removeprefix(".")
    if ending not in known:
        raise InvalidArgument(
            explain(
                "drawing the rewards",
                on=f"--output {output}",
                expected=f"an ending of {', '.join('.' + name for name in known)}",
                found=f".{ending}" if ending else "no ending",
            )
        )
