"""`ledger-train --prompt-data`: prompts of a file, recorded with its digest and held to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from ledger import open_ledger
from ledger.errors import InvalidArgument, NotFound
from tests.main_job.job import train
from trainer.cli import run

WORDS = ("cat", "dog", "sun", "pin", "map")


def write(path: Path, words: tuple[str, ...] = WORDS) -> Path:
    rows = [{"q": f"rev {word}>", "a": word[::-1], "metadata": {"word": word}} for word in words]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "task": "addition",
        "prompt_data": str(path),
        "input_key": "q",
        "label_key": "a",
        "rollout_shuffle": True,
        "dynamic_sampling_filter_path": "none",
        **more,
    }


def go_on(ledger: Path, **more: Any) -> dict[str, Any]:
    return run({"ledger": str(ledger), "num_rollout": 3, **more}, show=False)


def issued(folder: Path) -> list[dict[str, Any]]:
    with open_ledger(folder) as ledger:
        reader = ledger.reader("run", "main")
        names = ["source", "source_row", "text", "label", "metadata", "data_cursor"]
        return reader.table("prompt_issued", names).to_pylist()  # type: ignore[no-any-return]


def test_a_run_on_a_file_goes_on_where_it_was_and_with_nothing_else(
    tiny_dense: Path, tmp_path: Path
) -> None:
    data, place = write(tmp_path / "words.jsonl", (*WORDS, "elephant")), tmp_path / "ledger"
    long = write(tmp_path / "long.jsonl", ("cat", "elephant", "dog"))
    train(
        place,
        tiny_dense,
        **options(
            data,
            num_rollout=1,
            eval_prompt_data=["own", f"{data}@[:2]", "long", str(long)],
            eval_interval=2,
            rollout_max_prompt_len=8,
            eval_temperature=0.0,
            n_samples_per_eval_prompt=2,
        ),
    )
    moved = data.rename(tmp_path / "moved.jsonl")
    with pytest.raises(NotFound, match=r"words\.jsonl"):
        go_on(place)
    write(data, (*WORDS[:4], "mop"))
    for named in ({}, {"prompt_data": str(data)}):
        with pytest.raises(InvalidArgument, match=r"began with[^~]*--from-version K"):
            go_on(place, **named)
    evaluations = ["own", f"{moved}@[:2]", "long", str(long)]
    write(long)
    with pytest.raises(InvalidArgument, match="--eval-data-digests"):
        go_on(place, prompt_data=str(moved), eval_prompt_data=evaluations)
    write(long, ("cat", "elephant", "dog"))
    go_on(place, prompt_data=str(moved), eval_prompt_data=evaluations)
    rows = issued(place)
    assert [row["source_row"] for row in rows] == list(range(6))
    assert [row["data_cursor"] for row in rows] == list(range(1, 7))
    assert sorted(row["metadata"] for row in rows[:5]) == sorted(
        f'{{"word":"{word}"}}' for word in WORDS
    )
    for row in rows:
        word = json.loads(row["metadata"])["word"]
        assert (row["text"], row["label"]) == (f"rev {word}>", word[::-1])
    (source,) = {row["source"] for row in rows}
    digest = blake3(moved.read_bytes()).hexdigest()
    assert source.startswith(f'prompt_data:{digest}{{"input_key":"q"')
    with open_ledger(place) as ledger:
        started = ledger.reader("run", "main").table("run_started").to_pylist()[0]
        scored = ledger.reader("run", "main").table("eval_scored").to_pylist()
        left_out = ledger.reader("run", "main").table("prompts_left_out").to_pylist()
    assert [(one["source_rows"], one["prompt_tokens"]) for one in left_out] == [([5], [13])]
    assert (left_out[0]["source"], left_out[0]["rule"]) == (source, "rollout_max_prompt_len")
    assert [(one["weight_version"], one["name"]) for one in scored] == [
        (version, name) for version in (0, 1, 2, 3) for name in ("own", "long")
    ]
    for one in scored:
        assert one["source_rows"] == [0, 0, 1, 1]
        assert (one["temperature"], one["top_p"], one["top_k"]) == (0.0, 1.0, -1)
        assert one["max_new_tokens"] == 8
        # Greedy: two responses to a prompt are one.
        assert one["response_tokens"][::2] == one["response_tokens"][1::2]
    assert {one["source"].count('"too_long":1') for one in scored if one["name"] == "long"} == {1}
    assert json.loads(started["settings"])["prompt_data_digest"] == digest
    assert json.loads(started["places"])["prompt_data"] == str(data)


def test_a_bad_row_shows_before_anything_is_written(tiny_dense: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "words.jsonl")
    data.write_text(data.read_text() + '{"q": "rev x>"}\n')
    with pytest.raises(InvalidArgument, match=r"words\.jsonl, line 6\n[^~]*'a' \(--label-key\)"):
        train(tmp_path / "ledger", tiny_dense, **options(data))
    with open_ledger(tmp_path / "ledger") as ledger:
        assert not ledger.runs()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"task": "reasoning_gym:chain_sum"}, "--prompt-data and --task"),
        ({"custom_rm_path": None}, "choosing how answers are judged"),
        ({"apply_chat_template": True}, "a tokenizer with a chat template"),
        ({"prompt_data_digest": "00"}, "blake3 00"),
        ({"eval_prompt_data": ["a"], "eval_interval": 1}, "pairs of a name"),
        ({"eval_interval": 1}, "prompts that are not trained on"),
    ],
)
def test_what_does_not_go_together_is_refused(
    more: dict[str, Any], message: str, tiny_dense: Path, tmp_path: Path
) -> None:
    data = write(tmp_path / "words.jsonl")
    with pytest.raises(InvalidArgument, match=message):
        train(tmp_path / "ledger", tiny_dense, **options(data, **more))
