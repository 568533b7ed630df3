"""`ledger-rollout`: samples for a run in a process of its own, or begins one without a trainer."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ledger.commands.common import add_catalog
from ledger.errors import InvalidArgument, LedgerError, explain
from rollout.engines.sglang.arguments import sglang_options, with_sglang_options
from trainer.names_elsewhere import unknown_options
from trainer.options import OPTIONS, add_options

if TYPE_CHECKING:
    from ledger.store import Ledger
    from rollout.side import RemoteRollouts
    from trainer.begin import Standing

__all__ = ["main"]

_EXAMPLES = """\
examples:
  ledger-train   --ledger runs/a --hf-checkpoint models/tiny --rollout-by elsewhere
  ledger-rollout --ledger runs/a
      one run, two commands, in any order and on any hosts: each goes on where it was stopped
  ledger-rollout --ledger runs/b --hf-checkpoint models/tiny --num-rollout 5 --rollout-only
      begin a run and sample five rollout steps without any trainer; ledger-train may take it up
"""

_NOT_HERE = ("from_version", "ignore_checkpoint", "data", "rollout_by")
"""Options of ledger-train that say what a trainer does."""


def build_parser() -> argparse.ArgumentParser:
    """The parser; what is not given on the command line is absent from its result."""
    parser = argparse.ArgumentParser(
        prog="ledger-rollout",
        usage="ledger-rollout [options]",
        allow_abbrev=False,
        description="Sample the rollouts of a run with the weights that its trainer publishes, "
        "wherever that one runs: the two meet in the ledger. It takes the settings of the run from "
        "there; what is given all the same must agree. Stopped or killed, it goes on with the same "
        "command. The options are those of ledger-train.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    add_catalog(parser)
    parser.add_argument(
        "--rollout-only",
        action="store_true",
        help="wait for no trainer: sample with the newest weights there are, and begin the run "
        "from --hf-checkpoint where it is not there yet",
    )
    add_options(parser, [option for option in OPTIONS if option.name not in _NOT_HERE])
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. 0 on success, 2 with the reason on standard error, 130 when interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    try:
        own, engines = sglang_options(words, parser._option_string_actions.keys())
    except LedgerError as refused:
        print(f"ledger-rollout: {refused}", file=sys.stderr)
        return 2
    found, rest = parser.parse_known_args(own)
    if rest:
        error = unknown_options(
            rest, parser._option_string_actions.keys(), command="ledger-rollout"
        )
        print(f"ledger-rollout: {error}", file=sys.stderr)
        return 2
    given = with_sglang_options(vars(found), engines)
    as_json, catalog, alone = given.pop("json"), given.pop("catalog"), given.pop("rollout_only")
    try:
        result = run(given, show=not as_json, catalog=catalog, alone=alone)
    except LedgerError as error:
        print(f"ledger-rollout: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ledger-rollout: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    if as_json:
        print(json.dumps(result, sort_keys=True))
    else:
        _print_result(result)
    return 0


def run(
    explicit: Mapping[str, Any], *, show: bool, catalog: str | None = None, alone: bool = False
) -> dict[str, Any]:
    """Make the rollouts that the options ask for; returns what `--json` prints.

    `catalog` is the address of the ledger's catalog; with `alone` nobody trains. Raises
    LedgerError.
    """
    from ledger.opening import open_ledger
    from rollout.tasks.from_options import with_digests
    from trainer.progress import StepProgress

    began = time.monotonic()
    uri = str(explicit.get("ledger", os.environ.get("LEDGER_URI", "ledger-data")))
    explicit = with_digests({**explicit, "ledger": uri, "rollout_by": "elsewhere"})
    # The trainer may come later: whoever is first makes the place.
    with (
        open_ledger(uri, create=True, catalog=catalog) as ledger,
        StepProgress(total=0, enabled=show) as progress,
    ):
        began_here = _begin(ledger, explicit) if alone else False
        standing = _join(ledger, explicit, progress, alone=alone)
        with _placed(standing, explicit, ledger, catalog) as place:
            made = _sample(ledger, standing, progress, alone=alone, place=place)
        return {
            **made,
            "kind": "new run" if began_here else "resume",
            "seconds_total": round(time.monotonic() - began, 4),
        }


@contextmanager
def _placed(
    standing: Standing, explicit: Mapping[str, Any], ledger: Ledger, catalog: str | None
) -> Iterator[Callable[[Path], RemoteRollouts] | None]:
    """With --layout: Ray, and what places engines and workers there; else None."""
    path = explicit.get("layout")
    if path is None:
        if explicit.get("launcher") == "ray":
            raise InvalidArgument(
                explain(
                    "sampling on Ray",
                    on="--launcher ray",
                    expected="--layout FILE, which says how many engines and workers",
                    found="none",
                )
            )
        yield None
        return
    from rollout.ray.cluster import cluster, reserved
    from rollout.ray.layout import needed_by, read_layout
    from rollout.ray.remote import RayRollouts, RolloutPlace

    layout = read_layout(path)
    with cluster(needed_by(layout.rollout_bundles())) as ray:
        group = reserved() if layout.colocate else None
        if layout.colocate and group is None:
            raise InvalidArgument(
                explain(
                    "placing the engines",
                    on=f"--layout {path}",
                    expected="ledger-run, which places trainer and engines on the same devices",
                    found="colocate = true, and the rollouts alone",
                    do="start both with ledger-run, or say colocate = false",
                )
            )
        where = RolloutPlace(
            ledger=ledger, catalog=catalog, run_id=standing.run_id, branch=standing.branch
        )
        yield lambda model_dir: RayRollouts(
            ray, layout, where, model_dir, standing.values, group=group
        )


def _begin(ledger: Ledger, explicit: Mapping[str, Any]) -> bool:
    """Begin the run where it is not there yet; whether that was done."""
    from ledger.errors import AlreadyExists
    from rollout.beginning import first_events
    from rollout.engines.sglang.settings import refuse_unused
    from rollout.tasks.from_options import check_rows
    from trainer.begin import find_standing, new_model_folder

    standing = find_standing(ledger, explicit)
    if standing.kind != "new run":
        return False
    values = standing.values
    refuse_unused(explicit, values["engine"])
    _check(values)
    check_rows(values)
    events = first_events(
        new_model_folder(values),
        run_id=standing.run_id,
        run_seed=values["rollout_seed"],
        settings=standing.settings_json,
        places=standing.places_json,
        deterministic=values["deterministic_mode"],
        num_threads=values["num_threads"],
        dtype="bfloat16" if values["bf16"] else "float32",
    )
    if standing.run_id not in {run.run_id for run in ledger.runs()}:
        try:
            ledger.create_run(standing.run_id)
        except AlreadyExists:
            return False  # somebody else begins it at this moment
    with ledger.writer(
        standing.run_id, standing.branch, producer=_producer(standing.branch)
    ) as writer:
        writer.append(events)
    return True


def _producer(branch: str) -> str:
    """Name of the one process that issues the prompts of a branch."""
    return f"ledger-rollout/{branch}"


def _join(ledger: Ledger, explicit: Mapping[str, Any], progress: Any, *, alone: bool) -> Standing:
    """Wait until the run has begun and its trainer leaves the rollouts to this command."""
    from ledger.waiting import wait_for
    from rollout.engines.sglang.settings import refuse_unused
    from trainer.begin import DEFAULT_RUN, find_standing

    timeout_s = _timeout_s(explicit)
    branch = explicit.get("branch", "main")
    run_id = explicit.get("run_id")
    if run_id is None:
        runs = ledger.runs()
        run_id = ledger.run(None).run_id if runs else DEFAULT_RUN

    def begun() -> bool | None:
        there = {run.run_id for run in ledger.runs() if run.head_seq}
        if run_id not in there or branch not in {b.name for b in ledger.branches(run_id)}:
            return None
        return True

    wait_for(
        ledger,
        run_id,
        begun,
        what=f"run {run_id!r}, branch {branch!r}, to begin",
        timeout_s=timeout_s,
        do="start `ledger-train --rollout-by elsewhere` for this ledger; or --rollout-only begins "
        "a run without a trainer",
        tell=progress.doing,
    )
    if alone and not _left_to_us(ledger, run_id, branch):
        raise InvalidArgument(
            explain(
                "sampling for a run",
                on=f"run {run_id!r}, branch {branch!r}",
                expected="one whose rollouts are made elsewhere",
                found="one whose trainer makes its own",
                do="name a new run with --run-id",
            )
        )
    wait_for(
        ledger,
        run_id,
        lambda: _left_to_us(ledger, run_id, branch) or None,
        what=f"the trainer of run {run_id!r}, branch {branch!r}",
        timeout_s=timeout_s,
        standing=lambda: "it makes its own rollouts",
        do="start it again with `ledger-train --rollout-by elsewhere`",
        tell=progress.doing,
    )
    standing = find_standing(ledger, {**explicit, "run_id": run_id})
    refuse_unused(explicit, standing.values["engine"])
    _check(standing.values)
    return standing


def _left_to_us(ledger: Ledger, run_id: str, branch: str) -> bool:
    """Whether whoever last went on with a branch said that rollouts are made elsewhere."""
    reader = ledger.reader(run_id, branch)
    last = (0, "trainer")
    for kind in ("run_started", "branch_forked", "run_resumed"):
        table = reader.table(kind, ["seq", "places"])
        for seq, places in zip(table["seq"].to_pylist(), table["places"].to_pylist(), strict=True):
            last = max(last, (seq, json.loads(places or "{}").get("rollout_by", "trainer")))
    return last[1] == "elsewhere"


def _timeout_s(values: Mapping[str, Any]) -> float | None:
    minutes = values.get("rollout_timeout_minutes")
    return None if minutes is None else 60 * float(minutes)


def _check(values: Mapping[str, Any]) -> None:
    """Refuse what cannot work before anything is written."""
    from rollout.side import rollout_settings
    from trainer.rollout_shape import check_rollout_shape

    rollout_settings(values)
    check_rollout_shape(values)


def _model_folder(standing: Standing, versions: Any, tokenizer_digest: bytes) -> Path:
    """A folder with the run's tokenizer and configuration, and weights to start an engine with.

    Raises NotFound where there is none here, InvalidArgument where --hf-checkpoint is another
    model's.
    """
    from ledger.errors import NotFound
    from rollout.beginning import tokenizer_digest as digest_of

    start, _ = versions.first()
    named = standing.values["hf_checkpoint"]
    tried = [Path(named)] if named else []
    for version in dict.fromkeys((versions.newest(), start)):
        tried += versions.version(version).folders
    for folder in tried:
        if not (folder / "tokenizer.json").is_file():
            continue
        if digest_of(folder) != tokenizer_digest:
            raise InvalidArgument(
                explain(
                    "starting the engine",
                    on=str(folder),
                    expected="the tokenizer that the run began with",
                    found="another tokenizer.json",
                    do="name the folder of the run's model with --hf-checkpoint",
                )
            )
        return folder
    raise NotFound(
        explain(
            "starting the engine",
            on=f"run {standing.run_id!r}",
            expected="the run's model in one of: " + ", ".join(map(str, tried)),
            found="no tokenizer.json in any of them on this host",
            do="name the folder of the run's model with --hf-checkpoint",
        )
    )


def _sample(
    ledger: Ledger,
    standing: Standing,
    progress: Any,
    *,
    alone: bool,
    place: Callable[[Path], RemoteRollouts] | None,
) -> dict[str, Any]:
    from ledger.encode import events_of
    from ledger.events import RunResumed, RunStarted
    from rollout.published import PublishedVersions
    from rollout.side import LocalRolloutSide
    from rollout.taking_turns import RolloutsInTurn

    values, run_id, branch = standing.values, standing.run_id, standing.branch
    versions = PublishedVersions(
        ledger,
        run_id,
        branch,
        num_steps_per_rollout=values["num_steps_per_rollout"],
        update_weights_interval=values["update_weights_interval"],
    )
    (started,) = events_of(ledger.reader(run_id, branch).table("run_started"), RunStarted)
    if place is None and values["engine"] == "transformers":
        _pin(values["num_threads"], values["deterministic_mode"])
    model_dir = _model_folder(standing, versions, started.tokenizer_digest)
    side = LocalRolloutSide(model_dir, values, None if place is None else place(model_dir))
    with ledger.writer(run_id, branch, producer=_producer(branch)) as writer:
        side.attach(
            ledger,
            run_id,
            branch,
            writer,
            lambda p: progress.doing(
                f"rollout {p.rollout_step}: {p.kept_groups}/{p.wanted_groups} groups"
            ),
        )
        writer.append(
            [
                RunResumed(
                    run_id=run_id,
                    weight_version=versions.newest(),
                    rollout_step=versions.first()[1],
                    places=standing.places_json,
                    environment=_environment_json(),
                )
            ]
        )
        rollouts = RolloutsInTurn(
            ledger=ledger,
            run_id=run_id,
            branch=branch,
            writer=writer,
            side=side,
            versions=versions,
            num_rollout=values["num_rollout"],
            rollouts=values["rollout_batch_size"] * values["n_samples_per_prompt"],
            eval_interval=values["eval_interval"],
            alone=alone,
            timeout_s=_timeout_s(values),
            doing=progress.doing,
            say=progress.say,
        )
        try:
            turns = rollouts.run()
        finally:
            side.close()
    info = ledger.run(run_id)
    return {
        "ledger": ledger.uri,
        "run_id": run_id,
        "branch": branch,
        "rollout_steps": turns.rollout_steps,
        "tokens": turns.tokens,
        "weight_version": rollouts.loaded,
        "mean_rewards": turns.rewards,
        "chain_head": info.head_chain.hex(),
        "events": info.head_seq,
        "seconds": {name: round(seconds, 4) for name, seconds in turns.seconds.items()},
    }


def _pin(num_threads: int, deterministic: bool) -> None:
    """As the trainer's process, so that the embedded engine gives the bits that it would give."""
    import torch

    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(deterministic)


def _environment_json() -> str:
    from ledger.canonical import canonical_json
    from ledger.environment import describe_environment

    return canonical_json(describe_environment())


def _print_result(result: Mapping[str, Any]) -> None:
    if not result["rollout_steps"]:
        print("nothing left to do: raise --num-rollout to go on")
    print(
        f"run {result['run_id']!r}, branch {result['branch']!r}: {result['rollout_steps']} rollout "
        f"steps, {result['tokens']} tokens\n"
        f"chain head      {result['chain_head']} ({result['events']} events)"
    )


if __name__ == "__main__":
    sys.exit(main())
