"""Micro-batches: fixed shape, recorded partition, each token in the column that predicts it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.errors import InvalidArgument
from tests.trainer.memory import MemoryReader, prompt, routing, score, segment
from tests.trainer.test_balance import long_tailed
from trainer.batch import Batch, load_batch
from trainer.microbatch import Partition, cut
from trainer.partition import PartitionTerms, partition_for
from trainer.settings import BatchSettings


def make_batch(prompts, responses, *, routed=False) -> Batch:
    events = []
    for index, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        base = 100 * index
        events.append(prompt([index], np.arange(base, base + p), group=index))
        events.append(segment(index, np.arange(base + p, base + p + r)))
        events.append(score(index, index))
        if routed:
            ids = np.arange((p + r - 1) * 2 * 2).reshape(-1, 2, 2) % 4
            events.append(routing(index, ids))
    return load_batch(MemoryReader(events), range(len(prompts)))


def plan(batch, *, terms=None, **sizes):
    lengths = batch.prompt_lengths_B + batch.response_lengths_B
    n = len(lengths)
    settings = BatchSettings(
        rollout_batch_size=n,
        n_samples_per_prompt=1,
        global_batch_size=n,
        num_steps_per_rollout=1,
        **({"micro_batch_size": 1} | sizes),
    )
    return partition_for(lengths, batch.indices_B, settings, terms or PartitionTerms())


def test_three_samples_in_rows_of_two():
    batch = make_batch([2, 1, 1], [1, 3, 1])
    made = plan(batch, micro_batch_size=2)
    assert made.order_B.tolist() == [0, 1, 2]
    assert made.offsets_M.tolist() == [0, 2, 3]
    assert made.ranks_M.tolist() == [0, 0]
    assert (made.rows, made.widths_M.tolist(), made.packed) == (2, [4, 4], False)
    first, last = cut(batch, made, made.of_rank(0))
    assert (first.number, last.number) == (0, 1)
    assert first.tokens_BT.tolist() == [[0, 1, 2, 0], [100, 101, 102, 103]]
    assert first.positions_BT.tolist() == [[0, 1, 2, 3]] * 2
    # Row 0 predicts its token 2 from column 1; row 1 its tokens 1, 2, 3 from columns 0, 1, 2.
    assert first.columns_n.tolist() == [1, 4, 5, 6]
    assert first.targets_n.tolist() == [2, 101, 102, 103]
    assert first.sample_n.tolist() == [0, 1, 1, 1]
    assert last.tokens_BT.tolist() == [[200, 201, 0, 0], [0, 0, 0, 0]]
    assert (last.columns_n.tolist(), last.targets_n.tolist()) == ([0], [201])
    assert (last.samples, last.responses) == (slice(2, 3), slice(4, 5))
    assert last.sequence_starts is None


def test_a_packed_row_holds_its_samples_one_after_the_other():
    batch = make_batch([2, 1, 1], [1, 3, 1])
    packed = Partition(
        order_B=np.arange(3),
        offsets_M=np.array([0, 2, 3], np.int32),
        ranks_M=np.array([0, 0], np.int32),
        rows=1,
        widths_M=np.array([8, 2], np.int32),
        packed=True,
    )
    first, last = cut(batch, packed, [0, 1])
    assert first.tokens_BT.tolist() == [[0, 1, 2, 100, 101, 102, 103, 0]]
    assert first.positions_BT.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert first.sequence_starts.tolist() == [0, 3, 7]
    assert first.columns_n.tolist() == [1, 3, 4, 5]
    assert first.targets_n.tolist() == [2, 101, 102, 103]
    assert last.tokens_BT.tolist() == [[200, 201]]
    assert last.sequence_starts.tolist() == [0, 2]


def test_seq_length_is_the_width_and_the_limit():
    batch = make_batch([2, 1], [1, 3])
    assert plan(batch, micro_batch_size=1, seq_length=4).widths_M.tolist() == [4, 4]
    assert plan(batch, micro_batch_size=1, seq_length=9).widths_M.tolist() == [9, 9]
    with pytest.raises(InvalidArgument, match=r"sample 1 \(4 tokens\)(.|\n)*--seq-length 3"):
        plan(batch, micro_batch_size=1, seq_length=3)


def test_ranks_get_consecutive_runs():
    batch = make_batch([1] * 8, [1] * 8)
    two = PartitionTerms(data_parallel_size=2)
    made = plan(batch, micro_batch_size=2, terms=two)
    assert made.ranks_M.tolist() == [0, 0, 1, 1]
    assert made.of_rank(1) == [2, 3]
    with pytest.raises(InvalidArgument, match="multiple of 2"):
        plan(batch, micro_batch_size=3, terms=two)


def test_balanced_ranks_get_as_many_samples_of_about_as_many_tokens():
    batch = make_batch([1] * 4, [9, 8, 1, 2])
    two = PartitionTerms(data_parallel_size=2)
    assert plan(batch, micro_batch_size=2, terms=two).order_B.tolist() == [0, 1, 2, 3]
    made = plan(batch, micro_batch_size=2, balance_data=True, terms=two)
    assert made.order_B.tolist() == [0, 2, 1, 3]
    assert made.ranks_M.tolist() == [0, 1]
    with pytest.raises(InvalidArgument, match="--balance-data"):
        plan(batch, micro_batch_size=3, balance_data=True, terms=two)


def test_tokens_fill_packed_micro_batches():
    batch = make_batch([1] * 5, [5, 3, 2, 11, 1])
    sizes = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 8}
    made = plan(batch, **sizes)
    assert made.packed
    assert made.rows == 1
    # 6 + 2, 4 + 3, and the sample of 12 tokens, which is longer, alone.
    assert made.order_B.tolist() == [0, 4, 1, 2, 3]
    assert made.offsets_M.tolist() == [0, 2, 4, 5]
    assert made.widths_M.tolist() == [8, 7, 12]
    for terms, widths in (
        (PartitionTerms(width_multiple=4), [8, 8, 12]),
        (PartitionTerms(micro_batch_multiple=2), [6, 4, 5, 12]),
        (PartitionTerms(context_parallel_size=2), [13, 14]),
    ):
        assert plan(batch, terms=terms, **sizes).widths_M.tolist() == widths
    with pytest.raises(InvalidArgument, match="both or neither"):
        plan(batch, max_tokens_per_gpu=8)
    with pytest.raises(InvalidArgument, match="--seq-length 9"):
        plan(batch, seq_length=9, **sizes)


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("n_ranks", [1, 4])
def test_packing_wastes_under_two_percent_of_long_tailed_lengths(n_ranks, multiple):
    """Padding among the tokens that are computed, 16 batches of 128 samples."""
    tokens = computed = 0
    for seed in range(16):
        lengths = long_tailed(128, seed)
        sizes = BatchSettings(
            rollout_batch_size=16,
            n_samples_per_prompt=8,
            global_batch_size=128,
            num_steps_per_rollout=1,
            micro_batch_size=1,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=4096,
        )
        terms = PartitionTerms(data_parallel_size=n_ranks, width_multiple=multiple)
        made = partition_for(lengths, np.arange(128), sizes, terms)
        assert made.widths_M.max() <= 4096
        tokens += int(lengths.sum())
        computed += int(made.widths_M.sum())
    assert computed < 1.02 * tokens
    assert (computed > tokens) == (multiple > 1)


def test_routing_is_padded_with_different_experts():
    batch = make_batch([2, 1], [1, 1], routed=True)
    (micro,) = cut(batch, plan(batch, micro_batch_size=3), [0])
    assert micro.expert_ids is not None
    assert micro.expert_ids.shape == (3, 3, 2, 2)
    assert batch.expert_ids is not None
    assert micro.expert_ids[0, :2].tolist() == batch.expert_ids[0].tolist()
    # The last token of a sample has the experts of the one before.
    assert micro.expert_ids[0, 2].tolist() == batch.expert_ids[0][1].tolist()
    assert micro.expert_ids[1, :1].tolist() == batch.expert_ids[1].tolist()
    assert micro.expert_ids[1, 1].tolist() == batch.expert_ids[1][0].tolist()
    assert micro.expert_ids[1, 2].tolist() == [[0, 1], [0, 1]]
    assert micro.expert_ids[2].tolist() == [[[0, 1], [0, 1]]] * 3


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_every_token_is_in_exactly_one_place(lengths, rows, spare):
    prompts, responses = ([length[i] for length in lengths] for i in (0, 1))
    batch = make_batch(prompts, [max(r, 1) for r in responses])
    longest = int((batch.prompt_lengths_B + batch.response_lengths_B).max())
    made = plan(batch, micro_batch_size=rows, seq_length=longest + spare)
    micros = cut(batch, made, range(len(made.ranks_M)))
    numbers = np.arange(len(batch.sampled_N), dtype=np.float64)
    seen = []
    for micro in micros:
        assert micro.tokens_BT.shape == (rows, longest + spare)
        # What a column predicts is the next token: exactly the response, in order.
        predicted = micro.tokens_BT.reshape(-1)[micro.columns_n + 1]
        assert predicted.tolist() == micro.targets_n.tolist()
        seen += numbers[micro.responses].tolist()
        response_tokens = [
            batch.tokens_T[end - n : end]
            for end, n in zip(batch.offsets_T[1:], batch.response_lengths_B, strict=True)
        ][micro.samples]
        assert predicted.tolist() == np.concatenate(response_tokens).tolist()
        counts = np.bincount(micro.sample_n, minlength=micro.samples.stop - micro.samples.start)
        assert counts.tolist() == batch.response_lengths_B[micro.samples].tolist()
    assert seen == numbers.tolist()
