"""`ledger-train`: trains from a ledger, goes on where it stopped, or re-trains from a version."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ledger.commands.common import add_catalog
from ledger.errors import InvalidArgument, LedgerError, explain
from rollout.engines.sglang.arguments import sglang_options, with_sglang_options
from trainer.launch import RankPlan, RanksNeeded, start_ranks
from trainer.launch_ray import GROUP
from trainer.names_elsewhere import unknown_options
from trainer.option_values import defaults
from trainer.options import add_options
from trainer.processes import (
    ElsewhereFailed,
    as_launched,
    claim_failure,
    failure_code,
    from_writer,
    is_launched,
    is_writer,
    join_ranks,
    leave_ranks,
    wait_for_others,
)
from trainer.rank_count import ranks_of

if TYPE_CHECKING:
    from ledger.store import Ledger
    from trainer.begin import Standing
    from trainer.loop import RolloutSide

__all__ = ["main"]

_EXAMPLES = """\
examples:
  ledger-train --ledger runs/a --hf-checkpoint models/tiny --task reasoning_gym:spell_backward
      start a run; the same command again goes on where it was stopped
  ledger-train --ledger runs/a --from-version 42 --advantage-estimator rloo
      fork a branch at version 42 and re-train it on the recorded trajectories
  ledger-train --ledger runs/a --from-version 42 --data fresh --lr 5e-7
      the same with new rollouts
"""


DEFAULT_TIMEOUT_MINUTES = defaults()["distributed_timeout_minutes"]


def build_parser(*, show_megatron: bool = False) -> argparse.ArgumentParser:
    """The parser; what is not given on the command line is absent from its result.

    With `show_megatron` the help has Megatron-Core's own settings as well.
    """
    parser = argparse.ArgumentParser(
        prog="ledger-train",
        usage="ledger-train [options]",
        # An abbreviation may come to mean another option, of this package or of Megatron's.
        allow_abbrev=False,
        description="Train a language model from the trajectory ledger. A run that was stopped "
        "goes on with the same command; --from-version re-trains from any weight version. Every "
        "setting of Megatron-Core is an option too, by its own name: --help-megatron lists them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    add_catalog(parser)
    parser.add_argument(
        "--help-megatron",
        action=_HelpWithMegatron,
        nargs=0,
        default=argparse.SUPPRESS,
        help="show this help with Megatron-Core's own settings, and exit",
    )
    add_options(parser, show_megatron=show_megatron)
    return parser


class _HelpWithMegatron(argparse.Action):
    """Prints the whole help, as -h prints the short one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        build_parser(show_megatron=True).print_help()
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. 0 on success, 2 with the reason on standard error, 130 when interrupted.

    Where the layout needs several ranks and no launcher has started them, they are started here,
    each with this same command line. Rank 0 alone prints; of ranks that fail, the first one.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    try:
        own, engines = sglang_options(words, parser._option_string_actions.keys())
    except LedgerError as refused:
        if claim_failure(2):
            print(f"ledger-train: {refused}", file=sys.stderr)
        return 2
    found, rest = parser.parse_known_args(own)
    if rest:
        # argparse keeps its flags there, and has no other way to ask for them.
        error = unknown_options(rest, parser._option_string_actions.keys())
        if claim_failure(2):
            print(f"ledger-train: {error}", file=sys.stderr)
        return 2
    given = with_sglang_options(vars(found), engines)
    as_json, catalog = given.pop("json"), given.pop("catalog")
    try:
        result = run(given, show=not as_json, catalog=catalog)
    except RanksNeeded as needed:
        try:
            return start_ranks(needed.plan, "trainer.cli", words)
        except LedgerError as error:
            print(f"ledger-train: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130
    except LedgerError as error:
        if claim_failure(2):
            print(f"ledger-train: {error}", file=sys.stderr)
        return 2
    except ElsewhereFailed:
        return failure_code()
    except KeyboardInterrupt:
        if claim_failure(130):
            print("ledger-train: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except Exception:
        # An error of torch's on a rank whose peer has failed only says that the peer is gone.
        if claim_failure(1):
            raise
        return failure_code()
    if not result:
        return 0  # another rank than 0
    if as_json:
        print(json.dumps(result, sort_keys=True))
    else:
        _print_result(result)
    return 0


def run(explicit: Mapping[str, Any], *, show: bool, catalog: str | None = None) -> dict[str, Any]:
    """Do what the options ask for; returns what `--json` prints. Raises LedgerError.

    `catalog` is the address of the ledger's catalog, which may hold a password: it is no setting,
    and nothing records it. As one of several ranks (torchrun's environment), every rank calls it
    alike; others than rank 0 show and return nothing. Raises RanksNeeded where the layout needs
    several ranks and this process is none of them, ElsewhereFailed where another rank has failed.
    """
    from ledger.opening import open_ledger
    from rollout.tasks.from_options import with_digests

    began = time.monotonic()
    uri = explicit.get("ledger", os.environ.get("LEDGER_URI", "ledger-data"))
    device, explicit = _laid_out(explicit)
    explicit = as_launched({**explicit, "ledger": str(uri)})
    join_ranks(explicit.get("distributed_timeout_minutes", DEFAULT_TIMEOUT_MINUTES))
    if not is_writer():
        return _follow(uri, catalog)
    forking = "from_version" in explicit
    with open_ledger(uri, create=not forking, catalog=catalog) as ledger:
        standing = _decide(ledger, with_digests(explicit), device)
        # Heavy imports only once the options make sense.
        from trainer.opening import is_complete

        if from_writer(is_complete(ledger, standing)):
            result = _result(ledger, standing, began, steps=0, rewards=[], seconds={})
        else:
            from_writer(replace(standing, history=None))
            result = _train(ledger, standing, began, show=show)
    wait_for_others("end")
    leave_ranks()
    return result


def _laid_out(explicit: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The device of --layout, if there is one, and the options with what it says of the ranks."""
    if explicit.get("layout") is None:
        return None, explicit
    from rollout.ray.layout import read_layout

    layout = read_layout(explicit["layout"])
    says = {
        "launcher": "ray",
        "actor_num_nodes": layout.trainer.nodes,
        "actor_num_gpus_per_node": layout.trainer.gpus_per_node,
    }
    for name, value in says.items():
        if explicit.get(name, value) != value:
            raise InvalidArgument(
                explain(
                    "placing the ranks",
                    on=f"--{name.replace('_', '-')} {explicit[name]}",
                    expected=f"{value}, as --layout {explicit['layout']} says",
                    found=explicit[name],
                    do="leave it out",
                )
            )
    if layout.colocate and not is_launched() and GROUP not in os.environ:
        raise InvalidArgument(
            explain(
                "placing the ranks",
                on=f"--layout {explicit['layout']}",
                expected="ledger-run, which places trainer and engines on the same devices",
                found="colocate = true, and the trainer alone",
                do="start both with ledger-run, or say colocate = false",
            )
        )
    return layout.device, {**explicit, **says}


def _decide(ledger: Ledger, explicit: Mapping[str, Any], device: str | None) -> Standing:
    """Where the run stands; what can be checked before anything is written is checked."""
    from rollout.engines.sglang.settings import refuse_unused
    from rollout.tasks.from_options import check_rows
    from trainer.begin import checkpoint_root, find_standing
    from trainer.checkpoint_formats import format_of
    from trainer.publishing import version_folder
    from trainer.tracking import check_tracking

    standing = find_standing(ledger, explicit)
    values = standing.values
    refuse_unused(explicit, values["engine"])
    _check(values)
    if values["data"] == "fresh" and standing.kind != "resume":
        check_rows(values)
    format_of(values)
    check_tracking(values, ledger.root)
    checkpoint_root(ledger, standing)
    if values["rollout_by"] == "elsewhere" and values["data"] == "fresh":
        version_folder(ledger, standing)
    # A layout places the only rank, too.
    if ranks_of(values) == 1 and (device is None or is_launched()):
        return standing
    if ledger.uri.startswith("memory:"):
        raise InvalidArgument(
            explain(
                "training on several ranks",
                on=ledger.uri,
                expected="a ledger that every rank can open",
                found="one in the memory of a process",
            )
        )
    if not is_launched():
        from trainer.before_ranks import check_before_ranks

        check_before_ranks(standing)
        nodes, per_node = values["actor_num_nodes"], values["actor_num_gpus_per_node"]
        raise RanksNeeded(RankPlan(nodes, per_node, values["launcher"], device))
    return standing


def _follow(uri: Any, catalog: str | None) -> dict[str, Any]:
    """Train as another rank than 0, from what that one decides."""
    from ledger.opening import open_ledger

    if not from_writer(False):
        standing: Any = from_writer(None)
        with open_ledger(uri, catalog=catalog, read_only=True) as ledger:
            _train(ledger, standing, time.monotonic(), show=False)
    wait_for_others("end")
    leave_ranks()
    return {}


def _check(values: Mapping[str, Any]) -> None:
    """Refuse what cannot work before anything is written."""
    from rollout.engines import ENGINE_NAMES, create_engine
    from rollout.engines.sglang.settings import sglang_settings
    from rollout.side import rollout_settings
    from trainer.algorithms.needs import needs_teacher
    from trainer.rollout_shape import check_rollout_shape
    from trainer.settings import algorithm_settings, batch_settings

    batch_settings(values)
    rollout_settings(values)
    check_rollout_shape(values)
    algorithm = algorithm_settings(values)
    if needs_teacher(algorithm) and not values["opd_teacher_load"]:
        raise InvalidArgument(
            explain(
                "distilling a teacher",
                on="--opd-teacher-load",
                expected="the folder of a model with the policy's vocabulary",
                found="nothing",
            )
        )
    if algorithm.keep_old_actor and values["data"] == "recorded":
        raise InvalidArgument(
            explain(
                "re-training on recorded trajectories",
                on="--keep-old-actor",
                expected="off: there is no engine whose weights could be kept",
                found="on",
                do="take the engine's own log-probs as old ones: --use-rollout-logprobs",
            )
        )
    one = values["n_samples_per_prompt"] == 1 and values["data"] == "fresh"
    if one and values["dynamic_sampling_filter_path"] == "check_reward_nonzero_std":
        raise InvalidArgument(
            explain(
                "sampling one rollout of a prompt",
                on="--dynamic-sampling-filter-path check_reward_nonzero_std",
                expected="groups of several rollouts: it drops those whose rewards are all alike",
                found="--n-samples-per-prompt 1, of which it would drop every group",
                do="add --dynamic-sampling-filter-path none, or raise --n-samples-per-prompt",
            )
        )
    if values["engine"] == "sglang":
        engines = sglang_settings(values)
        fresh = values["data"] == "fresh" or values["eval_interval"] is not None
        if fresh and values["rollout_by"] == "trainer":
            engines.check_installed()
    elif values["engine"] not in ENGINE_NAMES:
        create_engine(values["engine"], "MODEL")  # says what the names are


def _train(ledger: Any, standing: Any, began: float, *, show: bool) -> dict[str, Any]:
    from rollout.side import LocalRolloutSide
    from trainer.algorithms.check import check_algorithm
    from trainer.algorithms.notes import algorithm_notes
    from trainer.frozen import old_actor_of
    from trainer.loop import TrainingLoop
    from trainer.opening import engine_version, model_folder, open_branch
    from trainer.parallel import initialize
    from trainer.progress import StepProgress
    from trainer.restore import restore
    from trainer.settings import (
        algorithm_settings,
        batch_settings,
        optimizer_settings,
        parallel_settings,
    )
    from trainer.tracking import open_tracker

    values = standing.values
    algorithm = algorithm_settings(values)
    check_algorithm(algorithm)
    initialize(
        parallel_settings(values),
        seed=values["rollout_seed"],
        num_threads=values["num_threads"],
        deterministic=values["deterministic_mode"],
        timeout_minutes=values["distributed_timeout_minutes"],
    )
    side: Any = None
    elsewhere = values["rollout_by"] == "elsewhere"
    fresh = values["data"] == "fresh"
    has_engine = fresh or (values["eval_interval"] is not None and not elsewhere)
    if has_engine and is_writer() and not elsewhere:
        side = LocalRolloutSide(model_folder(ledger, standing), values)
    opened = open_branch(
        ledger, standing, (lambda text: print(text, file=sys.stderr)) if show else (lambda _: None)
    )
    if opened.recorded is None:
        total = values["num_rollout"]
        steps_total = (total - opened.place.rollout_step) * values["num_steps_per_rollout"]
    else:
        steps_total = len(opened.recorded)
    with StepProgress(total=steps_total, enabled=show) as progress:
        progress.say(_headline(standing, opened))
        for note in algorithm_notes(
            algorithm,
            n_samples_per_prompt=values["n_samples_per_prompt"],
            global_batch_size=values["global_batch_size"],
            group_filter=values["dynamic_sampling_filter_path"]
            if opened.recorded is None
            else None,
            given=standing.explicit,
        ):
            progress.say(f"note: {note}")
        tracker = None
        if opened.writer is not None:
            tracker = open_tracker(
                values,
                ledger=ledger,
                run_id=standing.run_id,
                branch=standing.branch,
                history=opened.history,
                settings=json.loads(standing.settings_json),
                tell=lambda text: print(f"ledger-train: {text}", file=sys.stderr),
            )
        if has_engine and elsewhere and is_writer():
            side = _elsewhere(ledger, standing, opened, progress.doing)
        elif side is not None and opened.writer is not None:
            side.attach(
                ledger,
                standing.run_id,
                standing.branch,
                opened.writer,
                lambda p: progress.doing(
                    f"rollout {p.rollout_step}: {p.kept_groups}/{p.wanted_groups} groups"
                ),
            )
        engine_has, version = opened.state, engine_version(standing, opened)
        if has_engine and version != opened.place.weight_version:
            engine_has = restore(
                ledger,
                opened.history,
                version,
                parallel=parallel_settings(values),
                optimizer=optimizer_settings(values),
                seed=values["rollout_seed"],
                library=opened.library,
            )
        if has_engine:
            _load_first(side, engine_has, opened.history.weights[version], standing.run_id)
        loop = TrainingLoop(
            ledger=ledger,
            run_id=standing.run_id,
            branch=standing.branch,
            writer=opened.writer,
            state=opened.state,
            models=opened.library.models_for(algorithm),
            old_actor=old_actor_of(engine_has)
            if algorithm.keep_old_actor and opened.recorded is None
            else None,
            engine_version=version,
            update_weights_interval=values["update_weights_interval"],
            publish_each_step=not elsewhere,
            algorithm=algorithm,
            sizes=batch_settings(values),
            rollout_side=side,
            has_engine=has_engine,
            recorded=opened.recorded,
            history=opened.history,
            place=opened.place,
            fork_version=standing.fork_version,
            num_rollout=values["num_rollout"],
            max_weight_staleness=values["max_weight_staleness"],
            save_interval=values["save_interval"],
            eval_interval=values["eval_interval"],
            saver=opened.saver,
            progress=progress,
            tracker=tracker,
        )
        try:
            loop.run()
        finally:
            try:
                if side is not None:
                    side.close()  # samples on their way are recorded: before the writer closes
            finally:
                if opened.writer is not None:
                    opened.writer.close()
                if tracker is not None:
                    tracker.close()
    if tracker is None:
        return {}
    summary = loop.summary
    return _result(
        ledger,
        standing,
        began,
        steps=summary.steps,
        rewards=summary.rewards,
        seconds={"restore": opened.restore_time_s, **summary.seconds},
        failed_sinks=tracker.failures,
    )


def _elsewhere(ledger: Any, standing: Any, opened: Any, tell: Any) -> RolloutSide:
    """The side of rollouts that another process makes."""
    from trainer.elsewhere import RolloutsElsewhere
    from trainer.publishing import version_folder
    from trainer.weights.versions import VersionFolders

    values = standing.values
    minutes = values["rollout_timeout_minutes"]
    return RolloutsElsewhere(
        ledger,
        standing.run_id,
        standing.branch,
        VersionFolders(
            version_folder(ledger, standing),
            opened.state.hf_config,
            opened.saver.model_dir,
            keep=values["update_weight_disk_keep"],
        ),
        rollouts=values["rollout_batch_size"] * values["n_samples_per_prompt"],
        timeout_s=None if minutes is None else 60 * minutes,
        tell=tell,
    )


def _load_first(side: Any, state: Any, published: Any, run_id: str) -> None:
    """Give the engine the weights of a restored version, and compare its own checksums."""
    from ledger.errors import Diverged
    from ledger.weights import first_difference
    from trainer.compare import records_of_event

    if side is None:
        for _ in state.export_weights():
            pass  # this rank's shards go to rank 0, which has the engine
        return
    version = published.weight_version
    found = side.load_weights(version, state.export_weights())
    difference = first_difference(records_of_event(published), found)
    if difference is not None:
        raise Diverged(
            explain(
                "loading the engine",
                on=f"run {run_id!r}, version {version}, engine {side.name}",
                expected="the checksums that were published",
                found=difference,
            )
        )
    side.release(version)


def _headline(standing: Any, opened: Any) -> str:
    where = f"run {standing.run_id!r}, branch {standing.branch!r}"
    place = opened.place
    if standing.kind == "new run":
        return f"{where}: new run from {standing.values['hf_checkpoint']}"
    if standing.kind == "new branch":
        changed = ", ".join(f"{k} = {v}" for k, v in standing.changed.items()) or "nothing changed"
        data = "recorded trajectories" if opened.recorded is not None else "fresh rollouts"
        text = f"{where}: forked at version {place.weight_version} on {data}; {changed}"
        if opened.recorded is not None:
            text += (
                "\nnote: from its second step on the branch learns from what other weights "
                "sampled; watch effective_sample_size and behaviour_kl"
            )
        return text
    return f"{where}: goes on from version {place.weight_version}, step {place.step}"


def _result(
    ledger: Any,
    standing: Any,
    began: float,
    *,
    steps: int,
    rewards: list[float],
    seconds: Mapping[str, float],
    failed_sinks: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    from trainer.history import read_history

    run_id, branch = standing.run_id, standing.branch
    history = read_history(ledger, run_id)
    version = history.head(branch, standing.fork_version)
    info = ledger.run(run_id)
    return {
        "ledger": ledger.uri,
        "run_id": run_id,
        "branch": branch,
        "kind": standing.kind,
        "steps": steps,
        "weight_version": version,
        "weights_root": history.weights[version].root.hex(),
        "checkpoint": str(_checkpoint(ledger, history, version)),
        "content_digest": ledger.content_digest(run_id, branch).hex(),
        "chain_head": info.head_chain.hex(),
        "events": info.head_seq,
        "mean_rewards": rewards,
        "seconds": {
            **{k: round(v, 4) for k, v in seconds.items()},
            "total": round(time.monotonic() - began, 4),
        },
        "failed_sinks": dict(failed_sinks or {}),
    }


def _checkpoint(ledger: Any, history: Any, version: int) -> Path | None:
    event = history.checkpoints.get(version)
    return None if event is None else Path(ledger.locate(event.location))


def _print_result(result: Mapping[str, Any]) -> None:
    if not result["steps"]:
        print("nothing left to do: raise --num-rollout to go on")
    print(
        f"run {result['run_id']!r}, branch {result['branch']!r}: version "
        f"{result['weight_version']}, weights {result['weights_root'][:16]}…\n"
        f"checkpoint      {result['checkpoint']}\n"
        f"content digest  {result['content_digest']}\n"
        f"chain head      {result['chain_head']} ({result['events']} events)"
    )
    for sink, why in result["failed_sinks"].items():
        print(f"metrics         not all sent to {sink}: {why}")


if __name__ == "__main__":
    sys.exit(main())
