"""What every engine must do. A test module gives a fixture `case` and subclasses the suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from ledger.errors import Conflict, InvalidArgument
from ledger.events import UNKNOWN_VERSION
from rollout.protocol import Engine, GenerationRequest, GenerationResult, SamplingParams


@dataclass(frozen=True)
class EngineCase:
    engine: Engine
    vocab_size: int
    max_positions: int
    named: Callable[[], dict[str, Any]]
    """Copies of the current weights by canonical name."""
    changed: Callable[[Any], Any]
    """The same tensor with other values."""


def request(index: int, tokens: list[int], seed: int | None = None) -> GenerationRequest:
    return GenerationRequest(
        index=index,
        tokens=np.array(tokens, dtype=np.int32),
        seed=1000 + index if seed is None else seed,
    )


REQUESTS = [request(i, [5 + i, 6, 7][: 1 + i % 3]) for i in range(6)]
PARAMS = SamplingParams(max_new_tokens=9, stop_token_ids=(2, 20))


def same(one: Any, other: Any) -> bool:
    return bool(
        np.array_equal(one.tokens, other.tokens)
        and one.log_probs.tobytes() == other.log_probs.tobytes()
        and one.finish_reason == other.finish_reason
    )


class EngineContract:
    """The suite. `case` gives a released engine at UNKNOWN_VERSION for each test."""

    def test_results_have_the_promised_shape(self, case: EngineCase) -> None:
        reasons = set()
        for limit in (2, 9):
            params = replace(PARAMS, max_new_tokens=limit)
            results = case.engine.generate(REQUESTS, params)
            assert [r.index for r in results] == [r.index for r in REQUESTS]
            for result in results:
                self.check_result(case, params, result)
            reasons |= {r.finish_reason for r in results}
        assert reasons == {"stop", "length"}, "choose other stop ids"

    def check_result(
        self, case: EngineCase, params: SamplingParams, result: GenerationResult
    ) -> None:
        new = len(result.tokens)
        assert 1 <= new <= params.max_new_tokens
        assert result.tokens.dtype == np.int32
        assert result.log_probs.dtype == np.float32
        assert result.log_probs.shape == (new,)
        assert (result.log_probs <= 0).all()
        assert ((result.tokens >= 0) & (result.tokens < case.vocab_size)).all()
        assert result.span_starts.tolist() == [0]
        assert result.span_ends.tolist() == [new]
        assert result.span_versions.tolist() == [UNKNOWN_VERSION]
        assert result.logprob_mode == "full"
        stopped = result.tokens[-1] in PARAMS.stop_token_ids
        assert result.finish_reason == ("stop" if stopped else "length")
        assert not np.isin(result.tokens[:-1], PARAMS.stop_token_ids).any()
        if result.finish_reason == "length":
            assert new == params.max_new_tokens

    def test_the_same_call_gives_the_same_bits(self, case: EngineCase) -> None:
        first, second = (case.engine.generate(REQUESTS, PARAMS) for _ in range(2))
        assert all(same(a, b) for a, b in zip(first, second, strict=True))

    def test_another_seed_gives_other_tokens(self, case: EngineCase) -> None:
        requests = [request(i, [5, 6], seed=i) for i in range(8)]
        results = case.engine.generate(requests, SamplingParams(max_new_tokens=8))
        assert len({r.tokens.tobytes() for r in results}) > 4

    def test_a_response_that_was_cut_goes_on_as_it_would_have(self, case: EngineCase) -> None:
        """The choice is a function of the seed and the position in the whole sequence."""
        params = SamplingParams(max_new_tokens=9)
        whole = case.engine.generate([request(0, [5, 6])], params)[0].tokens
        tail = request(0, [5, 6, *whole[:4].tolist()])
        rest = case.engine.generate([tail], replace(params, max_new_tokens=5))[0].tokens
        assert rest.tolist() == whole[4:].tolist()

    def test_an_empty_call_gives_nothing(self, case: EngineCase) -> None:
        assert case.engine.generate([], PARAMS) == []

    @pytest.mark.parametrize("where", ["below", "above"])
    def test_an_id_outside_the_vocabulary_is_refused(self, case: EngineCase, where: str) -> None:
        wrong = -1 if where == "below" else case.vocab_size
        with pytest.raises(InvalidArgument, match=rf"sample 77, position 1[\s\S]*{wrong}"):
            case.engine.generate([request(77, [5, wrong])], PARAMS)
        assert len(case.engine.generate(REQUESTS, PARAMS)) == len(REQUESTS)

    def test_an_empty_prompt_is_refused(self, case: EngineCase) -> None:
        with pytest.raises(InvalidArgument, match="at least one token"):
            case.engine.generate([request(0, [])], PARAMS)

    def test_a_prompt_that_is_too_long_is_refused(self, case: EngineCase) -> None:
        longest = case.max_positions - PARAMS.max_new_tokens
        case.engine.generate([request(0, [5] * longest)], PARAMS)
        with pytest.raises(InvalidArgument, match=f"{longest + 1} \\+ {PARAMS.max_new_tokens}"):
            case.engine.generate([request(0, [5] * (longest + 1))], PARAMS)

    def test_an_update_pauses_until_its_release(self, case: EngineCase) -> None:
        named = case.named()
        records = case.engine.update_weights(7, named.items())
        assert [r.name for r in records] == sorted(named)
        with pytest.raises(Conflict, match="version 7 is loaded and waits for release"):
            case.engine.generate(REQUESTS, PARAMS)
        with pytest.raises(Conflict, match="loaded version 7"):
            case.engine.release(8)
        case.engine.release(7)
        assert case.engine.weight_version == 7
        assert case.engine.generate(REQUESTS, PARAMS)[0].span_versions.tolist() == [7]

    def test_the_checksums_are_those_of_what_was_sent(self, case: EngineCase) -> None:
        from ledger.weights import tensor_record

        named = {name: case.changed(value) for name, value in case.named().items()}
        records = case.engine.update_weights(1, named.items())
        for record in records:
            sent = np.asarray(named[record.name])
            assert record == tensor_record(record.name, sent.dtype.name, sent.shape, sent)

    @pytest.mark.parametrize("wrong", ["missing", "unexpected", "shape", "dtype"])
    def test_weights_that_do_not_fit_leave_the_old_ones(self, case: EngineCase, wrong: str) -> None:
        before = case.engine.generate(REQUESTS, PARAMS)
        named = {name: case.changed(value) for name, value in case.named().items()}
        name = sorted(named)[-1]
        if wrong == "missing":
            del named[name]
        elif wrong == "unexpected":
            named["model.extra.weight"] = named[name]
            name = "model.extra.weight"
        elif wrong == "shape":
            named[name] = named[name][:-1]
        else:
            named[name] = np.asarray(named[name]).astype(np.float64)
            if type(case.named()[name]).__module__.startswith("torch"):
                import torch

                named[name] = torch.from_numpy(named[name])
        with pytest.raises(InvalidArgument, match=name.replace(".", r"\.")):
            case.engine.update_weights(9, named.items())
        after = case.engine.generate(REQUESTS, PARAMS)
        assert case.engine.weight_version == UNKNOWN_VERSION
        assert all(same(a, b) for a, b in zip(before, after, strict=True))

    def test_a_closed_engine_refuses(self, case: EngineCase) -> None:
        case.engine.close()
        with pytest.raises(Conflict, match="closed"):
            case.engine.generate(REQUESTS, PARAMS)
