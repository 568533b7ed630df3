"""Bringing a branch to where it goes on: its first events, its state, its place."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from ledger.canonical import canonical_json, json_digest
from ledger.chat_template import chat_template_digest
from ledger.environment import describe_environment
from ledger.errors import AlreadyExists, Diverged, InvalidArgument, NotFound, explain
from ledger.events import BranchForked, RunResumed, RunStarted, StepCommitted, TrainingStarted
from ledger.store import Ledger
from ledger.weights import first_difference
from ledger.writer import Writer
from trainer.algorithms.needs import needs_values
from trainer.begin import Standing, checkpoint_root, find_standing, new_model_folder
from trainer.checkpoint_formats import FORMAT, format_of
from trainer.compare import records_of_event
from trainer.critic import create_critic, critic_settings
from trainer.frozen import FrozenModel
from trainer.history import History, read_history
from trainer.loop import Place
from trainer.model import read_config
from trainer.parallel import determinism_report
from trainer.processes import from_writer, is_writer, wait_for_head
from trainer.reconfigure import reconfigure
from trainer.restore import check_checkpoint, checkpoint_folder, restore
from trainer.saving import Saver, checkpoint_of
from trainer.settings import algorithm_settings, optimizer_settings, parallel_settings
from trainer.state import TrainState, create_state
from trainer.step_check import check_policy
from trainer.step_events import weights_event
from trainer.step_models import ModelLibrary, load_named, model_places

__all__ = [
    "Opened",
    "engine_version",
    "is_complete",
    "model_folder",
    "open_branch",
    "remaining_recorded",
]


def producer_of(branch: str) -> str:
    """Name of the one process that trains a branch: a second one fences the first one off."""
    return f"ledger-train/{branch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A branch that is ready to be trained."""

    writer: Writer | None
    """None on other ranks than 0."""
    state: TrainState
    history: History
    place: Place
    recorded: list[StepCommitted] | None
    """With recorded data: the steps whose samples come next."""
    saver: Saver
    library: ModelLibrary
    """Finds the other models of the steps."""
    restore_time_s: float


def open_branch(
    ledger: Ledger, standing: Standing, tell: Callable[[str], None] = lambda _: None
) -> Opened:
    """Write what has to be written first, and restore the state to go on from.

    The process groups must have been started; `tell` hears what takes long. Every rank calls it:
    rank 0 decides and writes, the others restore the same state. Raises InvalidArgument, NotFound,
    Corrupt, Diverged.
    """
    began = time.perf_counter()
    writer = None
    if is_writer():
        # The epoch first: from here on nobody else adds to the branch, and only then is its history
        # read. What another process committed in the meantime is taken again and compared.
        writer = _take_over(ledger, standing)
        if writer is not None:
            standing = find_standing(ledger, standing.explicit)
    standing = _share(ledger, standing)
    checkpoints = checkpoint_root(ledger, standing)
    if standing.takes_up:
        _take_up(ledger, standing, writer, checkpoints)
        wait_for_head(ledger, standing.run_id, from_writer(_head(ledger, standing)))
        if is_writer():
            history = read_history(ledger, standing.run_id)
            standing = replace(standing, history=history, takes_up=False)
        standing = _share(ledger, standing)
    if standing.history is None:
        state, named = _start_run(ledger, standing, writer, checkpoints)
        head_seq = from_writer(_head(ledger, standing))
        wait_for_head(ledger, standing.run_id, head_seq)
        history = read_history(ledger, standing.run_id, as_of=head_seq)
        place, recorded = Place(0, 0, 0), None
        library = _library(ledger, standing, history)
        library.loaded |= named
    else:
        history = standing.history
        library = _library(ledger, standing, history)
        recorded = remaining_recorded(history, standing)
        place = _place(history, standing, recorded)
        _require_work(standing, recorded)
        state = restore(
            ledger,
            history,
            place.weight_version,
            parallel=parallel_settings(standing.values),
            optimizer=optimizer_settings(standing.values),
            seed=standing.values["rollout_seed"],
            library=library,
            ignore=standing.values["ignore_checkpoint"],
            tell=tell,
        )
        reconfigure(state, optimizer_settings(standing.values))
        library.prepare_critic(
            state,
            algorithm_settings(standing.values),
            critic_settings(optimizer_settings(standing.values), standing.values),
        )
        # What the steps ask is there before the branch is.
        check_policy(state, algorithm_settings(standing.values))
        library.models_for(algorithm_settings(standing.values))
        if is_writer():
            writer = _go_on(ledger, standing, writer, history, place)
        # A branch that is new must be there before its number is asked for.
        wait_for_head(ledger, standing.run_id, from_writer(_head(ledger, standing)))
    return Opened(
        writer=writer,
        state=state,
        history=history,
        place=place,
        recorded=recorded,
        saver=Saver(
            ledger=ledger,
            writer=writer,
            checkpoints=checkpoints,
            model_dir=checkpoint_folder(
                ledger, history.checkpoints[_start(standing, history, place)]
            ),
            form=format_of(standing.values),
            in_background=standing.values["async_save"],
        ),
        library=library,
        restore_time_s=time.perf_counter() - began,
    )


def _library(ledger: Ledger, standing: Standing, history: History) -> ModelLibrary:
    return ModelLibrary(
        ledger=ledger,
        history=history,
        parallel=parallel_settings(standing.values),
        places=model_places(standing.values, ledger, standing.run_id),
        seed=standing.values["rollout_seed"],
    )


def engine_version(standing: Standing, opened: Opened) -> int:
    """The version that the engine has where the branch goes on.

    With --update-weights-interval N it gets the weights after every N-th rollout step, so before
    the present one it last got those from before the rollout step that N divides.
    """
    interval = standing.values["update_weights_interval"]
    began = opened.place.rollout_step // interval * interval
    made = _made(opened.history, standing)
    since = [one for one in made if began <= one.rollout_step < opened.place.rollout_step]
    return since[0].weight_version_in if since else opened.place.weight_version


def _head(ledger: Ledger, standing: Standing) -> int:
    return ledger.run(standing.run_id).head_seq if is_writer() else 0


def _share(ledger: Ledger, standing: Standing) -> Standing:
    """Rank 0's standing, on every rank. Each reads the history for itself, up to the event that
    rank 0 saw last: the parent of a branch may grow meanwhile, and what is left to train, and the
    checkpoint to start from, must be the same for all."""
    seen = None if standing.history is None else standing.history.head_seq
    bare, seen = from_writer((replace(standing, history=None), seen))
    if is_writer():
        return standing
    if seen is None:
        return bare
    wait_for_head(ledger, bare.run_id, seen)
    return replace(bare, history=read_history(ledger, bare.run_id, as_of=seen))


def model_folder(ledger: Ledger, standing: Standing) -> Path:
    """A model that the engine can start from: --hf-checkpoint of a new run, else the checkpoint
    that the branch goes on from, or, where that one is Megatron's, the last one before it that is
    not. It is checked.

    Raises InvalidArgument without --hf-checkpoint, NotFound where there is no model in it, and what
    `check_checkpoint` raises.
    """
    if standing.history is not None and standing.takes_up:
        return _begun_with(standing, standing.history)
    if standing.history is not None:
        recorded = remaining_recorded(standing.history, standing)
        place = _place(standing.history, standing, recorded)
        start = _start(standing, standing.history, place)
        saved = standing.history.checkpoints
        # A run's first version is always there by canonical names.
        named = [
            v for v in standing.history.path(start) if v in saved and saved[v].format == FORMAT
        ]
        return check_checkpoint(ledger, standing.history, named[-1] if named else start)
    return new_model_folder(standing.values)


def _begun_with(standing: Standing, history: History) -> Path:
    """The folder that rollouts began a run with. Raises NotFound where it is not here."""
    named = history.weights[standing.weight_version].location
    tried = [Path(one) for one in (named, standing.values["hf_checkpoint"]) if one]
    for folder in tried:
        if (folder / "config.json").is_file():
            return folder
    raise NotFound(
        explain(
            "taking up a run that rollouts have begun",
            on=f"run {standing.run_id!r}",
            expected="the model it began with in " + " or ".join(map(str, tried)),
            found="no config.json there on this host",
            do="name its folder here with --hf-checkpoint",
        )
    )


def _start(standing: Standing, history: History, place: Place) -> int:
    """The version whose checkpoint is the nearest to `place`."""
    if standing.history is None:
        return place.weight_version
    ignore = standing.values["ignore_checkpoint"]
    return history.from_checkpoint(place.weight_version, ignore)[0]


def _take_over(ledger: Ledger, standing: Standing) -> Writer | None:
    """Begin an epoch on the branch, which fences off whoever wrote to it; None for a new branch."""
    if standing.kind == "new branch":
        return None
    if standing.kind == "new run" and standing.run_id not in {r.run_id for r in ledger.runs()}:
        with contextlib.suppress(AlreadyExists):
            ledger.create_run(standing.run_id)
    writer = ledger.writer(standing.run_id, standing.branch, producer=producer_of(standing.branch))
    if standing.values["rollout_by"] == "trainer" and _was_elsewhere(ledger, standing):
        # Prompts are issued by one process: ledger-rollout, if it still runs, is fenced off.
        rollouts = f"ledger-rollout/{standing.branch}"
        ledger.writer(standing.run_id, standing.branch, producer=rollouts).close()
    return writer


def _was_elsewhere(ledger: Ledger, standing: Standing) -> bool:
    """Whether the branch ever had rollouts that another process made."""
    reader = ledger.reader(standing.run_id, standing.branch)
    return any(
        json.loads(places or "{}").get("rollout_by") == "elsewhere"
        for kind in ("run_started", "branch_forked", "run_resumed")
        for places in reader.table(kind, ["places"])["places"].to_pylist()
    )


def _take_up(ledger: Ledger, standing: Standing, writer: Writer | None, checkpoints: Path) -> None:
    """Make the state of the first version of a run that rollouts have begun, and its checkpoint.

    Raises NotFound where the folder that they began with is not here, Diverged where it has other
    weights now.
    """
    model_dir = model_folder(ledger, standing)
    if standing.history is None:
        raise RuntimeError("a run without events cannot be taken up")
    state = _first_state(model_dir, standing)
    published = standing.history.weights[standing.weight_version]
    difference = first_difference(records_of_event(published), state.tensor_records())
    if difference is not None:
        raise Diverged(
            explain(
                "taking up a run that rollouts have begun",
                on=f"run {standing.run_id!r}, {model_dir}",
                expected="the weights that version 0 was published with",
                found=difference,
                do="put the folder back as it was, or start another run with --run-id; --bf16 must "
                "be as it was for ledger-rollout",
            )
        )
    folder = checkpoints / f"v{standing.weight_version:06d}"
    if writer is not None and folder.exists():
        # The run has no checkpoint, so this is what a process left that was killed.
        shutil.rmtree(folder)
    saved = checkpoint_of(
        ledger,
        state,
        folder,
        model_dir=model_dir,
        weight_version=standing.weight_version,
        step=None,
    )
    if writer is not None:
        started = TrainingStarted(
            weight_version=standing.weight_version,
            settings=standing.settings_json,
            places=standing.places_json,
            environment=environment_json(),
        )
        writer.append([started, saved])


def _first_state(model_dir: Path, standing: Standing) -> TrainState:
    """The state that a run begins with, from a model folder."""
    values = standing.values
    state = create_state(
        model_dir,
        parallel_settings(values),
        optimizer_settings(values),
        seed=values["rollout_seed"],
    )
    check_policy(state, algorithm_settings(values))
    if needs_values(algorithm_settings(values)):
        state.critic = create_critic(
            values["critic_load"] or model_dir,
            state.hf_config,
            parallel_settings(values),
            critic_settings(optimizer_settings(values), values),
            seed=values["rollout_seed"],
        )
    return state


def _start_run(
    ledger: Ledger, standing: Standing, writer: Writer | None, checkpoints: Path
) -> tuple[TrainState, dict[tuple[str, str | None], FrozenModel]]:
    """The state of the first version, and the models that have a folder of their own."""
    values = standing.values
    model_dir = model_folder(ledger, standing)
    state = _first_state(model_dir, standing)
    named = load_named(
        values,
        algorithm_settings(values),
        parallel_settings(values),
        vocab_size=int(read_config(model_dir)["vocab_size"]),
    )
    weights = weights_event(
        state.tensor_records(), weight_version=0, parent_version=None, step=None
    )
    started = RunStarted(
        run_id=standing.run_id,
        run_seed=values["rollout_seed"],
        settings=standing.settings_json,
        places=standing.places_json,
        environment=environment_json(),
        deterministic=values["deterministic_mode"],
        num_threads=values["num_threads"],
        model_digest=json_digest(read_config(model_dir)),
        tokenizer_digest=_file_digest(model_dir / "tokenizer.json"),
        chat_template_digest=chat_template_digest(model_dir),
    )
    # The checkpoint first, so that one transaction makes the run, its first version and its first
    # checkpoint real together.
    folder = checkpoints / "v000000"
    if writer is not None and folder.exists():
        # The run has no event, so this is what a process left that was killed before its first.
        shutil.rmtree(folder)
    saved = checkpoint_of(
        ledger,
        state,
        folder,
        model_dir=model_dir,
        weight_version=0,
        step=None,
    )
    if writer is not None:
        writer.append([started, weights, saved])
    return state, named


def _go_on(
    ledger: Ledger, standing: Standing, writer: Writer | None, history: History, place: Place
) -> Writer:
    if writer is None:
        return ledger.fork(
            standing.run_id,
            BranchForked(
                branch=standing.branch,
                parent_branch=standing.parent_branch or "main",
                fork_seq=history.seq_of[standing.weight_version],
                weight_version=standing.weight_version,
                settings=standing.settings_json,
                data=standing.values["data"],
                places=standing.places_json,
            ),
            producer_of(standing.branch),
        )
    writer.append(
        [
            RunResumed(
                run_id=standing.run_id,
                weight_version=place.weight_version,
                rollout_step=place.rollout_step,
                places=standing.places_json,
                environment=environment_json(),
            )
        ]
    )
    return writer


def remaining_recorded(history: History, standing: Standing) -> list[StepCommitted] | None:
    """With recorded data: the recorded steps of the parent that the branch has still to take.

    A rollout that was cut by a kill is there as a whole: its steps are taken again from its first.
    """
    if standing.values["data"] != "recorded":
        return None
    if standing.fork_version is None:
        raise InvalidArgument(
            explain("training on recorded data", expected="a branch", found=standing.branch)
        )
    recorded = history.recorded_after(standing.fork_version)
    if standing.limit is not None:
        recorded = [one for one in recorded if one.rollout_step < standing.limit]
    made = _made(history, standing)
    left = recorded[len(made) :]
    if left and made and left[0].rollout_step == made[-1].rollout_step:
        cut = [one for one in made if one.rollout_step == left[0].rollout_step]
        return recorded[len(made) - len(cut) :]
    return left


def _made(history: History, standing: Standing) -> list[StepCommitted]:
    """The steps of the branch itself, in order."""
    steps = [s for v, s in history.steps.items() if history.branch_of[v] == standing.branch]
    return sorted(steps, key=lambda one: one.step)


def _place(history: History, standing: Standing, recorded: list[StepCommitted] | None) -> Place:
    """Where the next rollout begins; that is the cut one where a kill fell into a rollout."""
    made = _made(history, standing)
    if made:
        last = made[-1]
        of_rollout = [one for one in made if one.rollout_step == last.rollout_step]
        whole = last.step_in_rollout + 1 == standing.values["num_steps_per_rollout"]
        if recorded is not None:
            whole = not recorded or recorded[0].rollout_step != last.rollout_step
        if whole:
            return Place(last.weight_version_out, last.step + 1, last.rollout_step + 1)
        first = of_rollout[0]
        return Place(first.weight_version_in, first.step, first.rollout_step)
    before = history.steps.get(standing.weight_version)
    if before is None:
        return Place(standing.weight_version, 0, 0)
    return Place(standing.weight_version, before.step + 1, before.rollout_step + 1)


def _require_work(standing: Standing, recorded: list[StepCommitted] | None) -> None:
    if standing.kind == "new branch" and recorded is not None and not recorded:
        raise InvalidArgument(
            explain(
                "re-training from a version on recorded trajectories",
                on=f"run {standing.run_id!r}, version {standing.weight_version}",
                expected="steps recorded after it on its branch",
                found="none",
                do="name an earlier version, or train on new rollouts with --data fresh",
            )
        )


def environment_json() -> str:
    """What results depend on in this process, as an event records it."""
    return canonical_json({**describe_environment(), "determinism": determinism_report()})


def _file_digest(path: Path) -> bytes:
    if not path.is_file():
        raise NotFound(
            explain(
                "reading the tokenizer",
                on=str(path.parent),
                expected="tokenizer.json (a fast tokenizer)",
                found="no such file",
            )
        )
    return blake3(path.read_bytes()).digest()


def is_complete(ledger: Ledger, standing: Standing) -> bool:
    """Whether a branch that is gone on with has nothing left to train, evaluate or save."""
    if standing.kind != "resume" or standing.history is None:
        return False
    recorded = remaining_recorded(standing.history, standing)
    place = _place(standing.history, standing, recorded)
    if recorded is None:
        left = place.rollout_step < standing.values["num_rollout"]
    else:
        left = bool(recorded)
    if standing.values["eval_interval"] is not None and (
        standing.values["rollout_by"] == "trainer"
    ):
        table = ledger.reader(standing.run_id, branch=None).table("eval_scored")
        scored = {
            name
            for version, name in zip(
                table["weight_version"].to_pylist(), table["name"].to_pylist(), strict=True
            )
            if version == place.weight_version
        }
        named = (standing.values["eval_prompt_data"] or [])[::2]
        left = left or not scored or not scored.issuperset(named)
    return not left and place.weight_version in standing.history.checkpoints
