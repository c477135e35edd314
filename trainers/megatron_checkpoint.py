"""Checkpoints of the Megatron trainer: weights, optimizer and random state, through megatron.core.dist_checkpointing.

What is silently wrong in Megatron-Core 0.16.1 is not offered: the distributed optimizer is written as
`fully_reshardable` only (`dp_reshardable` resumes wrong), with the load fix of `megatron_cpu` and with the offsets put
right (`_offsets_without_padding`). Saving is synchronous and stays in this process: Megatron's own writer starts a
manager process by spawn, which hangs in a script without a `__main__` guard and in a Ray actor, and forks a process
that has threads.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainers.megatron_step import set_hyperparameters

if TYPE_CHECKING:
    from trainers.megatron_step import Learner
    from trainers.types import TrainerSpec

_SHARDING = "fully_reshardable"


def save(learner: Learner, folder: Path) -> None:
    """Write a checkpoint. Collective; all ranks give the same folder, which exists and is empty.

    Args:
        learner: what to save.
        folder: rank 0 writes the common part, every rank its own files.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    state = _sharded_state(learner, is_loading=False, with_random_state=True)
    with _writing_in_this_process():
        dist_checkpointing.save(
            state,
            str(folder),
            TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
            content_metadata=_parallel_sizes(learner.spec),
        )


def load(learner: Learner, folder: Path) -> None:
    """Read a checkpoint of the same model into a learner; collective.

    Another tp, pp, dp or `distributed` than the checkpoint's is fine for weights and optimizer; the random state is
    taken only if they are the same. Hyperparameters stay those of the learner's spec.

    Args:
        learner: built from the same model config.
        folder: of the user's own run: a checkpoint contains pickles.

    Raises:
        ValueError: there is no complete checkpoint in the folder.
    """
    from megatron.core import dist_checkpointing

    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise ValueError(f"{folder} holds no complete Megatron checkpoint (no metadata.json)")

    saved = dist_checkpointing.load_content_metadata(str(folder))
    with_random_state = saved == _parallel_sizes(learner.spec)
    wanted = _sharded_state(learner, is_loading=True, with_random_state=with_random_state)
    state = dist_checkpointing.load(wanted, str(folder))
    learner.model.module.load_state_dict(state["model"])
    learner.optimizer.load_state_dict(state["optimizer"])
    set_hyperparameters(learner.optimizer, learner.spec.optimizer)
    if with_random_state:
        _set_random_state(state["random_state"])


def _parallel_sizes(spec: TrainerSpec) -> dict[str, int | str]:
    return {"format": "asyncrl 1", "tp": spec.tp, "pp": spec.pp, "dp": spec.dp}


def _sharded_state(learner: Learner, *, is_loading: bool, with_random_state: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    metadata = {
        "distrib_optim_sharding_type": _SHARDING,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = learner.model.module.sharded_state_dict(metadata=metadata)
    with _offsets_without_padding(learner.optimizer):
        optimizer = learner.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    state = {"model": model, "optimizer": optimizer}
    if with_random_state:
        state["random_state"] = _random_state()
    return state


@contextmanager
def _offsets_without_padding(optimizer: Any) -> Iterator[None]:  # noqa: ANN401
    """Let `fully_reshardable` look up parameters where they are.

    It gathers the optimizer's buffers without the padding between buckets, and then cuts parameters out at their
    offsets with it. From the second bucket on that takes other parameters' numbers, and zeros at the end. A tied
    embedding on the first and last of several pipeline stages has a bucket of its own.
    """
    buffers = [buffer for inner in optimizer.chained_optimizers for buffer in getattr(inner, "buffers", ())]
    padded = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        starts, moved = [start for start, _ in buffer.bucket_indices], [0]
        for bucket in buffer.buckets:
            moved.append(moved[-1] + bucket.numel_unpadded)
        buffer.param_index_map = {
            parameter: (start - starts[bucket] + moved[bucket], end - starts[bucket] + moved[bucket], bucket)
            for parameter, (start, end, bucket) in buffer.param_index_map.items()
        }
        assert all(end <= buffer.numel_unpadded for _, end, _ in buffer.param_index_map.values())
    try:
        yield
    finally:
        for buffer, index_map in zip(buffers, padded, strict=True):
            buffer.param_index_map = index_map


def _random_state() -> Any:  # noqa: ANN401
    """This rank's generators, as one object a rank."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states = {"cpu": torch.get_rng_state(), "tracker": dict(get_cuda_rng_tracker().get_states())}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    ranks = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return ShardedObject("random_state", states, (ranks[0],), (ranks[1],))


def _set_random_state(states: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.set_rng_state(states["cpu"])
    get_cuda_rng_tracker().set_states(states["tracker"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@contextmanager
def _writing_in_this_process() -> Iterator[None]:
    """Exchange Megatron's writer, which starts processes, for one that does not, while a checkpoint is written."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategy

    theirs = filesystem_async.FileSystemWriterAsync

    class InProcessWriter(theirs):  # type: ignore[misc, valid-type]
        """Writes every bucket with the function that a forked process would have called."""

        @staticmethod
        def write_preloaded_data_multiproc(
            transforms: list[Any], _use_msc: bool, _rank: int, buckets: list[Any], results: queue.SimpleQueue[Any]
        ) -> None:
            results.put(_write_buckets(theirs.write_preloaded_data, transforms, buckets))

    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    make_queue = filesystem_async._get_write_results_queue
    torch_strategy.FileSystemWriterAsync = InProcessWriter
    filesystem_async._get_write_results_queue = lambda: answers
    try:
        yield
    finally:
        torch_strategy.FileSystemWriterAsync = theirs
        filesystem_async._get_write_results_queue = make_queue


def _write_buckets(write: Callable[..., None], transforms: list[Any], buckets: list[Any]) -> dict[int, Any] | Exception:
    """Call Megatron's per-file writer; return its results by file, or the first error, as Megatron expects them."""
    written: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        pending: queue.Queue[int] = queue.Queue()
        pending.put(index)
        write(transforms, index, bucket, answers, pending, use_fsync=True)
        _, result = answers.get()
        if isinstance(result, Exception):
            return result

        written[index] = result
    return written
