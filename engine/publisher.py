"""Driver side of a publish: which version is in which slot, who needs it, when its slot is free. Bookkeeping, no I/O.

Per version: WRITING (the training ranks may write its slot) -> SEALED (every bucket's digest is in) -> COMMITTED (it is
a weight version; generators may take it) -> RETIRED (nobody needs it). Invariant *every step makes a version*: a step
that made no new bits commits too, as an alias of its predecessor's slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine.shared_folder import WeightTransferError
from engine.types import Manifest, WeightVersion


class VersionState(StrEnum):
    """Where a version is in its life; it only ever moves down this list."""

    WRITING = "writing"
    SEALED = "sealed"
    COMMITTED = "committed"
    RETIRED = "retired"


@dataclass(slots=True)
class _Record:
    """One version's entry. Private to the publisher, hence mutable."""

    state: VersionState
    slot: int
    digests: Mapping[int, str] = field(default_factory=dict)
    manifest: Manifest | None = None
    holders: set[str] = field(default_factory=set)
    acknowledged: set[str] = field(default_factory=set)


class Publisher:
    """The one place where a weight version is made.

    Usage, for step s that turns version s into s + 1::

        slot = publisher.reserve(s + 1)
        digests = ...  # all training ranks wrote `slot` and returned their digests
        manifest = publisher.commit(s + 1, digests)  # or commit(s + 1, unchanged=True)
        publisher.hold(replica, s + 1)  # then prepare and apply there
        publisher.acknowledge(replica, s + 1)
        publisher.release(replica, s + 1)
        publisher.retire_below(s)  # open samples need nothing older

    An order that is not this one is a bug of ours and an AssertionError.

    Example: with two slots, version 4 in slot 0 and 5 in slot 1, `reserve(6)` fails until 4 is retired and released; if
    step 5 makes no new bits, version 6 is an alias in slot 1, and slot 0 becomes free as soon as 4 is retired.
    """

    def __init__(
        self, plan_hash: str, num_buckets: int, num_slots: int, replicas: tuple[str, ...], *, epoch: int = 0
    ) -> None:
        """Start without a version.

        Args:
            plan_hash, num_buckets: of the run's plan.
            num_slots: versions that the store holds; `max_staleness + 2` never makes a step wait for a generator.
            replicas: names of the generators.
            epoch: rises when the trainer falls back to a checkpoint.
        """
        assert num_slots >= 1, f"num_slots must be >= 1, got {num_slots}"
        assert len(set(replicas)) == len(replicas), f"replica names must differ, got {replicas}"
        self._plan_hash, self._num_buckets, self._num_slots, self._epoch = plan_hash, num_buckets, num_slots, epoch
        self._replicas = set(replicas)
        self._records: dict[int, _Record] = {}
        self._newest: Manifest | None = None
        self._floor: int | None = None

    @property
    def newest(self) -> Manifest | None:
        """Manifest of the newest committed version; None before the first. It is never retired."""
        return self._newest

    @property
    def epoch(self) -> int:
        """The epoch of every version made here."""
        return self._epoch

    @property
    def replicas(self) -> frozenset[str]:
        """The generators that have not been dropped."""
        return frozenset(self._replicas)

    @property
    def num_free_slots(self) -> int:
        """Slots that `reserve` could give out now."""
        return len(self._free_slots())

    def state(self, version: int) -> VersionState:
        """State of a version; RETIRED ones are remembered as such only by their number."""
        record = self._records.get(version)
        if record is not None:
            return record.state

        assert version < self._next(default=0), f"version {version} was never reserved"
        return VersionState.RETIRED

    def manifest(self, version: int) -> Manifest:
        """Manifest of a committed version that is still in the store."""
        manifest = self._committed(version).manifest
        assert manifest is not None
        return manifest

    def acknowledged(self, version: int) -> frozenset[str]:
        """Replicas that have applied a version that is still in the store."""
        return frozenset(self._committed(version).acknowledged)

    def reserve(self, version: int) -> int:
        """Take a free slot for the next version; its buckets may be written from now on.

        Args:
            version: the newest one + 1; anything >= 0 if it is the first (a resumed run starts where it was).

        Returns:
            The slot.
        """
        self._check_next(version)
        for other, record in self._records.items():
            assert record.state is VersionState.COMMITTED, f"version {other} is {record.state} already, not committed"
        free = self._free_slots()
        assert free, f"no slot for version {version}: {self._num_slots} are taken by {self._describe()}"
        self._records[version] = _Record(VersionState.WRITING, free[0])
        return free[0]

    def seal(self, version: int, digests: Mapping[int, str]) -> None:
        """Take the digests of all buckets: the payloads are whole.

        Args:
            version: one that is WRITING.
            digests: bucket id -> digest, exactly the plan's buckets.

        Raises:
            WeightTransferError: the training ranks returned more or fewer buckets; both are named.
        """
        record = self._record(version, VersionState.WRITING)
        wanted = set(range(self._num_buckets))
        missing, extra = sorted(wanted - digests.keys()), sorted(digests.keys() - wanted)
        if missing or extra:
            raise WeightTransferError(f"version {version}: buckets missing {missing}, unknown {extra}")

        record.digests, record.state = dict(digests), VersionState.SEALED

    def commit(self, version: int, digests: Mapping[int, str] | None = None, *, unchanged: bool = False) -> Manifest:
        """Make a weight version.

        Args:
            version: the next one; reserved, or sealed, or (only if unchanged) not reserved at all.
            digests: seals first, for a version that is WRITING.
            unchanged: the step made no new bits: the version is an alias of its predecessor, and a slot that was
                reserved for it is free again.

        Returns:
            What a generator needs to prepare it.
        """
        self._check_next(version)
        if unchanged:
            assert digests is None, f"version {version} is unchanged, yet it has digests"
            return self._commit_alias(version)

        if digests is not None:
            self.seal(version, digests)
        record = self._record(version, VersionState.SEALED)
        written = WeightVersion(version)
        record.manifest = Manifest(
            epoch=self._epoch,
            version=written,
            written_version=written,
            plan_hash=self._plan_hash,
            slot=record.slot,
            digests=record.digests,
        )
        return self._commit_record(record)

    def hold(self, replica: str, version: int) -> None:
        """Lend a version to a replica: its slot stays until `release`, whatever is retired."""
        self._check_replica(replica)
        record = self._committed(version)
        assert replica not in record.holders, f"{replica} holds version {version} already"
        record.holders.add(replica)

    def acknowledge(self, replica: str, version: int) -> None:
        """Note that a replica, which holds the version, has verified and applied it whole."""
        self._check_holder(replica, version)
        self._committed(version).acknowledged.add(replica)

    def release(self, replica: str, version: int) -> None:
        """Take a lent version back."""
        self._check_holder(replica, version)
        self._committed(version).holders.remove(replica)
        self._retire()

    def retire_below(self, version: int) -> None:
        """Note that no open sample needs a version older than this one; held ones go when they are released.

        Args:
            version: at most the newest; never smaller than in an earlier call.
        """
        assert version < self._next(default=0), f"retire_below({version}) would retire the newest version"
        assert self._floor is None or version >= self._floor, f"retire_below({version}) after {self._floor}"
        self._floor = version
        self._retire()

    def drop_replica(self, replica: str) -> None:
        """Forget a dead replica: its leases expire and its acknowledgements no longer count."""
        self._check_replica(replica)
        self._replicas.remove(replica)
        for record in self._records.values():
            record.holders.discard(replica)
            record.acknowledged.discard(replica)
        self._retire()

    def _commit_alias(self, version: int) -> Manifest:
        newest = self._newest
        assert newest is not None, f"version {version} is the first one: there is nothing that it could be equal to"
        if version in self._records:
            self._record(version, VersionState.WRITING)

        record = _Record(VersionState.SEALED, newest.slot, newest.digests)
        record.manifest = Manifest(
            epoch=self._epoch,
            version=WeightVersion(version),
            written_version=newest.written_version,
            plan_hash=self._plan_hash,
            slot=newest.slot,
            digests=newest.digests,
        )
        self._records[version] = record
        return self._commit_record(record)

    def _commit_record(self, record: _Record) -> Manifest:
        assert record.manifest is not None
        record.state = VersionState.COMMITTED
        self._newest = record.manifest
        return record.manifest

    def _retire(self) -> None:
        """Retire what lies below the floor and is not held; a slot is free when its last alias is retired."""
        for version, record in list(self._records.items()):
            committed = record.state is VersionState.COMMITTED
            if committed and self._floor is not None and version < self._floor and not record.holders:
                record.state = VersionState.RETIRED
                del self._records[version]

    def _free_slots(self) -> list[int]:
        taken = {record.slot for record in self._records.values()}
        return [slot for slot in range(self._num_slots) if slot not in taken]

    def _next(self, *, default: int) -> int:
        """The number that the next version must have; `default` before the first."""
        return default if self._newest is None else self._newest.version + 1

    def _check_next(self, version: int) -> None:
        assert version >= 0, f"version must be >= 0, got {version}"
        wanted = self._next(default=version)
        assert version == wanted, f"version {version} cannot come next, {wanted} does"

    def _check_replica(self, replica: str) -> None:
        assert replica in self._replicas, f"{replica} is no replica; there are {sorted(self._replicas)}"

    def _check_holder(self, replica: str, version: int) -> None:
        self._check_replica(replica)
        assert replica in self._committed(version).holders, f"{replica} does not hold version {version}"

    def _record(self, version: int, state: VersionState) -> _Record:
        record = self._records.get(version)
        assert record is not None, f"version {version} is not in the store, want {state}"
        assert record.state is state, f"version {version} is {record.state}, want {state}"
        return record

    def _committed(self, version: int) -> _Record:
        return self._record(version, VersionState.COMMITTED)

    def _describe(self) -> str:
        return ", ".join(
            f"{version} ({record.state} in slot {record.slot}, held by {sorted(record.holders) or 'nobody'})"
            for version, record in sorted(self._records.items())
        )
