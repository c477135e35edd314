"""What every section of a recipe has in common: frozen, strict, no unknown keys, and a few types shared by sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["float32", "bfloat16"]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Cpus = Literal["auto", "none"] | tuple[Annotated[int, Field(ge=0)], ...]


class Section(BaseModel):
    """One part of a recipe. Frozen; an unknown key or a value of another type is an error, never a conversion.

    Fields may carry `json_schema_extra={"not_yet": [...]}`: values that the design names and this version lacks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
