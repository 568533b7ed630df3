"""What is damaged is found, named, and not used."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import replay.cli
import trainer.cli
from ledger import open_ledger
from ledger.errors import Corrupt
from ledger.numbering import SAMPLE_SPAN
from ledger.verify import verify_ledger
from tests.main_job.job import retrain, train

Run = tuple[Path, dict[str, Any]]


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["segment_generated", "sample_scored", "prompt_issued"])
def test_one_bit_of_a_segment(copied: Run, kind: str) -> None:
    ledger, _ = copied
    with open_ledger(ledger) as opened:
        file = opened.reader("run").segments(kind)[0].file
    assert file is not None
    path = ledger / file.path
    _flip(path, path.stat().st_size // 2)
    with open_ledger(ledger) as opened:
        with pytest.raises(Corrupt) as refused:
            opened.reader("run").table(kind)
        report = verify_ledger(opened)
    message = str(refused.value)
    assert path.name in message
    assert path.stem in message, "the hash that was committed"
    assert not report.ok
    assert any(path.name in str(finding) for finding in report.findings)
    with pytest.raises(Corrupt, match=path.name):
        retrain(ledger, 0, advantage_estimator="rloo")
    with open_ledger(ledger) as opened:
        trained = opened.reader("run", branch=None).table("step_committed")
        assert trained.num_rows == 4, "nothing was trained from it"


@pytest.fixture
def one_ulp(copied: Run) -> tuple[Path, str]:
    """One weight of the checkpoint of version 2, moved to the next float."""
    ledger, _ = copied
    path = ledger / "checkpoints" / "run" / "v000002" / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[3]
    flat = tensors[name].reshape(-1)
    flat[5] = np.nextafter(flat[5], np.float32(np.inf))
    save_file(tensors, path, metadata={"format": "pt"})
    return ledger, name


def test_one_weight_moved_by_one_ulp_is_named_by_verify(
    one_ulp: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, tensor = one_ulp
    code = replay.cli.main(["verify", "--ledger", str(ledger), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 1
    assert report["reproduced"] is False
    last = report["verdicts"][-1]
    assert (last["weight_version"], last["step"], last["kind"]) == (2, 1, "checkpoint")
    assert tensor in last["detail"]
    # The steps before it were run again and are right; so is the one that made version 2.
    assert [v["reproduced"] for v in report["verdicts"]] == [True, True, True, False]
    code = replay.cli.main(["verify", "--ledger", str(ledger), "--from-version", "2"])
    shown = capsys.readouterr()
    assert code == 1
    assert tensor in shown.out
    assert "version 2, step 1" in shown.err


def test_a_branch_is_not_trained_from_it(one_ulp: tuple[Path, str]) -> None:
    ledger, tensor = one_ulp
    with pytest.raises(Corrupt, match=tensor.replace(".", "[.]")):
        retrain(ledger, 3, advantage_estimator="rloo")


@pytest.mark.parametrize(
    "name", ["optimizer.safetensors", "random_state.safetensors", "trainer_state.json"]
)
def test_other_files_of_a_checkpoint(
    copied: Run, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, _ = copied
    path = ledger / "checkpoints" / "run" / "v000002" / name
    _flip(path, path.stat().st_size - 9)
    code = replay.cli.main(["verify", "--ledger", str(ledger), "--from-version", "2"])
    assert code == 1
    assert name in capsys.readouterr().out


def test_a_step_that_gives_other_bits_is_named(
    copied: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learning rate of one step is changed in the trainer: first its weights differ."""
    ledger, _ = copied
    from trainer.state import TrainState

    original = TrainState.optimizer_step
    steps = []

    def other(state: TrainState) -> tuple[bool, float, float]:
        steps.append(state)
        if len(steps) == 2:
            for group in state.optimizer.param_groups:
                group["weight_decay"] = 1e-3
        return original(state)

    monkeypatch.setattr(TrainState, "optimizer_step", other)
    code = replay.cli.main(["verify", "--ledger", str(ledger), "--json"])
    last = json.loads(capsys.readouterr().out)["verdicts"][-1]
    assert code == 1
    assert (last["weight_version"], last["step"], last["quantity"]) == (2, 1, "weights")
    assert "tensor 'model" in last["where"]


def test_the_first_checkpoint_missing_is_named_where_it_is_needed(
    copied: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, _ = copied
    shutil.rmtree(ledger / "checkpoints" / "run" / "v000000")
    where = ["--ledger", str(ledger)]
    assert replay.cli.main(["verify", *where]) == 1
    assert "v000000" in capsys.readouterr().out
    code = trainer.cli.main([*where, "--from-version", "1", "--advantage-estimator", "rloo"])
    assert code == 2
    error = capsys.readouterr().err
    assert "v000000" in error
    assert "Traceback" not in error
    # What begins at a later checkpoint does not need it.
    assert trainer.cli.main([*where, "--num-rollout", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weight_version"] == 5


def test_a_changed_signal_is_named_by_replay(
    copied: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step is right, but what was recorded of it is not what was committed."""
    ledger, _ = copied
    with open_ledger(ledger) as opened:
        file = opened.reader("run").segments("signal_recorded")[1].file
    assert file is not None
    _flip(ledger / file.path, (ledger / file.path).stat().st_size // 2)
    code = replay.cli.main(["verify", "--ledger", str(ledger)])
    shown = capsys.readouterr()
    assert code == 2
    assert Path(file.path).name in shown.err


def test_special_floats_of_log_probs_come_back_with_their_bits(copied: Run) -> None:
    """−0.0, −inf and NaNs with payloads go through append, file, SQL and batch unchanged."""
    from blake3 import blake3

    from ledger.events import PromptIssued, SampleScored, SegmentGenerated
    from trainer.batch import load_batch

    ledger, _ = copied
    bits = np.array([0x80000000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001], np.uint32)
    tokens = np.arange(1, 6, dtype=np.int32)
    prompt = np.array([7, 8], np.int32)
    with open_ledger(ledger) as opened:
        index = group = SAMPLE_SPAN - 1
        with opened.writer("run", producer="special") as writer:
            writer.append(
                [
                    PromptIssued(
                        prompt_id=blake3(prompt.tobytes()).digest(),
                        group_index=group,
                        rollout_step=99,
                        round=0,
                        indices=np.array([index]),
                        rollout_ids=np.array([index]),
                        tokens=prompt,
                        text="",
                        source="test",
                        source_row=0,
                        data_cursor=1,
                    ),
                    SegmentGenerated(
                        index=index,
                        rollout_id=index,
                        group_index=group,
                        rollout_step=99,
                        segment=0,
                        turn=0,
                        start=0,
                        tokens=tokens,
                        rollout_log_probs=bits.view(np.float32),
                        logprob_mode="full",
                        logprob_temperature=1.0,
                        span_starts=np.array([0], np.int32),
                        span_ends=np.array([5], np.int32),
                        span_versions=np.array([4]),
                        temperature=1.0,
                        top_p=1.0,
                        top_k=-1,
                        max_new_tokens=8,
                        stop_token_ids=np.array([2], np.int32),
                        sampling_seed=1,
                        finish_reason="length",
                        engine="test",
                        engine_version="1",
                    ),
                    SampleScored(
                        index=index,
                        rollout_id=index,
                        group_index=group,
                        raw_reward=1.0,
                        reward=1.0,
                        part_names=[],
                        part_values=np.array([]),
                        verifier="test",
                        verifier_version="1",
                    ),
                ]
            )
        reader = opened.reader("run")
        from_batch = load_batch(reader, [index]).rollout_log_probs_N
        from_sql = reader.sql(
            "select rollout_log_probs as x from segment_generated where index = $i", {"i": index}
        )["x"]
    assert np.array_equal(from_batch.view(np.uint32), bits)
    read = from_sql.combine_chunks().flatten().to_numpy()
    assert np.array_equal(read.view(np.uint32), bits)


def _with_merges(model: Path, target: Path, pairs: list[str]) -> Path:
    """A copy of the model whose tokenizer writes each pair of letters as one id of its own."""
    shutil.copytree(model, target)
    path = target / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab, reserved = tokenizer["model"]["vocab"], [f"<reserved_{i}>" for i in range(len(pairs))]
    for pair, name in zip(pairs, reserved, strict=True):
        vocab[pair] = vocab.pop(name)
    tokenizer["model"]["merges"] = [[pair[0], pair[1]] for pair in pairs]
    tokenizer["added_tokens"] = [
        token for token in tokenizer["added_tokens"] if token["content"] not in reserved
    ]
    path.write_text(json.dumps(tokenizer))
    return target


def test_ids_that_decode_and_encode_to_others_are_trained_as_stored(
    dense_run: Run, tiny_dense: Path, tmp_path: Path
) -> None:
    """The model samples letters one by one; its tokenizer would write common pairs as one id."""
    from ledger.encode import events_of
    from ledger.events import SegmentGenerated
    from trainer.batch import load_batch

    with open_ledger(dense_run[0]) as opened:
        said = opened.reader("run").sql("select response_text as t from sample_scored")["t"]
    texts = [text for text in said.to_pylist() if text.isalpha()]
    counted = Counter(text[i : i + 2] for text in texts for i in range(len(text) - 1))
    pairs = [pair for pair, _ in counted.most_common(8)]
    model = _with_merges(tiny_dense, tmp_path / "model", pairs)
    assert train(tmp_path / "ledger", model)["steps"] == 2
    with open_ledger(tmp_path / "ledger") as opened:
        reader = opened.reader("run")
        trained = reader.sql("select unnest(indices) as index from step_committed")["index"]
        segments = {
            s.index: s for s in events_of(reader.table("segment_generated"), SegmentGenerated)
        }
        batch = load_batch(reader, trained.to_numpy())
        shown = reader.sql("select count(*) as n from samples where retokenization_drift > 0")["n"][
            0
        ].as_py()
    drifted = [i for i in trained.to_pylist() if segments[i].retokenization_drift]
    assert drifted
    assert shown >= len(drifted), "the drift is counted, and can be asked for"
    for place, index in enumerate(trained.to_pylist()):
        first = batch.offsets_T[place] + batch.prompt_lengths_B[place]
        response = batch.tokens_T[first : batch.offsets_T[place + 1]]
        assert np.array_equal(response, segments[index].tokens)
