"""One training rank: a process that holds a part of the model and runs Megatron-Core in it.

The class is cheap to import and to construct, so that the driver can place it; torch and megatron come with `start`.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.families import megatron_coordinates, megatron_layout
from engine.seeds import Purpose, derive_seed
from engine.worker_process import ignore_interrupt, peak_memory_bytes, pin_threads
from trainers.types import MicroBatch, RankInfo, RankStepResult, TrainerSpec

if TYPE_CHECKING:
    from engine.plan import Plan
    from engine.snapshot import SnapshotWriter
    from engine.types import FloatArray
    from trainers.megatron_step import Learner


_CUDA_ENVIRONMENT = {
    # Megatron warns otherwise: with more queues a collective may overtake the kernel that it waits for.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # The same seeds, the same bits: what Megatron-LM's `--deterministic-mode` asks of Transformer Engine, cuBLAS, NCCL.
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "^NVLS",
}


class MegatronRank:
    """One rank of the Megatron trainer.

    Calls: `listen` on rank 0, then `start` on all ranks at once, `attach`, `snapshot`, then `step` by `step`. `start`,
    `step`, `logprobs`, `save`, `load` and `export` are collective: every rank must get the call. Ranks are in
    Megatron's default order, see `engine.families.megatron_coordinates`.
    """

    def __init__(self, spec: TrainerSpec, rank: int) -> None:
        """Args:
        spec: the same on all ranks.
        rank: in [0, spec.num_ranks).
        """
        self._spec = spec
        self._rank = rank
        self._place = megatron_coordinates(rank, tp=spec.tp, pp=spec.pp, dp=spec.dp)
        hf_config = json.loads(Path(spec.model_dir, "config.json").read_text())
        self._hf_config: Mapping[str, Any] = hf_config
        self._layout = megatron_layout(hf_config, tp=spec.tp, pp=spec.pp, dp=spec.dp, dtype=spec.dtype)
        self._socket: socket.socket | None = None
        self._learner: Learner | None = None
        self._writer: SnapshotWriter | None = None
        self._stopped = threading.Event()

    def watch(self) -> None:
        """Return after `stop`. Awaited for the whole run, beside the other calls, so that a death shows at once."""
        self._stopped.wait()

    def listen(self, host: str) -> int:
        """Open the port that the ranks meet at, on this host's address only, and return its number. Rank 0 only."""
        assert self._rank == 0, f"only rank 0 listens, this is {self._rank}"
        self._socket = socket.create_server((host, 0))
        return int(self._socket.getsockname()[1])

    def start(self, master_addr: str, master_port: int) -> RankInfo:
        """Meet the other ranks, build this one's part of the model and load its weights.

        Args:
            master_addr, master_port: where rank 0 listens. A loopback address keeps all connections on this machine.

        Raises:
            ValueError: the model folder does not fit the config, or asks for something unsupported.
        """
        timings: dict[str, float] = {}
        ignore_interrupt()
        self._pin_threads()
        for name, value in _CUDA_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        with _timed(timings, "import"):
            import torch

            from trainers import megatron_cpu

            megatron_cpu.install()

            from trainers import megatron_model, megatron_step

        torch.set_num_threads(self._num_threads())
        with _timed(timings, "build"):
            self._join(master_addr, master_port)
            dtype = megatron_model.torch_dtype(self._spec.dtype)
            config = megatron_model.transformer_config(self._hf_config, tp=self._spec.tp, pp=self._spec.pp, dtype=dtype)
            module = megatron_model.build_model(self._hf_config, config)
        with _timed(timings, "load"):
            parameters = megatron_model.layout_parameters(module)
            megatron_model.load_weights(parameters, self._layout, self._rank, Path(self._spec.model_dir))
            self._learner = megatron_step.Learner.build(self._spec, module, self._hf_config["vocab_size"])
        self._pin_threads()  # those that the libraries have started too
        gc.collect()
        gc.freeze()  # a full collection over Megatron's and torch's own objects costs a tenth of a second
        return RankInfo(
            rank=self._rank,
            tp_rank=self._place.tensor,
            pp_rank=self._place.pipeline,
            dp_rank=self._place.data,
            pid=os.getpid(),
            device=f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu",
            num_parameters=sum(parameter.numel() for parameter in parameters.values()),
            timings_s=timings,
            peak_memory_bytes=peak_memory_bytes(),
        )

    def attach(self, plan: Plan, folder: str, num_slots: int) -> None:
        """Create this rank's segment in the store.

        Args:
            plan: its source layout must be this trainer's.
            folder: the run's shared-memory folder.
            num_slots: versions that the store can hold.
        """
        from engine.snapshot import SnapshotWriter
        from trainers import megatron_model

        parameters = megatron_model.layout_parameters(self._started().model.module)
        self._writer = SnapshotWriter(plan, self._rank, parameters, Path(folder), num_slots)

    def snapshot(self, version: int, epoch: int, slot: int) -> dict[int, str]:
        """Write the weights as they are; return bucket id -> digest of this rank's buckets."""
        assert self._writer is not None, "attach comes before snapshot"
        return self._writer.write(version, epoch, slot)

    def step(
        self, micro_batches: tuple[MicroBatch, ...], step: int, num_loss_tokens: int, epoch: int, slot: int
    ) -> RankStepResult:
        """Train on this DP rank's micro-batches and, before anything else can happen, snapshot version `step + 1`.

        Args:
            micro_batches: at least one.
            step: counted from 0.
            num_loss_tokens: the denominator, over all DP ranks.
            epoch, slot: where the snapshot goes. Without `attach` there is none.

        Raises:
            NonFiniteLoss: on all ranks alike; weights and optimizer are as they were.
        """
        assert micro_batches, "every DP rank needs at least one micro-batch"
        learner, seconds = self._started(), dict[str, float]()
        with _timed(seconds, "total"):
            with _timed(seconds, "forward_backward"):
                metrics = learner.forward_backward(micro_batches, num_loss_tokens)
                learner.wait()
            with _timed(seconds, "optimizer"):
                grad_norm = learner.check_and_clip(metrics, step)
                lr = learner.update(step)
                learner.wait()
            with _timed(seconds, "snapshot"):
                digests = self._writer.write(step + 1, epoch, slot) if self._writer is not None else {}
        return RankStepResult(
            metrics=replace(metrics, grad_norm=grad_norm, lr=lr),
            digests=digests,
            timings_ms={name: value * 1e3 for name, value in seconds.items()},
            peak_memory_bytes=peak_memory_bytes(),
        )

    def logprobs(self, micro_batches: tuple[MicroBatch, ...]) -> tuple[FloatArray, ...] | None:
        """Return the logprob of every label, float32 [T] a micro-batch; None except from the rank that reports."""
        learner = self._started()
        results = learner.logprobs(micro_batches)
        return results if learner.is_reporter else None

    def save(self, folder: str) -> None:
        """Write this rank's part of a checkpoint into an existing, empty folder that all ranks see."""
        from trainers import megatron_checkpoint

        megatron_checkpoint.save(self._started(), Path(folder))

    def load(self, folder: str) -> None:
        """Take weights, optimizer and random state from a folder that `save` filled."""
        from trainers import megatron_checkpoint

        megatron_checkpoint.load(self._started(), Path(folder))

    def export(self, folder: str, dtype: str | None = None) -> None:
        """Write a Hugging Face folder; rank 0 writes, the others send it their boxes.

        Args:
            folder: existing, empty.
            dtype: "float32" or "bfloat16"; None keeps the trainer's.
        """
        from trainers import megatron_export, megatron_model

        parameters = megatron_model.layout_parameters(self._started().model.module)
        target = self._spec.dtype if dtype is None else dtype
        megatron_export.export(parameters, self._layout, self._rank, Path(self._spec.model_dir), Path(folder), target)

    def stop(self) -> None:
        """Close the segment and leave the other ranks; calling again does nothing."""
        self._stopped.set()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

        if self._learner is not None:
            self._learner = None
            import torch.distributed
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()

    def _started(self) -> Learner:
        assert self._learner is not None, "start comes first"
        return self._learner

    def _pin_threads(self) -> None:
        if self._spec.cpus is not None:
            pin_threads(self._spec.cpus[self._rank])

    def _num_threads(self) -> int:
        if self._spec.num_threads is not None:
            return self._spec.num_threads

        return len(self._spec.cpus[self._rank]) if self._spec.cpus is not None else 1

    def _join(self, master_addr: str, master_port: int) -> None:
        """Initialize torch.distributed, Megatron's groups and the random state."""
        from datetime import timedelta

        import torch
        import torch.distributed
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        if master_addr in ("127.0.0.1", "localhost", "::1"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        timeout = timedelta(seconds=self._spec.collective_timeout_s)
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            master_addr,
            master_port,
            self._spec.num_ranks,
            is_master=self._rank == 0,
            timeout=timeout,
            master_listen_fd=self._socket.detach() if self._socket is not None else None,
        )
        self._socket = None  # the store owns it now
        torch.distributed.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=store,
            rank=self._rank,
            world_size=self._spec.num_ranks,
            timeout=timeout,
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self._spec.tp,
            pipeline_model_parallel_size=self._spec.pp,
            distributed_timeout_minutes=max(1, round(self._spec.collective_timeout_s / 60)),
            create_gloo_process_groups=False,
        )
        found = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        assert found == (self._place.pipeline, self._place.data, self._place.tensor), (found, self._place)
        seed = derive_seed(self._spec.seed, Purpose.TRAINER_RANK, self._place.data)
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Store how long the block took."""
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
