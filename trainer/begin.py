"""Where a training process stands when it starts: a new run, a run that goes on, or a new branch.

The recorded settings are the truth. What the command line says explicitly must agree with them when
a run goes on, and overrides them when a branch is forked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ledger.canonical import canonical_json
from ledger.encode import events_of
from ledger.errors import AlreadyExists, InvalidArgument, NotFound, explain
from ledger.events import BranchForked, RunStarted, TrainingStarted
from ledger.redact import redact
from ledger.store import Ledger
from trainer.history import History, read_history
from trainer.model_roles import FOLDERS
from trainer.option_values import check_values, content_of, places_of, validate
from trainer.options import OPTIONS
from trainer.presets import spelled_out

__all__ = ["Standing", "checkpoint_root", "find_standing", "new_model_folder"]

DEFAULT_RUN = "run"

_MODEL_FOLDERS = tuple(FOLDERS.values())

_OF_EVALUATIONS = {o.name for o in OPTIONS if o.name.startswith("eval_")} | {
    "n_eval_prompts",
    "n_samples_per_eval_prompt",
}
_ROLLOUT_GROUPS = ("rollout", "engines", "engine weights", "agents", "data")
_OF_ROLLOUTS = (
    {o.name for o in OPTIONS if o.content and o.group in _ROLLOUT_GROUPS} - _OF_EVALUATIONS
) | {"global_batch_size", "num_steps_per_rollout"}
"""What recorded trajectories were made with."""

_SAMPLED_WITH = _OF_ROLLOUTS - {"global_batch_size", "num_steps_per_rollout"}
"""What a run that has no trainer yet has begun with: how it will be trained is open."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What this process is to do."""

    kind: Literal["new run", "resume", "new branch"]
    run_id: str
    branch: str
    values: Mapping[str, Any]
    """Every option: as recorded, overridden by what was given where that is allowed."""
    history: History | None
    """None for a new run."""
    weight_version: int
    """The version whose state is to be restored."""
    parent_branch: str | None
    """For a new branch: the branch it leaves."""
    fork_version: int | None
    """For a branch, new or resumed: the version that it forked from."""
    changed: Mapping[str, Any]
    """For a branch: the options that differ from those of the branch it leaves."""
    explicit: Mapping[str, Any]
    """What the command line said."""
    limit: int | None
    """--num-rollout, where it was given: with recorded data there is an end without it."""
    takes_up: bool = False
    """Whether rollouts began the run without a trainer, and this process is its first one."""

    @property
    def settings_json(self) -> str:
        """The content options, as `run_started` and `branch_forked` record them."""
        return canonical_json(redact(content_of(self.values)))

    @property
    def places_json(self) -> str:
        """The place options, as recorded."""
        return canonical_json(redact(places_of(self.values)))


def find_standing(ledger: Ledger, explicit: Mapping[str, Any]) -> Standing:
    """Decide what the command asks for. Raises InvalidArgument, NotFound or AlreadyExists."""
    check_values(explicit)
    if "from_version" in explicit:
        return _fork(ledger, explicit)
    said, explicit = explicit, spelled_out(explicit)
    run_id = explicit.get("run_id") or (
        DEFAULT_RUN if not ledger.runs() else ledger.run(None).run_id
    )
    known = {run.run_id for run in ledger.runs()}
    branch = explicit.get("branch", "main")
    if run_id not in known or not ledger.reader(run_id, branch=None).head_seq:
        if branch != "main":
            raise NotFound(
                explain(
                    "continuing a branch",
                    on=f"run {run_id!r}, branch {branch!r}",
                    expected="a run that has begun",
                    found="no events",
                    do="start the run first, on its branch 'main'",
                )
            )
        if explicit.get("data") == "recorded":
            raise InvalidArgument(
                explain(
                    "starting a run",
                    on="--data recorded",
                    expected="--from-version K, after which there are recorded trajectories",
                    found="a new run",
                )
            )
        return Standing(
            kind="new run",
            run_id=run_id,
            branch=branch,
            values=validate(explicit),
            history=None,
            weight_version=0,
            parent_branch=None,
            fork_version=None,
            changed={},
            explicit=said,
            limit=explicit.get("num_rollout"),
        )
    return _resume(ledger, run_id, branch, said)


def _resume(ledger: Ledger, run_id: str, branch: str, said: Mapping[str, Any]) -> Standing:
    info = ledger.branch(run_id, branch)
    recorded, recorded_places = _recorded(ledger, run_id, branch)
    # What its own preset set is recorded, whatever that sets today.
    again = said.get("preset") == recorded.get("preset")
    explicit = spelled_out({k: v for k, v in said.items() if k != "preset" or not again}, recorded)
    given = content_of(explicit)
    different = {k: v for k, v in given.items() if _plain(v) != recorded.get(k)}
    if set(different) == {"prompt_data_digest"}:
        raise InvalidArgument(
            explain(
                "continuing a run with other prompt data",
                on=f"run {run_id!r}, branch {branch!r}, --prompt-data {said.get('prompt_data')}",
                expected=f"the content it began with, blake3 {recorded.get('prompt_data_digest')}",
                found=different["prompt_data_digest"],
                do="put the old content back, or name the place where it is now; to train on the "
                "new one, fork a branch: --from-version K --data fresh --prompt-data PATH",
            )
        )
    history = read_history(ledger, run_id)
    takes_up = not history.checkpoints
    if takes_up and not different.keys() & _SAMPLED_WITH:
        # Nobody has trained yet, so how is still open.
        recorded = _with_derived({**recorded, **different}, given)
        different = {}
    if different:
        raise InvalidArgument(
            explain(
                "continuing a run with other settings",
                on=f"run {run_id!r}, branch {branch!r}",
                expected=", ".join(f"--{_dash(k)} {recorded.get(k)}" for k in different),
                found=", ".join(f"--{_dash(k)} {v}" for k, v in different.items()),
                do="leave them out to go on as recorded; to train with others, fork a branch "
                "with --from-version K (--data fresh for new rollouts), or start another run with "
                "--run-id",
            )
        )
    return Standing(
        kind="resume",
        run_id=run_id,
        branch=branch,
        values=validate({**recorded_places, **recorded, **places_of(explicit)}),
        history=history,
        weight_version=history.head(branch, info.fork_version),
        parent_branch=info.parent,
        fork_version=info.fork_version,
        changed={},
        explicit=said,
        limit=explicit.get("num_rollout"),
        takes_up=takes_up,
    )


def _fork(ledger: Ledger, said: Mapping[str, Any]) -> Standing:
    version = int(said["from_version"])
    run_id = ledger.run(said.get("run_id")).run_id
    parent = ledger.version(run_id, version).branch
    recorded, recorded_places = _recorded(ledger, run_id, parent)
    explicit = spelled_out(said, recorded)
    if explicit.get("data", "recorded") == "recorded":
        # A preset cannot change how they were sampled; who says so on the command line is told.
        explicit = {k: v for k, v in explicit.items() if k in said or k not in _OF_ROLLOUTS}
    values = {**recorded_places, **recorded, **explicit}
    values["data"] = explicit.get("data", "recorded")
    if values["data"] == "recorded":
        # The recorded tokens were sampled by other weights than those that train on them from the
        # second step on: the ratio must be taken against the policy that sampled, or corrected for
        # it.
        values["use_rollout_logprobs"] = explicit.get(
            "use_rollout_logprobs", not values.get("use_tis", False)
        )
        _refuse_useless(explicit, recorded)
    full = validate(_with_derived(values, explicit))
    changed = {
        k: v for k, v in content_of(full).items() if _plain(v) != recorded.get(k) and k != "data"
    }
    name = explicit.get("branch") or _branch_name(version, said)
    history = read_history(ledger, run_id)
    if not history.checkpoints:
        raise NotFound(
            explain(
                "forking a branch",
                on=f"run {run_id!r}",
                expected="a run that is trained",
                found="rollouts only, begun by ledger-rollout",
                do="start ledger-train on the run itself first: its first trainer may choose how",
            )
        )
    standing = Standing(
        kind="new branch",
        run_id=run_id,
        branch=name,
        values=full,
        history=history,
        weight_version=version,
        parent_branch=parent,
        fork_version=version,
        changed=changed,
        explicit=said,
        limit=explicit.get("num_rollout"),
    )
    if name not in {b.name for b in ledger.branches(run_id)}:
        return standing
    info = ledger.branch(run_id, name)
    there, _ = _recorded(ledger, run_id, name)
    mine = json.loads(standing.settings_json)
    if info.fork_version != version or there != mine:
        different = sorted(k for k in mine if mine[k] != there.get(k))
        raise AlreadyExists(
            explain(
                "forking a branch",
                on=f"run {run_id!r}, branch {name!r}",
                expected="a new name, or the settings that the branch began with",
                found=f"a branch forked at version {info.fork_version}"
                + (f" that differs in {', '.join(different)}" if different else ""),
                do="give another name with --branch",
            )
        )
    return Standing(
        kind="resume",
        run_id=run_id,
        branch=name,
        values=full,
        history=history,
        weight_version=history.head(name, version),
        parent_branch=info.parent,
        fork_version=version,
        changed=changed,
        explicit=said,
        limit=explicit.get("num_rollout"),
    )


def _recorded(ledger: Ledger, run_id: str, branch: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Content and place options as a branch began with."""
    reader = ledger.reader(run_id, branch=branch)
    (started,) = events_of(reader.table("run_started"), RunStarted)
    settings, places = started.settings, json.loads(started.places)
    for taken_up in events_of(reader.table("training_started"), TrainingStarted):
        settings, places = taken_up.settings, places | json.loads(taken_up.places)
    forks = events_of(reader.table("branch_forked"), BranchForked)
    forked = [fork for fork in forks if fork.branch == branch]
    if forked:
        settings = forked[0].settings
        forked_places = json.loads(forked[0].places or "{}")
        places |= {name: forked_places.get(name) for name in _MODEL_FOLDERS}
    carried = (
        "save",
        "hf_checkpoint",
        "num_rollout",
        "save_interval",
        "eval_interval",
        "launcher",
        "prompt_data",
        "rollout_by",
        "update_weight_disk_dir",
        "rm_timeout",
        "rm_url",
        *_MODEL_FOLDERS,
    )
    kept = {name: places[name] for name in carried if places.get(name) is not None}
    return json.loads(settings), kept


def _refuse_useless(explicit: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    """Recorded trajectories are as they are: options of the rollout cannot change them."""
    for name in sorted(_OF_ROLLOUTS & set(explicit)):
        if _plain(explicit[name]) != recorded.get(name):
            raise InvalidArgument(
                explain(
                    "re-training on recorded trajectories",
                    on=f"--{_dash(name)} {explicit[name]}",
                    expected=f"as recorded: {recorded.get(name)}",
                    found=explicit[name],
                    do="leave it out, or sample new trajectories with --data fresh",
                )
            )


def _with_derived(values: dict[str, Any], explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Let derived options follow what was given explicitly, not the recorded result of them."""
    sizes = ("rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout")
    if any(name in explicit for name in sizes) and "global_batch_size" not in explicit:
        values["global_batch_size"] = None
    ranks = ("actor_num_nodes", "actor_num_gpus_per_node")
    layout = ("tensor_model", "pipeline_model", "context")
    moved = any(name in explicit for name in ranks)
    if moved or any(f"{name}_parallel_size" in explicit for name in layout):
        values["data_parallel_size"] = explicit.get("data_parallel_size")
    if not moved and any(f"{name}_parallel_size" in explicit for name in (*layout, "data")):
        values |= dict.fromkeys(ranks)
    if "rollout_batch_size" in explicit and "over_sampling_batch_size" not in explicit:
        values["over_sampling_batch_size"] = None
    if {"loss_aggregation", "rollout_max_response_len"} & set(explicit) and (
        "loss_scale_factor" not in explicit
    ):
        values["loss_scale_factor"] = None
    return values


def _branch_name(version: int, explicit: Mapping[str, Any]) -> str:
    """A name that the same command gives again, so that it continues its branch."""
    said = [
        str(v) if k == "advantage_estimator" else f"{_dash(k)}-{v}"
        for k, v in sorted(content_of(explicit).items())
    ]
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(said)).strip("-").lower()
    return f"v{version}-{slug}"[:80] if slug else f"v{version}-again"


def _plain(value: Any) -> Any:
    return json.loads(canonical_json(redact({"value": value})))["value"]


def _dash(name: str) -> str:
    return name.replace("_", "-")


def checkpoint_root(ledger: Ledger, standing: Standing) -> Path:
    """The folder of a run's checkpoints: below `save`, or in the ledger.

    Raises InvalidArgument where the ledger is in no folder and none was named.
    """
    base = standing.values["save"]
    if base:
        return Path(base) / standing.run_id
    if ledger.root is None:
        raise InvalidArgument(
            explain(
                "where checkpoints are to be saved was not said",
                on=ledger.uri,
                expected="--save DIR: checkpoints are folders, and this ledger is in none",
                found="no --save",
                do="name a folder that every process of this run sees",
            )
        )
    return ledger.root / "checkpoints" / standing.run_id


def new_model_folder(values: Mapping[str, Any]) -> Path:
    """The folder of the model that a new run starts from: --hf-checkpoint.

    Raises InvalidArgument without --hf-checkpoint, NotFound where there is no model in it.
    """
    if not values["hf_checkpoint"]:
        raise InvalidArgument(
            explain(
                "starting a run",
                on="--hf-checkpoint",
                expected="the folder of a Hugging Face model to start from",
                found="nothing",
                do="make a model with `python -m rollout.models tiny --output models/tiny`, or "
                "give the folder of one of yours",
            )
        )
    folder = Path(values["hf_checkpoint"])
    if not (folder / "config.json").is_file():
        raise NotFound(
            explain(
                "starting a run",
                on=f"--hf-checkpoint {folder}",
                expected="a folder with config.json, model.safetensors and tokenizer.json",
                found="no config.json in it" if folder.is_dir() else "no such folder",
            )
        )
    return folder
