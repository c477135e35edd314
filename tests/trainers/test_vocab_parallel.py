"""Logprobs and entropy of a cut vocabulary against log_softmax in float64, forward and backward.

The cut over several ranks is tested by `test_megatron_model.py` and `test_megatron_parallel.py`.
"""

from __future__ import annotations

import pytest
import torch

from trainers.vocab_parallel import VocabSlice, vocab_parallel_logprobs


def _reference(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (logits.double() / temperature).log_softmax(-1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("num_padding", [0, 3])
@pytest.mark.parametrize("has_rows", [False, True])
def test_one_slice_equals_log_softmax(temperature: float, num_padding: int, has_rows: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (5 * torch.randn(20, 11 + num_padding, generator=generator)).requires_grad_()
    rows = torch.tensor([19, 2, 3, 7]) if has_rows else None
    size = 4 if has_rows else 20
    labels = torch.randint(0, 11, (size,), generator=generator)
    weights = torch.randn(2, size, generator=generator)

    found = vocab_parallel_logprobs(logits, labels, rows=rows, temperature=temperature, vocab=VocabSlice(0, 11, None))
    wanted = _reference((logits if rows is None else logits[rows])[:, :11], labels, temperature)
    gradients = []
    for result, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=5e-6)
    for pair in (found, wanted):
        (gradient,) = torch.autograd.grad((pair[0] * weights[0] + pair[1] * weights[1]).sum(), logits)
        gradients.append(gradient)
    torch.testing.assert_close(*gradients, rtol=0, atol=5e-6)
    assert (gradients[0][:, 11:] == 0).all()


def test_the_input_is_left_alone() -> None:
    logits = torch.randn(4, 6)
    before = logits.clone()
    vocab_parallel_logprobs(logits, torch.zeros(4).long(), rows=None, temperature=0.5, vocab=VocabSlice(0, 6, None))
    assert torch.equal(logits, before)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(
        logits, torch.tensor([0]), rows=None, temperature=1.0, vocab=VocabSlice(0, 3, None)
    )
    (logprobs + entropy).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert (logprobs.item(), entropy.item()) == (0.0, 0.0)


def test_no_rows_give_a_zero_gradient() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    empty = torch.zeros(0).long()
    logprobs, entropy = vocab_parallel_logprobs(
        logits, empty, rows=empty, temperature=1.0, vocab=VocabSlice(0, 5, None)
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert (logits.grad == 0).all()
