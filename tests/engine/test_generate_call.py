"""What a replica refuses before its engine sees it, and the columns that it returns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.generate_call import GenerateCall, GeneratorError, check_request
from engine.types import GenerateRequest, Sampling, WeightVersion
from engine.vllm_engine import FinishedSample

SAMPLING = Sampling(max_tokens=4, stop_token_ids=(2,))
REQUEST = GenerateRequest(version=WeightVersion(3), prompt_ids=((5, 6), (7,)), seeds=(1, 2), sampling=SAMPLING)
FIRST = FinishedSample("a", [9, 2], [-0.5, -0.25], "stop")
SECOND = FinishedSample("b", [9, 9, 9, 9], [-1.0] * 4, "length")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ((5,), (1, 2, 3, 4, 5))}, "prompt 1 has 5 tokens and max_tokens is 4: .*max_model_len 8"),
        ({"prompt_ids": ((), (5,))}, "prompt 0 is empty"),
        ({"prompt_ids": ((5,), (5, 20))}, r"prompt 1 has token ids from 5 to 20; the model's are in \[0, 20\)"),
        ({"prompt_ids": ((-1,), (5,))}, "prompt 0 has token ids from -1 to -1"),
        ({"seeds": (1,)}, "2 prompts but 1 seeds"),
        ({"sampling": replace(SAMPLING, max_tokens=0)}, "max_tokens must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_served_is_a_value_error_with_both_values(change: dict[str, object], message: str) -> None:
    check_request(REQUEST, 8, 20)
    with pytest.raises(ValueError, match=message):
        check_request(replace(REQUEST, **change), 8, 20)  # type: ignore[arg-type] # one field


def test_the_longest_request_that_fits() -> None:
    check_request(replace(REQUEST, prompt_ids=((5,) * 4, (19,) * 4)), 8, 20)


def test_samples_end_in_any_order_and_come_back_in_the_requests() -> None:
    call = GenerateCall(REQUEST, ["a", "b"])
    call.put(SECOND)
    assert (call.num_open, call.open_ids()) == (1, ["a"])
    call.put(FIRST)
    result = call.result()
    assert result.token_ids.tolist() == [9, 2, 9, 9, 9, 9]
    assert result.logprobs.tolist() == [-0.5, -0.25, -1.0, -1.0, -1.0, -1.0]
    assert result.versions.tolist() == [3] * 6
    assert result.lengths.tolist() == [2, 4]
    assert result.finish_reasons == ("stop", "length")
    assert result.token_ids.dtype == result.versions.dtype == result.lengths.dtype == np.int32


def test_a_failed_call_says_how_far_it_was() -> None:
    call = GenerateCall(REQUEST, ["a", "b"])
    call.put(FIRST)
    call.fail("generator-0: it was stopped")
    assert call.ended.is_set()
    with pytest.raises(GeneratorError, match="it was stopped, with 1 of 2 samples of version 3 under way"):
        call.result()


def test_a_sample_ends_once() -> None:
    call = GenerateCall(REQUEST, ["a", "b"])
    call.put(FIRST)
    with pytest.raises(AssertionError, match="request a ended twice"):
        call.put(FIRST)
