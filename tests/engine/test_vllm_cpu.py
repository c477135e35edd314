"""The compatibility module without vLLM: the environment of a replica, and the rows that a kernel gets to see."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from engine.vllm_cpu import ROWS, _PackedLinear, worker_environment


def test_the_environment_is_told_by_device() -> None:
    cpu, cuda = worker_environment(2), worker_environment(2, device="cuda")
    assert (cpu["OMP_NUM_THREADS"], cpu["TORCHDYNAMO_DISABLE"]) == ("2", "1")
    assert cuda["VLLM_BATCH_INVARIANT"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in cuda
    for environment in (cpu, cuda):
        assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert environment["HF_HUB_OFFLINE"] == "1"
        assert all(isinstance(value, str) for value in environment.values())


@pytest.mark.parametrize(("num_threads", "device", "message"), [(1, "tpu", "got 'tpu'"), (0, "cpu", "got 0")])
def test_an_environment_that_cannot_be(num_threads: int, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        worker_environment(num_threads, device=device)


def test_neither_the_environment_nor_the_worker_imports_torch_or_vllm() -> None:
    code = (
        "import sys, engine.generator, engine.vllm_cpu; engine.vllm_cpu.worker_environment(1); "
        "sys.exit(bool({'torch', 'vllm', 'ray'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("num_rows", [1, 3, 4, 10, 11, 25, 40])
def test_a_kernel_sees_neither_few_nor_many_rows(num_rows: int) -> None:
    seen: list[int] = []
    weight, bias = torch.randn(5, 3), torch.randn(5)

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(len(x))
        return torch.nn.functional.linear(x, weight, bias)

    x = torch.randn(num_rows, 3)
    output = _PackedLinear(kernel, None, 4, 10)(x, weight, bias)
    assert all(4 <= rows <= 10 for rows in seen)
    assert output.shape == (num_rows, 5)
    torch.testing.assert_close(output, torch.nn.functional.linear(x, weight, bias))


def test_a_kernel_gets_its_own_bias_and_none_where_the_layer_has_none() -> None:
    biases: list[torch.Tensor | None] = []

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        biases.append(bias)
        return x

    kernel_bias = torch.ones(3)
    linear = _PackedLinear(kernel, kernel_bias, *ROWS["float32"])
    linear(torch.ones(2, 3), torch.ones(3, 3), torch.ones(3, dtype=torch.bfloat16))
    linear(torch.ones(2, 3), torch.ones(3, 3), None)
    assert biases[0] is kernel_bias
    assert biases[1] is None
