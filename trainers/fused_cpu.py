"""What Transformer Engine fuses on a GPU, in few passes over memory on a CPU. torch only, no megatron.

On a small model a training step is bound by such passes: with Megatron's own code the gated activation took a third of
it, and the rotary embedding did work in Python for every sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Rotate(torch.autograd.Function):
    """x * cos + swapped halves * sin, with the first half of `sin` negated (RoFormer, arXiv 2104.09864, equation 34,
    with halves in place of pairs). The backward is the rotation by the opposite angle.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1).mul_(sin).addcmul_(x, cos)


def rotate_packed(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *, cp_size: int = 1, cp_rank: int = 0, **_: object
) -> Tensor:
    """Apply rotary embeddings with positions that restart at every sequence.

    The signature is that of Transformer Engine's `fused_apply_rotary_pos_emb_thd`, whose place it takes on a CPU.

    Args:
        t: [T, heads, head dim].
        cu_seqlens: int32 [sequences + 1].
        freqs: [longest sequence, 1, 1, head dim], the angles, the same in both halves.
        cp_size, cp_rank: context parallelism, not supported here.
    """
    assert cp_size == 1, f"packed rotary embeddings on a CPU have no context parallelism, got cp_size={cp_size}"
    half = t.shape[-1] // 2
    assert freqs.shape[-1] == t.shape[-1], "partial rotary embeddings are not supported on a CPU"
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    positions = torch.arange(t.shape[0], dtype=starts.dtype) - starts
    angles = freqs[:, 0]
    sin = torch.cat((-angles[..., :half].sin(), angles[..., half:].sin()), dim=-1)
    cos, sin = (table.to(t.dtype).index_select(0, positions) for table in (angles.cos(), sin))
    rotated: Tensor = _Rotate.apply(t, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class SwiGlu:
    """SiLU of the first half of the last dim times the second half (arXiv 2002.05202, equation 6).

    It takes the place of Transformer Engine's `SwiGLU` as a Megatron layer's activation. Not a torch module: it has no
    state, and Megatron asks every module for its part of a checkpoint.
    """

    def __init__(self, **_: object) -> None:
        """Args:
        _: what Megatron hands to every activation (its config).
        """

    def __call__(self, x: Tensor) -> Tensor:
        """[..., 2 n] -> [..., n]."""
        out: Tensor = _SwiGlu.apply(x)  # type: ignore[no-untyped-call]
        return out


class _SwiGlu(torch.autograd.Function):
    """Keeps the input only, and writes both halves of its gradient into one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        gate_grad, up_grad = out.chunk(2, dim=-1)
        torch.mul(torch.nn.functional.silu(gate), grad, out=up_grad)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
        return out
