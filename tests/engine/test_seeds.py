"""Seeds: real hashes, the same for ever, different for everything that differs."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.seeds import Purpose, derive_seed

INDEX = st.one_of(st.integers(0, 2**63 - 1), st.text(max_size=8))


@pytest.mark.parametrize(
    ("arguments", "seed"),
    [
        ((0, Purpose.PARAMETER_INIT), 1_289_964_805_929_168_326),
        ((0, Purpose.SAMPLE, "copy-17", 3, 0), 1_952_313_307_533_222_854),
        ((1, Purpose.SAMPLE, "copy-17", 3, 0), 893_553_973_103_839_146),
        ((0, Purpose.EVALUATION, "copy-17", 3, 0), 508_638_003_049_303_603),
    ],
)
def test_same_seeds_for_ever(arguments: tuple[int, Purpose, str | int], seed: int) -> None:
    """Golden values: a change here changes every run that anybody has made."""
    assert derive_seed(*arguments) == seed


@given(run=st.integers(0, 2**63 - 1), purpose=st.sampled_from(Purpose), indices=st.lists(INDEX, max_size=4))
def test_seeds_fit_torch_numpy_and_vllm(run: int, purpose: Purpose, indices: list[int | str]) -> None:
    seed = derive_seed(run, purpose, *indices)
    assert 0 <= seed < 2**62
    assert seed == derive_seed(run, purpose, *indices)


@given(first=st.lists(INDEX, max_size=3), second=st.lists(INDEX, max_size=3))
def test_different_places_have_different_seeds(first: list[int | str], second: list[int | str]) -> None:
    """("ab",) and ("a", "b"), 1 and "1", one index more: all differ (62 bits: no collision in our lifetime)."""
    same = [(type(part), part) for part in first] == [(type(part), part) for part in second]
    assert (derive_seed(0, Purpose.SAMPLE, *first) == derive_seed(0, Purpose.SAMPLE, *second)) is same


def test_runs_and_purposes_do_not_overlap() -> None:
    """Not `base + i`: neighbouring runs, purposes and samples share no seed."""
    seeds = [derive_seed(run, purpose, "p", index) for run, purpose, index in product(range(4), Purpose, range(64))]
    assert len(set(seeds)) == len(seeds) == 4 * len(Purpose) * 64


def test_seeds_do_not_depend_on_the_process() -> None:
    script = "from engine.seeds import *; print(derive_seed(5, Purpose.SAMPLE, 'p', 1))"
    environment = os.environ | {"PYTHONHASHSEED": "17", "PYTHONPATH": str(Path(__file__).parents[2])}
    output = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert int(output.stdout) == derive_seed(5, Purpose.SAMPLE, "p", 1)


@pytest.mark.parametrize(
    ("run", "indices", "message"),
    [
        (-1, (), "seed must be >= 0, got -1"),
        (0, (-1,), r"a seed index must be in \[0, 2\*\*63\), got -1"),
        (0, (2**63,), r"a seed index must be in \[0, 2\*\*63\)"),
        (0, (1.5,), r"a seed index must be int or str, got 1.5 \(float\)"),
        (0, (True,), r"a seed index must be int or str, got True \(bool\)"),
        (0, (None,), r"a seed index must be int or str, got None \(NoneType\)"),
    ],
)
def test_what_is_no_index_is_named(run: int, indices: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        derive_seed(run, Purpose.SAMPLE, *indices)
