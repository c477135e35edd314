"""One training step on one rank: forward and backward over packed micro-batches, checks, optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from trainers.base import NonFiniteLoss
from trainers.learning_rate import learning_rate
from trainers.losses import policy_loss
from trainers.megatron_model import packed_sequences, torch_dtype
from trainers.types import MicroBatch, OptimizerSpec, StepMetrics, TrainerSpec
from trainers.vocab_parallel import VocabSlice, vocab_parallel_logprobs


class _PackedTensors(NamedTuple):
    """A `MicroBatch` on the device. `rows` are the N of its T positions that are trained on."""

    token_ids: Tensor  # int64 [1, T]
    sequences: Any  # Megatron's PackedSeqParams
    rows: Tensor  # int64 [N]
    labels: Tensor  # int64 [N]
    weights: Tensor  # float32 [N], the loss mask
    advantages: Tensor  # float32 [N]
    generator_logprobs: Tensor  # float32 [N]


class _Sums(NamedTuple):
    """What a step adds up over its tokens, in the order of the all-reduced vector."""

    loss: float
    entropy: float
    clipped: float
    generator_kl: float
    tokens: float


def make_optimizer(spec: OptimizerSpec, model: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """Return Megatron's optimizer for a model that is wrapped in Megatron's DDP.

    Weight decay leaves biases and norms out (Megatron's standard overrides).
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides

    config = OptimizerConfig(
        optimizer="adam",
        lr=spec.lr,
        adam_beta1=spec.betas[0],
        adam_beta2=spec.betas[1],
        adam_eps=spec.eps,
        weight_decay=spec.weight_decay,
        clip_grad=spec.clip_grad,
        use_distributed_optimizer=spec.distributed,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    optimizer = get_megatron_optimizer(
        config, [model], get_standard_config_overrides(config), use_gloo_process_groups=False
    )
    set_hyperparameters(optimizer, spec)
    return optimizer


def set_hyperparameters(optimizer: Any, spec: OptimizerSpec) -> None:  # noqa: ANN401
    """Set what a loaded checkpoint may have changed. The learning rate is set anew at every step."""
    for group in optimizer.param_groups:
        group.update(betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay * group["wd_mult"])


@dataclass(frozen=True, slots=True)
class Learner:
    """One rank's model, gradients and optimizer.

    Attributes:
        spec: the trainer's.
        model: `GPTModel` in Megatron's DistributedDataParallel.
        optimizer: from `make_optimizer`.
        vocab: which tokens this rank's logits are for.
        is_reporter: one rank of each DP rank adds to the metrics: last pipeline stage, first tensor rank.
    """

    spec: TrainerSpec
    model: Any
    optimizer: Any
    vocab: VocabSlice
    is_reporter: bool

    @classmethod
    def build(cls, spec: TrainerSpec, module: Any, vocab_size: int) -> Learner:  # noqa: ANN401
        """Wrap a `GPTModel` whose weights are loaded.

        Args:
            spec: the trainer's.
            module: this rank's `GPTModel`.
            vocab_size: without padding.
        """
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=spec.optimizer.distributed,
            overlap_grad_reduce=False,
            overlap_param_gather=False,  # else parameters are stale right after a step, and so is its snapshot
        )
        model = DistributedDataParallel(module.config, ddp, module)
        optimizer = make_optimizer(spec.optimizer, model, torch_dtype(spec.dtype))
        # The batch's own denominator is in the loss already: gradients are summed over ranks and not divided again.
        module.config.finalize_model_grads_func = lambda chunks, _num_tokens, **kwargs: finalize_model_grads(
            chunks, None, **kwargs
        )
        tp_rank, columns = parallel_state.get_tensor_model_parallel_rank(), -(-vocab_size // spec.tp)
        first = tp_rank * columns
        num_tokens = min(max(vocab_size - first, 0), columns)
        group = parallel_state.get_tensor_model_parallel_group()
        is_reporter = parallel_state.is_pipeline_last_stage() and tp_rank == 0
        return cls(spec, model, optimizer, VocabSlice(first, num_tokens, group), is_reporter)

    @staticmethod
    def wait() -> None:
        """Wait for the device, so that times are those of the work."""
        torch.cuda.synchronize()  # nothing, on a CPU: see megatron_cpu

    def forward_backward(self, micro_batches: tuple[MicroBatch, ...], num_loss_tokens: int) -> StepMetrics:
        """Leave the gradient of sum(token losses) / num_loss_tokens, over all DP ranks, in the buffers.

        Returns:
            The metrics, reduced over all ranks; `grad_norm` and `lr` are not known yet (NaN).
        """
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = self._run(micro_batches, partial(self._loss, num_loss_tokens), forward_only=False)
        sums = torch.zeros(len(_Sums._fields) + 1, dtype=torch.float64)
        highest = torch.zeros(1, dtype=torch.float64)
        if self.is_reporter:
            sums[-1] = sum(len(micro.token_ids) for micro in micro_batches)
            for result in results:
                sums[:-1] += result[:-1]
                highest = highest.maximum(result[-1:])

        if torch.distributed.get_world_size() > 1:
            sums, highest = (x.to(torch.cuda.current_device()) for x in (sums, highest))
            torch.distributed.all_reduce(sums)
            torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
        return _metrics(_Sums(*sums[:-1].tolist()), highest.item(), num_loss_tokens, round(sums[-1].item()))

    def check_and_clip(self, metrics: StepMetrics, step: int) -> float:
        """Clip the gradient and return its norm before clipping.

        Raises:
            NonFiniteLoss: loss or norm is not finite; on every rank alike, because both are reduced over all ranks.
        """
        if not math.isfinite(metrics.loss):
            raise NonFiniteLoss(_non_finite("loss", metrics.loss, step))

        # The parts of ChainedOptimizer.step, megatron/core/optimizer/optimizer.py, with the check between them.
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise NonFiniteLoss(_non_finite("gradient norm", norm, step))

        if self.spec.optimizer.clip_grad > 0.0:
            from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

            for inner in self.optimizer.chained_optimizers:
                clip_grad_by_total_norm_fp32(inner.get_parameters(), self.spec.optimizer.clip_grad, norm)
        return norm

    def update(self, step: int) -> float:
        """Apply the clipped gradient and return the learning rate. All parameters are gathered when this returns."""
        lr = learning_rate(self.spec.optimizer, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        is_applied = self.optimizer.step_with_ready_grads()
        assert is_applied, "without a loss scaler every step is applied"
        return lr

    def logprobs(self, micro_batches: tuple[MicroBatch, ...]) -> tuple[np.ndarray[Any, np.dtype[np.float32]], ...]:
        """Return the logprob of every label, float32 [T] a micro-batch; empty except on the last pipeline stage."""
        with torch.no_grad():
            results = self._run(micro_batches, self._label_logprobs, forward_only=True)
        return tuple(result.cpu().numpy() for result in results)

    def _run(self, micro_batches: tuple[MicroBatch, ...], compute: Any, *, forward_only: bool) -> list[Tensor]:  # noqa: ANN401
        """Send the micro-batches through Megatron's schedule; `compute(batch, output)` runs on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:  # noqa: ANN401
            batch = _to_device(next(batches), every_position=forward_only)
            output = model(batch.token_ids, None, None, packed_seq_params=batch.sequences)
            return output, partial(compute, batch)

        results: list[Tensor] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=self.model,
            num_microbatches=len(micro_batches),
            seq_length=1,  # ignored: lengths are variable
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results

    def _loss(self, num_loss_tokens: int, batch: _PackedTensors, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Megatron's loss function: (what to differentiate, its token count, what to report)."""
        logprobs, entropy = vocab_parallel_logprobs(
            logits[0], batch.labels, rows=batch.rows, temperature=self.spec.loss.temperature, vocab=self.vocab
        )
        tokens = policy_loss(logprobs, entropy, batch.generator_logprobs, batch.advantages, self.spec.loss)
        loss = (tokens.loss * batch.weights).sum()
        columns = torch.stack((tokens.loss.detach(), entropy.detach(), tokens.is_clipped, tokens.generator_kl))
        sums = (columns.double() * batch.weights).sum(dim=1)
        highest = tokens.ratio.amax().double() if len(batch.rows) else sums.new_zeros(())
        report = torch.cat((sums, batch.weights.sum().double()[None], highest[None]))
        return loss / num_loss_tokens, torch.zeros((), dtype=torch.int, device=loss.device), report.cpu()

    def _label_logprobs(self, batch: _PackedTensors, logits: Tensor, *, non_loss_data: bool = True) -> Tensor:
        assert non_loss_data
        return vocab_parallel_logprobs(
            logits[0], batch.labels, rows=None, temperature=self.spec.loss.temperature, vocab=self.vocab
        )[0]


def _to_device(micro: MicroBatch, *, every_position: bool) -> _PackedTensors:
    device = torch.cuda.current_device()
    rows = np.arange(len(micro.labels)) if every_position else micro.loss_mask.nonzero()[0]
    # Arrays that come from another process are read-only, which torch.from_numpy refuses: indexing copies.
    columns = (micro.labels, micro.loss_mask, micro.advantages, micro.generator_logprobs)
    labels, weights, advantages, generator_logprobs = (torch.from_numpy(x[rows]).to(device) for x in columns)
    return _PackedTensors(
        token_ids=torch.from_numpy(micro.token_ids.copy())[None].to(device),
        sequences=packed_sequences(micro.lengths),
        rows=torch.from_numpy(rows).to(device),
        labels=labels,
        weights=weights,
        advantages=advantages,
        generator_logprobs=generator_logprobs,
    )


def _metrics(sums: _Sums, ratio_max: float, num_loss_tokens: int, num_positions: int) -> StepMetrics:
    num_trained = max(sums.tokens, 1.0)
    return StepMetrics(
        loss=sums.loss / num_loss_tokens,
        grad_norm=math.nan,
        lr=math.nan,
        entropy=sums.entropy / num_trained,
        clip_fraction=sums.clipped / num_trained,
        ratio_max=ratio_max,
        generator_kl=sums.generator_kl / num_trained,
        num_tokens=num_positions,
    )


def _non_finite(what: str, value: float, step: int) -> str:
    return (
        f"step {step}: the {what} is {value}; the weights are as they were before the step. Look at the batch's "
        "generator_logprobs and advantages, and lower trainer.optimizer.lr or the clip range if it has been growing"
    )
