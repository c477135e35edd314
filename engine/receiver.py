"""Generator rank side of a publish, for any engine: verify a whole version, then write it into live parameters.

Two phases. `prepare` reads and proves (every bucket of this rank is there, sealed, of this plan, epoch and version, and
hashes to the manifest's digest); requests may run meanwhile. `apply` copies, between two decode steps. Invariant *whole
versions*: what fails before the first byte leaves the old version serving; what fails after it leaves the receiver
poisoned, without a version, until a whole one has been applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from engine.plan import Plan
from engine.segments import SegmentReader, WeightTransferError, digest_of
from engine.transport import check_header, check_manifest, sealed_header
from engine.types import Manifest, WeightVersion
from engine.views import BucketRuns, Chunks, LiveParams, memory_tensor


class Receiver:
    """Keeps the parameters of one target rank at a published version.

    Usage::

        receiver = Receiver(plan, rank, dict(model.named_parameters()), folder, num_slots)
        receiver.prepare(manifest)  # while requests run
        touched, num_bytes = receiver.apply(manifest)  # between two decode steps
    """

    def __init__(
        self, plan: Plan, target_rank: int, params: Mapping[str, torch.Tensor], folder: Path, num_slots: int
    ) -> None:
        """Check that the plan covers every parameter, and fill their padding with 0.

        The segments are opened by the first `prepare`: the training ranks may create them later than this.

        Args:
            plan: the run's plan.
            target_rank: which rank of `plan.target` this is; replicas share a plan and its ranks.
            params: all live parameters by local name. The tensor objects must stay the engine's own.
            folder: the run's folder of shared memory.
            num_slots: versions that the store can hold.

        Raises:
            WeightTransferError: a parameter that the plan does not cover whole, or that is missing, too many, or of
                another shape or dtype; all of them are named.
        """
        self._params = LiveParams(plan.target, target_rank, params)
        self._runs = [BucketRuns.of(bucket, bucket.target_runs) for bucket in plan.buckets_of_target(target_rank)]
        _check_coverage(plan, target_rank, self._runs)
        self._plan, self._plan_hash = plan, plan.hash
        self._folder, self._num_slots = folder, num_slots
        self._param_views = self._view_params()
        self._touched = frozenset(run.param for runs in self._runs for group in runs.groups for run in group)
        self._readers: dict[int, SegmentReader] = {}
        self._payload_views: list[list[Chunks]] = []
        self._prepared: dict[WeightVersion, Manifest] = {}  # proven and not yet applied; a new one may come meanwhile
        self._live: Manifest | None = None
        self._poison: str | None = None
        with torch.no_grad():
            for pad in plan.target.pads[target_rank]:
                params[pad.param].detach()[pad.box.slices].zero_()

    @property
    def version(self) -> WeightVersion | None:
        """The version that the parameters hold whole; None before the first one and while poisoned."""
        return None if self._live is None else self._live.version

    @property
    def poisoned(self) -> bool:
        """Whether an apply failed after its first byte: the parameters are of two versions and must not be used."""
        return self._poison is not None

    @property
    def poison(self) -> str | None:
        """Why it is poisoned."""
        return self._poison

    def prepare(self, manifest: Manifest) -> None:
        """Prove that this rank's part of a version is whole in shared memory. Changes no parameter.

        Raises:
            WeightTransferError: another plan, a missing bucket, a header or a digest that differs, a file that is
                missing, truncated or not private: named with both values.
        """
        self._prepared.pop(manifest.version, None)
        self._check_manifest(manifest)
        self._open()
        for runs in self._runs:
            self._check_header(runs, manifest)
            self._check_digest(runs, manifest)
        self._prepared[manifest.version] = manifest

    def apply(self, manifest: Manifest) -> tuple[set[str], int]:
        """Write a prepared version into the parameters.

        Args:
            manifest: of an earlier `prepare`; further versions may have been prepared since.

        Returns:
            Names of the parameters that were written, and the bytes that were copied. Both are empty if the version's
            bytes are those that are live already (a step that made no new bits).

        Raises:
            WeightTransferError: a bucket is no longer what was prepared. Found before the first byte, the old version
                stays; found after the copy, the receiver is poisoned.
        """
        assert manifest == self._prepared.get(manifest.version), (
            f"apply of version {manifest.version} without its prepare; prepared are {sorted(self._prepared)}"
        )
        if self._live is not None and _same_bytes(self._live, manifest):
            self._live = manifest
            self._forget_until(manifest.version)
            return set(), 0

        for runs in self._runs:
            self._check_header(runs, manifest)

        self._live, self._poison = None, f"the apply of version {manifest.version} did not end"
        self._copy(manifest.slot)
        try:
            for runs in self._runs:
                self._check_header(runs, manifest)
        except WeightTransferError as error:
            self._poison = f"version {manifest.version} was overwritten while it was applied: {error}"
            raise

        self._live, self._poison = manifest, None
        self._forget_until(manifest.version)
        return set(self._touched), sum(runs.bucket.num_bytes for runs in self._runs)

    def close(self) -> None:
        """Unmap the segments; they stay where they are. Idempotent."""
        self._prepared = {}
        self._payload_views = []
        for reader in self._readers.values():
            reader.close()
        self._readers = {}

    def _forget_until(self, version: WeightVersion) -> None:
        self._prepared = {later: manifest for later, manifest in self._prepared.items() if later > version}

    @torch.no_grad()
    def _copy(self, slot: int) -> None:
        if self._params.have_moved():
            self._param_views = self._view_params()

        for params, payload in zip(self._param_views, self._payload_views[slot], strict=True):
            for targets, sources in zip(params, payload, strict=True):
                torch._foreach_copy_(targets, sources)

    def _view_params(self) -> list[Chunks]:
        return [self._params.views(runs.groups) for runs in self._runs]

    def _open(self) -> None:
        """Map the segments of every rank that this one reads from, once."""
        if self._payload_views:
            return

        ranks = sorted({runs.bucket.source_rank for runs in self._runs})
        readers = {rank: SegmentReader(self._plan, rank, self._folder, self._num_slots) for rank in ranks}
        memories = {rank: memory_tensor(reader.memory) for rank, reader in readers.items()}
        self._payload_views = [
            [
                runs.payload_views(
                    memories[runs.bucket.source_rank],
                    readers[runs.bucket.source_rank].payload(runs.bucket.id, slot),
                )
                for runs in self._runs
            ]
            for slot in range(self._num_slots)
        ]
        self._readers = readers

    def _check_manifest(self, manifest: Manifest) -> None:
        check_manifest(manifest, self._plan_hash, self._plan.num_buckets)
        if not 0 <= manifest.slot < self._num_slots:
            raise WeightTransferError(
                f"manifest of version {manifest.version}: slot {manifest.slot} is not in [0, {self._num_slots})"
            )

    def _check_header(self, runs: BucketRuns, manifest: Manifest) -> None:
        """Raise unless the bucket is sealed and what the manifest says."""
        bucket = runs.bucket
        reader = self._readers[bucket.source_rank]
        reader.check_size()
        found = reader.header(bucket.id, manifest.slot)
        check_header(found, sealed_header(manifest, bucket), _place(runs, manifest))

    def _check_digest(self, runs: BucketRuns, manifest: Manifest) -> None:
        """Raise unless the payload hashes to what the manifest says."""
        bucket = runs.bucket
        reader = self._readers[bucket.source_rank]
        with memoryview(reader.memory)[reader.payload(bucket.id, manifest.slot)] as payload:
            found = digest_of(payload)
        if found != manifest.digests[bucket.id]:
            wanted = manifest.digests[bucket.id]
            raise WeightTransferError(f"{_place(runs, manifest)}: the payload hashes to {found}, want {wanted}")


def _place(runs: BucketRuns, manifest: Manifest) -> str:
    bucket = runs.bucket
    return f"version {manifest.version}, bucket {bucket.id} of source rank {bucket.source_rank}, slot {manifest.slot}"


def _same_bytes(live: Manifest, manifest: Manifest) -> bool:
    """Whether two manifests name the same written bytes."""
    return (live.epoch, live.written_version, live.digests) == (
        manifest.epoch,
        manifest.written_version,
        manifest.digests,
    )


def _check_coverage(plan: Plan, rank: int, buckets: list[BucketRuns]) -> None:
    """Raise unless buckets and padding add up to every parameter of this rank (invariant *full coverage*)."""
    covered = Counter[str]()
    for run in (run for runs in buckets for group in runs.groups for run in group):
        covered[run.param] += run.box.num_elements
    for pad in plan.target.pads[rank]:
        covered[pad.param] += pad.box.num_elements

    wrong = [
        f"{name} {covered[name]} of {spec.num_elements} elements"
        for name, spec in sorted(plan.target.params[rank].items())
        if covered[name] != spec.num_elements
    ]
    if wrong:
        raise WeightTransferError(f"the plan does not cover the parameters of target rank {rank}: {'; '.join(wrong)}")
