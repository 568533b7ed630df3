"""The endpoint: agents that speak the OpenAI API are recorded with the ids that were sampled."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from ledger.events import ObservationAppended, PromptIssued, SegmentGenerated
from ledger.fields import Event
from rollout.engines.scripted_async import Failure, ManualClock, ScriptedAsyncEngine
from rollout.episode import Episode, EpisodeServices
from rollout.openai.reading import Reader
from rollout.openai.server import Endpoint
from rollout.openai.session import Session
from rollout.protocol import SamplingParams
from rollout.trajectory import Trajectory
from tests.rollout.talking import END, Texts, chat_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


class Sink:
    """Keeps events in memory."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def append(self, events: Sequence[Event]) -> None:
        self.events += events

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Table:
    """An endpoint with one open session, and what stands behind it."""

    def __init__(
        self,
        texts: Sequence[str],
        *,
        clock: ManualClock | None = None,
        weight_version: int = 4,
        **more: Any,
    ) -> None:
        self.tokenizer = chat_tokenizer()
        self.script, self.sink, self.clock = Texts(texts), Sink(), clock
        self.engine = ScriptedAsyncEngine(
            self.script,
            clock=clock,
            vocab_size=len(self.tokenizer),
            weight_version=weight_version,
            **more,
        )
        indices = itertools.count(1)
        self.services = EpisodeServices(
            engine=self.engine,
            sink=self.sink,
            tokenizer=self.tokenizer,
            params=SamplingParams(
                max_new_tokens=400, stop_token_ids=(self.tokenizer.eos_token_id,)
            ),
            run_id="r",
            branch="main",
            run_seed=1,
            source="tests",
            take_index=lambda: next(indices),
        )
        self.endpoint = Endpoint(Reader(self.tokenizer), keep_alive_s=0.01)
        self.session: Session

    def episode(self, prompt: str = "unlike what is asked", **more: Any) -> Episode:
        ids = np.array(self.tokenizer.encode(prompt, add_special_tokens=False), np.int32)
        at = Trajectory(
            index=0,
            group_index=0,
            rollout_id=0,
            rollout_step=0,
            prompt_tokens=ids,
            text=prompt,
            label=None,
            metadata={},
            **more,
        )
        return Episode(at, self.services)

    def client(self, **more: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.endpoint.url}/v1", api_key="sk-s1", max_retries=0, **more
        )

    def sequence(self, index: int) -> str:
        return str(
            self.tokenizer.decode(
                self.session.samples[index].trajectory.context(), skip_special_tokens=False
            )
        )


def at_table(texts: Sequence[str], talk: Callable[[Table], Awaitable[None]], **more: Any) -> Table:
    """Open a session that is answered with `texts`, and let `talk` use it."""
    prompt = more.pop("prompt", None)
    pinned = more.pop("pinned", None)

    async def main() -> Table:
        table = Table(texts, **more)
        await table.endpoint.start()
        try:
            episode = table.episode() if prompt is None else table.episode(prompt)
            table.session = table.endpoint.open("s1", episode, pinned=pinned)
            await talk(table)
        finally:
            await table.endpoint.close()
        return table

    return asyncio.run(main())


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def say(table: Table, messages: Sequence[Any], **more: Any) -> Any:
    async with table.client() as client:
        return await client.chat.completions.create(model="any", messages=list(messages), **more)


def test_a_conversation_with_tools_is_one_sample_and_only_new_tokens_are_added() -> None:
    async def talk(table: Table) -> None:
        messages: list[Any] = [{"role": "developer", "content": "Be brief."}, user("1+1?")]
        first = await say(table, messages, tools=TOOLS)
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I add."
        call = choice.message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"x": 1})
        # As the client's own object, as agents do it.
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        second = await say(table, messages, tools=TOOLS)
        assert second.choices[0].message.content == "abab"
        assert second.usage.prompt_tokens > first.usage.total_tokens
        messages += [second.choices[0].message, user("sure?")]
        third = await say(table, messages, tools=TOOLS)
        assert third.choices[0].finish_reason == "stop"

    table = at_table([f"I add.\n{CALL}", "abab", "yes"], talk)
    assert [s.trajectory.index for s in table.session.samples] == [0, 1]
    root, sample = (s.trajectory for s in table.session.samples)
    assert not root.pieces
    assert [type(piece).__name__ for piece in sample.pieces] == [
        "Segment",
        "Observation",
        "Segment",
        "Observation",
        "Segment",
    ]
    assert [piece.turn for piece in sample.pieces] == [0, 0, 1, 1, 2]
    # What the engine was asked is what the template says, but for what was sampled.
    (issued,) = table.sink.of(PromptIssued)
    assert (issued.parent_index, issued.rollout_ids.tolist()) == (0, [0])
    assert issued.text.endswith("1+1?<|im_end|>\n<|im_start|>assistant\n")
    tool, again = table.sink.of(ObservationAppended)
    assert (tool.source, again.source) == ("tool", "user")
    assert tool.text == (
        "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    # Said letter by letter, and kept so, though 'ab' is one token when it is encoded.
    segments = table.sink.of(SegmentGenerated)
    assert len(segments[1].tokens) == len("abab") + 1
    report = json.loads(segments[2].engine_report)["request"]
    assert report["history_drift"] == 4
    assert report["session"] == "s1"
    assert np.array_equal(segments[1].rollout_log_probs, np.linspace(-1, -2, 5, dtype=np.float32))
    assert table.sequence(1).endswith(
        f"abab<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\nyes{END}"
    )


def test_the_issued_prompt_is_gone_on_from_where_the_agent_asks_it() -> None:
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    async def talk(table: Table) -> None:
        await say(table, [user("hi")])

    table = at_table(["yo"], talk, prompt=prompt)
    assert len(table.session.samples) == 1
    assert table.sequence(0) == f"{prompt}yo{END}"


def test_thoughts_that_the_template_or_the_agent_leaves_out_stay_in_the_recorded_context() -> None:
    async def talk(table: Table) -> None:
        first = await say(table, [user("q")])
        assert first.choices[0].message.content == "<think>hm</think>\nA"
        told = {"role": "assistant", "content": "A"}
        await say(table, [user("q"), told, user("r")])

    table = at_table(["<think>hm</think>\nA", "B"], talk)
    assert len(table.session.samples) == 2
    assert "<think>hm</think>\nA<|im_end|>\n<|im_start|>user\nr" in table.script.asked[1]
    report = json.loads(table.sink.of(SegmentGenerated)[1].engine_report)["request"]
    assert report["history_drift"] == len("<think>hm</think>\n")


def test_rewritten_history_and_sub_agents_are_siblings_and_sampled_ids_stay() -> None:
    async def talk(table: Table) -> None:
        begin = [user("q")]
        one = await say(table, begin)
        more = [*begin, one.choices[0].message, user("r")]
        await say(table, more)
        # The last question is put otherwise; then a sub-agent; then the first thread goes on.
        await say(table, [*begin, one.choices[0].message, user("R!")])
        await say(table, [user("sub")])
        two = table.session.samples[1].trajectory
        assert len(two.segments) == 2
        await say(table, [*more, {"role": "assistant", "content": "second"}, user("s")])

    table = at_table(["abab", "second", "third", "fourth", "fifth"], talk)
    samples = [s.trajectory for s in table.session.samples]
    assert [(t.index, t.parent_index, len(t.segments)) for t in samples] == [
        (0, None, 0),
        (1, 0, 3),
        (2, 1, 1),
        (3, 0, 1),
    ]
    assert {t.rollout_id for t in samples} == {0}
    # The prompt of the rewritten one holds the answer as it was sampled.
    said = samples[1].segments[0].tokens
    begin = len(samples[1].prompt_tokens)
    assert np.array_equal(samples[2].prompt_tokens[begin : begin + len(said)], said)
    assert table.sequence(2).endswith(
        f"abab{END}\n<|im_start|>user\nR!{END}\n<|im_start|>assistant\nthird{END}"
    )
    assert table.sequence(1).count("assistant\n") == 3


def test_requests_at_the_same_time_are_siblings() -> None:
    async def talk(table: Table) -> None:
        one = await say(table, [user("q")])
        more = [user("q"), one.choices[0].message, user("r")]
        found = await asyncio.gather(*(say(table, more) for _ in range(3)))
        assert {f.choices[0].message.content for f in found} == {"b", "c", "d"}

    table = at_table(["a", "b", "c", "d"], talk)
    samples = [s.trajectory for s in table.session.samples]
    assert sorted(len(t.segments) for t in samples) == [0, 1, 1, 2]
    assert len({t.context().tobytes()[: -4 * 2] for t in samples[1:]}) == 1


def test_a_stream_tells_the_same_as_an_answer_at_once() -> None:
    async def talk(table: Table) -> None:
        async with table.client() as client:
            said, calls, reasons, usage = "", [], [], None
            stream = await client.chat.completions.create(
                model="any",
                messages=[user("q")],
                tools=TOOLS,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    said += choice.delta.content or ""
                    calls += choice.delta.tool_calls or []
                    reasons += [choice.finish_reason] if choice.finish_reason else []
            assert said == "x" * 100
            assert [c.function.name for c in calls] == ["add"]
            assert reasons == ["tool_calls"]
            assert usage is not None
            assert usage.completion_tokens == len(f"{'x' * 100}\n{CALL}") + 1

    at_table([f"{'x' * 100}\n{CALL}"], talk)


def test_log_probs_ids_and_limits() -> None:
    async def talk(table: Table) -> None:
        async with table.client() as client:
            cut = await client.chat.completions.create(
                model="any",
                messages=[user("q")],
                max_completion_tokens=3,
                logprobs=True,
                temperature=0.5,
                top_p=0.9,
                seed=7,
                extra_body={"return_token_ids": True},
            )
        choice = cut.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("lon", "length")
        assert [one.token for one in choice.logprobs.content] == ["l", "o", "n"]
        assert choice.logprobs.content[0].logprob == -1.0
        assert choice.token_ids == table.session.samples[1].trajectory.response().tolist()
        # The end that was not sampled is added, not trained on.
        await say(table, [user("q"), choice.message, user("on")])
        with pytest.raises(openai.BadRequestError, match="n=2"):
            await say(table, [user("q")], n=2)
        with pytest.raises(openai.BadRequestError, match="only 'auto'"):
            await say(table, [user("q")], tools=TOOLS, tool_choice="required")
        image = {"type": "image_url", "image_url": {"url": "http://x"}}
        with pytest.raises(openai.BadRequestError, match="only text"):
            await say(table, [{"role": "user", "content": [image]}])
        with pytest.raises(openai.BadRequestError, match="top_p"):
            await say(table, [user("q")], top_p=7)
        with pytest.raises(openai.BadRequestError, match="positions") as long:
            await say(table, [user("q" * 2000)])
        assert long.value.code == "context_length_exceeded"

    table = at_table(["longer", "x"], talk, max_positions=1000)
    first = table.sink.of(SegmentGenerated)[0]
    assert (first.temperature, first.top_p, first.max_new_tokens) == (0.5, 0.9, 3)
    assert json.loads(first.engine_report)["request"]["seed"] == 7
    (observed,) = table.sink.of(ObservationAppended)
    assert observed.text.startswith("<|im_end|>\n<|im_start|>user\non")


def test_pinned_sampling_is_not_the_agents_to_choose() -> None:
    async def talk(table: Table) -> None:
        await say(table, [user("q")], temperature=0)

    table = at_table(["a"], talk, pinned={"temperature": 1.0})
    (segment,) = table.sink.of(SegmentGenerated)
    assert segment.temperature == 1.0
    assert json.loads(segment.engine_report)["request"]["temperature"] == 0


def test_a_stop_text_cuts_what_is_told_and_never_what_is_recorded() -> None:
    async def talk(table: Table) -> None:
        one = await say(table, [user("q")], stop=["STOP", "!"])
        assert one.choices[0].message.content == "say "
        assert one.choices[0].finish_reason == "stop"
        await say(table, [user("q"), one.choices[0].message, user("r")])

    table = at_table(["say STOP and more of it" + "." * 100, "x"], talk)
    samples = [s.trajectory for s in table.session.samples]
    (segment,) = samples[1].segments
    assert len(segment.tokens) == 64
    # The agent goes on from what it saw: another sample, with those ids.
    n = len(samples[1].prompt_tokens)
    assert np.array_equal(samples[2].prompt_tokens[n : n + 4], segment.tokens[:4])
    assert "assistant\nsay <|im_end|>\n<|im_start|>user\nr" in table.script.asked[-1]


def test_a_client_that_goes_away_ends_its_generation_and_may_come_back_for_the_rest() -> None:
    clock = ManualClock()

    async def talk(table: Table) -> None:
        asking = asyncio.ensure_future(say(table, [user("q")]))
        await clock.until(lambda: bool(table.engine.running))
        await clock.advance(3)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await clock.until(lambda: bool(table.sink.of(SegmentGenerated)))
        await clock.until(lambda: table.session.under_way == 0)
        (cut,) = table.sink.of(SegmentGenerated)
        assert (cut.finish_reason, len(cut.tokens)) == ("abort", 3)
        assert not table.engine.running
        again = asyncio.ensure_future(say(table, [user("q")]))
        await clock.until(lambda: bool(table.engine.running))
        await clock.advance(10)
        assert (await again).choices[0].message.content == "hello"

    table = at_table(["hello"], talk, clock=clock)
    first, rest = table.sink.of(SegmentGenerated)
    assert (first.turn, rest.turn) == (0, 0)
    assert first.sampling_seed == rest.sampling_seed
    assert table.sequence(1).endswith(f"hello{END}")


def test_a_request_sent_again_has_the_recorded_answer() -> None:
    async def talk(table: Table) -> None:
        headers = {"X-Request-Id": "a"}
        found = await asyncio.gather(
            *(say(table, [user("q")], extra_headers=headers) for _ in range(2))
        )
        found.append(await say(table, [user("q")], extra_headers=headers))
        # The official client's own word for it; without either it is another sample.
        late = {"x-stainless-retry-count": "1"}
        found.append(await say(table, [user("p")]))
        found.append(await say(table, [user("p")], extra_headers=late))
        found.append(await say(table, [user("p")]))
        # The same name for another question is no repetition.
        found.append(await say(table, [user("o")], extra_headers=headers))
        contents = [one.choices[0].message.content for one in found]
        assert contents == ["a", "a", "a", "b", "b", "c", "d"]

    table = at_table(["a", "b", "c", "d"], talk)
    assert len(table.sink.of(SegmentGenerated)) == 4


def test_an_engine_that_fails_is_a_server_error_and_the_request_may_come_again() -> None:
    from ledger.errors import EngineFailed

    def once(request: Any, attempt: int) -> Failure | None:
        return Failure(EngineFailed("it broke")) if attempt == 0 else None

    async def talk(table: Table) -> None:
        with pytest.raises(openai.InternalServerError, match="it broke"):
            await say(table, [user("q")])
        assert (await say(table, [user("q")])).choices[0].message.content == "a"

    table = at_table(["a"], talk, failures=once)
    assert len(table.session.samples) == 2
    assert len(table.sink.of(PromptIssued)) == 1


def test_sessions_are_found_by_key_header_or_address_and_end_with_a_reward() -> None:
    async def talk(table: Table) -> None:
        url = table.endpoint.url
        body = {"model": "m", "messages": [user("q")]}
        async with aiohttp.ClientSession() as http:

            async def post(path: str, body: Any, **headers: str) -> tuple[int, Any]:
                async with http.post(url + path, json=body, headers=headers) as answer:
                    return answer.status, await answer.json()

            status, found = await post("/v1/chat/completions", body)
            assert (status, found["error"]["code"]) == (401, "invalid_api_key")
            for headers in (
                {"X-Session-Id": "s1"},
                {"X-SMG-Routing-Key": "s1"},
                {"Authorization": "Bearer s1"},
            ):
                assert (await post("/v1/chat/completions", body, **headers))[0] == 200
            assert (await post("/sessions/s1/v1/chat/completions", body))[0] == 200
            assert (await post("/v1/sessions/s1/reward", {"reward": "much"}))[0] == 400
            status, found = await post(
                "/v1/sessions/s1/reward", {"reward": 0.5, "parts": {"tests": 1}}
            )
            assert (status, found["reward"], len(found["samples"])) == (200, 0.5, 5)
            status, found = await post("/sessions/s1/v1/chat/completions", body)
            assert (status, found["error"]["code"]) == (410, "session_over")
            async with http.get(url + "/health") as answer:
                assert (await answer.json())["status"] == "ok"
            async with http.get(url + "/v1/models") as answer:
                assert (await answer.json())["data"][0]["id"] == "policy"
            async with http.post(url + "/v1/completions", data=b"{") as answer:
                assert answer.status == 401
            async with http.post(url + "/sessions/s1/v1/completions", data=b"{") as answer:
                assert (answer.status, (await answer.json())["error"]["type"]) == (
                    400,
                    "invalid_request_error",
                )

    table = at_table(["a", "b", "c", "d"], talk)
    assert table.session.reward is not None
    assert table.session.reward.parts == {"tests": 1.0}


def test_completions_and_native_generate_go_on_by_text_and_by_ids() -> None:
    async def talk(table: Table) -> None:
        async with table.client() as client:
            one = await client.completions.create(model="m", prompt="Once", logprobs=1)
            assert one.choices[0].text == " upon"
            assert one.choices[0].logprobs.tokens[-1] == END
            two = await client.completions.create(
                model="m", prompt=f"Once upon{END} a", stream=False
            )
            assert two.choices[0].text == " time"
            stream = await client.completions.create(
                model="m", prompt=table.tokenizer.encode("By ids"), stream=True
            )
            assert [c.choices[0].text async for c in stream] == [" too"]
        asked = table.session.samples[-1].trajectory.context().tolist()
        async with aiohttp.ClientSession(headers={"X-Session-Id": "s1"}) as http:
            body = {
                "input_ids": [*asked, asked[0]],
                "sampling_params": {"max_new_tokens": 2, "temperature": 0.5},
                "return_logprob": True,
            }
            async with http.post(table.endpoint.url + "/generate", json=body) as answer:
                found = await answer.json()
        meta = found["meta_info"]
        assert found["text"] == "na"
        assert meta["finish_reason"] == {"type": "length", "length": 2}
        assert meta["weight_version"] == "4"
        assert [one[1] for one in meta["output_token_logprobs"]] == found["output_ids"]

    table = at_table([" upon", " time", " too", "native"], talk)
    samples = [s.trajectory for s in table.session.samples]
    assert [len(t.segments) for t in samples] == [0, 2, 2]
    assert [o.text for o in table.sink.of(ObservationAppended)] == [" a", "B"]
