"""One run, from a checked recipe to a summary: builds the parts, wires them, starts the scheduler, cleans up.

Reads top to bottom. The parts know neither each other nor the recipe; each gets its own piece here.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio

from asyncrl.batcher import BatchSpec, make_batch
from asyncrl.checkpoint import Checkpoint, CheckpointStore
from asyncrl.checks import check_model, notes
from asyncrl.config import LoadedRecipe
from asyncrl.console import Console
from asyncrl.data import PromptSets, open_prompts
from asyncrl.evaluate import Evaluator
from asyncrl.fleet import Fleet, cluster_for, fleet_spec
from asyncrl.idle import BusyClock, BusyTrainer, BusyWorker
from asyncrl.machine import Machine, this_machine
from asyncrl.model_source import ModelInfo, inspect_folder, materialize
from asyncrl.recipe_errors import RecipeError
from asyncrl.recorder import Recorder
from asyncrl.rewards import RewardFunction
from asyncrl.rollout import Rollout
from asyncrl.run_folder import MODEL_INIT
from asyncrl.run_report import RunReport, describe_error
from asyncrl.scheduler import Parts, Scheduler, ScheduleSpec, Scored
from asyncrl.schema import Recipe
from asyncrl.scoring import Scorer
from asyncrl.summary import ExitReason, Summary
from asyncrl.tokenizer import TextTokenizer
from asyncrl.wave import Wave
from engine.types import Manifest, Sampling, WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What to run.

    Attributes:
        loaded: the recipe.
        reward: the recipe's reward function.
        folder: the run's, open and locked by the caller.
        resume: the checkpoint to go on from; None for a new run.
        started_s: `time.monotonic()` when the process began, for the summary's wall time.
    """

    loaded: LoadedRecipe
    reward: RewardFunction
    folder: Path
    resume: Checkpoint | None
    started_s: float

    @property
    def first_step(self) -> int:
        """The step that is trained first."""
        return self.resume.state.version if self.resume is not None else 0


async def run(request: RunRequest, console: Console) -> Summary:
    """Run to the end; whatever ends it, everything is closed and `summary.json` is written before this returns.

    Raises:
        Exception: what ended the run, possibly inside ExceptionGroups.
    """
    recipe = request.loaded.recipe
    report = RunReport(
        request.loaded,
        request.folder,
        console,
        resume_step=request.first_step if request.resume is not None else None,
        started_s=request.started_s,
    )
    try:
        await _run(request, recipe, console, report)
    except BaseException as error:
        interrupted = isinstance(error, anyio.get_cancelled_exc_class())
        try:
            report.close(ExitReason.INTERRUPTED if interrupted else ExitReason.FAILED, error)
        except (OSError, RuntimeError) as another:  # what ended the run is the cause that counts
            console.warning(f"the report is incomplete: {describe_error(another)}")
        raise

    return report.close(ExitReason.FINISHED, None)


async def _run(request: RunRequest, recipe: Recipe, console: Console, report: RunReport) -> None:
    machine = this_machine()
    for note in notes(recipe, machine):
        console.line(f"note: {note}")
    model = _find_model(request, machine)
    tokenizer = TextTokenizer(model.folder)
    prompts = open_prompts(
        recipe.data,
        seed=recipe.seed,
        num_eval_prompts=recipe.eval.num_prompts if recipe.eval.every else 0,
        tokenizer=tokenizer,
        max_prompt_tokens=recipe.max_prompt_tokens,
    )
    console.line(f"run {request.folder}: {model.num_parameters:,} parameters, seed {recipe.seed}")
    spec = fleet_spec(recipe, machine, model_dir=str(model.folder), hf_config=model.hf_config)
    async with cluster_for(recipe, machine) as cluster:
        with Fleet(spec, cluster) as fleet:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(report.start_tracker)
                tasks.start_soon(fleet.start, str(request.resume.megatron) if request.resume is not None else None)
            manifest, _ = await fleet.publish_first(WeightVersion(request.first_step))
            console.line(
                f"publish: {fleet.plan.num_bytes:,} bytes in {fleet.plan.num_buckets} bucket(s), "
                f"{fleet.store_bytes:,} bytes of shared memory"
            )
            report.fingerprints.open(manifest.digests)
            scheduler = _build_scheduler(request, fleet, manifest, model, tokenizer, prompts, report)
            gc.collect()
            gc.freeze()  # a full collection over start-up's objects would stop the loops for a tenth of a second
            report.loop_starts()
            try:
                await scheduler.run()
            finally:
                report.loop_ended()


def _find_model(request: RunRequest, machine: Machine) -> ModelInfo:
    folder, recipe = request.folder / MODEL_INIT, request.loaded.recipe
    is_new = request.resume is None
    model = materialize(recipe.model, recipe.seed, folder) if is_new else inspect_folder(folder)
    problems = check_model(recipe, model.hf_config, machine)  # of a model from the hub it is known only now
    if problems:
        raise RecipeError(*(problem.describe(request.loaded.public) for problem in problems))

    return model


def _build_scheduler(
    request: RunRequest,
    fleet: Fleet,
    manifest: Manifest,
    model: ModelInfo,
    tokenizer: TextTokenizer,
    prompts: PromptSets,
    report: RunReport,
) -> Scheduler:
    recipe = request.loaded.recipe
    trainer, generator = recipe.trainer, recipe.generator
    sampling = _sampling(recipe, model)
    busy = BusyClock(anyio.current_time, num_replicas=generator.num_replicas)
    report.measures(busy)
    rollout = Rollout(
        replicas=[BusyWorker(worker, busy, index) for index, worker in enumerate(fleet.replicas)],
        run_seed=recipe.seed,
        sampling=sampling,
        samples_per_prompt=trainer.samples_per_prompt,
        deadline_s=recipe.cluster.call_deadline_s,
        prepare_deadline_s=recipe.publish.prepare_deadline_s,
        flip_deadline_s=recipe.publish.flip_deadline_s,
        stop_deadline_s=recipe.cluster.stop_deadline_s,
    )
    scorer = Scorer(
        reward=request.reward,
        decode=tokenizer.decode_batch,
        stop_token_ids=model.stop_token_ids,
        max_attempts=recipe.schedule.max_attempts,
    )
    recorder = Recorder(
        report.tracker,
        report.summary,
        report.fingerprints,
        busy,
        store_bytes=fleet.store_bytes,
        num_sample_rows=recipe.tracking.sample_rollouts,
    )
    evaluator = Evaluator(
        rollout=rollout,
        scorer=scorer,
        prompts=prompts.eval,
        samples_per_prompt=recipe.eval.samples_per_prompt,
        sampling=sampling,
        greedy=recipe.eval.greedy,
        max_failure_rate=recipe.schedule.max_failure_rate,
        report=recorder.evaluation,
    )
    parts = Parts(
        take=lambda step: prompts.train.take(step * trainer.prompts_per_step, trainer.prompts_per_step),
        generators=rollout,
        score=_score_with(scorer, recipe),
        trainer=BusyTrainer(fleet.trainer, busy),
        publisher=fleet.publisher,
        evaluate=evaluator.run,
        checkpoint=_checkpoint_with(request, fleet, report),
        report=recorder.step,
    )
    return Scheduler(_schedule(request), parts, manifest)


def _sampling(recipe: Recipe, model: ModelInfo) -> Sampling:
    generator = recipe.generator
    return Sampling(
        temperature=generator.temperature,
        top_p=generator.top_p,
        top_k=generator.top_k,
        max_tokens=generator.max_new_tokens,
        stop_token_ids=model.stop_token_ids,
    )


def _schedule(request: RunRequest) -> ScheduleSpec:
    recipe = request.loaded.recipe
    return ScheduleSpec(
        num_steps=recipe.trainer.num_steps,
        first_step=request.first_step,
        max_staleness=recipe.schedule.max_staleness,
        max_failure_rate=recipe.schedule.max_failure_rate,
        eval_every=recipe.eval.every,
        eval_deadline_s=recipe.eval.deadline_s,
    )


def _score_with(scorer: Scorer, recipe: Recipe) -> Callable[[Wave], Awaitable[Scored]]:
    spec = BatchSpec(
        dp=recipe.trainer.dp,
        micro_batch_tokens=recipe.trainer.micro_batch_tokens,
        normalize_std=recipe.algorithm.normalize_std,
        pack_all=recipe.algorithm.entropy_coef > 0.0,
    )

    async def score(wave: Wave) -> Scored:
        groups = await scorer.groups(wave.prompts, wave.results, samples_per_prompt=recipe.trainer.samples_per_prompt)
        return Scored(wave=wave, groups=groups, batch=make_batch(wave.step, groups, spec))

    return score


def _checkpoint_with(
    request: RunRequest, fleet: Fleet, report: RunReport
) -> Callable[[WeightVersion], Awaitable[None]]:
    recipe = request.loaded.recipe
    every, num_steps = recipe.checkpoint.every, recipe.trainer.num_steps
    store = CheckpointStore(request.folder, seed=recipe.seed, keep_last=recipe.checkpoint.keep_last)

    async def checkpoint(version: WeightVersion) -> None:
        if version == num_steps or (every > 0 and version % every == 0):
            await store.write(version, partial(_save, fleet))
            await report.generator_memory(fleet)

    return checkpoint


async def _save(fleet: Fleet, megatron: Path, hf: Path) -> None:
    await fleet.trainer.save(str(megatron))
    await fleet.trainer.export(str(hf))
