"""A training rank for tests: a plain process that runs the methods of a `MegatronRank`, without Ray.

Started by conftest.py as `python rank_server.py SOCKET`; answers one call after the other until the socket closes.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Client
from typing import Any

import numpy as np

from trainers.megatron import MegatronRank
from trainers.types import MicroBatch

Arrays = dict[str, Any]


class ProbedRank(MegatronRank):
    """A rank that also shows what is inside it."""

    def forward_backward(self, micro_batches: tuple[MicroBatch, ...], num_loss_tokens: int) -> Arrays:
        """Return the gradient by layout name, before any update. With dp > 1 only for the plain optimizer."""
        from trainers.megatron_model import layout_parameters

        learner = self._started()
        learner.forward_backward(micro_batches, num_loss_tokens)
        parameters = layout_parameters(learner.model.module)
        return {name: parameter.main_grad.clone().numpy() for name, parameter in parameters.items()}

    def weights(self) -> Arrays:
        """Return the parameters by layout name."""
        from trainers.megatron_model import layout_parameters

        parameters = layout_parameters(self._started().model.module)
        return {name: parameter.detach().float().clone().numpy() for name, parameter in parameters.items()}

    def poison(self, name: str, value: float) -> None:
        """Overwrite one weight."""
        import torch

        from trainers.megatron_model import layout_parameters

        with torch.no_grad():
            layout_parameters(self._started().model.module)[name].view(-1)[0] = value

    def logits(self, micro_batch: MicroBatch) -> np.ndarray[Any, Any]:
        """Return this rank's columns of the logits, float32 [T, V / tp]; without a pipeline."""
        import torch

        from trainers.megatron_model import packed_sequences

        token_ids = torch.from_numpy(micro_batch.token_ids.copy())[None]
        with torch.no_grad():
            out = self._started().model(token_ids, None, None, packed_seq_params=packed_sequences(micro_batch.lengths))
        return out[0].float().numpy()  # type: ignore[no-any-return]

    def threads(self) -> tuple[set[tuple[int, ...]], int]:
        """Return the cores of all threads, and how many torch uses."""
        import torch

        tasks = [int(task) for task in os.listdir("/proc/self/task")]
        return {tuple(sorted(os.sched_getaffinity(task))) for task in tasks}, torch.get_num_threads()

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, without parameters."""
        groups = self._started().optimizer.param_groups
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def main(address: str) -> None:
    """Serve calls: ("make", args) builds the rank, (method, args) runs a method."""
    rank: ProbedRank | None = None
    with Client(address, family="AF_UNIX") as connection:
        while True:
            try:
                method, args, kwargs = connection.recv()
            except EOFError:
                return

            try:
                if method == "make":
                    rank = ProbedRank(*args)
                    answer: object = None
                else:
                    answer = getattr(rank, method)(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 the test process raises it
                error.add_note(traceback.format_exc())
                connection.send((None, error))
            else:
                connection.send((answer, None))


if __name__ == "__main__":
    main(sys.argv[1])
