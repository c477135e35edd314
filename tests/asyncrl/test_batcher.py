"""The batcher, against a reference that packs token by token and shares no code with it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.batcher import BatchSpec, make_batch
from asyncrl.types import Group, Prompt, SampleFailure, Trajectory, VersionSpan
from trainers.types import Batch, MicroBatch

SPEC = BatchSpec(dp=1, micro_batch_tokens=1000, normalize_std=True, pack_all=False)
COLUMNS = ("token_ids", "labels", "loss_mask", "advantages", "generator_logprobs")


@dataclass(frozen=True)
class Sample:
    """One response, drawn: tokens, which of them are trained on, the version of each, the reward."""

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    versions: tuple[int, ...]
    reward: float


def trajectory(uid: str, sample_index: int, sample: Sample) -> Trajectory:
    length = len(sample.tokens)
    return Trajectory(
        prompt_uid=uid,
        sample_index=sample_index,
        draw=0,
        attempt=0,
        token_ids=np.array(sample.tokens, np.int32),
        loss_mask=np.array(sample.trained, np.float32),
        generator_logprobs=np.array([-token / 8 - sample_index for token in sample.tokens], np.float32),
        versions=tuple(VersionSpan(start=at, stop=at + 1, version=sample.versions[at]) for at in range(length)),
        text="",
        reward=sample.reward,
        correct=None,
        finish_reason="stop",
    )


def group(index: int, prompt_ids: tuple[int, ...], samples: Sequence[Sample]) -> Group:
    prompt = Prompt(uid=f"p{index}", index=index, text="", token_ids=prompt_ids, answer="")
    return Group(prompt=prompt, trajectories=tuple(trajectory(f"p{index}", k, s) for k, s in enumerate(samples)))


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(0, 6))
    return Sample(
        tokens=tuple(draw(st.lists(st.integers(0, 40), min_size=length, max_size=length))),
        trained=tuple(draw(st.lists(st.sampled_from([True, True, False]), min_size=length, max_size=length))),
        versions=tuple(sorted(draw(st.lists(st.integers(0, 3), min_size=length, max_size=length)))),
        reward=draw(st.sampled_from([0.0, 0.5, 1.0, -2.0, 0.1])),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[Group, ...]:
    """The groups of one step; prompts have tokens of their own, so that every packed sequence names its prompt."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 5), st.lists(samples(), max_size=4)), max_size=5))
    return tuple(
        group(index, tuple(100 * (index + 1) + place for place in range(length)), drawn)
        for index, (length, drawn) in enumerate(shapes)
    )


SPECS = st.builds(
    BatchSpec,
    dp=st.integers(1, 3),
    micro_batch_tokens=st.integers(4, 40),
    normalize_std=st.booleans(),
    pack_all=st.booleans(),
)


def reference_advantages(rewards: Sequence[float], *, normalize_std: bool) -> list[float]:
    """DeepSeekMath (arXiv 2402.03300), section 4.1.2, with the sample deviation."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)

    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) + 1e-4
    return [(reward - mean) / (deviation if normalize_std else 1.0) for reward in rewards]


Position = tuple[int, int, float, float, float]
"""Token that is read, label, mask, advantage, generator logprob."""


def reference(groups: Sequence[Group], spec: BatchSpec) -> tuple[list[tuple[Position, ...]], int, int | None]:
    """The sequences that must be packed, token by token; the denominator; the oldest version that is trained."""
    sequences: list[tuple[Position, ...]] = []
    num_loss_tokens, versions = 0, []
    for each in groups:
        advantages = reference_advantages([t.reward for t in each.trajectories], normalize_std=spec.normalize_std)
        for t, advantage in zip(each.trajectories, advantages, strict=True):
            written = t.token_ids.tolist()
            whole = [*each.prompt.token_ids, *written]
            first = len(each.prompt.token_ids)
            positions: list[Position] = []
            for at in range(1, len(whole)):
                trained = at >= first and t.loss_mask[at - first] == 1
                num_loss_tokens += trained
                logprob = float(t.generator_logprobs[at - first]) if trained else 0.0
                positions.append((whole[at - 1], whole[at], float(trained), advantage if trained else 0.0, logprob))
            has_gradient = any(position[2] for position in positions) and (advantage != 0.0 or spec.pack_all)
            if has_gradient:
                sequences.append(tuple(positions))
                versions += [
                    span.version for span in t.versions for at in range(span.start, span.stop) if t.loss_mask[at] == 1
                ]
    return sequences, num_loss_tokens, min(versions, default=None)


def unpack(batch: Batch) -> list[tuple[Position, ...]]:
    """The sequences of a batch; the one masked position of a rank without a share is none."""
    sequences: list[tuple[Position, ...]] = []
    for micro in (micro for rank in batch.micro_batches for micro in rank):
        columns = [getattr(micro, name) for name in COLUMNS]
        assert all(column.shape == (sum(micro.lengths),) for column in columns)
        start = 0
        for length in micro.lengths:
            rows = zip(*(column[start : start + length].tolist() for column in columns), strict=True)
            sequences.append(tuple(rows))
            start += length
    return [sequence for sequence in sequences if any(position[2] for position in sequence)]


def rounded(sequences: Sequence[tuple[Position, ...]]) -> Counter[tuple[Position, ...]]:
    return Counter(
        tuple((token, label, mask, round(advantage, 5) + 0.0, logprob) for token, label, mask, advantage, logprob in s)
        for s in sequences
    )


@given(steps(), SPECS)
def test_every_sequence_with_a_gradient_exactly_once(groups: tuple[Group, ...], spec: BatchSpec) -> None:
    """Over all DP ranks and micro-batches: every token, label, mask, advantage and logprob, and nothing else."""
    sequences, num_loss_tokens, oldest_version = reference(groups, spec)
    batch = make_batch(7, groups, spec)
    assert rounded(unpack(batch)) == rounded(sequences)
    assert batch.step == 7
    assert batch.num_loss_tokens == num_loss_tokens, "those that were left out are part of the mean"
    assert batch.oldest_version == oldest_version
    assert batch.is_empty == (not sequences)


@given(steps(), SPECS)
def test_shape_of_a_batch(groups: tuple[Group, ...], spec: BatchSpec) -> None:
    """Every rank takes part, budgets hold, ranks are balanced, types are the declared ones."""
    batch = make_batch(0, groups, spec)
    assert len(batch.micro_batches) == spec.dp
    assert all(batch.micro_batches), "a rank without a micro-batch would leave the others waiting"
    for micro in (micro for rank in batch.micro_batches for micro in rank):
        assert sum(micro.lengths) <= spec.micro_batch_tokens or len(micro.lengths) == 1
        assert all(length >= 1 for length in micro.lengths)
        assert [getattr(micro, name).dtype for name in COLUMNS] == [np.int64] * 2 + [np.float32] * 3
        outside = micro.loss_mask == 0
        assert not micro.advantages[outside].any()
        assert not micro.generator_logprobs[outside].any()
    loads = [
        sum(length + 1 for micro in rank for length in micro.lengths if micro.loss_mask.any())
        for rank in batch.micro_batches
    ]
    longest = max((len(s) + 1 for s in unpack(batch)), default=0)
    assert max(loads) - min(loads) <= longest


@given(steps(), SPECS)
def test_micro_batches_are_full(groups: tuple[Group, ...], spec: BatchSpec) -> None:
    """The first sequence of a micro-batch did not fit into the one before."""
    for rank in make_batch(0, groups, spec).micro_batches:
        for before, after in itertools.pairwise(rank):
            assert sum(before.lengths) + after.lengths[0] > spec.micro_batch_tokens


@pytest.mark.parametrize(("budget", "lengths"), [(6, [(3, 3), (3, 3)]), (5, [(3,)] * 4), (9, [(3, 3, 3), (3,)])])
def test_a_budget_may_be_used_up(budget: int, lengths: list[tuple[int, ...]]) -> None:
    """Sequences of 4 tokens have 3 positions."""
    drawn = [Sample(tokens=(5, 6, 2), trained=(True,) * 3, versions=(0,) * 3, reward=float(k)) for k in range(4)]
    spec = BatchSpec(dp=1, micro_batch_tokens=budget, normalize_std=True, pack_all=True)
    (rank,) = make_batch(0, [group(0, (1,), drawn)], spec).micro_batches
    assert [micro.lengths for micro in rank] == lengths


@given(steps(), SPECS, SPECS)
def test_split_free_loss(groups: tuple[Group, ...], one: BatchSpec, other: BatchSpec) -> None:
    """What is trained does not depend on how a batch is cut into ranks and micro-batches, to the bit."""
    same = BatchSpec(
        dp=other.dp,
        micro_batch_tokens=other.micro_batch_tokens,
        normalize_std=one.normalize_std,
        pack_all=one.pack_all,
    )
    a, b = make_batch(0, groups, one), make_batch(0, groups, same)
    assert Counter(unpack(a)) == Counter(unpack(b))
    assert (a.num_loss_tokens, a.oldest_version) == (b.num_loss_tokens, b.oldest_version)


@given(steps(), SPECS)
def test_same_groups_same_bits(groups: tuple[Group, ...], spec: BatchSpec) -> None:
    one, two = make_batch(0, groups, spec), make_batch(0, groups, spec)
    for a, b in zip(one.micro_batches, two.micro_batches, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.lengths == y.lengths
            assert all(getattr(x, name).tobytes() == getattr(y, name).tobytes() for name in COLUMNS)


@given(steps(), SPECS)
def test_one_way_data(groups: tuple[Group, ...], spec: BatchSpec) -> None:
    """Packing changes no group, and a batch cannot be written to nor be changed through a group's arrays."""
    names = ("token_ids", "loss_mask", "generator_logprobs")
    arrays = [getattr(t, name) for each in groups for t in each.trajectories for name in names]
    before = [array.copy() for array in arrays]
    batch = make_batch(0, groups, spec)
    assert all(np.array_equal(array, copy) for array, copy in zip(arrays, before, strict=True))
    for micro in (micro for rank in batch.micro_batches for micro in rank):
        for name in COLUMNS:
            column = getattr(micro, name)
            with pytest.raises(ValueError, match="read-only"):
                column[:] = 0
            assert not any(np.shares_memory(column, array) for array in arrays)


def test_the_example_of_the_docstring() -> None:
    right = Sample(tokens=(5, 6, 2), trained=(True,) * 3, versions=(4, 4, 5), reward=1.0)
    wrong = Sample(tokens=(7,), trained=(True,), versions=(5,), reward=0.0)
    (rank,) = make_batch(6, [group(0, (1, 9), [right, wrong])], SPEC).micro_batches
    (micro,) = rank
    assert micro.token_ids.tolist() == [1, 9, 5, 6, 1, 9]
    assert micro.labels.tolist() == [9, 5, 6, 2, 9, 7]
    assert micro.lengths == (4, 2)
    assert micro.loss_mask.tolist() == [0, 1, 1, 1, 0, 1]
    good, bad = micro.advantages[1], micro.advantages[5]
    assert good == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4))
    assert bad == -good
    assert micro.advantages.tolist() == [0, good, good, good, 0, bad]
    assert micro.generator_logprobs.tolist() == [0, -0.625, -0.75, -0.25, 0, -1.875]


def test_equal_rewards_have_no_gradient_but_count() -> None:
    same = Sample(tokens=(5, 2), trained=(True, True), versions=(1, 1), reward=1.0)
    batch = make_batch(3, [group(0, (1,), [same] * 3)], SPEC)
    assert batch.is_empty
    assert batch.num_loss_tokens == 6
    assert batch.oldest_version is None
    with_entropy = make_batch(
        3, [group(0, (1,), [same] * 3)], BatchSpec(dp=1, micro_batch_tokens=1000, normalize_std=True, pack_all=True)
    )
    assert not with_entropy.is_empty
    assert (with_entropy.num_loss_tokens, with_entropy.oldest_version) == (6, 1)
    assert not with_entropy.micro_batches[0][0].advantages.any()


@pytest.mark.parametrize("dp", [1, 2])
def test_nothing_at_all_still_makes_a_batch(dp: int) -> None:
    """Everything failed, or there was no prompt: every rank has one masked position, and nothing is trained."""
    failure = SampleFailure(prompt_uid="p0", sample_index=0, attempt=2, reason="", traceback="")
    prompt = Prompt(uid="p0", index=0, text="", token_ids=(1,), answer="")
    spec = BatchSpec(dp=dp, micro_batch_tokens=10, normalize_std=True, pack_all=True)
    for groups in ((), (Group(prompt=prompt, trajectories=(), failures=(failure,)),)):
        batch = make_batch(5, groups, spec)
        assert batch.is_empty
        assert (batch.num_loss_tokens, batch.oldest_version) == (0, None)
        assert [[micro.lengths for micro in rank] for rank in batch.micro_batches] == [[(1,)]] * dp


def test_a_failed_sample_changes_its_groups_advantages_only() -> None:
    good = Sample(tokens=(5,), trained=(True,), versions=(0,), reward=1.0)
    bad = Sample(tokens=(6,), trained=(True,), versions=(0,), reward=0.0)
    spec = BatchSpec(dp=1, micro_batch_tokens=100, normalize_std=False, pack_all=False)
    whole = group(0, (1,), [good, bad, bad, bad])
    short = Group(prompt=whole.prompt, trajectories=whole.trajectories[:2])
    assert set(make_batch(0, [whole], spec).micro_batches[0][0].advantages.tolist()) == {0.75, -0.25}
    assert set(make_batch(0, [short], spec).micro_batches[0][0].advantages.tolist()) == {0.5, -0.5}


def test_a_version_that_wrote_only_masked_tokens_is_not_trained() -> None:
    """Staleness is measured on trained tokens: a tool's output, say, may be older."""
    mixed = Sample(tokens=(5, 6), trained=(False, True), versions=(0, 3), reward=1.0)
    other = Sample(tokens=(5,), trained=(True,), versions=(4,), reward=0.0)
    assert make_batch(5, [group(0, (1,), [mixed, other])], SPEC).oldest_version == 3


def test_a_micro_batch_has_no_other_columns() -> None:
    """A new one needs a place in these tests."""
    assert {item.name for item in fields(MicroBatch)} == {*COLUMNS, "lengths"}
