"""Fused rotary embeddings and gated activation against their formulas in float64, forward and backward."""

from __future__ import annotations

import torch

from trainers.fused_cpu import SwiGlu, rotate_packed


def test_rotation_restarts_at_every_sequence() -> None:
    """The formula of a rotation in the plane of (x_i, x_{i + d/2}), position by position."""
    lengths, heads, dim = (3, 1, 7), 2, 6
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(sum(lengths), heads, dim, generator=generator).requires_grad_()
    weights = torch.randn(t.shape, generator=generator)
    frequencies = torch.tensor([1.0, 0.3, 0.01])
    angles = torch.arange(max(lengths))[:, None] * torch.cat((frequencies, frequencies))
    ends = torch.tensor((0, *lengths)).cumsum(0).int()

    found = rotate_packed(t, ends, angles[:, None, None, :])
    rows, row = [], 0
    for length in lengths:
        for position in range(length):
            first, second = t[row].double().chunk(2, dim=-1)
            cos, sin = (position * frequencies.double()).cos(), (position * frequencies.double()).sin()
            rows.append(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
            row += 1
    wanted = torch.stack(rows)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-6)
    (gradient,), (expected,) = (torch.autograd.grad((x * weights).sum(), t) for x in (found, wanted))
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)


def test_gated_activation_equals_its_formula() -> None:
    generator = torch.Generator().manual_seed(3)
    x = (3 * torch.randn(5, 1, 14, generator=generator)).requires_grad_()
    weights = torch.randn(5, 1, 7, generator=generator)
    found = SwiGlu(config=None)(x)
    gate, up = x.double().chunk(2, dim=-1)
    wanted = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
    (gradient,), (expected,) = (torch.autograd.grad((y * weights).sum(), x) for y in (found, wanted))
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5)
