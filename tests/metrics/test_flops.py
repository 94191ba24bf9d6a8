"""Peaks of devices, throughput and MFU."""

import pytest

from components.metrics.flops import peak_tflops, throughput


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_the_peak_is_the_dense_bf16_figure_of_the_device(name, peak):
    assert peak_tflops(name) == peak


@pytest.mark.parametrize(
    "name", ["cpu", "", "Tesla V100-SXM2-32GB", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA L40", "NVIDIA A1000"]
)
def test_an_unknown_device_has_no_peak_rather_than_a_guess(name):
    assert peak_tflops(name) is None


def test_throughput_is_per_device_and_mfu_in_percent():
    found = throughput(tokens=65_000 * 10, seconds=10, ranks=4, flops_per_token=3.72e9, peak=312.0)
    assert found.tps == 16_250
    assert found.tflops == pytest.approx(60.45)
    assert found.mfu == pytest.approx(19.4, abs=0.05)


def test_mfu_is_not_available_without_a_peak():
    assert throughput(10, 1.0, 1, 1e9, None).mfu is None
