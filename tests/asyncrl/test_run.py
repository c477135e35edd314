"""The whole driver, from the command line to the summary, over fake workers: no Ray, no vLLM, no Megatron.

The fake replica writes tokens that depend on the seed and on the bits of the weights, the fake trainer makes new bits
out of the old ones and the whole batch: whatever goes wrong in between changes every later fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from safetensors.numpy import save_file

from asyncrl import train
from asyncrl.fingerprints import batch_digest
from asyncrl.fleet import FleetSpec
from asyncrl.line_file import read_lines
from engine.publisher import Publisher
from engine.types import FlipReport, GenerateRequest, GenerateResult, Manifest, WeightVersion
from trainers.base import NonFiniteLoss
from trainers.types import Batch, StepResult

COPY = Path(__file__).parents[2] / "configs" / "grpo_copy.yaml"
NUM_STEPS, PROMPTS, SAMPLES = 6, 4, 3
SMALL = (
    f"trainer.num_steps={NUM_STEPS}", f"trainer.prompts_per_step={PROMPTS}", f"trainer.samples_per_prompt={SAMPLES}",
    "trainer.lr_schedule.warmup_steps=2", "eval.every=2", "eval.num_prompts=5", "checkpoint.every=2",
    "cluster.devices=4", "generator.num_replicas=2", "trainer.cpus=none", "generator.cpus=none",
    "tracking.wandb.mode=disabled",
)  # fmt: skip
FIRST_BITS = "0" * 32


def mixed(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


@dataclass
class Script:
    """What shall happen in the fake world."""

    train: Callable[[int], Awaitable[None]] | None = None
    waves: list[tuple[int, tuple[tuple[int, ...], ...]]] = field(default_factory=list)
    """Weight version and prompts of every training request, replica after replica."""


class FakeReplica:
    def __init__(self, name: str, script: Script) -> None:
        self.name = name
        self._script = script
        self._prepared: dict[int, Manifest] = {}
        self._served: Manifest | None = None
        self._num_running = 0
        self._stopped = anyio.Event()

    async def call(self, method: str, *args: Any, deadline_s: float | None, **kwargs: Any) -> Any:  # noqa: ANN401
        assert not kwargs
        assert (deadline_s is None) == (method == "run"), f"{method} has no deadline"
        return await getattr(self, method)(*args)

    async def run(self) -> None:
        await self._stopped.wait()

    async def stop(self) -> None:
        assert self._num_running == 0, "stopped with requests under way"
        self._stopped.set()

    async def prepare(self, manifest: Manifest) -> float:
        await anyio.lowlevel.checkpoint()
        self._prepared[manifest.version] = manifest
        return 1.0

    async def flip(self, manifest: Manifest) -> FlipReport:
        assert self._num_running == 0, "flip while requests run"
        assert manifest is self._prepared.pop(manifest.version, None), "flip before prepare"
        self._served = manifest
        return FlipReport(version=manifest.version, copy_ms=0.1, repack_ms=0.1, num_bytes=100)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        served = self._served
        assert served is not None
        assert request.version == served.version
        self._num_running += 1
        await anyio.sleep(0.002)
        assert self._served is served, "the weights changed under a request"
        self._num_running -= 1
        if request.priority == 0:
            self._script.waves.append((request.version, request.prompt_ids[::SAMPLES]))
        greedy = request.sampling.temperature == 0
        texts = [
            _response(served.digests[0], prompt, 0 if greedy else seed)
            for prompt, seed in zip(request.prompt_ids, request.seeds, strict=True)
        ]
        return GenerateResult(
            token_ids=np.array([token for text in texts for token in text], np.int32),
            logprobs=np.array([-token / 64 for text in texts for token in text], np.float32),
            versions=np.full(sum(map(len, texts)), request.version, np.int32),
            lengths=np.array([len(text) for text in texts], np.int32),
            finish_reasons=("stop",) * len(texts),
            busy_s=0.002,
        )


def _response(bits: str, prompt: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Between one and four digits and the end token (2); digits are tokens 4 to 13."""
    random = bytes.fromhex(mixed(bits, prompt, seed))
    return (*(4 + byte % 10 for byte in random[1 : 2 + random[0] % 4]), 2)


class FakeTrainer:
    """Weights are one digest; a checkpoint is a file that holds it."""

    def __init__(self, script: Script) -> None:
        self.bits = FIRST_BITS
        self._script = script
        self._stopped = anyio.Event()

    async def step(self, batch: Batch, *, epoch: int, slot: int) -> StepResult:
        await anyio.sleep(0.003)
        if self._script.train is not None:
            await self._script.train(batch.step)
        self.bits = mixed(self.bits, batch_digest(batch))
        made = replace(
            StepResult.skip(batch.step), skipped=False, digests={0: self.bits}, loss=int(self.bits[:4], 16) / 7
        )
        return replace(made, timings_ms={"snapshot": 1.0}, peak_memory_bytes=(123,))

    async def watch(self) -> None:
        await self._stopped.wait()

    async def stop(self) -> None:
        self._stopped.set()

    async def snapshot(self, version: WeightVersion, *, epoch: int, slot: int) -> dict[int, str]:
        return {0: self.bits}

    async def save(self, folder: str) -> None:
        await anyio.Path(folder, "common.pt").write_text(self.bits)

    async def load(self, folder: str) -> None:
        self.bits = await anyio.Path(folder, "common.pt").read_text()

    async def export(self, folder: str) -> None:
        save_file({"w": np.zeros(1, np.float32)}, Path(folder, "model.safetensors"))


class FakeFleet:
    """Like `asyncrl.fleet.Fleet`."""

    script = Script()
    left: list[str] = []  # noqa: RUF012 - reset by the fixture

    def __init__(self, spec: FleetSpec, cluster: FakeCluster) -> None:
        self._spec = spec
        self.plan = Plan(num_bytes=1000, num_buckets=1)
        self.store_bytes = 3000

    def __enter__(self) -> FakeFleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.left.append("fleet")

    async def start(self, resume_from: str | None = None) -> None:
        self.trainer = FakeTrainer(self.script)
        if resume_from is not None:
            await self.trainer.load(resume_from)
        self.replicas = tuple(FakeReplica(each.name, self.script) for each in self._spec.generators)
        names = tuple(replica.name for replica in self.replicas)
        self.publisher = Publisher("plan", 1, self._spec.num_slots, names)

    async def publish_first(self, version: WeightVersion) -> tuple[Manifest, tuple[FlipReport, ...]]:
        slot = self.publisher.reserve(version)
        manifest = self.publisher.commit(version, await self.trainer.snapshot(version, epoch=0, slot=slot))
        flips = []
        for replica in self.replicas:
            await replica.prepare(manifest)
            flips.append(await replica.flip(manifest))
        return manifest, tuple(flips)

    async def generator_peaks(self) -> dict[str, int]:
        return {replica.name: 456 for replica in self.replicas}


@dataclass(frozen=True)
class Plan:
    num_bytes: int
    num_buckets: int


class FakeCluster:
    async def __aenter__(self) -> FakeCluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        FakeFleet.left.append("cluster")


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.run.Fleet", FakeFleet)
    monkeypatch.setattr("asyncrl.run.cluster_for", lambda recipe, machine: FakeCluster())
    monkeypatch.setattr("asyncrl.stack.require_stack", lambda: None)
    monkeypatch.setattr("gc.freeze", lambda: None)  # for good, and this process lives on
    monkeypatch.setattr(FakeFleet, "left", [])


def start(folder: Path, *overrides: str, script: Script | None = None) -> int:
    FakeFleet.script = script if script is not None else Script()
    return train.main(["--config", str(COPY), f"run.dir={folder}", *SMALL, *overrides])


def resume(folder: Path, *overrides: str, script: Script | None = None) -> int:
    FakeFleet.script = script if script is not None else Script()
    return train.main(["--resume", str(folder), *overrides])


def fingerprints(folder: Path) -> bytes:
    return (folder / "fingerprints.jsonl").read_bytes()


def metrics(folder: Path, name: str) -> list[float]:
    return [line[name] for line in read_lines(folder / "metrics.jsonl") if name in line]


def summary(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return loaded


def prompts_by_step(script: Script, first_step: int = 0) -> dict[int, list[tuple[int, ...]]]:
    asked = [prompt for _, prompts in script.waves for prompt in prompts]
    assert len(asked) % PROMPTS == 0
    return {first_step + at // PROMPTS: asked[at : at + PROMPTS] for at in range(0, len(asked), PROMPTS)}


def fails_at(step: int) -> Callable[[int], Awaitable[None]]:
    async def fail(at: int) -> None:
        if at == step:
            raise NonFiniteLoss(f"the loss of step {step} is nan")

    return fail


def test_a_run_from_the_command_line_to_its_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert start(run) == 0
    written = summary(run)
    assert (written["exit_reason"], written["steps"], written["staleness_max"]) == ("finished", NUM_STEPS, 1)
    assert written["num_response_tokens"] == sum(metrics(run, "rollout/num_response_tokens"))
    assert {"driver", "trainer_0", "generator_0", "generator_1"} <= set(written["peak_memory"])
    assert metrics(run, "eval/version") == [0, 2, 4, 6]
    assert metrics(run, "schedule/staleness") == [0, 1, 1, 1, 1, 1]
    assert metrics(run, "train/version") == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    assert (run / "model").readlink() == Path("checkpoints/step-000006/hf")
    assert FakeFleet.left == ["fleet", "cluster"]
    assert "finished: 6 steps" in capsys.readouterr().out


def test_same_seeds_same_bits(tmp_path: Path) -> None:
    """Two runs agree, with evaluation on and off and with any number of replicas; another seed does not."""
    start(tmp_path / "a")
    start(tmp_path / "b")
    start(tmp_path / "quiet", "eval.every=0", "checkpoint.every=0")
    start(tmp_path / "wide", "generator.num_replicas=3")
    start(tmp_path / "other", "seed=1")
    assert len(fingerprints(tmp_path / "a").splitlines()) == NUM_STEPS
    for name in ("b", "quiet", "wide"):
        assert fingerprints(tmp_path / name) == fingerprints(tmp_path / "a"), name
    assert fingerprints(tmp_path / "other") != fingerprints(tmp_path / "a")


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_never_interrupted(tmp_path: Path) -> None:
    """Synchronous, where no rollout of an older version is under way; step 5 failed, the checkpoint is of version 4."""
    start(tmp_path / "whole", "schedule.max_staleness=0")
    broken = tmp_path / "broken"
    assert start(broken, "schedule.max_staleness=0", script=Script(train=fails_at(5))) == 1
    assert summary(broken)["error"] == "the loss of step 5 is nan"
    assert resume(broken) == 0
    assert fingerprints(broken) == fingerprints(tmp_path / "whole")
    assert summary(broken)["resumed_from"] == 4
    for name in ("train/loss", "rollout/reward_mean", "eval/version", "eval/sampled_accuracy"):
        assert metrics(broken, name) == metrics(tmp_path / "whole", name)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_prompts_of_a_step_depend_on_the_step_only(tmp_path: Path, max_staleness: int) -> None:
    """Whatever the staleness, and after a resume."""
    whole, broken, resumed = Script(), Script(train=fails_at(5)), Script()
    start(tmp_path / "whole", script=whole)
    start(tmp_path / "broken", f"schedule.max_staleness={max_staleness}", script=broken)
    resume(tmp_path / "broken", script=resumed)
    expected = prompts_by_step(whole)
    assert sorted(expected) == list(range(NUM_STEPS))
    assert len({prompt for prompts in expected.values() for prompt in prompts}) == NUM_STEPS * PROMPTS
    assert prompts_by_step(resumed, first_step=4) == {step: expected[step] for step in (4, 5)}
    assert [version for version, _ in resumed.waves] == [
        v for step in (4, 5) for v in [max(4, step - max_staleness)] * 2
    ]


def test_a_finished_run_that_is_resumed_has_nothing_left_to_do(tmp_path: Path) -> None:
    start(tmp_path / "run")
    before = fingerprints(tmp_path / "run")
    script = Script()
    assert resume(tmp_path / "run", script=script) == 0
    assert script.waves == []
    assert fingerprints(tmp_path / "run") == before
    assert summary(tmp_path / "run")["tokens_per_s"] > 0, "the summary is still that of the run"
    assert resume(tmp_path / "run", f"trainer.num_steps={NUM_STEPS + 2}", script=script) == 0
    assert resume(tmp_path / "run") == 0, "the recipe remembers what the run was resumed with"
    assert [version for version, _ in script.waves] == [6, 6, 6, 6], "two steps on two replicas"
    assert summary(tmp_path / "run")["steps"] == NUM_STEPS + 2


def test_a_resume_to_a_step_that_is_past_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path / "run")
    assert resume(tmp_path / "run", "trainer.num_steps=5") == 2
    assert f"trainer.num_steps=5, but {tmp_path / 'run'} has trained 6 steps already" in capsys.readouterr().err
    assert resume(tmp_path / "run") == 0, "the folder's lock was given back"


@pytest.mark.parametrize(
    "override", ["trainer.prompts_per_step=2", "data.train.args.length=3", "model.fresh.num_hidden_layers=1"]
)
def test_a_resume_with_other_prompts_or_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    assert start(tmp_path / "run") == 0
    assert resume(tmp_path / "run", override) == 2
    assert "the run was begun with" in capsys.readouterr().err


def test_a_run_that_could_not_start_is_begun_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mistake is found when the model's tokenizer is there, and mended it is run again under the same name."""
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "c1>", "answer": 7.5.1}\n')
    own = ("data.train.task=null", "data.train.args=null", f"data.train.path={data}", "eval.every=0")
    assert start(tmp_path / "run", *own) == 2
    assert f"{data}:1" in capsys.readouterr().err
    (tmp_path / "run" / "notes.txt").write_text("mine")
    data.write_text("".join(f'{{"prompt": "c{n}>", "answer": "{n}"}}\n' for n in range(9)))
    assert start(tmp_path / "run", *own) == 2
    assert "is not empty (notes.txt)" in capsys.readouterr().err, "nothing of the user's is removed"
    (tmp_path / "run" / "notes.txt").unlink()
    assert start(tmp_path / "run", *own) == 0
    assert start(tmp_path / "run", *own) == 2, "a run with records stays"


def test_a_resume_may_mend_what_does_not_hold_here_and_shows_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_TEST_LENGTH", "4")
    assert start(tmp_path / "run", "data.train.args.length=${oc.decode:${oc.env:ASYNCRL_TEST_LENGTH}}") == 0
    monkeypatch.delenv("ASYNCRL_TEST_LENGTH")
    assert resume(tmp_path / "run", "data.train.args.length=3") == 2
    assert 'begun with "${oc.decode:${oc.env:ASYNCRL_TEST_LENGTH}}"' in capsys.readouterr().err
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("devices: 4", "devices: 1"))
    monkeypatch.setenv("ASYNCRL_TEST_LENGTH", "4")
    assert resume(tmp_path / "run") == 2
    assert "cluster.devices = 1: too few" in capsys.readouterr().err
    assert resume(tmp_path / "run", "cluster.devices=4") == 0


def test_a_run_without_a_checkpoint_cannot_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(tmp_path / "run", "checkpoint.every=0", script=Script(train=fails_at(3))) == 1
    assert resume(tmp_path / "run") == 2
    assert "holds no complete checkpoint" in capsys.readouterr().err
    assert start(tmp_path / "run") == 2, "it has trained some steps"
    assert "holds a run already" in capsys.readouterr().err


def test_a_reward_function_that_raises_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("def reward(completion):\n    return completion.anwser\n")
    assert start(tmp_path / "run", f"reward.function={tmp_path / 'mine.py'}:reward", "eval.every=0") == 1
    message = capsys.readouterr().err
    assert "error: step 0: 12 of 12 samples failed" in message
    assert "AttributeError: 'Completion' object has no attribute 'anwser'" in message
    assert summary(tmp_path / "run")["exit_reason"] == "failed"
    assert FakeFleet.left == ["fleet", "cluster"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    async def interrupt(step: int) -> None:
        if step == 3:
            signal.raise_signal(number)
            await anyio.sleep_forever()

    assert start(tmp_path / "run", script=Script(train=interrupt)) == 130
    written = summary(tmp_path / "run")
    assert (written["exit_reason"], written["error"], written["steps"]) == ("interrupted", None, 3)
    assert written["steps_per_s"] > 0
    assert f"ended by {number.name}" in capsys.readouterr().err
    assert FakeFleet.left == ["fleet", "cluster"]
    assert resume(tmp_path / "run") == 0
