"""Packed attention against one sequence at a time, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.packing import PackedAttention, group_sequences

_LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12).map(tuple)


@given(_LENGTHS)
def test_groups_hold_every_row_once(lengths: tuple[int, ...]) -> None:
    groups = group_sequences(lengths)
    assert sum(count for count, _ in groups.shapes) == len(lengths)
    num_padded = sum(count * length for count, length in groups.shapes)
    assert len(groups.rows) == num_padded
    assert len(groups.padding) == num_padded - sum(lengths)
    assert torch.equal(groups.rows[groups.places], torch.arange(sum(lengths)))
    assert not set(groups.places.tolist()) & set(groups.padding.tolist())
    for count, length in groups.shapes:
        assert count > 0
        assert length > 0


def test_groups_pad_little() -> None:
    groups = group_sequences((2, 40, 3, 100, 95, 41))
    assert groups.shapes == ((2, 100), (2, 41), (2, 3))
    assert not groups.is_identity
    assert group_sequences((7, 7, 7)).is_identity


def _one_by_one(tensors: tuple[torch.Tensor, ...], lengths: tuple[int, ...]) -> torch.Tensor:
    """Plain causal softmax attention, a loop over sequences and heads, in float64."""
    q, k, v = tensors
    repeat = q.shape[1] // k.shape[1]
    outputs = []
    for a, b, c in zip(*(x.double().split(list(lengths)) for x in (q, k, v)), strict=True):
        heads = []
        for head in range(q.shape[1]):
            scores = a[:, head] @ b[:, head // repeat].T / q.shape[2] ** 0.5
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            heads.append(scores.softmax(-1) @ c[:, head // repeat])
        outputs.append(torch.stack(heads, dim=1))
    return torch.cat(outputs)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", [(1,), (5, 5, 5), (1, 9, 30, 2, 2, 17, 60, 44), (3, 20, 4)], ids=str)
def test_packed_attention_equals_one_sequence_at_a_time(lengths: tuple[int, ...], kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    total, heads, dim = sum(lengths), 4, 8
    q, k, v = (torch.randn(total, n, dim, generator=generator).requires_grad_() for n in (heads, kv_heads, kv_heads))
    weights = torch.randn(total, heads, dim, generator=generator)
    packed = SimpleNamespace(groups=group_sequences(lengths))

    found = PackedAttention()(q, k, v, packed_seq_params=packed)
    wanted = _one_by_one((q, k, v), lengths)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-6)
    gradients = torch.autograd.grad((found * weights).sum(), (q, k, v))
    for gradient, expected in zip(gradients, torch.autograd.grad((wanted * weights).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5)
