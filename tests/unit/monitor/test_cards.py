"""Peaks are those of the card with exactly this name."""

import pytest

from megalite.monitor.cards import CARDS, find_card, peak_flops
from tests.support.parity import PUBLISHED_RTOL, about


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H100 NVL", "fp16", 835.5),
        ("NVIDIA H200", "fp16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA L40", "bf16", 181.05),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_a_card_has_the_peak_of_its_data_sheet(name: str, precision: str, teraflops: float) -> None:
    assert peak_flops(name, precision) == about(teraflops * 1e12)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA H100", "bf16"),
        ("NVIDIA H20", "bf16"),
        ("NVIDIA A100-SXM4-80GB", "fp64"),
        ("Tesla V100-SXM2-32GB", "bf16"),
        ("standin", "fp32"),
    ],
)
def test_what_no_data_sheet_says_is_not_known(name: str, precision: str) -> None:
    assert peak_flops(name, precision) is None


def test_fp32_products_in_tf32_have_the_tensor_cores_peak() -> None:
    assert peak_flops("NVIDIA A100 80GB PCIe", "fp32", tf32=True) == 156e12
    assert peak_flops("Tesla T4", "fp32", tf32=True) == 8.1e12
    assert peak_flops("NVIDIA A100 80GB PCIe", "bf16", tf32=True) == 312e12


@pytest.mark.parametrize("name", CARDS)
def test_the_figures_of_a_card_fit_together(name: str) -> None:
    """A figure with sparsity or of fp16 sums among the others would be twice what fits."""
    card = find_card(name)
    assert card is not None and card.fp16 > card.fp32
    if card.bf16 is not None and card.tf32 is not None:
        assert card.bf16 == card.fp16 and card.tf32 == about(card.bf16 / 2, PUBLISHED_RTOL)
    # FLOPs that a card makes while it moves a byte: tens to some hundreds.
    assert 50 < card.fp16 * 1e3 / card.memory < 500
