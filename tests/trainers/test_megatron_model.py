"""Megatron computes what Hugging Face computes: logits, logprobs, gradients, with packing, tied and untied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers

from trainers.megatron_model import _check_supported
from trainers.types import Batch, LossSpec, MicroBatch, OptimizerSpec

if TYPE_CHECKING:
    from tests.trainers.conftest import Batches, StartTrainer


@pytest.fixture(params=["tied", "untied"])
def model_dir(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(f"{request.param}_model")
    return folder


def _reference(folder: Path, micro: MicroBatch) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """The Hugging Face model and its logits of every sequence, one sequence at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sequences = torch.from_numpy(micro.token_ids).split(list(micro.lengths))
    return model, [model(sequence[None]).logits[0] for sequence in sequences]


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_equal_hugging_face(start_trainer: StartTrainer, batches: Batches, model_dir: Path, tp: int) -> None:
    micro = batches.micro(1, 5, 30, 5, 17)
    _, expected = _reference(model_dir, micro)
    columns = start_trainer(model_dir=str(model_dir), tp=tp).probe("logits", micro)
    wanted = torch.cat(expected).detach().numpy()
    logits = np.concatenate(columns, axis=1)[:, : wanted.shape[1]]  # without the padding
    assert np.abs(wanted).max() > 1.0
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
def test_logprobs_equal_hugging_face(
    start_trainer: StartTrainer, batches: Batches, model_dir: Path, sizes: dict[str, int]
) -> None:
    temperature, dp = 0.7, sizes.get("dp", 1)
    shares = tuple((batches.micro(4, 9), batches.micro(12)) for _ in range(dp))
    trainer = start_trainer(model_dir=str(model_dir), loss=LossSpec(temperature=temperature), **sizes)
    answers = trainer.run("logprobs", shares)
    for share, answer in zip(shares, answers, strict=True):
        for micro, logprobs in zip(share, answer, strict=True):
            _, logits = _reference(model_dir, micro)
            wanted = (
                (torch.cat(logits) / temperature).log_softmax(-1).gather(1, torch.from_numpy(micro.labels)[:, None])
            )
            assert logprobs.dtype == np.float32
            np.testing.assert_allclose(logprobs, wanted[:, 0].detach().numpy(), rtol=0, atol=1e-4)


def _reference_loss(logits: torch.Tensor, micro: MicroBatch, spec: LossSpec, num_loss_tokens: int) -> torch.Tensor:
    """The loss written down a second time, token by token where that matters."""
    log_p = (logits / spec.temperature).log_softmax(-1)
    total = logits.new_zeros(())
    for t in np.flatnonzero(micro.loss_mask):
        logprob = log_p[t, int(micro.labels[t])]
        ratio = torch.exp(logprob - float(micro.generator_logprobs[t]))
        advantage = float(micro.advantages[t])
        clipped = torch.clamp(ratio, 1 - spec.clip_low, 1 + spec.clip_high)
        surrogate = torch.min(ratio * advantage, clipped * advantage)
        entropy = -(log_p[t].exp() * log_p[t]).sum()
        total = total - surrogate - spec.entropy_coef * entropy
    return total / num_loss_tokens


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_gradient_equals_hugging_face_autograd(
    start_trainer: StartTrainer, batches: Batches, model_dir: Path, sizes: dict[str, int]
) -> None:
    micro, spec, num_loss_tokens = batches.micro(7, 2, 19, 11), LossSpec(entropy_coef=0.05, temperature=1.3), 40
    model, logits = _reference(model_dir, micro)
    _reference_loss(torch.cat(logits), micro, spec, num_loss_tokens).backward()

    trainer = start_trainer(model_dir=str(model_dir), loss=spec, optimizer=OptimizerSpec(lr=0.1), **sizes)
    gradient = trainer.canonical(trainer.probe("forward_backward", (micro,), num_loss_tokens))
    wanted = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert set(gradient) == set(wanted)
    for name, expected in wanted.items():
        scale = np.abs(expected).max()
        assert scale > 0 or name.endswith("k_proj.bias"), name  # softmax does not see a constant shift of all keys
        np.testing.assert_allclose(gradient[name], expected, rtol=0, atol=max(1e-4 * scale, 1e-7), err_msg=name)


@pytest.mark.parametrize("sizes", [{}, {"dp": 2}], ids=str)
def test_a_step_equals_torch_adamw(
    start_trainer: StartTrainer, batches: Batches, tied_model: Path, sizes: dict[str, int]
) -> None:
    """Clipping, learning rate, weight decay and update, on Hugging Face's gradient. A large eps keeps Adam smooth."""
    micro, spec, num_loss_tokens = batches.micro(7, 2, 19, 11), LossSpec(entropy_coef=0.05), 30
    optimizer = OptimizerSpec(lr=0.02, betas=(0.8, 0.9), eps=1e-2, weight_decay=0.3, clip_grad=0.4, warmup_steps=2)
    model, logits = _reference(tied_model, micro)
    loss = _reference_loss(torch.cat(logits), micro, spec, num_loss_tokens)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
    decayed, plain = ([p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-2).step()

    trainer = start_trainer(loss=spec, optimizer=optimizer, **sizes)
    parts = batches.split(micro)
    shares = tuple(tuple(parts[rank :: trainer.spec.dp]) for rank in range(trainer.spec.dp))
    result = trainer.step(Batch(step=0, micro_batches=shares, num_loss_tokens=num_loss_tokens, oldest_version=None))
    assert (result.loss, result.grad_norm) == pytest.approx((loss.item(), norm.item()), rel=1e-5)
    assert result.lr == pytest.approx(0.01)
    weights = trainer.canonical(trainer.probe("weights"))
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(weights[name], parameter.detach().numpy(), rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'silu', but config.json has 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window False, but config.json has True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'default'"),
        ({"model_type": "llama"}, "model_type 'qwen2'"),
    ],
)
def test_unsupported_models_are_refused(tied_model: Path, change: dict[str, object], message: str) -> None:
    config = json.loads((tied_model / "config.json").read_text())
    _check_supported(config)
    with pytest.raises(ValueError, match=message):
        _check_supported(config | change)
