"""Who takes part in transfers, epoch by epoch, and how it is told: announcements and reports through a rendezvous.

A group that has lost a member is never repaired. Everybody reports how the transfer went, the coordinator (the process
of the first training rank) drops who was lost and announces the next epoch; the groups of that epoch are new.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from engine.transport import Deadline, TransportError
from engine.transport_group import Rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The replicas of one epoch.

    Attributes:
        epoch: 0, 1, ...
        replicas: their names, in the order of the relay.
    """

    epoch: int
    replicas: tuple[str, ...]

    def without(self, lost: Iterable[str]) -> Membership:
        """The next epoch, without these replicas."""
        gone = set(lost)
        return Membership(epoch=self.epoch + 1, replicas=tuple(name for name in self.replicas if name not in gone))

    def joined_by(self, replica: str) -> Membership:
        """The next epoch, with one more replica at the end."""
        assert replica not in self.replicas, f"{replica} is a member of epoch {self.epoch} already"
        return Membership(epoch=self.epoch + 1, replicas=(*self.replicas, replica))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one transfer of one version went for one generator rank.

    Attributes:
        member: who reports ("generator-0 rank 1").
        error: why its version is not whole; None if it is.
        lost: the member that it waited for in vain; None if it missed nobody.
    """

    member: str
    error: str | None = None
    lost: str | None = None


class MembershipBoard:
    """Announcements and reports of a run, in the rendezvous's store, over a connection of its own; one a thread."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._store = rendezvous.connection("membership")

    def announce(self, membership: Membership) -> None:
        """Coordinator: make an epoch known."""
        self._store.set(f"epoch/{membership.epoch}", json.dumps(list(membership.replicas)))

    def await_epoch(self, epoch: int, *, timeout_s: float) -> Membership:
        """Member: wait until an epoch is announced.

        Raises:
            TransportError: it was not in time, or the coordinator is gone.
        """
        replicas = json.loads(self._get(f"epoch/{epoch}", timeout_s))
        return Membership(epoch=epoch, replicas=tuple(replicas))

    def report(self, epoch: int, version: int, outcome: Outcome) -> None:
        """Member: say how the transfer of a version went."""
        place = self._store.add(f"reports/{epoch}/{version}", 1)
        self._store.set(f"reports/{epoch}/{version}/{place}", json.dumps(asdict(outcome)))

    def collect(
        self,
        epoch: int,
        version: int,
        members: Iterable[str],
        *,
        timeout_s: float,
        suspected: Iterable[str] = (),
        grace_s: float = 1.0,
    ) -> dict[str, Outcome]:
        """Coordinator: take the members' reports; whoever did not report is missing in the answer.

        Args:
            epoch, version: which transfer.
            members: who was to take part.
            timeout_s: longest wait for all of them.
            suspected: whom the training ranks lost (`TransportError.peer`).
            grace_s: wait for the rest once every one of them is suspected, or was named lost by one who reported.
        """
        waiting, named = set(members), set(suspected)
        found: dict[str, Outcome] = {}
        deadline = Deadline(timeout_s)
        while waiting and deadline.remaining_s > 0:
            if waiting <= named and deadline.remaining_s > grace_s:
                deadline = Deadline(grace_s)
            key = f"reports/{epoch}/{version}/{len(found) + 1}"
            try:
                raw = self._get(key, deadline.remaining_s)
            except TransportError:
                break

            self._store.delete_key(key)  # a long run makes many versions
            outcome = Outcome(**json.loads(raw))
            found[outcome.member] = outcome
            waiting.discard(outcome.member)
            if outcome.lost is not None:
                named.add(outcome.lost)
        return found

    def _get(self, key: str, timeout_s: float) -> str:
        try:
            self._store.wait([key], timedelta(seconds=max(timeout_s, 1e-3)))
            return str(self._store.get(key).decode())
        except (dist.DistError, RuntimeError) as error:
            raise TransportError(f"{key} was not there within {timeout_s:g} s: {error}") from error
