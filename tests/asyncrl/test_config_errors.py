"""Every mistake in a recipe is one clear line: path, value, what is allowed, nearest known key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import load_recipe
from asyncrl.machine import Machine
from asyncrl.recipe_errors import RecipeError, all_paths
from asyncrl.schema import Recipe

CONFIGS = Path(__file__).parents[2] / "configs"
COPY = CONFIGS / "grpo_copy.yaml"
TWO_CORES = Machine(cores=(0, 1))

_TRAINER_KEYS = (
    "cpus, dp, dtype, lr_schedule, micro_batch_tokens, num_steps, optimizer, pp, prompts_per_step, samples_per_prompt, "
    "threads, tp"
)

# One mutation of grpo_copy.yaml each, and the whole message.
KEYS_AND_TYPES = {
    "trainer.num_step=300": (
        f"trainer.num_step = 300: unknown key; nearest known key: trainer.num_steps; known here: {_TRAINER_KEYS}"
    ),
    "trainer.learning_rate=3e-4": (f"trainer.learning_rate = 0.0003: unknown key; known here: {_TRAINER_KEYS}"),
    "trainer.lr=3e-4": (
        f"trainer.lr = 0.0003: unknown key; nearest known key: trainer.optimizer.lr; known here: {_TRAINER_KEYS}"
    ),
    "max_staleness=2": (
        "max_staleness = 2: unknown key; nearest known key: schedule.max_staleness; known here: algorithm, checkpoint, "
        "cluster, data, eval, generator, model, publish, reward, run, schedule, seed, tracking, trainer"
    ),
    "tracking.wandb.modes=offline": (
        'tracking.wandb.modes = "offline": unknown key; nearest known key: tracking.wandb.mode; known here: entity, '
        "group, mode, project, tags"
    ),
    "seed=-1": "seed = -1: must be a whole number >= 0",
    "seed=null": "seed = null: must be a whole number >= 0",
    "seed=true": "seed = true: must be a whole number >= 0",
    "trainer.num_steps=300.5": "trainer.num_steps = 300.5: must be a whole number >= 1",
    "trainer.num_steps=many": 'trainer.num_steps = "many": must be a whole number >= 1',
    "schedule.max_staleness=-1": "schedule.max_staleness = -1: must be a whole number >= 0",
    "trainer.optimizer.lr=0": "trainer.optimizer.lr = 0: must be a number > 0",
    "trainer.optimizer.lr=.nan": "trainer.optimizer.lr = NaN: must be a number > 0",
    "trainer.optimizer.lr=.inf": "trainer.optimizer.lr = Infinity: must be a number > 0",
    "trainer.optimizer.betas=[0.9]": (
        "trainer.optimizer.betas = [0.9]: must be a list of 2, each a number >= 0 and < 1"
    ),
    "trainer.optimizer.betas=[0.9,1.0]": (
        "trainer.optimizer.betas = [0.9, 1.0]: must be a list of 2, each a number >= 0 and < 1"
    ),
    "trainer.optimizer.distributed=1": "trainer.optimizer.distributed = 1: must be true or false",
    "trainer.dtype=fp32": 'trainer.dtype = "fp32": must be "float32" or "bfloat16"',
    "trainer.optimizer=adam": (
        'trainer.optimizer = "adam": must be a section with keys among lr, betas, eps, weight_decay, grad_clip, '
        "distributed"
    ),
    "algorithm.clip_low=1.5": "algorithm.clip_low = 1.5: must be a number > 0 and < 1",
    "algorithm.name=ppo": 'algorithm.name = "ppo": must be "grpo"',
    "schedule.order=ready": 'schedule.order = "ready": not available yet; must be "strict"',
    "schedule.update=inflight": 'schedule.update = "inflight": not available yet; must be "drain"',
    "schedule.stale=drop": 'schedule.stale = "drop": not available yet; must be "wait"',
    "generator.temperature=0": "generator.temperature = 0: must be a number > 0",
    "generator.cpus=all": ('generator.cpus = "all": must be "auto" or "none" or a list, each a whole number >= 0'),
    "cluster.devices=0": 'cluster.devices = 0: must be "auto" or a whole number >= 1',
    "cluster.devices=two": 'cluster.devices = "two": must be "auto" or a whole number >= 1',
    "tracking.wandb.mode=off": ('tracking.wandb.mode = false: must be "auto" or "online" or "offline" or "disabled"'),
    "tracking.wandb.tags=[1]": "tracking.wandb.tags = [1]: must be a list, each text",
    "run.name=2026": "run.name = 2026: must be text that is not empty; put it in quotes",
    "model.fresh.family=llama": 'model.fresh.family = "llama": must be "qwen2"',
    "model.fresh.hidden_size=0": "model.fresh.hidden_size = 0: must be a whole number >= 1",
    "data.train.args=4": "data.train.args = 4: must be a mapping or null",
}

ACROSS_FIELDS = {
    "trainer.dp=3": (
        "trainer.dp = 3: must divide the batch, trainer.prompts_per_step * trainer.samples_per_prompt = 64 * 8 = 512 "
        "samples"
    ),
    "trainer.tp=4": (
        "trainer.tp = 4: must divide the model's num_attention_heads = 2",
        "trainer.tp = 4: must divide the model's num_key_value_heads = 2",
    ),
    "trainer.pp=3": "trainer.pp = 3: must divide the model's num_hidden_layers = 2: every stage has as many",
    "generator.tp=4": "generator.tp = 4: must divide the model's num_attention_heads = 2",
    "generator.tp=3": (
        "generator.tp = 3: must divide the model's num_attention_heads = 2",
        "generator.tp = 3: must divide the model's intermediate_size = 256",
        "generator.tp = 3: must divide the model's num_key_value_heads = 2, or be a multiple: ranks then share a head",
    ),
    "generator.max_new_tokens=32": (
        "generator.max_new_tokens = 32: leaves no room for a prompt within generator.max_model_len = 32; raise that"
    ),
    "generator.max_model_len=128": (
        "generator.max_model_len = 128: longer than the model's max_position_embeddings = 64"
    ),
    "trainer.micro_batch_tokens=16": (
        "trainer.micro_batch_tokens = 16: must hold the longest sequence, generator.max_model_len = 32"
    ),
    "trainer.samples_per_prompt=1": (
        "trainer.samples_per_prompt = 1: GRPO compares the samples of one prompt and needs at least 2; with 1 every "
        "advantage is 0"
    ),
    "generator.top_p=0.9": (
        "generator.top_p = 0.9: would make the generator's logprobs those of a cut distribution, not of the one that "
        "is trained; only 1.0 (off) for now"
    ),
    "generator.top_k=5": (
        "generator.top_k = 5: would make the generator's logprobs those of a cut distribution, not of the one that "
        "is trained; only 0 (off) for now"
    ),
    "model.fresh.num_attention_heads=3": (
        "model.fresh.num_attention_heads = 3: must divide the model's hidden_size = 64",
        "model.fresh.num_key_value_heads = 2: must divide the model's num_attention_heads = 3",
    ),
    "model.fresh.num_attention_heads=4": (
        "model.fresh.num_attention_heads = 4: gives heads of width 64 / 4 = 16; vLLM's CPU attention has 32, 64, 80, "
        "96, 112, 128, 160, 192, 224, 256, 512"
    ),
    "model.path=Qwen/Qwen2-0.5B": (
        'model = {"path": "Qwen/Qwen2-0.5B", "fresh": "..."}: give exactly one of model.path and model.fresh; '
        "model.fresh=null keeps the path"
    ),
    "model.fresh=null": (
        'model = {"path": null, "fresh": null}: give exactly one of model.path and model.fresh; a fresh one is '
        "model.fresh: {hidden_size: 64, ...}"
    ),
    "model.revision=main": 'model.revision = "main": only a hub id in model.path has revisions',
    "data.train.task=null": (
        'data.train = {"path": null, "task": null}: give exactly one of data.train.path and data.train.task; '
        'data.train.task="asyncrl.tasks:copy"'
    ),
    "data.train.task=asyncrl.tasks.copy": (
        'data.train.task = "asyncrl.tasks.copy": must be an import path "module:function" or "path/to/file.py:function"'
    ),
    "reward.function=exact_match": (
        'reward.function = "exact_match": must be an import path "module:function" or "path/to/file.py:function"'
    ),
    "trainer.cpus=[0,0]": ("trainer.cpus = [0, 0]: must be different cores that this process may use: [0, 1]"),
    "generator.cpus=[7]": "generator.cpus = [7]: must be different cores that this process may use: [0, 1]",
    "cluster.devices=1": (
        "cluster.devices = 1: too few: 2 workers, 1 training ranks (tp 1 * pp 1 * dp 1) and 1 * 1 for the generator; "
        "cluster.devices=2 lets them share"
    ),
    "generator.num_replicas=4": (
        'cluster.devices = "auto": too few (2 here): 5 workers, 1 training ranks (tp 1 * pp 1 * dp 1) and 4 * 1 for '
        "the generator; cluster.devices=5 lets them share"
    ),
}


def lines_of(*overrides: str) -> tuple[str, ...]:
    """Return the lines that a mutation of grpo_copy.yaml is refused with; enough devices unless it says otherwise."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(COPY, overrides, TWO_CORES)

    assert str(caught.value) == "\n".join(caught.value.lines)
    return caught.value.lines


@pytest.mark.parametrize("override", KEYS_AND_TYPES)
def test_unknown_key_or_wrong_type_is_one_line(override: str) -> None:
    assert lines_of(override) == (KEYS_AND_TYPES[override],)


@pytest.mark.parametrize("override", ACROSS_FIELDS)
def test_impossible_combination_is_one_line_each(override: str) -> None:
    expected = ACROSS_FIELDS[override]
    enough = () if "devices" in str(expected) else ("cluster.devices=16",)
    assert lines_of(*enough, override) == ((expected,) if isinstance(expected, str) else expected)


def test_all_mistakes_are_told_at_once() -> None:
    assert lines_of("seed=-1", "trainer.tp=two", "trainer.tpp=1") == (
        "seed = -1: must be a whole number >= 0",
        'trainer.tp = "two": must be a whole number >= 1',
        f"trainer.tpp = 1: unknown key; nearest known key: trainer.tp; known here: {_TRAINER_KEYS}",
    )


def test_missing_keys_are_named(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("trainer: {prompts_per_step: 4, samples_per_prompt: 2}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "r.yaml")

    assert caught.value.lines == (
        "model: missing; must be a section with keys among path, revision, fresh",
        "data: missing; must be a section with keys among train, eval",
        "reward: missing; must be a section with keys among function, args, weight",
        "trainer.num_steps: missing; must be a whole number >= 1",
        "generator: missing; must be a section with keys among num_replicas, tp, dtype, max_model_len, max_new_tokens, "
        "temperature, top_p, top_k, max_num_seqs, kv_cache_mb, threads, cpus",
    )


def test_file_data_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n')
    base = ("data.train.task=null", "data.train.args=null")
    assert lines_of(*base, f"data.train.path={file}") == (
        f"eval.every = 50: data.train is a file ({file}), so data.eval must name the held-out prompts, or eval.every=0",
    )
    assert lines_of(*base, f"data.train.path={file}", f"data.eval.path={file}") == (
        f'data.eval.path = "{file}": the same file as data.train.path: evaluation prompts must not occur in training',
    )
    assert lines_of(*base, "data.train.path=nowhere.jsonl", "eval.every=0") == (
        f'data.train.path = "nowhere.jsonl": no such file in {Path.cwd()}',
    )
    assert lines_of(*base, "data.train.path=train.csv", "eval.every=0") == (
        'data.train.path = "train.csv": must end in .jsonl or .parquet',
    )
    assert lines_of("data.train.task=null", f"data.train.path={file}", "eval.every=0") == (
        'data.train.args = {"length": 4}: a file takes no arguments; data.train.args=null',
    )


def test_more_gpus_than_there_are_is_refused_without_a_cure_by_sharing() -> None:
    with pytest.raises(RecipeError, match=r"too few \(1 here\): 2 workers.*it takes 2 GPUs$"):
        load_recipe(COPY, ("trainer.dtype=bfloat16",), Machine(cores=(0, 1), num_gpus=1))


def test_a_cluster_elsewhere_is_not_counted() -> None:
    loaded = load_recipe(COPY, ("cluster.address=10.0.0.1:6379", "trainer.dp=8", "trainer.cpus=[63]"), TWO_CORES)
    assert loaded.recipe.num_devices_needed == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", ":2:2: did not find expected ',' or ']'"),
        ("seed: 1\nseed: 2\n", ":2:1: duplicate key 'seed'"),
        ("trainer:\n  tp: 1\n  tp: 2\n", ":3:3: duplicate key 'tp'"),
        ("a: 1\n\tb: 2\n", ":2:1: found a tab character that violates indentation"),
        ("a: !!python/object:os.system {}\n", ":1:4: could not determine a constructor"),
        ("- 1\n- 2\n", ": a recipe is a mapping of sections, this is a list"),
        ("defaults: base.yaml\n", 'defaults = "base.yaml": must be a list of recipe files, relative to '),
        ("defaults: [1]\n", "defaults = [1]: must be a list of recipe files, relative to "),
    ],
)
def test_broken_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)

    (line,) = caught.value.lines
    assert message in line
    assert str(file) in line


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "none.yaml")

    assert caught.value.lines == (f"{tmp_path}/none.yaml: No such file or directory",)


def test_missing_default_is_named_with_who_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: [b.yaml]\n")
    (tmp_path / "b.yaml").write_text("defaults: [sub/c.yaml]\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "a.yaml")

    assert caught.value.lines == (
        f"{tmp_path}/sub/c.yaml: No such file or directory, in `defaults` of {tmp_path}/b.yaml, "
        f"in `defaults` of {tmp_path}/a.yaml",
    )


def test_what_a_base_leaves_open_must_be_given(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"defaults: [{COPY}]\ntracking: {{wandb: {{group: '???'}}}}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "a.yaml")

    assert caught.value.lines == ("tracking.wandb.group: must be given, the recipe says ???",)
    given_ = load_recipe(tmp_path / "a.yaml", ("tracking.wandb.group=seeds",), TWO_CORES)
    assert given_.recipe.tracking.wandb.group == "seeds"


def test_a_circle_of_defaults_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: [b.yaml]\n")
    (tmp_path / "b.yaml").write_text("defaults: [a.yaml]\n")
    with pytest.raises(RecipeError, match=r"a\.yaml: includes itself, in `defaults` of .*b\.yaml"):
        load_recipe(tmp_path / "a.yaml")


def test_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"seed: \xff\n")
    with pytest.raises(RecipeError, match=r"a\.yaml: not UTF-8 text: byte 6"):
        load_recipe(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("trainer.tp", "trainer.tp: an override is dotted.path=value, for instance trainer.optimizer.lr=3e-4"),
        ("=3", "=3: an override is dotted.path=value, for instance trainer.optimizer.lr=3e-4"),
        ("trainer..tp=3", "trainer..tp=3: an override is dotted.path=value, for instance trainer.optimizer.lr=3e-4"),
        ("trainer.cpus=[0", "trainer.cpus = [0: not YAML: did not find expected ',' or ']'"),
        ("seed=${nowhere}", "seed = \"${nowhere}\": Interpolation key 'nowhere' not found"),
        (
            "seed=${oc.env:ASYNCRL_UNSET}",
            "seed = \"${oc.env:ASYNCRL_UNSET}\": Environment variable 'ASYNCRL_UNSET' not found",
        ),
    ],
)
def test_broken_override_is_one_line(override: str, line: str) -> None:
    assert lines_of(override) == (line,)


def test_a_value_of_the_environment_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_TEST_SECRET", "hunter2")
    refused = [
        lines_of("seed=${oc.env:ASYNCRL_TEST_SECRET}"),
        lines_of("trainer.dtype=${oc.env:ASYNCRL_TEST_SECRET}"),
        lines_of("tracking.wandb.tags=[a, '${oc.env:ASYNCRL_TEST_SECRET}', 3]"),
        lines_of("tracking.wandb.nope=${oc.env:ASYNCRL_TEST_SECRET}"),
        lines_of("reward.function=${oc.env:ASYNCRL_TEST_SECRET}"),
        lines_of("seed=${oc.decode:'[${oc.env:ASYNCRL_TEST_SECRET}'}"),
        lines_of("model.fresh=null", "model.path=${oc.env:ASYNCRL_TEST_SECRET}"),
    ]
    for lines in refused:
        assert "hunter2" not in str(lines)
        assert "ASYNCRL_TEST_SECRET" in str(lines)

    assert refused[0] == (
        'seed = "${oc.env:ASYNCRL_TEST_SECRET}": must be a whole number >= 0; the environment gives text: '
        "${oc.decode:${oc.env:NAME}} makes it a number or a list",
    )


@settings(max_examples=30)
@given(st.sampled_from(sorted(all_paths(Recipe))), st.characters(categories=["Ll"]))
def test_a_mistyped_key_is_answered_with_the_right_one(path: str, letter: str) -> None:
    """Any key with a letter too many is refused by its path; where the letter makes another word, that is not asked."""
    mistyped = f"{path}{letter}"
    if mistyped in set(all_paths(Recipe)):
        return

    (line,) = lines_of(f"{mistyped}=1", *(("model.path=null",) if path.startswith("model") else ()))
    assert line.startswith(f"{mistyped} = 1: unknown key; ")
    if len(path.rpartition(".")[2]) > 2:
        assert f"nearest known key: {path}; " in line
