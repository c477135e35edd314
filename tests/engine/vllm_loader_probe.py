"""Every rank of vLLM's own models, loaded by vLLM's own loaders, against the layout. Run as a process of its own.

    python vllm_loader_probe.py cases.json results.json

Each element of the Hugging Face tensors is a number of its own (float32, below 2^24, so exact): equal parameters then
mean equal coordinates. One process plays all ranks in turn: vLLM asks its groups for rank and size only while it builds
and loads a model, and a group's numbers are plain attributes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def numbered_tensors(config: dict[str, Any]) -> dict[str, Any]:
    """Canonical tensors in which every element is another integer >= 1."""
    import torch

    from engine.families import canonical_layout

    tensors, first = {}, 1
    for name, spec in canonical_layout(config, dtype="float32").tensors.items():
        tensors[name] = torch.arange(first, first + spec.num_elements, dtype=torch.float32).reshape(spec.shape)
        first += spec.num_elements
    assert first < 1 << 24, first
    return tensors


def build_rank(engine_config: Any, *, tp: int, rank: int, pp: int, stage: int, ep: bool) -> Any:  # noqa: ANN401
    """Return vLLM's model of one rank; parameters are -1 everywhere."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    parallel_state._EP = parallel_state._TP  # dense models have none; its ranks are those of the tensor group
    for group, place, size in ((parallel_state._TP, rank, tp), (parallel_state._PP, stage, pp)):
        group.rank_in_group = group.rank = place
        group.world_size, group.ranks = size, list(range(size))

    parallel = engine_config.parallel_config
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.enable_expert_parallel = tp, pp, ep
    engine_config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(engine_config), set_default_torch_dtype(engine_config.model_config.dtype):
        model = initialize_model(engine_config)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(-1)
    return model


def differences(case: dict[str, Any], engine_config: Any) -> list[str]:  # noqa: ANN401
    """Return what differs between vLLM and the layout, over all ranks."""
    import torch
    from vllm.config import set_current_vllm_config

    from engine.families import vllm_layout

    config, tp, pp, ep, dtype = (case[key] for key in ("config", "tp", "pp", "ep", "dtype"))
    layout = vllm_layout(config, tp=tp, pp=pp, ep=ep, dtype=dtype)
    hf = numbered_tensors(config)
    found: list[str] = []
    for index, (specs, shards) in enumerate(zip(layout.params, layout.shards, strict=True)):
        model = build_rank(engine_config, tp=tp, rank=index % tp, pp=pp, stage=index // tp, ep=ep)
        with set_current_vllm_config(engine_config):
            model.load_weights(hf.items())

        wanted = {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
        for shard in shards:
            wanted[shard.param][shard.param_slices] = hf[shard.tensor][shard.box.slices].to(wanted[shard.param].dtype)

        live = {name: param.detach() for name, param in model.named_parameters()}
        found += [f"rank {index}: {name} on one side only" for name in sorted(live.keys() ^ wanted.keys())]
        for name in sorted(live.keys() & wanted.keys()):
            if live[name].dtype != wanted[name].dtype or not torch.equal(live[name], wanted[name]):
                here, there = live[name], wanted[name]
                found.append(f"rank {index}: {name} {here.dtype} {tuple(here.shape)}, {tuple(there.shape)}")
    return found


def main(cases_file: Path, results_file: Path) -> None:
    """Write name -> differences of every case."""
    os.environ.update(QUIET)
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs

    results: dict[str, list[str]] = {}
    for number, (name, case) in enumerate(json.loads(cases_file.read_text()).items()):
        folder = results_file.parent / f"model-{number}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(case["config"]))
        arguments = EngineArgs(
            model=str(folder), dtype=case["dtype"], max_model_len=64, enforce_eager=True, skip_tokenizer_init=True
        )
        engine_config = arguments.create_engine_config()
        if number == 0:
            with set_current_vllm_config(engine_config):
                init_distributed_environment(1, 0, f"file://{results_file.parent}/rendezvous", 0, "gloo")
                initialize_model_parallel(1)

        results[name] = differences(case, engine_config)
    results_file.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # groups whose sizes were changed need no farewell
