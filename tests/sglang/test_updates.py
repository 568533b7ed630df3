"""New weights while a request runs: each token is labelled with the version that sampled it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file

from ledger.errors import InvalidArgument
from ledger.events import UNKNOWN_VERSION
from rollout.protocol import GenerationRequest, GenerationResult, SamplingParams
from rollout.weights import EngineControl, WeightUpdater, WeightUpdateSettings
from tests.sglang import reference
from tests.sglang.asking import FREE, client_of, request, until
from tests.sglang.proxy import proxy
from tests.sglang.servers import Served

WEIGHTS = "model.safetensors"
LONG = SamplingParams(max_new_tokens=120)
"""Some seconds: an update finds it running."""


def updated_on_the_way(
    server: Served, folder: Path, mode: str, number: int
) -> tuple[GenerationRequest, GenerationResult]:
    """A request, and its answer: paused after some tokens, weights of `folder` as version 1."""
    one = request(number)

    async def asking() -> GenerationResult:
        async with client_of(server.address, server.model) as client:
            began = server.decoded()
            call = asyncio.ensure_future(client.generate(one, LONG, rid=f"{number}~0~"))
            await until(lambda: server.decoded() >= began + 10)
            await client.pause(mode)
            await client.call(
                "/update_weights_from_disk",
                {
                    "model_path": str(folder),
                    "weight_version": "1",
                    "flush_cache": mode == "retract",
                },
                changes_weights=True,
            )
            assert not call.done() or mode == "abort"
            await client.resume()
            return await call

    return one, asyncio.run(asking())


def check_two_spans(found: GenerationResult) -> int:
    """Where the second span begins; there are two, without a hole."""
    assert found.span_versions.tolist() == [0, 1]
    middle = int(found.span_ends[0])
    assert found.span_starts.tolist() == [0, middle]
    assert found.span_ends.tolist() == [middle, len(found.tokens)]
    assert 10 <= middle < len(found.tokens)
    return middle


@torch.no_grad()
def log_probs_across(
    before: Path, after: Path, context: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32], k: int
) -> npt.NDArray[np.float32]:
    """[R] Log-probs where the keys and values of all that `before` was fed are kept.

    `before` samples the first `k` tokens; the last of them is fed to `after` already.
    """
    whole = torch.from_numpy(np.concatenate([context, tokens]).astype(np.int64))[None]
    fed = len(context) + k - 1
    first = reference.model_of(before)(whole[:, :fed], use_cache=True)
    second = reference.go_on(after, whole[:, fed:], first.past_key_values)
    logits = torch.cat([first.logits, second.logits], dim=1)[0, len(context) - 1 : -1]
    chosen = torch.log_softmax(logits, dim=-1).gather(1, whole[0, len(context) :, None])
    found: npt.NDArray[np.float32] = chosen[:, 0].numpy()
    return found


def boundaries(
    before: Path, after: Path, one: GenerationRequest, found: GenerationResult
) -> dict[int, float]:
    """For boundaries about the one that was said: the largest difference of log-probs."""
    middle = check_two_spans(found)
    return {
        k: float(
            np.abs(
                log_probs_across(before, after, one.tokens, found.tokens, middle + k)
                - found.log_probs
            ).max()
        )
        for k in (-1, 0, 1)
    }


def test_in_place_the_label_is_the_version_that_sampled_each_token(
    dense: Served, folders: dict[str, Path]
) -> None:
    """The boundary is exact: with it, and with no other, the log-probs are those of transformers.

    Keys and values of the tokens before it are the old weights', and stay.
    """
    one, found = updated_on_the_way(dense, folders["dense-1"], "in_place", 11)
    differences = boundaries(folders["dense-0"], folders["dense-1"], one, found)
    assert differences[0] < 1e-4
    assert min(differences[-1], differences[1]) > 1e-2


def test_in_place_is_refused_where_sampling_overlaps_since_the_label_would_be_wrong(
    moe: Served, folders: dict[str, Path]
) -> None:
    """SGLang 0.5.23 counts a request's tokens while one more, of the old weights, is on its way:
    that one gets the new label. Where this fails, it need not be refused any more.
    """
    one, found = updated_on_the_way(moe, folders["moe-1"], "in_place", 11)
    differences = boundaries(folders["moe-0"], folders["moe-1"], one, found)
    assert differences[1] < 1e-4
    assert min(differences[-1], differences[0]) > 1e-2

    async def updates() -> None:
        config = json.loads((moe.model / "config.json").read_text())
        updater = WeightUpdater(WeightUpdateSettings(pause_mode="in_place"), config)
        engine = EngineControl(moe.address, local=True)
        try:
            with pytest.raises(InvalidArgument, match="--disable-overlap-schedule"):
                await updater.update([engine], 2, load_file(folders["moe-0"] / WEIGHTS).items())
        finally:
            await updater.close()
            await engine.close()

    asyncio.run(updates())
    assert moe.call("/model_info")["weight_version"] == "1"


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_retracted_the_rest_is_computed_anew_by_the_new_weights(
    kind: str, folders: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    """With scheduling that overlaps sampling (moe) and without."""
    server: Served = request.getfixturevalue(kind)
    one, found = updated_on_the_way(server, folders[f"{kind}-1"], "retract", 12)
    middle = check_two_spans(found)
    whole = np.concatenate([one.tokens, found.tokens])
    rows = np.arange(len(one.tokens) - 1, len(whole) - 1)
    old, new = (
        reference.log_probs(folders[f"{kind}-{i}"], whole)[rows, found.tokens] for i in (0, 1)
    )
    assert np.abs(old - found.log_probs)[:middle].max() < 1e-4
    assert np.abs(new - found.log_probs)[middle:].max() < 1e-4


def test_aborted_by_the_pause_what_was_sampled_comes_back(
    dense: Served, folders: dict[str, Path]
) -> None:
    one, found = updated_on_the_way(dense, folders["dense-1"], "abort", 13)
    assert found.finish_reason == "abort"
    assert 10 <= len(found.tokens) < LONG.max_new_tokens
    assert found.span_versions.tolist() == [0]
    whole = np.concatenate([one.tokens, found.tokens])
    rows = np.arange(len(one.tokens) - 1, len(whole) - 1)
    expected = reference.log_probs(folders["dense-0"], whole)[rows, found.tokens]
    assert np.abs(expected - found.log_probs).max() < 1e-4


@pytest.mark.parametrize("said", ["nothing", "no number"])
def test_an_answer_without_a_version_is_of_an_unknown_one(
    dense: Served, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tokens are good; whose they are is recorded as unknown, and said once."""

    def edit(answer: dict[str, Any]) -> None:
        for name in ("weight_version", "weight_versions"):
            del answer["meta_info"][name]
        if said == "no number":
            answer["meta_info"]["weight_versions"] = [{"version": "main", "start": 0, "end": 24}]

    async def asking(address: str) -> list[GenerationResult]:
        async with client_of(address, dense.model) as client:
            return [await client.generate(request(i), FREE, rid=f"{i}~0~") for i in (1, 2)]

    with proxy(dense.port, edit) as address:
        found = asyncio.run(asking(address))
    for one in found:
        assert one.span_versions.tolist() == [UNKNOWN_VERSION]
        assert one.report is not None
        assert one.report["unknown_version"] == ("none" if said == "nothing" else "main")
        assert len(one.tokens) == 24
    assert len([r for r in caplog.records if "does not say which weight version" in r.message]) == 1
