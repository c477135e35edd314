"""Logprobs and entropy of a vocabulary that is cut over tensor-parallel ranks, with their gradient. torch only."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor


class VocabSlice(NamedTuple):
    """Which tokens this rank's columns stand for.

    Attributes:
        first: token id of the first column.
        num_tokens: columns that are tokens; the ones behind are padding, of probability 0.
        group: the tensor-parallel ranks; None or a group of one needs no communication.
    """

    first: int
    num_tokens: int
    group: torch.distributed.ProcessGroup | None


def vocab_parallel_logprobs(
    logits: Tensor, labels: Tensor, *, rows: Tensor | None, temperature: float, vocab: VocabSlice
) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature) at the labels, and the entropy of that distribution.

    The maximum and the sums go through two all-reduces of [N] and [3, N]; no rank sees another one's logits. The
    normalisation is that of Megatron-LM (arXiv 1909.08053, section 3, vocabulary-parallel cross entropy).

    Args:
        logits: [T, columns of this rank], any float dtype.
        labels: int64 [N], token ids.
        rows: int64 [N], distinct rows of `logits` that are wanted; None is all of them (N = T).
        temperature: > 0.
        vocab: what this rank's columns are.

    Returns:
        logprobs float32 [N] and entropy float32 [N] (nats), the same on all ranks of the group.

    Example: uniform logits over 64 tokens give logprob -4.159 and entropy 4.159 at every temperature.
    """
    assert temperature > 0.0, f"temperature must be > 0, got {temperature}"
    result: tuple[Tensor, Tensor] = _VocabParallelLogprobs.apply(logits, labels, rows, temperature, vocab)  # type: ignore[no-untyped-call]
    return result


class _VocabParallelLogprobs(torch.autograd.Function):
    """d logprob / d z_j = [j = label] - p_j and d entropy / d z_j = -p_j (log p_j + entropy), with z = logits / T."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logits: Tensor,
        labels: Tensor,
        rows: Tensor | None,
        temperature: float,
        vocab: VocabSlice,
    ) -> tuple[Tensor, Tensor]:
        tokens = logits[:, : vocab.num_tokens]
        chosen = tokens.clone() if rows is None else tokens.index_select(0, rows)  # a copy: all below is in place
        scaled = chosen.float().div_(temperature)
        if vocab.num_tokens > 0:
            highest = scaled.amax(dim=-1)
        else:
            highest = torch.full((len(labels),), -torch.inf, device=logits.device)
        _all_reduce(highest, torch.distributed.ReduceOp.MAX, vocab)
        scaled.sub_(highest[:, None])

        place = labels - vocab.first
        is_here = (place >= 0) & (place < vocab.num_tokens)
        place = place.clamp_(0, max(vocab.num_tokens - 1, 0))
        weights = scaled.exp()
        sums = torch.zeros(3, len(labels), device=logits.device)
        torch.sum(weights, dim=-1, out=sums[0])
        torch.sum(weights.mul_(scaled), dim=-1, out=sums[1])
        if vocab.num_tokens > 0:
            sums[2] = scaled.gather(1, place[:, None])[:, 0].masked_fill_(~is_here, 0.0)
        _all_reduce(sums, torch.distributed.ReduceOp.SUM, vocab)

        log_total = sums[0].log()
        entropy = log_total - sums[1] / sums[0]
        ctx.save_for_backward(scaled.sub_(log_total[:, None]), place, is_here, entropy, rows)
        ctx.temperature, ctx.shape, ctx.dtype = temperature, logits.shape, logits.dtype
        return sums[2] - log_total, entropy

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        logprob_grad: Tensor,
        entropy_grad: Tensor,
    ) -> tuple[Tensor, None, None, None, None]:
        logprobs, place, is_here, entropy, rows = ctx.saved_tensors
        num_tokens = logprobs.shape[1]
        grad = (logprobs + entropy[:, None]).mul_(-entropy_grad[:, None]).sub_(logprob_grad[:, None])
        grad.mul_(logprobs.exp())
        if num_tokens > 0:
            grad.scatter_add_(1, place[:, None], (logprob_grad * is_here)[:, None])
        grad.div_(ctx.temperature)

        if rows is None and num_tokens == ctx.shape[1]:
            return grad.to(ctx.dtype), None, None, None, None

        full = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad.device)
        if rows is None:
            full[:, :num_tokens] = grad
        else:
            full[:, :num_tokens].index_copy_(0, rows, grad.to(ctx.dtype))
        return full, None, None, None, None


def _all_reduce(tensor: Tensor, op: torch.distributed.ReduceOp.RedOpType, vocab: VocabSlice) -> None:
    if vocab.group is not None and vocab.group.size() > 1:
        torch.distributed.all_reduce(tensor, op, group=vocab.group)
