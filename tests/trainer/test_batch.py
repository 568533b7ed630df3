"""The batch of a step: pieces put together in order, each reward to its own sample, holes named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.errors import InvalidArgument, InvalidEvent, NotFound
from tests.trainer.memory import (
    MemoryReader,
    observation,
    prompt,
    routing,
    score,
    segment,
)
from trainer.batch import batch_digest, load_batch
from trainer.batch_routing import RoutingSource


def two_turns():
    """Sample 7: prompt 1 2, tokens 3 4 by version 0, tool 5, tokens 6 by version 1 then 8 by 2."""
    return [
        segment(7, [6, 8], [-0.5, -0.25], start=3, number=1, spans=[(0, 1, 1), (1, 2, 2)]),
        score(7, 0.5),
        observation(7, [5], start=2),
        segment(7, [3, 4], [-0.0, -np.inf], spans=[(0, 2, 0)], finish_reason="length"),
        prompt([7, 9], [1, 2], group=3),
    ]


def single(index=9, tokens=(11,), reward=1.0):
    return [segment(index, tokens, finish_reason="length"), score(index, reward)]


def test_pieces_are_put_together_by_start():
    batch = load_batch(MemoryReader([*two_turns(), *single()]), [9, 7])
    assert batch.indices_B.tolist() == [9, 7]
    assert batch.tokens_T.tolist() == [1, 2, 11, 1, 2, 3, 4, 5, 6, 8]
    assert batch.offsets_T.tolist() == [0, 3, 10]
    assert batch.offsets_N.tolist() == [0, 1, 6]
    assert batch.prompt_lengths_B.tolist() == [2, 2]
    assert batch.response_lengths_B.tolist() == [1, 5]
    assert batch.group_index_B.tolist() == [3, 3]
    assert batch.rollout_id_B.tolist() == [9, 7]
    assert batch.rewards_B.tolist() == [1.0, 0.5]
    assert batch.sampled_N.tolist() == [1, 1, 1, 0, 1, 1]
    assert batch.loss_mask_N.tolist() == [1, 1, 1, 0, 1, 1]
    assert batch.weight_versions_N.tolist() == [0, 0, 0, -1, 1, 2]
    assert batch.truncated_B.tolist() == [True, False]
    assert batch.logprob_temperatures_B.tolist() == [1.0, 1.0]
    assert batch.logprob_processed_B.tolist() == [False, False]
    assert batch.expert_ids is None


def test_log_probs_keep_their_bits_and_are_nan_where_nothing_was_sampled():
    batch = load_batch(MemoryReader([*two_turns(), *single()]), [7])
    expected = np.array([-0.0, -np.inf, np.nan, -0.5, -0.25], np.float32)
    assert batch.rollout_log_probs_N.tobytes() == expected.tobytes()


def test_the_last_score_counts():
    events = [*two_turns(), *single(), score(7, 4.0), score(9, 2.0), score(7, 3.0)]
    assert load_batch(MemoryReader(events), [7, 9]).rewards_B.tolist() == [3.0, 2.0]


def test_parts_of_the_last_score_are_columns():
    events = [
        *two_turns(),
        *single(),
        score(9, 1.0, parts={"right": 1.0, "form": -0.0}),
        score(7, 3.0, parts={"old": 9.0}),
        score(7, 3.0, parts={"right": 0.5}),
    ]
    batch = load_batch(MemoryReader(events), [7, 9])
    assert batch.part_names == ("form", "right")
    expected = np.array([[np.nan, 0.5], [-0.0, 1.0]])
    assert batch.reward_parts_BP.tobytes() == expected.tobytes()
    without = load_batch(MemoryReader([*two_turns(), *single()]), [7, 9])
    assert without.part_names == ()
    assert without.reward_parts_BP.shape == (2, 0)


def test_a_score_with_names_but_no_values_is_named():
    broken = dataclasses.replace(score(9, 1.0, parts={"right": 1.0}), part_values=np.zeros(0))
    with pytest.raises(InvalidEvent, match=r"sample 9\n.*1 parts\n.*0 values"):
        load_batch(MemoryReader([*single(), prompt([9], [1]), broken]), [9])


def test_an_empty_segment_is_no_overlap():
    events = two_turns()
    for start, number in ((2, 2), (5, 3)):
        events.append(segment(7, [], start=start, number=number, spans=[], finish_reason="abort"))
    batch = load_batch(MemoryReader(events), [7])
    assert batch.tokens_T.tolist() == [1, 2, 3, 4, 5, 6, 8]
    assert batch.weight_versions_N.tolist() == [0, 0, -1, 1, 2]


@pytest.mark.parametrize(
    ("missing", "message"),
    [(0, r"samples \[9\]\n.*segment_generated"), (1, r"samples \[9\]\n.*sample_scored")],
)
def test_what_is_missing_is_named(missing, message):
    events = [*two_turns(), *single()]
    del events[len(two_turns()) + missing]
    with pytest.raises(NotFound, match=message):
        load_batch(MemoryReader(events), [7, 9])


def test_unknown_sample():
    with pytest.raises(NotFound, match=r"samples \[8\]\n.*prompt_issued"):
        load_batch(MemoryReader([*two_turns(), *single()]), [7, 8])


@pytest.mark.parametrize("indices", [[], [7, 9, 7]])
def test_no_sample_or_one_twice(indices):
    with pytest.raises(InvalidArgument, match="each once"):
        load_batch(MemoryReader(two_turns()), indices)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (observation(9, [5], start=2), r"sample 9(.|\n)*offset 1\n.*a hole.*offset 2"),
        (observation(9, [5], start=0), r"sample 9(.|\n)*an overlap"),
        (segment(9, [5], start=1, spans=[(0, 0, 1)]), r"sample 9(.|\n)*0\.\.1"),
        (segment(9, [5, 6], start=1, spans=[(0, 1, 1), (0, 2, 1)]), r"starts \[0, 0\]"),
        (segment(9, [5], start=1, spans=[]), r"sample 9(.|\n)*starts \[\]"),
        (segment(9, [5], [-1.0, -1.0], start=1), "1 log-probs in the segment at offset 1"),
        (segment(9, [5], start=1, logprob_temperature=0.5), "one logprob_temperature"),
        (segment(9, [5], start=1, rollout_id=3), "rollout_id 9"),
        (observation(9, [5], start=1, rollout_id=3), "rollout_id 9"),
        (score(9, 1.0, rollout_id=3), "rollout_id 9"),
        (prompt([9], [1]), "one prompt"),
    ],
)
def test_pieces_that_do_not_fit_are_named(event, message):
    with pytest.raises(InvalidEvent, match=message):
        load_batch(MemoryReader([*two_turns(), *single(), event]), [7, 9])


IDS = np.arange(6 * 2 * 2).reshape(6, 2, 2) % 4


def test_routing_is_put_together_from_segments():
    events = [
        *two_turns(),
        *single(),
        routing(7, IDS[3:], start=3, number=1),
        routing(9, IDS[:2]),
        routing(7, IDS[:3]),
    ]
    batch = load_batch(MemoryReader(events), [9, 7])
    assert batch.expert_ids is not None
    assert [ids.tolist() for ids in batch.expert_ids] == [IDS[:2].tolist(), IDS.tolist()]


def twice(row: int, layer: int) -> np.ndarray:
    """IDS with one expert twice for a token."""
    made = IDS.copy()
    made[row, layer] = 3
    return made


@pytest.mark.parametrize(
    ("events", "message"),
    [
        # tokens − 2 rows, tokens rows
        ([routing(7, IDS[:5])], r"sample 7\n.*6 rows.*nothing for positions 5 to 5; segment 1 "),
        (
            [routing(7, np.concatenate([IDS, IDS[:1]]))],
            r"6 rows: one for each of its 7 tokens but the last\n.*7",
        ),
        # a missing turn, in the middle and at the end
        (
            [routing(7, IDS[:1]), routing(7, IDS[3:], start=3, number=1)],
            r"positions 1 to 2; segment 0 \(turn 0, length\) ends at 3",
        ),
        (
            [routing(7, IDS[:3])],
            r"positions 3 to 5; segment 1 \(turn 0, stop\) ends at 6",
        ),
        ([routing(7, IDS[:4]), routing(7, IDS[3:], start=3)], "position 4 of 6.*an overlap"),
        ([routing(7, IDS, number=3, expert_ids=b"short")], r"sample 7, segment 3\n.*5 bytes"),
        ([routing(7, IDS, num_experts=3)], r"ids below 3\n.*\[2, 3\], layer 1, position 0"),
        ([routing(7, IDS, dtype="int8")], "int8"),
        ([routing(7, IDS[:3]), routing(7, IDS[3:, :1], start=3)], "layers 2, as sample 7.*1"),
        ([routing(7, twice(4, 1))], r"2 different experts.*\[3, 3\], layer 1, position 4"),
        (
            [routing(7, IDS * [[[0, 0], [1, 1]]])],
            r"\[0, 0\], layer 0, position 0; the whole layer is zero: nobody captured it",
        ),
    ],
)
def test_holes_in_routing_are_named(events, message):
    with pytest.raises(InvalidEvent, match="(?s)" + message):
        load_batch(MemoryReader([*two_turns(), *single(), *events]), [7])


def test_the_call_that_was_aborted_without_routing_is_named():
    pieces = [
        prompt([7], [1, 2]),
        segment(7, [5, 6], number=0, finish_reason="abort"),
        segment(7, [5, 6, 8], start=2, number=1),
        score(7, 1.0),
    ]
    late = routing(7, IDS[:3], start=3, number=1)
    with pytest.raises(InvalidEvent, match=r"positions 0 to 2; segment 0 \(turn 0, abort\) ends"):
        load_batch(MemoryReader([*pieces, late]), [7])


def test_one_expert_a_token_and_a_layer_that_nobody_captured():
    ids = np.array([[[1], [0]]] * 6)
    some = [*two_turns(), *single(), routing(7, ids)]
    zero = [*some, routing(9, ids[:2])]
    with pytest.raises(InvalidEvent, match=r"(?s)layer 1\n.*expert 0 for every token"):
        load_batch(MemoryReader(zero), [7, 9])
    used = [*some, routing(9, 1 - ids[:2])]
    assert load_batch(MemoryReader(used), [7, 9]).expert_ids is not None


def test_routing_of_a_policy_is_apart_from_that_of_the_engine():
    by_policy = routing(9, IDS[2:4], number=-1, policy_version=3)
    events = [*two_turns(), *single(), routing(9, IDS[:2]), by_policy]
    reader = MemoryReader(events)
    batch = load_batch(reader, [9])
    assert batch.expert_ids is not None
    assert batch.expert_ids[0].tolist() == IDS[:2].tolist()
    batch = load_batch(reader, [9], routing=RoutingSource(policy_version=3))
    assert batch.expert_ids is not None
    assert batch.expert_ids[0].tolist() == IDS[2:4].tolist()
    assert load_batch(reader, [9], routing=None).expert_ids is None
    assert load_batch(reader, [9], routing=RoutingSource(policy_version=4)).expert_ids is None


WEIGHTS = np.linspace(0.1, 0.9, 24, dtype=np.float32).reshape(6, 2, 2)


def weighed(index, start, end, weights=WEIGHTS, number=0):
    stored = weights[start:end].tobytes()
    return routing(index, IDS[start:end], start=start, number=number, weights=stored)


def test_gate_weights_are_put_together_by_their_bits():
    events = [*two_turns(), *single(), weighed(7, 3, 6, number=1), weighed(7, 0, 3)]
    source = RoutingSource(weights=True)
    batch = load_batch(MemoryReader(events), [7], routing=source)
    assert batch.expert_weights is not None
    assert batch.expert_weights[0].tobytes() == WEIGHTS.tobytes()
    assert load_batch(MemoryReader(events), [7]).expert_weights is None
    bare = [*two_turns(), routing(7, IDS, number=5)]
    with pytest.raises(NotFound, match=r"(?s)sample 7, segment 5.*--record-routing-weights"):
        load_batch(MemoryReader(bare), [7], routing=source)
    for wrong, row in ((np.nan, 2), (np.inf, 4), (0.0, 5)):
        broken = WEIGHTS.copy()
        broken[row, 1] = wrong
        with pytest.raises(InvalidEvent, match=f"layer 1, position {row}"):
            load_batch(MemoryReader([*two_turns(), weighed(7, 0, 6, broken)]), [7], routing=source)


def test_routing_of_some_samples_only():
    events = [*two_turns(), *single(), routing(7, IDS)]
    with pytest.raises(NotFound, match=r"samples \[9\]"):
        load_batch(MemoryReader(events), [7, 9])
    assert load_batch(MemoryReader(events), [9]).expert_ids is None


def test_digest_covers_every_field_and_the_order():
    events = [*two_turns(), *single(), routing(7, IDS), routing(9, IDS[:2])]
    batch = load_batch(MemoryReader(events), [7, 9])
    digests = [batch_digest(batch), batch_digest(load_batch(MemoryReader(events), [9, 7]))]
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if field.name in ("part_names", "reward_parts_BP"):
            continue  # the step adds the parts that its estimator looks at
        if field.name == "num_experts":
            continue  # the ids say which experts
        if field.name == "expert_ids":
            changed: object = (value[0], 3 - value[1])
        elif field.name == "expert_weights":
            changed = (WEIGHTS, WEIGHTS[:2])
        elif value is None:
            changed = np.ones(3, np.int32)
        else:
            changed = value.copy()
            changed.view(np.uint8)[-1] ^= 1  # type: ignore[attr-defined]
        digests.append(batch_digest(dataclasses.replace(batch, **{field.name: changed})))
    digests.append(batch_digest(batch, [("old_log_probs", np.zeros(6, np.float32))]))
    assert len(set(digests)) == len(digests)
    assert batch_digest(load_batch(MemoryReader(events), [7, 9])) == digests[0]


@st.composite
def samples(draw):
    """Samples as lists of (sampled, tokens) pieces."""
    pieces = st.tuples(st.booleans(), st.lists(st.integers(0, 99), min_size=1, max_size=4))
    sample = st.lists(pieces, min_size=1, max_size=4).filter(lambda s: any(x for x, _ in s))
    return draw(st.lists(sample, min_size=1, max_size=5))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(samples(), st.randoms(use_true_random=False))
def test_any_samples_in_any_order(made, random):
    """Events shuffled, samples in another order: every token and reward is in its place."""
    prompts = [[1, 2], [3]]
    groups = [np.arange(g, len(made), 2) for g in (0, 1)]
    events = [prompt(groups[g], prompts[g], group=g) for g in (0, 1) if len(groups[g])]
    tokens, masks = [], []
    for index, pieces in enumerate(made):
        start = 0
        for number, (sampled, ids) in enumerate(pieces):
            if sampled:
                log_probs = [-float(i) for i in ids]
                events.append(segment(index, ids, log_probs, start=start, number=number))
            else:
                events.append(observation(index, ids, start=start))
            start += len(ids)
        events.append(score(index, index * 1.5))
        tokens.append([i for _, ids in pieces for i in ids])
        masks.append([int(sampled) for sampled, ids in pieces for _ in ids])
    random.shuffle(events)
    order = list(range(len(made)))
    random.shuffle(order)
    batch = load_batch(MemoryReader(events), order)
    for position, index in enumerate(order):
        t = slice(*batch.offsets_T[position : position + 2])
        n = slice(*batch.offsets_N[position : position + 2])
        assert batch.tokens_T[t].tolist() == [*prompts[index % 2], *tokens[index]]
        assert batch.group_index_B[position] == index % 2
        assert batch.sampled_N[n].tolist() == masks[index]
        expected = np.where(masks[index], -np.array(tokens[index], np.float32), np.nan)
        np.testing.assert_array_equal(batch.rollout_log_probs_N[n], expected)
        assert batch.rewards_B[position] == index * 1.5
