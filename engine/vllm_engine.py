"""A vLLM engine in this process, stepped by its owner: requests in, finished samples out, weights in place.

It knows nothing of versions, calls or buckets; `engine.generator` does. A replica of several tensor-parallel ranks is
`engine.vllm_parallel`'s.
Import it in a generator's process only: vLLM seeds the process, replaces `torch.set_num_threads` and more.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from engine.layout import TensorSpec
from engine.types import Sampling
from engine.vllm_weights import LiveWeights

if TYPE_CHECKING:
    from engine.inference_engine import WeightReceiver
    from engine.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One inference engine.

    Attributes:
        model_dir: Hugging Face folder (config.json and safetensors; no code of its own is run).
        dtype: "float32", "bfloat16" or "float16"; of weights, activations and key-value cache.
        max_model_len: most tokens of one sample, prompt and response together.
        max_num_seqs: samples that are decoded at the same time; more wait.
        max_num_batched_tokens: most tokens of one engine step; raised to `max_model_len` and `max_num_seqs` if below.
        kv_cache_bytes: of the key-value cache. None: 256 MiB on a CPU, what `gpu_memory_utilization` leaves on a GPU.
        gpu_memory_utilization: share of a GPU's memory for weights, activations and cache.
        prefix_caching: share the cache of equal prompt beginnings (whole blocks of them).
        enforce_eager: no compilation and no CUDA graphs. None: True on a CPU, False on a GPU.
        num_threads: of the kernels of each rank on a CPU; None: what the environment says. Samples are bitwise
            independent of their batch with 1.
        cpus: cores that every thread is bound to; `tp` ranks divide them. None leaves that to the environment.
        tp: tensor-parallel ranks.
        seed: of everything that a request's own seed does not decide; the same on all ranks.
    """

    model_dir: str
    dtype: str = "float32"
    max_model_len: int
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 8192
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    prefix_caching: bool = False
    enforce_eager: bool | None = None
    num_threads: int | None = None
    cpus: tuple[int, ...] | None = None
    tp: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class FinishedSample(NamedTuple):
    """One finished request: its id, its tokens (end token included), their processed logprobs, "stop" or "length"."""

    request_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str


class _OpenRequest:
    """What a request has drawn so far."""

    __slots__ = ("logprobs", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []


class VllmEngine:
    """vLLM's engine core, scheduler and model, in this process and without its front end.

    The front end (`LLMEngine`: input and output processors) makes text and streams; of a batch of 512 samples of 5
    tokens it takes an eighth of the time, for what is a few lists here. Between two calls of `step` nothing computes,
    so that weights may be read and, with no request open, written.
    """

    def __init__(self, spec: EngineSpec) -> None:
        """Load the model. Takes seconds.

        Raises:
            RuntimeError: the process was not started with `engine.vllm_cpu.worker_environment`.
        """
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise RuntimeError(
                "VLLM_ENABLE_V1_MULTIPROCESSING is "
                f"{os.environ.get('VLLM_ENABLE_V1_MULTIPROCESSING')!r} and must be '0' before vLLM is imported: start "
                "the generator's process with engine.vllm_cpu.worker_environment"
            )

        import torch

        from engine.vllm_cpu import prepare_process

        if spec.num_threads is not None:
            torch.set_num_threads(spec.num_threads)
        prepare_process()
        config = _engine_args(spec).create_engine_config()
        self._core = self._start_core(config)
        self._vocabulary_size = int(config.model_config.get_vocab_size())
        self._open: dict[str, _OpenRequest] = {}

    def _start_core(self, config: Any) -> Any:  # noqa: ANN401 - vLLM has no types for us
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        core = make_core(config, UniProcExecutor)
        self._weights = LiveWeights(core.engine_core.model_executor.driver_worker.get_model())
        return core

    @property
    def vocabulary_size(self) -> int:
        """Token ids are in [0, this); vLLM itself does not look, and an id beyond it ends the engine."""
        return self._vocabulary_size

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Processes that compute for this one."""
        return ()

    def param_specs(self) -> tuple[dict[str, TensorSpec], ...]:
        """The live parameters of every rank, by vLLM's names."""
        return (self._weights.specs(),)

    def attach(self, plan: Plan, folder: Path, num_slots: int) -> WeightReceiver:
        """Connect the parameters with the run's shared memory.

        Raises:
            WeightTransferError: the parameters are not those of the plan.
        """
        return self._weights.receiver(plan, 0, folder, num_slots)

    async def died(self) -> str:
        """Wait until a process of the engine other than this one has ended, and say which. Never, if there is none."""
        await anyio.sleep_forever()
        raise AssertionError("unreachable")

    def add(
        self,
        request_ids: Sequence[str],
        prompt_ids: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        priority: int,
    ) -> None:
        """Queue requests, all or none. A lower `priority` number goes first.

        Raises:
            ValueError: vLLM refuses one (a temperature out of range).
        """
        from vllm.v1.engine import EngineCoreRequest

        template = _sampling_params(sampling)
        now = time.time()  # of equal priority the order of arrival decides
        added: list[str] = []
        try:
            for request_id, prompt, seed in zip(request_ids, prompt_ids, seeds, strict=True):
                params = copy.copy(template)
                params.seed = seed
                self._open[request_id] = _OpenRequest()
                added.append(request_id)
                self._core.add_request(
                    EngineCoreRequest(
                        request_id=request_id,
                        prompt_token_ids=list(prompt),
                        mm_features=None,
                        sampling_params=params,
                        pooling_params=None,
                        arrival_time=now,
                        lora_request=None,
                        cache_salt=None,
                        data_parallel_rank=None,
                        priority=priority,
                    )
                )
        except BaseException:
            self.abort(added)
            raise

    def step(self) -> list[FinishedSample]:
        """Run one prefill or decode step; the samples that ended with it."""
        finished: list[FinishedSample] = []
        for output in self._core.get_output().outputs:
            request = self._open.get(output.request_id)
            if request is None:
                continue  # aborted

            if output.new_token_ids:
                request.token_ids += output.new_token_ids
                request.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                del self._open[output.request_id]
                reason = str(output.finish_reason)
                finished.append(FinishedSample(output.request_id, request.token_ids, request.logprobs, reason))
        return finished

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; those that are unknown or have finished are ignored."""
        known = [name for name in request_ids if self._open.pop(name, None) is not None]
        self._core.abort_requests(known)

    def repack(self, touched: Iterable[str] | None) -> int:
        """Make the kernels compute with parameters that were just written, None for all; the number of layers."""
        return self._weights.repack(touched)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prompt beginning: it was computed by older weights.

        Raises:
            RuntimeError: a request still holds cache blocks.
        """
        if not self._core.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: a request still holds blocks of it")

    def close(self) -> None:
        """Release the engine. No other method works afterwards."""
        self._core.shutdown()


def make_core(config: Any, executor_class: type) -> Any:  # noqa: ANN401 - vLLM has no types for us
    """Start vLLM's engine core in this process."""
    from vllm.v1.engine.core_client import EngineCoreClient

    return EngineCoreClient.make_client(
        multiprocess_mode=False,
        asyncio_mode=False,
        vllm_config=config,
        executor_class=executor_class,
        log_stats=False,
    )


def _engine_args(spec: EngineSpec) -> Any:  # noqa: ANN401 - vLLM has no types for us
    from vllm import EngineArgs

    from engine.vllm_cpu import DEFAULT_KV_CACHE_BYTES, needs_repack
    from engine.vllm_rank import EXTENSION

    on_cpu = needs_repack()
    kv_cache_bytes = spec.kv_cache_bytes
    if kv_cache_bytes is None and on_cpu:
        kv_cache_bytes = DEFAULT_KV_CACHE_BYTES
    return EngineArgs(
        model=spec.model_dir,
        dtype=spec.dtype,
        seed=spec.seed,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=max(spec.max_num_batched_tokens, spec.max_model_len, spec.max_num_seqs),
        kv_cache_memory_bytes=kv_cache_bytes,
        gpu_memory_utilization=spec.gpu_memory_utilization,
        enforce_eager=spec.enforce_eager if spec.enforce_eager is not None else on_cpu,
        enable_prefix_caching=spec.prefix_caching,
        # On a CPU a seeded request whose prompt is cut ends the engine ("CPU Generator does not use offset").
        enable_chunked_prefill=False if on_cpu else None,
        tensor_parallel_size=spec.tp,
        distributed_executor_backend="uni" if spec.tp == 1 else "mp",
        worker_extension_cls="" if spec.tp == 1 else EXTENSION,
        async_scheduling=False,  # else a step is still under way when `step` returns
        scheduling_policy="priority",
        logprobs_mode="processed_logprobs",
        generation_config="vllm",  # sampling is the recipe's, never the folder's
        skip_tokenizer_init=True,
        disable_log_stats=True,
        trust_remote_code=False,
        use_tqdm_on_load=False,
    )


def _sampling_params(sampling: Sampling) -> Any:  # noqa: ANN401 - vLLM has no types for us
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the recipe names the tokens that end a response; the folder does not add others
        logprobs=0,  # the drawn token's only
        detokenize=False,
        watermarking=False,
    )
