"""A piece whose two sides keep it in different forms is refused by name."""

from __future__ import annotations

import pytest

from engine.layout import Box, Layout, Shard, TensorSpec
from engine.plan import PlanError, make_plan
from engine.transforms import IDENTITY, TransformedShard, transform_of


def one_norm(name: str, param: str, transform: str) -> Layout:
    """A model of one norm on one rank."""
    specs = {"norm.weight": TensorSpec((8,), "float32")}
    place = ("norm.weight", Box((0,), (8,)), param, (0,))
    shard = Shard(*place) if transform == IDENTITY else TransformedShard(*place, transform)
    return Layout(name, specs, ({param: specs["norm.weight"]},), ((shard,),), ((),), {})


@pytest.mark.parametrize("form", [IDENTITY, "zero_centered"])
def test_equal_forms_are_copied_as_they_are(form: str) -> None:
    plan = make_plan(one_norm("train", "gamma", form), one_norm("infer", "weight", form), bucket_bytes=16)
    assert [copy.transform for bucket in plan.buckets for copy in bucket.copies] == [form, form]
    assert plan.num_bytes == 32
    assert {transform_of(shard) for shard in plan.source.shards[0]} == {form}


def test_the_form_is_part_of_the_hash() -> None:
    hashes = {
        make_plan(one_norm("train", "gamma", form), one_norm("infer", "weight", form), bucket_bytes=16).hash
        for form in (IDENTITY, "zero_centered", "block_scaled")
    }
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("held", "wanted", "message"),
    [
        ("zero_centered", IDENTITY, "source rank 0 holds it as 'zero_centered' .* target rank 0 wants 'identity'"),
        (IDENTITY, "block_scaled", "source rank 0 holds it as 'identity' .* target rank 0 wants 'block_scaled'"),
        (IDENTITY, "transposed", "no transform is called 'transposed'; known are identity, zero_centered"),
    ],
)
def test_different_forms_are_refused_by_name(held: str, wanted: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"^norm.weight: {message}"):
        make_plan(one_norm("train", "gamma", held), one_norm("infer", "weight", wanted), bucket_bytes=16)
