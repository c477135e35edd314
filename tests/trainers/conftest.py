"""Fixtures of the trainer's tests: a model folder, random batches, and rank processes that are started once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt
import pytest

from engine.families import megatron_layout
from engine.workers import WorkerError
from trainers.megatron_group import MegatronTrainer
from trainers.types import Batch, LossSpec, MicroBatch, OptimizerSpec, StepResult, TrainerSpec

Arrays = dict[str, npt.NDArray[np.float32]]
COLUMNS = ("token_ids", "labels", "loss_mask", "advantages", "generator_logprobs")
VOCABULARY = 61  # not divisible by two: the padding is tested too
HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 32, 2, 4, 2, 64


class ProcessRank:
    """A rank in another process; an `engine.workers.Worker`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        address = str(folder / f"{name}.socket")
        with Listener(address, family="AF_UNIX") as listener:
            root = Path(__file__).parents[2]
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("rank_server.py")), address],
                env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            )
            self._connection: Connection = listener.accept()

    def send(self, method: str, *args: object, **kwargs: object) -> None:
        self._connection.send((method, args, kwargs))

    def receive(self) -> Any:  # noqa: ANN401
        answer, error = self._connection.recv()
        if error is not None:
            raise error

        return answer

    async def call(self, method: str, *args: object, deadline_s: float | None, **kwargs: object) -> Any:  # noqa: ANN401
        try:
            with anyio.fail_after(deadline_s):
                self.send(method, *args, **kwargs)
                return await anyio.to_thread.run_sync(self.receive)
        except Exception as error:
            raise WorkerError(f"{self.name}.{method} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RankPool:
    """Processes that are started when first needed and then play one rank after another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[ProcessRank] = []

    def ranks(self, num_ranks: int) -> list[ProcessRank]:
        while len(self._processes) < num_ranks:
            self._processes.append(ProcessRank(f"rank-{len(self._processes)}", self._folder))
        return self._processes[:num_ranks]

    def close(self) -> None:
        for process in self._processes:
            process.close()


class RunningTrainer:
    """A started trainer, driven synchronously."""

    def __init__(self, spec: TrainerSpec, ranks: list[ProcessRank]) -> None:
        self.spec = spec
        self.ranks = ranks
        self.layout = megatron_layout(
            json.loads(Path(spec.model_dir, "config.json").read_text()),
            tp=spec.tp,
            pp=spec.pp,
            dp=spec.dp,
            dtype=spec.dtype,
        )
        self.group = MegatronTrainer(spec, ranks, start_deadline_s=120, step_deadline_s=60, disk_deadline_s=60)

    def run(self, method: str, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        """Run one method of the `MegatronTrainer`."""

        async def call() -> object:
            return await getattr(self.group, method)(*args, **kwargs)

        return anyio.run(call)

    def step(self, batch: Batch) -> StepResult:
        result: StepResult = self.run("step", batch, epoch=0, slot=0)
        return result

    def probe(self, method: str, *args: object, own: Sequence[tuple[object, ...]] | None = None) -> list[Any]:
        """Run a method of `ProbedRank` on all ranks at once, `own` being each rank's first arguments."""
        for index, rank in enumerate(self.ranks):
            rank.send(method, *(own[index] if own is not None else ()), *args)
        return [rank.receive() for rank in self.ranks]

    def canonical(self, per_rank: list[Arrays]) -> Arrays:
        """Assemble arrays by parameter into arrays by Hugging Face name; copies of one box must agree bitwise."""
        whole = {name: np.full(spec.shape, np.nan, np.float32) for name, spec in self.layout.tensors.items()}
        for shards, arrays in zip(self.layout.shards, per_rank, strict=True):
            for shard in shards:
                block = arrays[shard.param][shard.param_slices]
                here = whole[shard.tensor][shard.box.slices]
                assert np.isnan(here).all() or (here == block).all(), f"copies of {shard.tensor} differ"
                whole[shard.tensor][shard.box.slices] = block
        return whole


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Rank processes, shared by all tests of a session: importing torch and megatron is most of a test's time."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


StartTrainer = Callable[..., RunningTrainer]


@pytest.fixture
def start_trainer(pool: RankPool, tied_model: Path) -> Iterator[StartTrainer]:
    """Start a trainer; a running one is stopped first, and the last one at the end of the test."""
    running: list[RunningTrainer] = []

    def stop() -> None:
        while running:
            running.pop().run("stop")

    def start(**fields: object) -> RunningTrainer:
        stop()
        spec = make_spec(**{"model_dir": str(tied_model), **fields})
        ranks = pool.ranks(spec.num_ranks)
        for index, rank in enumerate(ranks):
            rank.send("make", spec, index)
        for rank in ranks:
            rank.receive()
        trainer = RunningTrainer(spec, ranks)
        trainer.run("start")
        running.append(trainer)
        return trainer

    yield start
    stop()


def make_spec(**fields: object) -> TrainerSpec:
    """A spec of tests: large steps, all parts of the loss."""
    defaults: dict[str, Any] = {
        "model_dir": "",
        "optimizer": OptimizerSpec(lr=1e-2, weight_decay=0.1, clip_grad=0.5, warmup_steps=2),
        "loss": LossSpec(entropy_coef=0.01, temperature=0.8),
        "seed": 7,
        "collective_timeout_s": 60.0,
    }
    return TrainerSpec(**{**defaults, **fields})


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 with tied embeddings and grouped queries."""
    return write_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with an output layer of its own."""
    return write_model(tmp_path_factory.mktemp("untied"), tied=False)


def write_model(folder: Path, *, tied: bool) -> Path:
    """Write a Hugging Face folder with large random weights (biases and norms too), so that every part matters."""
    import torch
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=FFN,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    model = transformers.Qwen2ForCausalLM(config)
    generator = torch.Generator().manual_seed(11 + tied)
    with torch.no_grad():
        for parameter in model.parameters():
            offset = 1.0 if parameter.dim() == 1 and (parameter == 1).all() else 0.0
            parameter.normal_(offset, 0.2, generator=generator)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"stands for": "a tokenizer"}')
    return folder


class Batches:
    """Makes and cuts random batches."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def micro(self, *lengths: int) -> MicroBatch:
        """Sequences with these numbers of positions, about half of which are trained on."""
        rng, total = self._rng, sum(lengths)
        mask = (rng.random(total) < 0.6).astype(np.float32)
        mask[np.cumsum(lengths) - 1] = 1.0
        return MicroBatch(
            token_ids=rng.integers(0, VOCABULARY, total),
            labels=rng.integers(0, VOCABULARY, total),
            lengths=lengths,
            loss_mask=mask,
            advantages=(rng.normal(size=total) * mask).astype(np.float32),
            generator_logprobs=(-rng.uniform(3, 5, total) * mask).astype(np.float32),
        )

    def batch(self, step: int, micro_batches: Sequence[Sequence[MicroBatch]]) -> Batch:
        """A batch of [DP rank][micro-batch]; some samples were left out of it, as far as the denominator goes."""
        tokens = sum(int(micro.loss_mask.sum()) for share in micro_batches for micro in share)
        return Batch(
            step=step,
            micro_batches=tuple(tuple(share) for share in micro_batches),
            num_loss_tokens=tokens + 5,
            oldest_version=None,
        )

    @staticmethod
    def split(micro: MicroBatch) -> list[MicroBatch]:
        """One micro-batch a sequence."""
        stops = np.cumsum(micro.lengths).tolist()
        return [
            MicroBatch(lengths=(length,), **{name: getattr(micro, name)[stop - length : stop] for name in COLUMNS})
            for length, stop in zip(micro.lengths, stops, strict=True)
        ]

    @staticmethod
    def join(parts: Sequence[MicroBatch]) -> MicroBatch:
        """Several micro-batches as one."""
        return MicroBatch(
            lengths=tuple(length for part in parts for length in part.lengths),
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS},
        )


@pytest.fixture
def batches() -> Batches:
    return Batches(seed=5)
