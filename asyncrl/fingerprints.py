"""`fingerprints.jsonl`: digests of every step's batch, numbers and weights. Two runs that agree line by line are the
same run, bit for bit (invariant *same seeds, same bits*)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.line_file import LineFile
from asyncrl.scheduler import StepOutcome
from trainers.types import Batch


class Fingerprints:
    """Writes one line a step.

    Example: {"step": 7, "version": 6, "batch": "5f...", "loss": "-0x1.8p-6", "grad_norm": "0x1.2p-2",
    "weights": "c0..."};
    `version` wrote the rollouts, `weights` digests the version that the step made.
    """

    def __init__(self, folder: Path, *, resume_step: int | None) -> None:
        """Args:
        folder: the run's.
        resume_step: None for a new run; lines of this step and later ones are dropped otherwise.
        """
        self._file = LineFile(folder / "fingerprints.jsonl", resume_step=resume_step)
        self._resume_step = resume_step
        self._weights = ""  # of the newest version: a skipped step makes one of the same bits

    def open(self, first_weights: Mapping[int, str]) -> None:
        """Open the file.

        Args:
            first_weights: digests of the version that the run starts with.
        """
        self._file.open(self._keep)
        self._weights = weights_digest(first_weights)

    def step(self, outcome: StepOutcome) -> None:
        """Write the line of one step."""
        result = outcome.result
        if not result.skipped:
            self._weights = weights_digest(result.digests)
        self._file.write(
            {
                "step": result.step,
                "version": outcome.scored.wave.version,
                "batch": batch_digest(outcome.scored.batch),
                "loss": result.loss.hex(),
                "grad_norm": result.grad_norm.hex(),
                "weights": self._weights,
            }
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _keep(self, line: Mapping[str, Any]) -> bool:
        assert self._resume_step is not None
        return bool(line["step"] < self._resume_step)


def batch_digest(batch: Batch) -> str:
    """Return xxh3_128 of everything that a batch's gradient depends on, 32 hex digits."""
    digest = xxhash.xxh3_128()
    digest.update(f"{batch.step} {batch.num_loss_tokens} {batch.oldest_version}".encode())
    for rank in batch.micro_batches:
        digest.update(f"rank {len(rank)}".encode())
        for micro in rank:
            digest.update(repr(micro.lengths).encode())
            for column in (
                micro.token_ids,
                micro.labels,
                micro.loss_mask,
                micro.advantages,
                micro.generator_logprobs,
            ):
                digest.update(column.tobytes())
    return digest.hexdigest()


def weights_digest(digests: Mapping[int, str]) -> str:
    """Return one digest of a version's bucket digests. It depends on the plan, so compare runs of one layout."""
    return xxhash.xxh3_128_hexdigest("".join(digests[bucket] for bucket in sorted(digests)).encode())
