"""Named forms of a parameter whose values are not simply those of its tensor. Pure, no torch.

A plan moves values as they are. Where one side stores them in another form (Megatron's zero-centred gamma keeps w - 1),
its shards say so by name; a piece whose two sides differ in form is refused by that name instead of copied wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.layout import Shard

IDENTITY = "identity"

TRANSFORMS: Mapping[str, str] = MappingProxyType(
    {
        IDENTITY: "the tensor's own values",
        "zero_centered": "the tensor's values minus 1 (Megatron's layernorm_zero_centered_gamma)",
        "block_scaled": "quantised blocks whose scales lie in another parameter",
    }
)
"""Name -> what a parameter of that form holds. Equal names are copied as they are; nothing converts between two."""


@dataclass(frozen=True, slots=True)
class TransformedShard(Shard):
    """A shard whose parameter holds the box in another form.

    Example: `TransformedShard("model.norm.weight", Box((0,), (64,)), "final_layernorm.weight", (0,), "zero_centered")`.
    """

    transform: str = IDENTITY


def transform_of(shard: Shard) -> str:
    """Return the name of a shard's form; `IDENTITY` unless it says otherwise."""
    return shard.transform if isinstance(shard, TransformedShard) else IDENTITY
