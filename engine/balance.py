"""How much each holder sends, so that the busiest has as little to do as possible. Exact integers, no torch.

Pieces with the same holders form a class. How a class is shared out is a flow: every class must send all its bytes,
every holder at most T. The smallest T is max over sets S of classes of bytes(S) / |holders of S| (Hall); each failed
attempt names such a set, which raises T, until one succeeds. The holders of that set are then done, and the rest is
shared out in the same way: whoever can be relieved is.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HolderClass:
    """Bytes that every one of `ranks` could send.

    Attributes:
        ranks: ascending, at least one.
        num_bytes: together.
    """

    ranks: tuple[int, ...]
    num_bytes: int


Shares = list[dict[int, int]]
"""Per class: rank -> bytes that it sends; ranks that send nothing are left out."""


def fair_shares(classes: Sequence[HolderClass]) -> Shares:
    """Share every class out over its holders; the sorted loads are the smallest possible, to a byte a holder.

    Example: 8 bytes that ranks 0 and 1 hold and 4 that only rank 0 holds give `[{0: 2, 1: 6}, {0: 4}]`.
    """
    shares: Shares = [{} for _ in classes]
    for members in _components(classes):
        _share_component(classes, members, shares)
    return shares


def busiest(classes: Sequence[HolderClass]) -> int:
    """Return the bytes of the busiest holder in the best possible sharing (rounded up to a byte)."""
    loads: dict[int, int] = defaultdict(int)
    for share in fair_shares(classes):
        for rank, num_bytes in share.items():
            loads[rank] += num_bytes
    return max(loads.values(), default=0)


def _components(classes: Sequence[HolderClass]) -> list[list[int]]:
    """Group classes that are joined by common holders."""
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        while parent.setdefault(rank, rank) != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    for item in classes:
        first = root(item.ranks[0])
        for rank in item.ranks[1:]:
            parent[root(rank)] = first

    found: dict[int, list[int]] = defaultdict(list)
    for number, item in enumerate(classes):
        found[root(item.ranks[0])].append(number)
    return list(found.values())


def _share_component(classes: Sequence[HolderClass], members: list[int], shares: Shares) -> None:
    """Fix the tightest set of classes, then the next, on the holders that are left."""
    done: set[int] = set()
    while members:
        ranks = {number: [rank for rank in classes[number].ranks if rank not in done] for number in members}
        holders = {rank for held in ranks.values() for rank in held}
        limit = -(-sum(classes[number].num_bytes for number in members) // len(holders))
        tight = members
        while True:
            flow = _Flow({number: (ranks[number], classes[number].num_bytes) for number in members}, limit)
            stuck = flow.run()
            if not stuck:
                break

            tight = stuck
            reached = {rank for number in stuck for rank in ranks[number]}
            limit = -(-sum(classes[number].num_bytes for number in stuck) // len(reached))

        done |= {rank for number in tight for rank in ranks[number]}
        fixed = [number for number in members if done.issuperset(ranks[number])]
        for number in fixed:
            shares[number] = {rank: sent for rank, sent in sorted(flow.sent[number].items()) if sent}
        members = [number for number in members if number not in set(fixed)]


class _Flow:
    """Sends every class's bytes to its holders, at most `limit` to each: first greedily, then along augmenting paths.

    Greedily: the classes with the fewest holders first, each levelled over them. That alone is a whole flow where
    holder sets are nested (the data-parallel ranks of a shard, within a stage), as they nearly always are.
    """

    def __init__(self, supplies: dict[int, tuple[list[int], int]], limit: int) -> None:
        self._ranks = {number: ranks for number, (ranks, _) in supplies.items()}
        self._left = {number: num_bytes for number, (_, num_bytes) in supplies.items()}
        self._limit = limit
        self._room = {rank: limit for ranks, _ in supplies.values() for rank in ranks}
        self._senders: dict[int, set[int]] = {rank: set() for rank in self._room}  # rank -> classes that it sends for
        self.sent: dict[int, dict[int, int]] = {number: defaultdict(int) for number in supplies}

    def run(self) -> list[int]:
        """Place all bytes; return the classes that keep others from being placed, none if all are."""
        for number in sorted(self._ranks, key=lambda number: (len(self._ranks[number]), number)):
            self._level(number)

        while any(self._left.values()):
            came_from, end = self._search()
            if end is None:
                return sorted(number for kind, number in came_from if kind == "class")

            self._augment(came_from, end)
        return []

    def _level(self, number: int) -> None:
        """Fill the emptiest holders of a class up to one level."""
        order = sorted(self._ranks[number], key=lambda rank: (-self._room[rank], rank))
        amount = min(self._left[number], sum(self._room[rank] for rank in order))
        used = [self._limit - self._room[rank] for rank in order]
        total, count = 0, 0
        while count < len(order) and (count == 0 or used[count] * count < total + amount):
            total += used[count]
            count += 1

        level, extra = divmod(total + amount, count)
        for position, rank in enumerate(order[:count]):
            self._move(number, rank, level + (position < extra) - used[position])

    def _move(self, number: int, rank: int, num_bytes: int) -> None:
        self._left[number] -= num_bytes
        self._room[rank] -= num_bytes
        self.sent[number][rank] += num_bytes
        if self.sent[number][rank]:
            self._senders[rank].add(number)
        else:
            self._senders[rank].discard(number)

    def _search(self) -> tuple[dict[tuple[str, int], tuple[str, int] | None], int | None]:
        """Look for a holder with room, breadth first: from a class to its holders, from a holder to what it sends."""
        came_from: dict[tuple[str, int], tuple[str, int] | None] = {}
        todo: deque[int] = deque()
        for number in sorted(number for number, left in self._left.items() if left):
            came_from["class", number] = None
            todo.append(number)

        while todo:
            number = todo.popleft()
            for rank in self._ranks[number]:
                if ("rank", rank) in came_from:
                    continue

                came_from["rank", rank] = ("class", number)
                if self._room[rank]:
                    return came_from, rank

                for other in sorted(self._senders[rank]):
                    if ("class", other) not in came_from:
                        came_from["class", other] = ("rank", rank)
                        todo.append(other)
        return came_from, None

    def _augment(self, came_from: dict[tuple[str, int], tuple[str, int] | None], end: int) -> None:
        """Push as much as the path allows: each class on it moves bytes from the holder before it to the one after."""
        path: list[int] = [end]  # rank, class, rank, class, ..., the class that has bytes left
        node = came_from["rank", end]
        while node is not None:
            path.append(node[1])
            node = came_from[node]

        takers, movers, givers = path[0::2], path[1::2], path[2::2]
        amount = min([self._room[end], self._left[path[-1]], *_sent(self.sent, movers, givers)])
        for rank, number in zip(givers, movers, strict=False):
            self._move(number, rank, -amount)
        for rank, number in zip(takers, movers, strict=True):
            self._move(number, rank, amount)


def _sent(sent: dict[int, dict[int, int]], movers: Iterable[int], givers: Iterable[int]) -> list[int]:
    return [sent[number][rank] for number, rank in zip(movers, givers, strict=False)]
