"""Every seed of a run, derived with a real hash from (run seed, purpose, indices).

Never `base + i` (streams of neighbouring runs would overlap) and never `hash()` (salted for strings).
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

_SEED_BITS = 62  # fits torch's and numpy's signed 64-bit seeds, and vLLM's
_MAX_INDEX = 2**63


class Purpose(StrEnum):
    """What a stream of random numbers is for. The value enters the hash: renaming one changes every run."""

    PARAMETER_INIT = "parameter_init"
    DATA_ORDER = "data_order"
    REFILL_ORDER = "refill_order"
    SAMPLE = "sample"
    EVALUATION = "evaluation"
    TRAINER_RANK = "trainer_rank"
    GENERATOR_RANK = "generator_rank"


def derive_seed(run_seed: int, purpose: Purpose, *indices: int | str) -> int:
    """Return a seed in [0, 2**62) for one purpose and one place in the run.

    Args:
        run_seed: the recipe's `seed`, >= 0.
        purpose: what the numbers are for.
        indices: where in the run, for instance (prompt uid, sample index, draw). An attempt never enters: the
            same rollout executed again must give the same tokens.

    Raises:
        ValueError: a negative seed or index, or one that is neither int nor str.

    Example:
        `derive_seed(0, Purpose.SAMPLE, "copy-17", 3, 0)` is the seed of sample 3 of prompt copy-17, first draw.
    """
    if run_seed < 0:
        raise ValueError(f"seed must be >= 0, got {run_seed}")

    digest = hashlib.blake2b(digest_size=8, person=b"asyncrl-seed")
    for part in (run_seed, str(purpose), *indices):
        digest.update(_encode(part))
    return int.from_bytes(digest.digest(), "little") >> (64 - _SEED_BITS)


def _encode(part: int | str) -> bytes:
    """Encode one part with its type and length, so that ("1", 2) and (1, "2") or ("ab",) and ("a", "b") differ."""
    if isinstance(part, bool) or not isinstance(part, int | str):
        raise ValueError(f"a seed index must be int or str, got {part!r} ({type(part).__name__})")

    if isinstance(part, int):
        if not 0 <= part < _MAX_INDEX:
            raise ValueError(f"a seed index must be in [0, 2**63), got {part}")

        return b"i" + part.to_bytes(8, "little")

    text = part.encode()
    return b"s" + len(text).to_bytes(8, "little") + text
