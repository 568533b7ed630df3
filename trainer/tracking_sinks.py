"""TensorBoard and Weights & Biases as places that numbers are sent to."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from ledger.errors import Corrupt, InvalidArgument, MissingDependency, StorageFailed, explain

__all__ = ["Sink", "TensorBoardSink", "WandbSink"]


class Sink(Protocol):
    """Takes numbers by tag and step."""

    name: str
    last: dict[str, int]
    """Tag → the last step that the sink has of it; the caller keeps it up to date."""

    def write(self, step: int, values: Mapping[str, float], at_s: float | None) -> None:
        """Add numbers at a step; on return they survive the end of the process."""

    def close(self) -> None:
        """Flush, and free what is held."""


def _require(package: str, flag: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingDependency(
            explain(
                "sending metrics",
                on=flag,
                expected=f"the package {package}",
                found="it is not installed",
                do="pip install 'trajectory-ledger[track]', or pip install " + package,
            )
        )


class TensorBoardSink:
    """Event files in one folder, a new file a process. What is there already is read first."""

    name = "TensorBoard"

    @staticmethod
    def require() -> None:
        """Raises MissingDependency where the package is missing."""
        _require("tensorboard", "--use-tensorboard")

    def __init__(self, folder: Path) -> None:
        """Raises StorageFailed where the folder cannot be read or written."""
        self.require()
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        try:
            self.last = _last_steps(folder)
            # Without a queue's delay: a step is on its way to the disk when `write` returns.
            self._writer: Any = SummaryWriter(str(folder), max_queue=1, flush_secs=1)
        except OSError as error:
            raise StorageFailed(
                explain(
                    "opening TensorBoard's files",
                    on=str(folder),
                    found=error,
                    do="name another folder with --tensorboard-dir",
                )
            ) from error

    def write(self, step: int, values: Mapping[str, float], at_s: float | None) -> None:
        """As `Sink.write`. Raises OSError where the files are not writable."""
        if not self.folder.is_dir():
            # The writer's thread would fail where nobody hears it.
            raise FileNotFoundError(f"the folder {self.folder} is gone")
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step, walltime=at_s)
        self._writer.flush()

    def close(self) -> None:
        """As `Sink.close`."""
        self._writer.close()


def _last_steps(folder: Path) -> dict[str, int]:
    """Tag → last step in the event files of a folder; a torn last record counts as not written."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    last: dict[str, int] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                last[value.tag] = max(last.get(value.tag, -1), int(event.step))
    return last


class WandbSink:
    """One W&B run a branch, under an id that the branch determines.

    W&B cannot be asked what an offline run holds, so the last step of each tag is kept in a small
    file beside its own, replaced after every write.
    """

    name = "Weights & Biases"

    @staticmethod
    def require() -> None:
        """Raises MissingDependency where the package is missing."""
        _require("wandb", "--use-wandb")

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        group: str,
        team: str | None,
        mode: str,
        name: str,
        identity: str,
        settings: Mapping[str, Any],
    ) -> None:
        """Raises InvalidArgument where W&B refuses, StorageFailed where the folder is not writable,
        Corrupt where the file of last steps cannot be read."""
        self.require()
        import wandb

        self.run_id = blake3(identity.encode()).hexdigest(length=8)
        self._progress = folder / f"{project}-{self.run_id}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.last = _read_progress(self._progress)
        except OSError as error:
            if isinstance(error, Corrupt):
                raise
            raise StorageFailed(
                explain("opening W&B's files", on=str(folder), found=error)
            ) from error
        try:
            self._run: Any = wandb.init(
                project=project,
                group=group,
                entity=team,
                mode=mode,  # type: ignore[arg-type]
                dir=str(folder),
                id=self.run_id,
                name=name,
                config=dict(settings),
                # Offline files of one id are joined when they are synced.
                resume="allow" if mode == "online" else None,
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as error:  # its own classes, and those of what it talks to
            raise InvalidArgument(
                explain(
                    "starting a run of Weights & Biases",
                    on=f"--wandb-mode {mode}, project {project}",
                    found=f"{type(error).__name__}: {error}",
                    do="log in (wandb login, or WANDB_API_KEY in the environment), or give "
                    "--wandb-mode offline",
                )
            ) from error
        for kind in ("train", "rollout", "perf", "eval"):
            axis = "eval/step" if kind == "eval" else "train/step"
            self._run.define_metric(f"{kind}/*", step_metric=axis)

    def write(self, step: int, values: Mapping[str, float], at_s: float | None) -> None:
        """As `Sink.write`; `at_s` is not sent: W&B takes its own clock."""
        kinds = {tag.partition("/")[0] for tag in values}
        axis = "eval/step" if kinds == {"eval"} else "train/step"
        self._run.log({**values, axis: step})
        held = {**self.last, **dict.fromkeys(values, step)}
        new = self._progress.with_suffix(".new")
        new.write_text(json.dumps(held, sort_keys=True), encoding="utf-8")
        os.replace(new, self._progress)

    def close(self) -> None:
        """As `Sink.close`; waits until everything is written (or sent)."""
        self._run.finish()


def _read_progress(path: Path) -> dict[str, int]:
    try:
        return {str(tag): int(step) for tag, step in json.loads(path.read_text("utf-8")).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise Corrupt(
            explain(
                "reading which metrics W&B has",
                on=str(path),
                expected="tags and their last steps as JSON",
                found=repr(error),
                do="delete the file: every metric is then sent again",
            )
        ) from error
