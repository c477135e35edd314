"""Tensor views that join buckets in shared memory with live parameters, made once and used for every version."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.buckets import BucketSpec, Run, chunks
from engine.layout import DTYPE_BYTES, Layout, TensorSpec
from engine.segments import WeightTransferError

_CHUNK_BYTES = 1 << 20  # copied and hashed in one go: small enough to be still in the cache when it is hashed

Chunks = list[list[torch.Tensor]]
"""The views of one bucket, chunk by chunk."""


class LiveParams:
    """The parameters of one rank, checked against its layout once, watched for a change of storage afterwards."""

    def __init__(self, layout: Layout, rank: int, params: Mapping[str, torch.Tensor]) -> None:
        """Check names, shapes and dtypes.

        Raises:
            WeightTransferError: what is missing, too many or different, all of it in one message.
        """
        _check_params(layout, rank, params)
        self._params = dict(params)
        self._addresses = self._current_addresses()

    def have_moved(self) -> bool:
        """Whether a storage was exchanged since the last call (or the start): views on it are stale then."""
        addresses = self._current_addresses()
        moved, self._addresses = addresses != self._addresses, addresses
        return moved

    def views(self, groups: Iterable[Iterable[Run]]) -> Chunks:
        """Views of the parameters' blocks."""
        return [[self._params[run.param].detach()[run.box.slices] for run in group] for group in groups]

    def _current_addresses(self) -> list[int]:
        return [param.data_ptr() for param in self._params.values()]


@dataclass(frozen=True, slots=True)
class BucketRuns:
    """How one side moves one bucket: its runs, in chunks.

    Attributes:
        bucket: which one.
        groups: runs per chunk, in payload order.
        ends: offset in the payload at which each chunk ends, in bytes.
    """

    bucket: BucketSpec
    groups: tuple[tuple[Run, ...], ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, bucket: BucketSpec, runs: Sequence[Run]) -> BucketRuns:
        """Cut the runs of one side into chunks."""
        item = DTYPE_BYTES[bucket.dtype]
        groups = tuple(map(tuple, chunks(runs, max(_CHUNK_BYTES // item, 1))))
        return cls(bucket, groups, tuple((group[-1].offset + group[-1].box.num_elements) * item for group in groups))

    def payload_views(self, memory: torch.Tensor, place: slice) -> Chunks:
        """Views of the bucket's payload at `place` of the mapped file (uint8), shaped like the parameters' blocks."""
        flat = memory[place].view(getattr(torch, self.bucket.dtype))
        return [
            [flat[run.offset : run.offset + run.box.num_elements].view(run.box.shape) for run in group]
            for group in self.groups
        ]


def memory_tensor(memory: mmap.mmap) -> torch.Tensor:
    """Return a mapped file as a uint8 tensor without a copy; it keeps the mapping open."""
    with warnings.catch_warnings():
        # torch has no read-only tensors and says so; nothing here ever writes through a reader's mapping.
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        return torch.frombuffer(memory, dtype=torch.uint8)


def _check_params(layout: Layout, rank: int, params: Mapping[str, torch.Tensor]) -> None:
    wanted = layout.params[rank]
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - params.keys())]
    problems += [f"{name} is not in the layout" for name in sorted(params.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & params.keys()):
        tensor = params[name]
        found = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if found != wanted[name]:
            problems.append(
                f"{name} is {found.dtype} {list(found.shape)}, "
                f"the layout says {wanted[name].dtype} {list(wanted[name].shape)}"
            )

    if problems:
        raise WeightTransferError(f"live parameters of rank {rank} do not match {layout.name}: {'; '.join(problems)}")
