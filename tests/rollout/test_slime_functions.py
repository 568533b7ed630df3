"""Functions with slime's signatures: what they get, what they may return, and what is recorded."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from ledger.errors import InvalidArgument
from ledger.events import ObservationAppended, PromptIssued, SampleDecided, SegmentGenerated
from rollout.engines.scripted_async import ScriptedAsyncEngine
from rollout.episode import Episode, EpisodeAborted, EpisodeServices, single_turn
from rollout.filters import create_filter
from rollout.openai.reading import Reader
from rollout.openai.server import Endpoint
from rollout.protocol import SamplingParams
from rollout.rewards import Reward, ScoredSample, create_reward
from rollout.slime import Sample, SlimeArguments, slime_arguments
from rollout.slime.convert import sample_of, scored_as_slime
from rollout.slime.generate import SlimeGenerate
from rollout.slime.hooks import HookedEpisode, HookFailed, SampleHooks
from rollout.slime.returned import ReturnedWrong
from rollout.trajectory import Observation, Segment, Trajectory
from tests.rollout.agents import Sink
from tests.rollout.talking import Texts, chat_tokenizer

VALUES = {
    "rollout_temperature": 1.0,
    "rollout_max_response_len": 40,
    "reward_key": None,
    "lr": 1e-6,
}
PROMPT = "2+2?"


class Bench:
    """One episode, an engine that says given texts, and an endpoint in front of it."""

    def __init__(self, texts: Sequence[str], **more: Any) -> None:
        self.tokenizer = chat_tokenizer()
        self.sink = Sink()
        self.script = Texts(texts)
        self.engine = ScriptedAsyncEngine(
            self.script, vocab_size=len(self.tokenizer), weight_version=4, **more
        )
        indices = itertools.count(9)
        self.services = EpisodeServices(
            engine=self.engine,
            sink=self.sink,
            tokenizer=self.tokenizer,
            params=SamplingParams(max_new_tokens=40, stop_token_ids=(self.tokenizer.eos_token_id,)),
            run_id="r",
            branch="main",
            run_seed=1,
            source="tests",
            take_index=lambda: next(indices),
        )
        self.at = Trajectory(
            index=3,
            group_index=1,
            rollout_id=3,
            rollout_step=0,
            prompt_tokens=self.ids(PROMPT),
            text=PROMPT,
            label="4",
            metadata={"level": 2},
        )
        self.episode = Episode(self.at, self.services)

    def ids(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def drive(self, name: str, hooks: Sequence[str] = (), **values: Any) -> Trajectory:
        """Let the function `name` of this module drive the episode, through the endpoint."""

        async def run() -> None:
            endpoint = Endpoint(Reader(self.tokenizer))
            await endpoint.start()
            arguments = slime_arguments({**VALUES, **values})
            drive = SlimeGenerate(
                name if ":" in name else f"{__name__}:{name}",
                endpoint,
                arguments,
                vocab_size=len(self.tokenizer),
                hooks=SampleHooks([f"{__name__}:{hook}" for hook in hooks], arguments),
            )
            try:
                await drive(self.episode)
            finally:
                await drive.close()
                await endpoint.close()
            assert not endpoint.sessions

        asyncio.run(run())
        return self.at

    def shape(self, at: Trajectory | None = None) -> list[tuple[str, str]]:
        """Its pieces: sampled or observed, and the text."""
        pieces = (self.at if at is None else at).pieces
        return [
            ("sampled" if isinstance(p, Segment) else "observed", self.tokenizer.decode(p.tokens))
            for p in pieces
        ]


async def post(args: Any, payload: dict[str, Any]) -> Any:
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    async with aiohttp.ClientSession() as client, client.post(url, json=payload) as answer:
        answer.raise_for_status()
        return await answer.json()


async def ask(args: Any, sample: Any, sampling_params: Any) -> None:
    """One turn, as slime's own `generate` takes it."""
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": sampling_params,
        "return_logprob": True,
    }
    output = await post(args, payload)
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[item[1] for item in pairs],
        log_probs=[item[0] for item in pairs],
        meta_info=output["meta_info"],
        text=output["text"],
    )


def begin(sample: Any) -> None:
    sample.tokens = chat_tokenizer().encode(sample.prompt, add_special_tokens=False)


async def one_turn(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    assert (sample.prompt, sample.label, sample.metadata) == (PROMPT, "4", {"level": 2})
    assert (sample.status, sample.tokens) == (Sample.Status.PENDING, [])  # type: ignore[attr-defined]
    assert sampling_params["max_new_tokens"] == args.rollout_max_response_len
    begin(sample)
    await ask(args, sample, sampling_params)
    return sample


async def with_tool(args: Any, sample: Any, sampling_params: Any, evaluation: bool = True) -> Any:
    assert evaluation is False
    begin(sample)
    for _ in range(2):
        await ask(args, sample, sampling_params)
        result = chat_tokenizer().encode("[7]", add_special_tokens=False)
        sample.append_response_tokens(tokens=result, trainable=False, text="[7]")
    sample.reward = 0.5
    sample.metadata["turns"] = 2
    return sample


async def two_agents(args: Any, sample: Any, sampling_params: Any) -> Any:
    begin(sample)
    await ask(args, sample, sampling_params)
    other, unused = Sample(prompt="sub"), Sample(prompt="thrown away")
    for one in (other, unused):
        begin(one)
        await ask(args, one, sampling_params)
    return [sample, other]


async def own_engine(args: Any, sample: Any, sampling_params: Any) -> Any:
    begin(sample)
    for text, trainable in (("cd", True), ("[9]", False), ("e", True)):
        ids = chat_tokenizer().encode(text, add_special_tokens=False)
        given = [-0.25] * len(ids) if trainable else None
        sample.append_response_tokens(tokens=ids, log_probs=given, trainable=trainable)
    sample.weight_versions = ["4", "4"]
    sample.status = Sample.Status.TRUNCATED  # type: ignore[attr-defined]
    return sample


def test_a_function_that_asks_as_slime_does_is_recorded() -> None:
    bench = Bench(["4"])
    at = bench.drive("one_turn")
    assert bench.shape() == [("sampled", "4<|im_end|>")]
    (segment,) = bench.sink.of(SegmentGenerated)
    assert (segment.engine, segment.span_versions.tolist()) == ("scripted", [4])
    assert bench.episode.reward is None
    assert at.metadata == {"level": 2}


def test_turns_with_tools_get_observations_between_them() -> None:
    bench = Bench(["use", "done"])
    bench.drive("with_tool")
    # The result behind the last turn teaches nothing, and is left out.
    assert bench.shape() == [
        ("sampled", "use<|im_end|>"),
        ("observed", "[7]"),
        ("sampled", "done<|im_end|>"),
    ]
    assert bench.episode.reward == Reward(value=0.5)
    assert bench.at.metadata == {"level": 2, "turns": 2}


def test_several_samples_are_siblings_and_what_is_not_returned_is_decided() -> None:
    bench = Bench(["main", "sub", "lost"])
    bench.drive("two_agents")
    sub, lost = bench.episode.siblings
    assert [bench.shape(one.trajectory) for one in (bench.episode, sub, lost)] == [
        [("sampled", f"{text}<|im_end|>")] for text in ("main", "sub", "lost")
    ]
    assert sub.trajectory.rollout_id == lost.trajectory.rollout_id == 3
    (decided,) = bench.sink.of(SampleDecided)
    assert (decided.index, decided.decision) == (lost.trajectory.index, "filtered")
    assert decided.reason == "the custom function did not return it"


def test_what_another_engine_sampled_is_recorded_as_it_was_returned() -> None:
    bench = Bench([])
    bench.drive("own_engine")
    assert bench.shape() == [("sampled", "cd"), ("observed", "[9]"), ("sampled", "e")]
    first, last = bench.sink.of(SegmentGenerated)
    assert first.engine == f"{__name__}:own_engine"
    assert (first.finish_reason, last.finish_reason) == ("stop", "length")
    assert last.span_versions.tolist() == [4]
    assert last.rollout_log_probs.tolist() == [-0.25]
    assert (last.segment, last.turn, last.start) == (1, 1, 5)
    (observed,) = bench.sink.of(ObservationAppended)
    assert observed.source == "environment"


CHANGE: Any = None


async def changed(args: Any, sample: Any, sampling_params: Any) -> Any:
    """One recorded turn, then `CHANGE` of what is returned."""
    begin(sample)
    await ask(args, sample, sampling_params)
    return CHANGE(sample)


def setting(**values: Any) -> Any:
    def change(sample: Any) -> Any:
        for name, value in values.items():
            setattr(sample, name, value(sample) if callable(value) else value)
        return sample

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: None, "returned NoneType"),
        (lambda s: [], "returned no sample"),
        (lambda s: [[s]], "returned list"),
        (setting(tokens=lambda s: [*s.tokens[:-1], 10**6]), "outside \\[0, "),
        (setting(tokens=lambda s: [float(t) for t in s.tokens]), "no ids"),
        (setting(response_length=0), "a prompt and a response"),
        (setting(response_length=lambda s: len(s.tokens)), "a prompt and a response"),
        (setting(loss_mask=[1]), "loss_mask of shape"),
        (setting(loss_mask=lambda s: [2] * s.response_length), "one 0 or 1"),
        (setting(loss_mask=lambda s: [0] * s.response_length), "nothing was sampled"),
        (setting(loss_mask=[0, 1, 1]), "not sampled, and it was"),
        (setting(rollout_log_probs=[-1.0]), "rollout_log_probs of shape"),
        (setting(rollout_log_probs=[-1.0, float("nan"), -2.0]), "log-prob nan"),
        (setting(rollout_log_probs=[-1.0, 0.5, -2.0]), "log-prob 0.5"),
        (setting(rollout_log_probs=[-1.0, -1.25, -2.0]), "the engine said -1.5"),
        # 'ab' was said as two tokens: encoded anew it is one, which nobody sampled.
        (
            setting(
                tokens=lambda s: chat_tokenizer().encode(PROMPT + "ab<|im_end|>"),
                response_length=2,
                loss_mask=None,
                rollout_log_probs=None,
            ),
            "never a text encoded anew",
        ),
        (
            setting(
                tokens=lambda s: [*s.tokens, 5],
                response_length=4,
                loss_mask=[1] * 4,
                rollout_log_probs=None,
            ),
            "without rollout_log_probs",
        ),
        (setting(status=Sample.Status.FAILED), "status failed"),  # type: ignore[attr-defined]
        (setting(remove_sample=True), "removed every sample"),
        (setting(reward="good"), "finite number"),
        (setting(reward={"score": 1.0}), "--reward-key"),
        (
            lambda s: [setting(reward=1.0)(s), setting(reward=0.0)(Sample(**vars(s)))],
            "different rewards",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    change: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "CHANGE", change)
    bench = Bench(["ab"])
    with pytest.raises(ReturnedWrong, match=message):
        bench.drive("changed")
    # What the engine answered is recorded whatever became of it.
    assert bench.shape() == [("sampled", "ab<|im_end|>")]


def test_a_reward_of_several_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CHANGE", setting(reward={"score": 1, "length": 3, "why": "x"}))
    bench = Bench(["ab"])
    bench.drive("changed", reward_key="score")
    assert bench.episode.reward == Reward(value=1.0, parts={"length": 3.0})


async def raises(args: Any, sample: Any, sampling_params: Any) -> Any:
    raise InvalidArgument("one sample's trouble")


def test_a_function_that_raises_fails_its_sample_and_not_the_run() -> None:
    with pytest.raises(ReturnedWrong, match="one sample's trouble"):
        Bench([]).drive("raises")


def test_an_abort_keeps_the_function_and_its_requests_wait() -> None:
    async def run() -> None:
        bench = Bench(["use", "done"])
        endpoint = Endpoint(Reader(bench.tokenizer))
        await endpoint.start()
        arguments = slime_arguments(VALUES)
        drive = SlimeGenerate(
            f"{__name__}:with_tool", endpoint, arguments, vocab_size=len(bench.tokenizer)
        )
        await bench.episode.abort()
        with pytest.raises(EpisodeAborted):
            await drive(bench.episode)
        again = Episode(bench.at, bench.services)
        await drive(again)
        assert [text for _, text in bench.shape()] == ["use<|im_end|>", "[7]", "done<|im_end|>"]
        assert again.reward == Reward(value=0.5)
        await endpoint.close()

    asyncio.run(run())


def test_a_second_process_is_answered_what_is_recorded() -> None:
    bench = Bench(["use", "done"])
    bench.drive("with_tool")
    events = len(bench.sink.events)
    bench.episode = Episode(bench.at, bench.services)
    bench.drive("with_tool")
    assert len(bench.sink.events) == events
    assert bench.episode.reward == Reward(value=0.5)


def praise(args: Any, sample: Any, *, rollout_id: Any = None) -> None:
    assert rollout_id == 0
    sample.reward = 2.0
    sample.metadata["seen"] = args.lr


async def replaces(args: Any, sample: Any, **kwargs: Any) -> Any:
    assert kwargs == {"rollout_id": 0, "evaluation": False}
    return Sample.from_dict({**sample.to_dict(), "reward": 3.0})


def rewrites(args: Any, sample: Any) -> None:
    sample.loss_mask[0] = 0


def test_hooks_see_the_sample_and_may_judge_it() -> None:
    async def run(*hooks: str) -> Bench:
        bench = Bench(["4"])
        paths = [f"{__name__}:{hook}" for hook in hooks]
        drive = HookedEpisode(single_turn, SampleHooks(paths, slime_arguments(VALUES)))
        await drive(bench.episode)
        return bench

    bench = asyncio.run(run("praise"))
    assert bench.episode.reward == Reward(value=2.0)
    assert bench.at.metadata == {"level": 2, "seen": 1e-6}
    assert asyncio.run(run("praise", "replaces")).episode.reward == Reward(value=3.0)
    with pytest.raises(HookFailed, match="tokens or loss_mask"):
        asyncio.run(run("rewrites"))
    with pytest.raises(HookFailed, match="returned bool"):
        asyncio.run(run("always"))
    custom = Bench(["use", "done"])
    custom.drive("with_tool", hooks=["praise"])
    assert custom.episode.reward == Reward(value=2.0)


def test_the_arguments_are_read_only() -> None:
    args = slime_arguments({**VALUES, "custom_rm_path": None})
    assert (args.rollout_temperature, args.custom_rm_path, args.reward_key) == (1.0, None, None)
    assert args.router_policy == "consistent_hashing"
    assert getattr(args, "no_such", 7) == 7
    assert "lr" in args
    assert "no_such" not in args
    with pytest.raises(AttributeError, match="getattr"):
        _ = args.no_such
    with pytest.raises(InvalidArgument, match="only read"):
        args.lr = 1.0
    again: SlimeArguments = pickle.loads(pickle.dumps(args))
    assert again.lr == args.lr
    assert args.replaced(lr=2.0).lr == 2.0


def test_a_recorded_sample_as_slime_has_it() -> None:
    bench = Bench(["use", "done"])
    at = bench.drive("with_tool")
    sample = sample_of(at, "text", 0.5)
    n = [len(piece.tokens) for piece in at.pieces]
    assert sample.loss_mask == [1] * n[0] + [0] * n[1] + [1] * n[2]
    assert sample.rollout_log_probs is not None
    assert sample.rollout_log_probs[n[0] : n[0] + n[1]] == [0.0] * n[1]
    assert len(sample.rollout_log_probs) == sample.response_length == sum(n)
    assert sample.tokens == at.context().tolist()
    assert (sample.weight_versions, sample.status.value) == (["4", "4"], "completed")
    assert sample.effective_response_length == n[0] + n[2]
    assert Sample.from_dict(sample.to_dict()) == sample
    assert isinstance(at.pieces[1], Observation)


def test_what_slime_refuses_to_append() -> None:
    sample = Sample(tokens=[1], response_length=0)
    for given, message in (
        ({"tokens": [2], "log_probs": [0.1, 0.2]}, "2 log-probs for 1 tokens"),
        ({"tokens": [2]}, "come with their log-probs"),
        ({"tokens": [2], "log_probs": [0.1], "trainable": False}, "have no log-probs"),
    ):
        with pytest.raises(ValueError, match=message):
            sample.append_response_tokens(**given)
    assert sample.tokens == [1]
    with pytest.raises(InvalidArgument, match="--reward-key"):
        Sample(reward={"a": 1.0}).get_reward_value(SlimeArguments({}))
    args = SlimeArguments({"reward_key": "a"})
    assert Sample(reward={"a": 1.0}).get_reward_value(args) == 1.0


async def judges(args: Any, sample: Any) -> float:
    assert isinstance(sample, Sample)
    return args.scale * float(sample.loss_mask == [1, 1]) if sample.loss_mask else 0.0


def always(args: Any, samples: Any, **kwargs: Any) -> bool:
    return not isinstance(samples, list) or all(isinstance(one, Sample) for one in samples)


def test_rewards_and_filters_get_samples_of_slime() -> None:
    scored = ScoredSample(
        index=0,
        group_index=0,
        rollout_id=0,
        prompt="p",
        response="r",
        tokens=np.array([1, 2, 3], np.int32),
        response_length=2,
        label=None,
        metadata={},
        finish_reason="length",
        reward=1.0,
    )
    args = SlimeArguments({"scale": 3.0})
    assert create_reward(f"{__name__}:judges", args=args)(scored).value == 3.0
    assert scored_as_slime(scored).status.value == "truncated"
    assert create_filter(f"{__name__}:always")(args, [scored]).keep
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    assert not create_filter(path)(args, [scored, scored]).keep


WRITTEN_FOR_SLIME = """
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import GenerateState, generate as one_turn
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert GenerateState(args).tokenizer is GenerateState(args).tokenizer
    sample = await one_turn(args, sample, sampling_params)
    assert sample.status == Sample.Status.COMPLETED
    try:
        await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/no_such", {})
    except Exception as error:
        sample.metadata["refused"] = str(error)
    return sample


def keep(args, samples):
    return DynamicFilterOutput(keep=False, reason="tired")
"""


def test_a_module_that_was_written_for_slime_runs_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("slime") is not None:
        pytest.skip("slime itself is installed")
    (tmp_path / "written_for_slime.py").write_text(WRITTEN_FOR_SLIME)
    (tmp_path / "wants_more.py").write_text("import slime.backends.megatron_utils\n")
    monkeypatch.syspath_prepend(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path / "model")
    bench = Bench(["4"])
    try:
        bench.drive("written_for_slime:generate", hf_checkpoint=tmp_path / "model")
        scored = ScoredSample(
            index=0,
            group_index=0,
            rollout_id=0,
            prompt="",
            response="",
            tokens=np.zeros(1, np.int32),
            response_length=1,
            label=None,
            metadata={},
            finish_reason="stop",
        )
        assert create_filter("written_for_slime:keep")(None, [scored]).reason == "tired"
        with pytest.raises(InvalidArgument, match=r"slime\.backends"):
            create_filter("wants_more:keep")
    finally:
        for name in [one for one in sys.modules if one.split(".")[0] == "slime"]:
            del sys.modules[name]
    assert bench.shape() == [("sampled", "4<|im_end|>")]
    assert "expected: status 200" in bench.at.metadata["refused"]


def test_an_episode_issues_nothing_by_itself() -> None:
    bench = Bench(["4"])
    bench.drive("one_turn")
    assert bench.sink.of(PromptIssued) == []
