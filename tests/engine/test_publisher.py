"""The publisher's state machine: every legal order, every illegal one, and slots that are never given out too early."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.publisher import Publisher, VersionState
from engine.segments import WeightTransferError

DIGESTS = {0: "aa", 1: "bb"}


def publisher(*, num_slots: int = 2, replicas: tuple[str, ...] = ("left", "right"), epoch: int = 0) -> Publisher:
    return Publisher("plan", 2, num_slots, replicas, epoch=epoch)


def published(*versions: int, num_slots: int = 4) -> Publisher:
    """A publisher that has committed these versions."""
    made = publisher(num_slots=num_slots)
    for version in versions:
        made.reserve(version)
        made.commit(version, DIGESTS)
    return made


def test_a_version_goes_from_writing_to_retired() -> None:
    made = publisher(epoch=3)
    assert made.newest is None
    assert made.reserve(7) == 0
    assert made.state(7) is VersionState.WRITING
    made.seal(7, DIGESTS)
    assert made.state(7) is VersionState.SEALED
    manifest = made.commit(7)
    assert made.state(7) is VersionState.COMMITTED
    assert made.newest is manifest is made.manifest(7)
    assert (manifest.epoch, manifest.version, manifest.written_version, manifest.slot) == (3, 7, 7, 0)
    assert (manifest.plan_hash, manifest.digests) == ("plan", DIGESTS)

    made.hold("left", 7)
    made.acknowledge("left", 7)
    assert made.acknowledged(7) == {"left"}
    assert made.reserve(8) == 1
    made.commit(8, DIGESTS)
    made.retire_below(8)
    assert made.state(7) is VersionState.COMMITTED  # still held
    assert made.num_free_slots == 0
    made.release("left", 7)
    assert made.state(7) is VersionState.RETIRED
    assert made.reserve(9) == 0


def test_every_step_makes_a_version() -> None:
    """A step without new bits commits too: same slot, digests and written version; a slot reserved for it is free."""
    made = published(0, 1, num_slots=3)
    slot = made.reserve(2)
    assert made.num_free_slots == 0
    manifest = made.commit(2, unchanged=True)
    assert made.newest is manifest
    assert (manifest.version, manifest.written_version, manifest.slot, manifest.digests) == (2, 1, 1, DIGESTS)
    assert made.num_free_slots == 1

    again = made.commit(3, unchanged=True)  # a step that is known to be empty reserves nothing
    assert (again.version, again.written_version, again.slot) == (3, 1, 1)
    assert made.reserve(4) == slot


def test_a_slot_is_free_when_its_last_alias_is_retired() -> None:
    made = published(0, num_slots=2)
    made.commit(1, unchanged=True)
    made.commit(2, unchanged=True)
    made.hold("left", 1)
    made.reserve(3)
    made.commit(3, DIGESTS)
    made.retire_below(3)
    assert [made.state(version) for version in (0, 1, 2)] == [
        VersionState.RETIRED,
        VersionState.COMMITTED,
        VersionState.RETIRED,
    ]
    assert made.num_free_slots == 0
    made.release("left", 1)
    assert made.num_free_slots == 1


def test_a_dead_replicas_leases_expire() -> None:
    made = published(0, 1, num_slots=2)
    for replica in ("left", "right"):
        made.hold(replica, 0)
        made.acknowledge(replica, 0)
    made.retire_below(1)
    made.release("left", 0)
    assert made.num_free_slots == 0
    made.drop_replica("right")
    assert made.num_free_slots == 1
    assert made.replicas == {"left"}
    with pytest.raises(AssertionError, match=r"right is no replica; there are \['left'\]"):
        made.hold("right", 1)


@pytest.mark.parametrize(
    ("digests", "message"),
    [
        ({0: "aa"}, r"version 0: buckets missing \[1\], unknown \[\]"),
        ({0: "aa", 1: "bb", 2: "cc"}, r"version 0: buckets missing \[\], unknown \[2\]"),
    ],
)
def test_a_version_with_other_buckets_than_the_plans_is_refused(digests: dict[int, str], message: str) -> None:
    made = publisher()
    made.reserve(0)
    with pytest.raises(WeightTransferError, match=message):
        made.commit(0, digests)
    assert made.state(0) is VersionState.WRITING
    assert made.newest is None


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (lambda: published(0).reserve(2), "version 2 cannot come next, 1 does"),
        (lambda: published(0).reserve(0), "version 0 cannot come next, 1 does"),
        (lambda: publisher().reserve(-1), "version must be >= 0, got -1"),
        (lambda: [made := publisher(), made.reserve(0), made.reserve(0)], "version 0 is writing already"),
        (
            lambda: [made := publisher(), made.reserve(0), made.reserve(1)],
            "version 0 is writing already, not committed",
        ),
        (lambda: published(0, 1, num_slots=2).reserve(2), "no slot for version 2: 2 are taken by 0 .*held by nobody"),
        (lambda: publisher().commit(0, DIGESTS), "version 0 is not in the store, want writing"),
        (lambda: [made := publisher(), made.reserve(0), made.commit(0)], "version 0 is writing, want sealed"),
        (lambda: publisher().commit(0, unchanged=True), "version 0 is the first one"),
        (lambda: published(0).commit(1, DIGESTS, unchanged=True), "version 1 is unchanged, yet it has digests"),
        (
            lambda: [made := published(0), made.reserve(1), made.seal(1, DIGESTS), made.commit(1, unchanged=True)],
            "version 1 is sealed, want writing",
        ),
        (lambda: published(0).seal(0, DIGESTS), "version 0 is committed, want writing"),
        (lambda: published(0).hold("other", 0), "other is no replica"),
        (lambda: published(0).hold("left", 1), "version 1 is not in the store, want committed"),
        (lambda: [made := publisher(), made.reserve(0), made.hold("left", 0)], "version 0 is writing, want committed"),
        (lambda: [made := published(0), made.hold("left", 0), made.hold("left", 0)], "left holds version 0 already"),
        (lambda: published(0).acknowledge("left", 0), "left does not hold version 0"),
        (lambda: published(0).release("left", 0), "left does not hold version 0"),
        (lambda: published(0).retire_below(1), r"retire_below\(1\) would retire the newest version"),
        (lambda: publisher().retire_below(0), r"retire_below\(0\) would retire the newest version"),
        (lambda: [made := published(0, 1), made.retire_below(1), made.retire_below(0)], r"retire_below\(0\) after 1"),
        (
            lambda: [made := published(0, 1), made.retire_below(1), made.hold("left", 0)],
            "version 0 is not in the store",
        ),
        (lambda: published(0).state(1), "version 1 was never reserved"),
        (lambda: publisher(num_slots=0), "num_slots must be >= 1, got 0"),
        (lambda: publisher(replicas=("a", "a")), "replica names must differ"),
    ],
)
def test_every_illegal_order_raises(order: Callable[[], object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        order()


class SlotsAreNotReused(RuleBasedStateMachine):
    """Random legal calls, the bytes of a slot simulated: whoever holds or may still need a version finds its own."""

    def __init__(self) -> None:
        super().__init__()
        self.publisher = publisher(num_slots=3)
        self.slots: dict[int, int] = {}
        self.held: set[tuple[str, int]] = set()
        self.floor = 0
        self.next = 0

    @precondition(lambda self: self.publisher.num_free_slots > 0)
    @rule()
    def publish(self) -> None:
        slot = self.publisher.reserve(self.next)
        self.slots[slot] = self.next
        self.publisher.commit(self.next, DIGESTS)
        self.next += 1

    @precondition(lambda self: self.next > 0)
    @rule(reserved=st.booleans())
    def publish_nothing_new(self, *, reserved: bool) -> None:
        if reserved and self.publisher.num_free_slots:
            self.publisher.reserve(self.next)
        self.publisher.commit(self.next, unchanged=True)
        self.next += 1

    @precondition(lambda self: self.next > 0)
    @rule(replica=st.sampled_from(["left", "right"]), back=st.integers(0, 5))
    def hold(self, replica: str, back: int) -> None:
        version = max(self.next - 1 - back, self.floor)
        if (replica, version) not in self.held:
            self.publisher.hold(replica, version)
            self.held.add((replica, version))

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0, 100))
    def release(self, choice: int) -> None:
        replica, version = sorted(self.held)[choice % len(self.held)]
        self.publisher.acknowledge(replica, version)
        self.publisher.release(replica, version)
        self.held.remove((replica, version))

    @precondition(lambda self: self.next > 0)
    @rule(back=st.integers(0, 3))
    def retire(self, back: int) -> None:
        self.floor = max(self.floor, self.next - 1 - back)
        self.publisher.retire_below(self.floor)

    @invariant()
    def every_needed_version_has_its_bytes(self) -> None:
        needed = {version for _, version in self.held} | set(range(self.floor, self.next))
        for version in needed:
            manifest = self.publisher.manifest(version)
            assert self.slots[manifest.slot] == manifest.written_version <= version
        for version in set(range(self.floor)) - needed:
            assert self.publisher.state(version) is VersionState.RETIRED


test_slots_are_not_reused = SlotsAreNotReused.TestCase
