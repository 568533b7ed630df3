"""Requests in SGLang's words, and answers: what is whole is converted, what is not is named."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import Corrupt, EngineFailed, InvalidArgument, NotFound
from ledger.events import UNKNOWN_VERSION
from rollout.engines import own_end_token_ids
from rollout.engines.sglang.answer import Asked, parse_answer, parse_version
from rollout.engines.sglang.model import ModelFacts, read_model_facts
from rollout.engines.sglang.request import SENT_SAMPLING_PARAMS, Extras, generate_body, wire_rid
from rollout.engines.sglang.server import read_server_facts
from rollout.protocol import GenerationRequest, GenerationResult, SamplingParams
from tests.rollout.sglang_server import DENSE, MOE, FakeSGLang, experts

ADDRESS = "http://engine:1"
PARAMS = SamplingParams(max_new_tokens=6, stop_token_ids=(2,))
CUT = SamplingParams(max_new_tokens=6, top_k=4, logprob_mode="processed", stop_token_ids=(2,))
WITH_EXPERTS = Extras(routed_experts=True)
Change = Callable[[dict[str, Any]], object]


def request(**more: Any) -> GenerationRequest:
    return GenerationRequest(
        index=4, tokens=np.array([5, 6, 7, 8], np.int32), seed=11, request_id="run.main.4.0", **more
    )


def exchange(
    change: Change = lambda answer: answer,
    *,
    model: ModelFacts = MOE,
    params: SamplingParams = PARAMS,
    extras: Extras = WITH_EXPERTS,
    asked: GenerationRequest | None = None,
    steady: bool = True,
    aborted: bool = False,
    length: int | None = None,
) -> GenerationResult:
    """Ask, let `change` spoil the honest answer, and read it."""
    asked = asked or request()
    rid = wire_rid(asked.request_id or "", 0)
    server = FakeSGLang(model)
    if length is not None:
        server.lengths[asked.seed] = length
    body = json.loads(json.dumps(generate_body(asked, params, rid=rid, extras=extras)))
    answer = json.loads(json.dumps(server.answer(body, aborted=aborted)))
    changed = change(answer)
    whole = Asked(
        request=asked, params=params, extras=extras, rid=rid, address=ADDRESS, model=model
    )
    return parse_answer(answer if changed is None else changed, whole, time_s=0.5, steady=steady)


def meta(**changes: Any) -> Change:
    def change(answer: dict[str, Any]) -> None:
        for name, value in changes.items():
            if value is ...:
                del answer["meta_info"][name]
            else:
                answer["meta_info"][name] = value

    return change


def spans(*said: tuple[str | None, int, int]) -> Change:
    return meta(weight_versions=[{"version": v, "start": s, "end": e} for v, s, e in said])


# Requests


def test_a_request_says_everything_that_bears_on_its_answer() -> None:
    body = generate_body(
        request(session_id="rollout-4", routing_start=3),
        SamplingParams(
            temperature=0.5, top_p=0.9, top_k=40, max_new_tokens=6, stop_token_ids=(2, 9)
        ),
        rid="r~0~",
        extras=Extras(routed_experts=True, indexer_topk=True),
    )
    assert body["input_ids"] == [5, 6, 7, 8]
    assert body["sampling_params"].keys() == SENT_SAMPLING_PARAMS
    said = body["sampling_params"]
    assert (said["temperature"], said["top_p"], said["top_k"]) == (0.5, 0.9, 40)
    assert (said["sampling_seed"], said["stop_token_ids"], said["n"]) == (11, [2, 9], 1)
    # It would switch stop_token_ids off, too.
    assert said["ignore_eos"] is False
    assert (body["rid"], body["session_id"]) == ("r~0~", "rollout-4")
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 3)
    assert body["return_indexer_topk"] is True
    assert "return_sampling_mask" not in body
    assert json.loads(json.dumps(body)) == body


def test_greedy_and_processed_requests() -> None:
    plain = Extras()
    greedy = generate_body(
        request(),
        SamplingParams(temperature=0.0, top_p=0.5, top_k=3, logprob_mode="processed"),
        rid="r",
        extras=plain,
    )
    assert greedy["sampling_params"]["temperature"] == 0.0
    assert (greedy["sampling_params"]["top_p"], greedy["sampling_params"]["top_k"]) == (1.0, -1)
    assert "return_sampling_mask" not in greedy
    assert generate_body(request(), CUT, rid="r", extras=plain)["return_sampling_mask"] is True


names = st.text(alphabet="ab.~0", min_size=1, max_size=6)


@given(st.lists(st.tuples(names, st.integers(0, 11)), min_size=2, max_size=2, unique=True))
def test_no_name_begins_with_another(two: list[tuple[str, int]]) -> None:
    """SGLang aborts every request whose name begins with the one given."""
    one, other = (wire_rid(name, attempt) for name, attempt in two)
    assert not other.startswith(one)
    assert not one.startswith(other)


# Answers


def test_a_whole_answer() -> None:
    result = exchange()
    assert (result.index, len(result.tokens), result.finish_reason) == (4, 6, "length")
    assert result.tokens.dtype == np.int32
    assert result.log_probs.dtype == np.float32
    assert result.log_probs.tolist() == [-0.5 - t / 8 for t in range(6)]
    assert result.logprob_mode == "full"
    assert result.span_versions.tolist() == [7]
    assert (result.span_starts.dtype, result.span_versions.dtype) == (np.int32, np.int64)
    assert result.request_id == "run.main.4.0"
    assert (result.engine_address, result.time_s, result.cached_tokens) == (ADDRESS, 0.5, 0)
    assert result.report is not None
    assert result.report["finish_reason"] == {"type": "length", "length": 6}
    assert (result.report["id"], result.report["num_retractions"]) == ("run.main.4.0~0~", 0)
    assert not {"routed_experts", "output_token_logprobs"} & result.report.keys()


def test_experts_of_the_layers_that_have_some() -> None:
    result = exchange()
    assert result.expert_ids is not None
    assert result.expert_ids.dtype == np.uint8
    assert result.expert_ids.tolist() == experts(MOE, 9)[:, 1:].tolist()
    assert result.num_experts == 8
    rest = exchange(asked=request(routing_start=3))
    assert rest.expert_ids is not None
    assert rest.expert_ids.tolist() == experts(MOE, 9)[3:, 1:].tolist()


def test_a_stop_is_the_last_token() -> None:
    result = exchange(length=4)
    assert (result.finish_reason, result.tokens[-1], len(result.tokens)) == ("stop", 2, 4)
    assert result.report is not None
    assert result.report["finish_reason"]["matched"] == 2


def test_the_models_own_end_is_a_stop_that_the_report_names() -> None:
    params = SamplingParams(max_new_tokens=6)
    result = exchange(model=DENSE, extras=Extras(), params=params, length=4)
    assert (result.finish_reason, result.tokens[-1]) == ("stop", 63)
    assert result.report is not None
    assert result.report["finish_reason"]["matched"] == 63


def test_what_top_k_left() -> None:
    result = exchange(params=CUT)
    assert result.logprob_mode == "processed"
    assert result.log_probs.tolist() == [-0.25] * 6
    assert result.top_p_token_offsets is not None
    assert result.top_p_token_ids is not None
    assert result.top_p_token_offsets.tolist() == [0, 2, 4, 6, 8, 10, 12]
    for t, token in enumerate(result.tokens.tolist()):
        assert result.top_p_token_ids[2 * t : 2 * t + 2].tolist() == sorted(
            [token, (token + 1) % 63]
        )
    assert result.report is not None
    full = base64.b64decode(result.report["full_log_probs_base64"])
    assert np.frombuffer(full, "<f4").tolist() == [-0.5 - t / 8 for t in range(6)]


def test_spans_of_several_versions() -> None:
    result = exchange(spans(("3", 0, 2), ("3", 2, 3), ("12", 3, 6), ("13", 6, 6)))
    assert result.span_starts.tolist() == [0, 3]
    assert result.span_ends.tolist() == [3, 6]
    assert result.span_versions.tolist() == [3, 12]


@pytest.mark.parametrize("said", ["default", "v7", "07", "-1", "", "7.0", 7, None, "9" * 30])
def test_a_version_that_is_none_of_ours_is_unknown_and_flagged(said: object) -> None:
    assert parse_version(said) == UNKNOWN_VERSION
    result = exchange(spans(("7", 0, 2), (said, 2, 6)))  # type: ignore[arg-type]
    assert result.span_versions.tolist() == [7, UNKNOWN_VERSION]
    assert result.report is not None
    assert result.report["unknown_version"] == ("none" if said is None else str(said))


def test_an_answer_without_any_version_is_unknown_and_no_crash() -> None:
    result = exchange(meta(weight_versions=..., weight_version=...))
    assert result.span_versions.tolist() == [UNKNOWN_VERSION]
    assert result.report is not None
    assert result.report["unknown_version"] == "none"


def test_the_version_at_the_end_counts_only_where_nothing_changed_meanwhile() -> None:
    alone = meta(weight_versions=...)
    assert exchange(alone).span_versions.tolist() == [7]
    moved = exchange(alone, steady=False)
    assert moved.span_versions.tolist() == [UNKNOWN_VERSION]
    assert moved.report is not None
    assert moved.report["unknown_version"] == "7 at the end"


def test_an_aborted_answer_keeps_what_it_has() -> None:
    result = exchange(aborted=True)
    assert (result.finish_reason, len(result.tokens)) == ("abort", 3)
    assert result.expert_ids is not None
    assert len(result.expert_ids) == 4 + 3 - 1
    assert result.span_ends.tolist() == [3]


def from_the_queue(answer: dict[str, Any]) -> None:
    """As SGLang ends a request that waits (again): without most of what it says of others."""
    for name in ("prompt_tokens", "cached_tokens", "routed_experts", "num_retractions"):
        answer["meta_info"].pop(name, None)


def test_an_abort_in_the_queue_gives_up_what_cannot_be_recorded_whole() -> None:
    result = exchange(from_the_queue, aborted=True)
    assert (result.finish_reason, len(result.tokens), result.expert_ids) == ("abort", 0, None)
    assert result.report is not None
    assert result.report["discarded_tokens"] == 3
    whole = exchange(from_the_queue, aborted=True, model=DENSE, extras=Extras())
    assert len(whole.tokens) == 3

    def nothing(answer: dict[str, Any]) -> None:
        from_the_queue(answer)
        answer["output_ids"] = []
        answer["meta_info"].update(
            completion_tokens=0, weight_versions=[], output_token_logprobs=[]
        )

    empty = exchange(nothing, aborted=True)
    assert (len(empty.tokens), len(empty.span_starts)) == (0, 0)
    assert empty.report is not None
    assert "discarded_tokens" not in empty.report


def ids(change: Callable[[list[Any]], object]) -> Change:
    def spoil(answer: dict[str, Any]) -> None:
        change(answer["output_ids"])

    return spoil


def entry(position: int, part: int, value: object) -> Change:
    def spoil(answer: dict[str, Any]) -> None:
        answer["meta_info"]["output_token_logprobs"][position][part] = value

    return spoil


def routed(change: Callable[[np.ndarray], object]) -> Change:
    def spoil(answer: dict[str, Any]) -> None:
        raw = base64.b64decode(answer["meta_info"]["routed_experts"])
        numbers = np.frombuffer(raw, "<i4").reshape(-1, 3, 2).copy()
        changed = change(numbers)
        kept = changed if isinstance(changed, np.ndarray) else numbers
        answer["meta_info"]["routed_experts"] = base64.b64encode(kept.tobytes()).decode()

    return spoil


def put(index: Any, value: int) -> Callable[[np.ndarray], object]:
    def change(numbers: np.ndarray) -> None:
        numbers[index] = value

    return change


BROKEN: dict[str, tuple[Change, str, str]] = {
    "no object": (lambda _: [1], r"field \(whole\)", "list"),
    "no meta": (lambda a: {"output_ids": a["output_ids"]}, "field meta_info", "None"),
    "another's answer": (meta(id="run.main.4.0~1~"), "meta_info.id", "4.0~1~"),
    "not finished": (meta(finish_reason=None), "finish_reason", "None"),
    "an unknown end": (meta(finish_reason={"type": "tired"}), "finish_reason", "tired"),
    "a cut prompt": (meta(prompt_tokens=3), "prompt_tokens", "3"),
    "no ids": (lambda a: a.update(output_ids=None), "output_ids", "None"),
    "an id above": (ids(lambda x: x.__setitem__(2, 64)), r"output_ids\[2\]", "64"),
    "an id below": (ids(lambda x: x.__setitem__(2, -1)), r"output_ids\[2\]", "-1"),
    "an id of another kind": (ids(lambda x: x.__setitem__(2, True)), r"output_ids\[2\]", "True"),
    "too many ids": (ids(lambda x: x.append(5)), "output_ids", "7 ids"),
    "an id too few": (ids(lambda x: x.pop()), "completion_tokens", "6"),
    "a stop id inside": (ids(lambda x: x.__setitem__(1, 2)), r"output_ids\[1\]", "2 of 6"),
    "an early length": (
        meta(finish_reason={"type": "length"}, completion_tokens=4),
        "completion_tokens",
        "4",
    ),
    "a stop elsewhere": (
        meta(finish_reason={"type": "stop", "matched": 2}),
        "finish_reason.matched",
        "2",
    ),
    "no number": (
        meta(finish_reason={"type": "stop", "matched": "NaN happened"}),
        "finish_reason.matched",
        "NaN happened",
    ),
    "an error as an abort": (
        meta(finish_reason={"type": "abort", "status_code": 500, "message": "oh"}),
        "finish_reason",
        "oh",
    ),
    "no log-probs": (meta(output_token_logprobs=...), "output_token_logprobs", "None"),
    "few log-probs": (meta(output_token_logprobs=[[0.0, 1, None]]), "logprobs", "1 entries"),
    "a log-prob of another id": (entry(1, 1, 62), r"output_token_logprobs\[1\]", "62"),
    "a log-prob that is none": (entry(1, 0, None), r"output_token_logprobs\[1\]", "None"),
    "no experts": (meta(routed_experts=...), "routed_experts", "enable-return-routed-experts"),
    "experts in another code": (meta(routed_experts="%%%"), "routed_experts", "base64"),
    "a row too few": (routed(lambda n: n[1:]), "routed_experts", "9 rows × 3 layers × 2 experts"),
    "no expert": (routed(put((4, 2, 1), 8)), r"routed_experts\[4, 2, 1\]", "8"),
    "a dense layer's experts": (routed(put((4, 0, 1), 3)), "routed_experts", "layer 0"),
    "a layer that was not caught": (routed(put((slice(2, 4), 1), 0)), r"experts\[2, 1\]", "zeros"),
    "a hole between spans": (spans(("1", 0, 2), ("2", 3, 6)), "weight_versions", r"\[0, 6\)"),
    "spans that end early": (spans(("1", 0, 5)), "weight_versions", r"\[0, 6\)"),
    "spans that begin late": (spans(("1", 1, 6)), "weight_versions", r"\[0, 6\)"),
    "spans that overlap": (spans(("1", 0, 4), ("2", 3, 6)), "weight_versions", r"\[0, 6\)"),
    "a span backwards": (spans(("1", 0, 7), ("2", 7, 6)), "weight_versions", r"\[0, 6\)"),
    "a span without end": (meta(weight_versions=[{"version": "1"}]), "weight_versions", "version"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_named(name: str) -> None:
    change, field, found = BROKEN[name]
    with pytest.raises(
        EngineFailed, match=rf"(?s)run\.main\.4\.0~0~.*{ADDRESS}.*{field}"
    ) as failed:
        exchange(change)
    assert all(part in str(failed.value) for part in ("expected:", "found:"))
    assert found.replace("\\", "") in str(failed.value)


def test_a_length_below_the_one_that_was_asked_for() -> None:
    """The server cuts what does not fit its cache without a word."""
    with pytest.raises(EngineFailed, match="'length' after max_new_tokens = 6"):
        exchange(meta(finish_reason={"type": "length", "length": 4}), length=4)


KEPT_BROKEN: dict[str, tuple[Change, str]] = {
    "no sets": (meta(output_token_sampling_mask=...), "output_token_sampling_mask"),
    "a set too few": (meta(output_token_sampling_mask=[[1]]), "1 entries"),
    "no log-probs": (meta(output_token_sampling_logprobs=...), "output_token_sampling_logprobs"),
    "a log-prob that is none": (
        meta(output_token_sampling_logprobs=[None] * 6),
        r"sampling_logprobs\[0\]",
    ),
    "sets without the token": (meta(output_token_sampling_mask=[[62]] * 6), r"mask\[0\]"),
    "an id outside": (
        lambda a: a["meta_info"]["output_token_sampling_mask"][3].append(64),
        r"mask\[3\]",
    ),
    "an id twice": (
        lambda a: a["meta_info"]["output_token_sampling_mask"][3].append(
            a["meta_info"]["output_token_sampling_mask"][3][0]
        ),
        r"mask\[3\]",
    ),
}


@pytest.mark.parametrize("name", KEPT_BROKEN)
def test_broken_sets_are_named(name: str) -> None:
    change, says = KEPT_BROKEN[name]
    with pytest.raises(EngineFailed, match=says):
        exchange(change, params=CUT)


SPARSE = ModelFacts(
    model_type="deepseek_v32", vocab_size=64, max_positions=128, num_layers=3, indexer_topk=4
)


def test_indexed_positions() -> None:
    whole = np.arange(9 * 2 * 4, dtype=np.int32).reshape(9, 2, 4)
    said = base64.b64encode(whole.tobytes()).decode()
    asks = {"model": SPARSE, "extras": Extras(indexer_topk=True)}
    result = exchange(meta(indexer_topk=said), asked=request(routing_start=3), **asks)  # type: ignore[arg-type]
    assert result.indexer_positions is not None
    assert result.indexer_positions.tolist() == whole[3:].tolist()
    for wrong in (..., said[:-8], base64.b64encode(whole[:, :, :3].tobytes()).decode()):
        with pytest.raises(EngineFailed, match="indexer_topk"):
            exchange(meta(indexer_topk=wrong) if wrong is not ... else lambda a: a, **asks)  # type: ignore[arg-type]


# What a model and a server are


def folder(tmp_path: Path, config: dict[str, Any], **files: Any) -> Path:
    sizes = {"vocab_size": 64, "max_position_embeddings": 128, "num_hidden_layers": 4}
    for name, value in {"config": {**sizes, **config}, **files}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "layers", "experts", "topk"),
    [
        ({"model_type": "qwen3"}, (), 0, 0),
        ({"num_experts": 8, "num_experts_per_tok": 2}, (0, 1, 2, 3), 8, 2),
        (
            {
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "decoder_sparse_step": 2,
                "mlp_only_layers": [3],
            },
            (1,),
            8,
            2,
        ),
        (
            {"n_routed_experts": 16, "num_experts_per_tok": 4, "first_k_dense_replace": 1},
            (1, 2, 3),
            16,
            4,
        ),
        (
            {
                "n_routed_experts": 16,
                "num_experts_per_tok": 4,
                "first_k_dense_replace": 1,
                "moe_layer_freq": 2,
            },
            (2,),
            16,
            4,
        ),
        (
            {
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            },
            (1, 2),
            8,
            2,
        ),
        ({"text_config": {"num_experts": 8, "num_experts_per_tok": 2}}, (0, 1, 2, 3), 8, 2),
    ],
)
def test_which_layers_have_experts(
    tmp_path: Path, config: dict[str, Any], layers: tuple[int, ...], experts: int, topk: int
) -> None:
    facts = read_model_facts(folder(tmp_path, config))
    assert (facts.moe_layers, facts.num_experts, facts.topk) == (layers, experts, topk)


def test_all_ids_that_end_a_response_are_known(tmp_path: Path) -> None:
    facts = read_model_facts(
        folder(
            tmp_path,
            {"eos_token_id": 9},
            generation_config={"eos_token_id": [3, 9]},
            tokenizer_config={"eos_token": {"content": "<end>"}},
            tokenizer={
                "added_tokens": [
                    {"id": 5, "content": "<end>"},
                    {"id": 6, "content": "<|eom_id|>"},
                    {"id": 7, "content": "<other>"},
                ]
            },
        )
    )
    assert facts.end_token_ids == (3, 5, 6, 9)
    assert own_end_token_ids("sglang", tmp_path) == (3, 5, 6, 9)
    assert own_end_token_ids("transformers", tmp_path) == ()


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no config\.json"):
        read_model_facts(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Corrupt, match="copy it again"):
        read_model_facts(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="num_hidden_layers"):
        read_model_facts(tmp_path)


def test_a_server_that_serves_something_else() -> None:
    good = {"max_req_input_len": 122, "enable_deterministic_inference": True}
    facts = read_server_facts(good, {"model_type": "qwen3"}, DENSE, on="e")
    # What the scheduler of 0.5.23 serves of a model of 128 positions: 2 fewer.
    assert facts.max_positions == 126
    small = {
        "context_length": 100,
        "max_total_num_tokens": 90,
        "enable_deterministic_inference": True,
    }
    assert read_server_facts(small, {}, DENSE, on="e").max_positions == 88
    for info, says in (
        ({"model_type": "llama"}, "llama"),
        ({"is_generation": False}, "generates"),
        ({"preferred_sampling_params": {"logit_bias": {}}}, "logit_bias"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            read_server_facts(good, info, DENSE, on="e")
    read_server_facts(good, {"preferred_sampling_params": {"top_p": 0.5}}, DENSE, on="e")
