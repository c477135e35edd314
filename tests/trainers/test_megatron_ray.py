"""The trainer where it lives: in Ray actors, driven by a script without a `__main__` guard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Megatron's own checkpoint writer hangs exactly here: it spawns processes, which import the main script again.
_SCRIPT = """
import sys
from pathlib import Path

import anyio
import numpy as np

from engine.workers import Cluster, ClusterSpec, WorkerError, WorkerSpec
from trainers.megatron import MegatronRank
from trainers.megatron_group import MegatronTrainer
from trainers.types import Batch, LossSpec, MicroBatch, OptimizerSpec, TrainerSpec

model, folder = sys.argv[1], Path(sys.argv[2])
spec = TrainerSpec(model_dir=model, dp=2, optimizer=OptimizerSpec(lr=1e-2), loss=LossSpec(), seed=0)
rng = np.random.default_rng(0)


def batch(step, poison=0.0):
    def micro():
        return MicroBatch(
            token_ids=rng.integers(0, 61, 9),
            labels=rng.integers(0, 61, 9),
            lengths=(4, 5),
            loss_mask=np.ones(9, np.float32),
            advantages=rng.normal(size=9).astype(np.float32) + np.float32(poison),
            generator_logprobs=np.full(9, -4, np.float32),
        )
    return Batch(step=step, micro_batches=((micro(),), (micro(),)), num_loss_tokens=18, oldest_version=None)


async def main():
    assert "torch" not in sys.modules
    async with Cluster(ClusterSpec(address=None, num_devices=2), environment={"OMP_NUM_THREADS": "1"}) as cluster:
        ranks = [
            await cluster.place(WorkerSpec(name=f"trainer-{rank}", cls=MegatronRank, args=(spec, rank)))
            for rank in range(2)
        ]
        trainer = MegatronTrainer(spec, ranks, start_deadline_s=120, step_deadline_s=60, disk_deadline_s=60)
        infos = await trainer.start()
        assert [info.dp_rank for info in infos] == [0, 1], infos
        await trainer.step(batch(0), epoch=0, slot=0)
        for name in ("checkpoint", "export"):
            (folder / name).mkdir()
        await trainer.save(str(folder / "checkpoint"))
        work = batch(1)
        first = await trainer.step(work, epoch=0, slot=0)
        await trainer.export(str(folder / "export"))
        await trainer.load(str(folder / "checkpoint"))
        second = await trainer.step(work, epoch=0, slot=0)
        assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm), (first, second)
        try:
            await trainer.step(batch(2, poison=np.nan), epoch=0, slot=0)
        except WorkerError as error:
            assert "NonFiniteLoss: step 2: the loss is nan" in str(error), error
        else:
            raise AssertionError("a NaN was trained on")
        await trainer.stop()
    assert "torch" not in sys.modules, "the driver needs no torch"


anyio.run(main)
print("done")
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_trains_and_saves_in_ray_actors(tied_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    answer = subprocess.run(
        [sys.executable, "-P", str(script), str(tied_model), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.endswith("done\n"), answer.stdout
    assert (tmp_path / "checkpoint" / "metadata.json").exists()
    assert (tmp_path / "export" / "model.safetensors").exists()
