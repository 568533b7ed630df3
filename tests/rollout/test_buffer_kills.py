"""Kill a process anywhere, start again: nothing is lost, nothing counts twice, in every shape."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ledger.errors import EngineFailed
from rollout.engines.scripted_async import Failure
from rollout.protocol import GenerationRequest, SamplingParams
from rollout.shapes import RolloutShape
from tests.rollout.coordinating import Bench, Killed, Mortal, facts, settle

STEPS, BATCH = 3, 2

SHAPES = {
    "synchronous": RolloutShape(),
    "partial": RolloutShape(partial_rollout=True),
    "retry": RolloutShape(fully_async=True, max_weight_staleness=1),
    "drop": RolloutShape(
        fully_async=True, max_weight_staleness=1, async_unused_samples_handler="drop"
    ),
}


@dataclass(frozen=True)
class Death:
    """How a process ends."""

    append: int | None
    """Number of the append at which it dies; None: it does not die there."""
    after: bool
    """Whether that append is stored."""
    ticks: int | None
    """Moves of the clock after which it dies; None: it does not die so."""


deaths = st.lists(
    st.one_of(
        st.builds(Death, append=st.integers(0, 25), after=st.booleans(), ticks=st.none()),
        st.builds(Death, append=st.none(), after=st.just(False), ticks=st.integers(0, 40)),
    ),
    max_size=4,
)


def fails(request: GenerationRequest, attempt: int) -> Failure | None:
    """Sample 5 finds no answer, the first time that it is asked for by a process."""
    return Failure(EngineFailed("HTTP 500"), after_tokens=1) if request.index == 5 else None


async def life(bench: Bench, shape: RolloutShape, death: Death) -> None:
    """A process that makes rollout steps until it dies, or until all are made."""
    writer = Mortal(bench.writer())
    writer.die_at, writer.after = death.append, death.after
    ticks = 0

    async def run(work: object) -> None:
        nonlocal ticks
        task = asyncio.ensure_future(work)  # type: ignore[arg-type]
        while True:
            await settle()
            if task.done():
                task.result()
                return
            if ticks == death.ticks:
                writer.is_dead = True
                raise Killed
            ticks += 1
            assert await bench.clock.advance_to_next(), "everybody waits, for nothing"

    coordinator = bench.coordinator(shape, writer=writer, over_sampling_batch_size=3)
    check_projection(bench)
    for step in range(STEPS):
        await run(coordinator.rollout(step, step))
        await run(bench.clock.sleep(6.0))
        named = [("w", np.full(1, step + 1, np.float32))]
        await run(coordinator.update_weights(step + 1, named))
        await run(coordinator.release(step + 1))
    await coordinator.close()
    assert facts(coordinator.buffer) == facts(bench.buffer())


def check_projection(bench: Bench) -> None:
    """What must hold of the ledger at any moment."""
    prompts = bench.rows("prompt_issued")
    indices = [index for row in prompts for index in row["indices"]]
    assert len(indices) == len(set(indices))
    # Each row of the source once, and once more for each group that did not do.
    first = [row["source_row"] for row in prompts if row["retry_of"] is None]
    assert sorted(first) == list(range(len(first)))
    replaced = Counter(row["retry_of"] for row in prompts if row["retry_of"] is not None)
    assert set(replaced.values()) <= {1}
    last: dict[int, tuple[str, int]] = {}
    for row in bench.rows("sample_decided"):
        assert last.get(row["index"], ("recycled", 0))[0] == "recycled", "decided twice"
        last[row["index"]] = (row["decision"], row["rollout_step"])
    of_group: dict[int, set[str]] = {}
    for row in prompts:
        for index in row["indices"]:
            of_group.setdefault(row["group_index"], set()).add(last.get(index, ("open", 0))[0])
    assert all(len(found) == 1 for found in of_group.values()), "a group that is cut in two"
    gone = {group for group, found in of_group.items() if found & {"failed", "stale"}}
    assert set(replaced) <= gone
    # A prompt that failed comes again in the commit that says so; two tries more, not three.
    before = {row["group_index"]: row["retry_of"] for row in prompts}
    for group in (g for g, found in of_group.items() if "failed" in found):
        chain, at = 0, group
        while at is not None:
            chain, at = chain + ("failed" in of_group[at]), before[at]
        assert (group in replaced) == (chain <= 2)
    buffer = bench.buffer()
    assert set(buffer.groups) == {
        g for g, found in of_group.items() if found & {"open", "recycled"}
    }
    # Pieces follow each other, each engine call once.
    pieces: dict[int, list[tuple[int, int, int]]] = {}
    for row in bench.rows("segment_generated"):
        pieces.setdefault(row["index"], []).append(
            (row["segment"], row["start"], len(row["tokens"]))
        )
    for found in pieces.values():
        end = 0
        for number, (segment, start, length) in enumerate(sorted(found)):
            assert (segment, start) == (number, end)
            end += length
    # Of groups that failed nothing is scored.
    scored = {row["group_index"] for row in bench.rows("sample_scored")}
    assert not scored & {g for g, found in of_group.items() if "failed" in found}


def check_end(bench: Bench, name: str) -> None:
    kept = [row for row in bench.rows("sample_decided") if row["decision"] == "kept"]
    assert Counter(row["rollout_step"] for row in kept) == dict.fromkeys(range(STEPS), BATCH * 2)
    lost = {row["decision"] for row in bench.rows("sample_decided")} - {"kept", "recycled"}
    allowed = {
        "synchronous": {"aborted", "surplus", "failed"},
        "partial": {"failed"},
        "retry": {"failed", "stale"},
        "drop": {"failed", "stale"},
    }
    assert lost <= allowed[name]
    # Every response is the one that would have come without any cut: tokens are a function of
    # seed and position, and those from before a cut were kept.
    prompts = {
        index: row["tokens"] for row in bench.rows("prompt_issued") for index in row["indices"]
    }
    segments = bench.rows("segment_generated")
    seeds = {row["index"]: row["sampling_seed"] for row in segments}
    for index in {row["index"] for row in kept}:
        found = [t for row in segments if row["index"] == index for t in row["tokens"]]
        request = GenerationRequest(
            index=index, tokens=np.array(prompts[index], np.int32), seed=seeds[index]
        )
        whole = bench.engine._script(request, PARAMS)[0]
        assert found == whole.tolist()
        assert len(found) == bench.lengths(index)
    if name in ("retry", "drop"):
        assert max(row["staleness"] for row in kept) <= 1
    if name == "partial":
        # Nobody is passed over: what was issued first is kept, or still there.
        buffer = bench.buffer()
        issued = [row["group_index"] for row in bench.rows("prompt_issued")]
        there = {row["group_index"] for row in kept} | set(buffer.groups)
        failed = set(bench.groups("failed", 0)) | {
            g for step in range(STEPS) for g in bench.groups("failed", step)
        }
        assert set(issued) == there | failed


PARAMS = SamplingParams(max_new_tokens=64, stop_token_ids=(0,))


@given(
    name=st.sampled_from(sorted(SHAPES)),
    spread=st.integers(1, 9),
    tail=st.integers(5, 40),
    deaths=deaths,
)
@example(name="partial", spread=3, tail=40, deaths=[Death(3, True, None), Death(9, False, None)])
@example(name="retry", spread=5, tail=30, deaths=[Death(None, False, 11), Death(4, True, None)])
@settings(max_examples=4)
def test_killed_anywhere_it_goes_on_with_everything(
    name: str, spread: int, tail: int, deaths: list[Death]
) -> None:
    bench = Bench(lambda index: tail if index % 7 == 3 else 2 + index * 3 % spread)
    for death in [*deaths, Death(None, False, None)]:
        bench.engine = bench.new_engine(failures=fails)
        try:
            asyncio.run(life(bench, SHAPES[name], death))
        except Killed:
            pass
        else:
            break
    check_projection(bench)
    check_end(bench, name)
    bench.ledger.close()
