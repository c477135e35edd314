"""megatron.core.resharding over gloo, as a contender of benchmarks/reshard.py.

It moves Megatron's parameters to Megatron's: names and fused rows stay the trainer's, so it cannot feed vLLM; here its
target is the same model with the inference side's tensor parallelism. What had to be changed for a CPU: the project's
own `trainers.megatron_cpu`, and a `GlooCopyService` without its CUDA stream, which its `run` allows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from reshard_ways import Gather, Step, World

from engine.families import megatron_layout
from engine.plan import make_plan
from trainers import megatron_cpu


class Megatron:
    """`swap_model_weights` between two GPTModels that live side by side in every process."""

    def __init__(self, world: World) -> None:
        megatron_cpu.install()

        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        from trainers import megatron_model

        case = world.case
        tp, pp = case.train["tp"], case.train["pp"]
        parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(0)
        dtype = getattr(torch, case.dtype)
        config = megatron_model.transformer_config(case.hf_config, tp=tp, pp=pp, dtype=dtype)
        self._source = megatron_model.build_model(case.hf_config, config)
        self._source.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        with torch.no_grad():
            for name, param in megatron_model.layout_parameters(self._source).items():
                param.copy_(world.sources[name])
        self._target = _target_model(world)
        self._service = _copy_service()
        self.steps: tuple[Step, ...] = (("reshard", self._run),)
        self._run()
        self._check(world)

    def _run(self) -> None:
        from megatron.core.resharding.refit import swap_model_weights

        swap_model_weights([self._source], [self._target], self._service)

    def _check(self, world: World) -> None:
        """Its target must hold what gathering and cutting for the same layout gives."""
        from trainers import megatron_model

        case = world.case
        layout = megatron_layout(case.hf_config, tp=case.infer_tp, pp=1, dp=1, dtype=case.dtype)
        plan = make_plan(case.source, layout, bucket_bytes=16 << 20)
        found = megatron_model.layout_parameters(self._target)
        wanted = {name: torch.zeros_like(param) for name, param in found.items()}
        Gather(world, plan, wanted, world.target_rank, point_to_point=True).steps[0][1]()
        for name, param in found.items():
            assert torch.equal(param.detach().view(torch.int16), wanted[name].view(torch.int16)), name

    def close(self) -> None:
        """Megatron's groups go with the process."""


def _target_model(world: World) -> Any:  # noqa: ANN401
    """The model on the inference side's grid: consecutive ranks are one tensor-parallel group, replicas beside."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    from trainers import megatron_model

    case, size = world.case, dist.get_world_size()
    tp = case.infer_tp
    groups = ProcessGroupCollection()
    alone = [dist.new_group([rank]) for rank in range(size)][world.rank]
    for name in ("pp", "cp", "ep", "expt_tp", "tp_ep_pp", "embd", "pos_embd", "expt_dp", "hcp"):
        setattr(groups, name, alone)
    tensor = [dist.new_group(list(range(first, first + tp))) for first in range(0, size, tp)][world.rank // tp]
    for name in ("tp", "mp", "tp_cp", "tp_ep"):
        setattr(groups, name, tensor)
    data = [dist.new_group(list(range(first, size, tp))) for first in range(tp)][world.rank % tp]
    for name in ("dp", "dp_cp"):
        setattr(groups, name, data)
    groups.tp_dp_cp = dist.group.WORLD
    config = megatron_model.transformer_config(case.hf_config, tp=tp, pp=1, dtype=getattr(torch, case.dtype))
    model = GPTModel(
        config,
        megatron_model.layer_spec(),
        vocab_size=case.hf_config["vocab_size"],
        max_sequence_length=case.hf_config["max_position_embeddings"],
        parallel_output=True,
        share_embeddings_and_output_weights=bool(case.hf_config["tie_word_embeddings"]),
        position_embedding_type="rope",
        pg_collection=groups,
    )
    return model.to(dtype=config.params_dtype)


def _copy_service() -> Any:  # noqa: ANN401
    from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService

    class CpuCopyService(GlooCopyService):
        """Without the CUDA stream that the original's constructor makes."""

        def __init__(self) -> None:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self.gloo_pg = dist.group.WORLD
            self.send_ops: list[Any] = []
            self.recv_ops: list[Any] = []
            self._copy_stream = None

    return CpuCopyService()
