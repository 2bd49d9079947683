"""The peak FLOP/s of accelerators, for MFU, by the exact device name of torch. No torch.

Names must match completely, so that another form factor (SXM, PCIe, NVL) or a MIG slice never gets the figures of a
similar card. Figures are dense (figures with 2:4 sparsity are halved) and of tensor cores that accumulate in fp32,
which on GeForce cards are half as fast as with fp16 accumulation. The source of each row is the data sheet of NVIDIA or
AMD for that card, or the white paper named above it.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """The peaks of an accelerator: TFLOP/s per type, and the memory bandwidth in GB/s. None: no such tensor cores.

    fp32: matrix products with fp32 operands, without TF32.
    """

    bf16: float | None
    fp16: float
    tf32: float | None
    fp32: float
    memory: float


def _card(bf16: float, tf32: float | None, fp32: float, memory: float) -> Card:
    """Return a card with the same peak in fp16 and bf16."""
    return Card(bf16, bf16, tf32, fp32, memory)


_A100 = (312, 156, 19.5)
_H100_SXM = (989.4, 494.7, 67)
_HOPPER_NVL = (835.5, 417.5, 60)

CARDS: Mapping[str, Card] = {
    # Volta and Turing have no bf16. "NVIDIA V100 Tensor Core GPU" data sheet; "NVIDIA T4" product brief PB-09256.
    "Tesla V100-SXM2-16GB": Card(None, 125, None, 15.7, 900),
    "Tesla V100-SXM2-32GB": Card(None, 125, None, 15.7, 900),
    "Tesla V100-PCIE-16GB": Card(None, 112, None, 14, 900),
    "Tesla V100-PCIE-32GB": Card(None, 112, None, 14, 900),
    "Tesla V100S-PCIE-32GB": Card(None, 130, None, 16.4, 1134),
    "Tesla T4": Card(None, 65, None, 8.1, 320),
    # Ampere. "NVIDIA A100 Tensor Core GPU", "A10", "A30", "A40" data sheets.
    "A100-SXM4-40GB": _card(*_A100, 1555),
    "A100-SXM4-80GB": _card(*_A100, 2039),
    "A100-PCIE-40GB": _card(*_A100, 1555),
    "A100 80GB PCIe": _card(*_A100, 1935),
    "A10": _card(125, 62.5, 31.2, 600),
    # "NVIDIA A10G" data sheet for AWS: other clocks and units than the A10's.
    "A10G": _card(70, 35, 35, 600),
    "A30": _card(165, 82, 10.3, 933),
    "A40": _card(149.7, 74.8, 37.4, 696),
    # White paper "NVIDIA Ampere GA102 GPU Architecture", tables of both.
    "GeForce RTX 3090": _card(71, 35.6, 35.6, 936),
    "RTX A6000": _card(154.8, 77.4, 38.7, 768),
    # Ada. "NVIDIA L4", "L40" and "L40S" data sheets.
    "L4": _card(121, 60, 30.3, 300),
    "L40": _card(181.05, 90.5, 90.5, 864),
    "L40S": _card(362.05, 183, 91.6, 864),
    # White papers "NVIDIA Ada GPU Architecture" and "NVIDIA Ada Lovelace Professional GPU Architecture".
    "GeForce RTX 4090": _card(165.2, 82.6, 82.6, 1008),
    "RTX 6000 Ada Generation": _card(364.2, 182.1, 91.1, 960),
    # Hopper. "NVIDIA H100 Tensor Core GPU" (its first edition for the PCIe card), "H200" and "GH200" data sheets.
    "H100 80GB HBM3": _card(*_H100_SXM, 3350),
    "H100 PCIe": _card(756.5, 378, 51, 2000),
    "H100 NVL": _card(*_HOPPER_NVL, 3900),
    "H200": _card(*_H100_SXM, 4800),
    "H200 NVL": _card(*_HOPPER_NVL, 4800),
    "GH200 120GB": _card(*_H100_SXM, 4000),
    "GH200 480GB": _card(*_H100_SXM, 4000),
    # Blackwell. "NVIDIA HGX B200 / B300" (an eighth of the board) and "GB200 NVL72" (a 72nd of the rack) data sheets.
    "B200": _card(2250, 1125, 75, 8000),
    "B300 SXM6 AC": _card(2250, 1125, 75, 8000),
    "GB200": _card(2500, 1250, 80, 8000),
    # White paper "NVIDIA RTX Blackwell GPU Architecture".
    "GeForce RTX 5090": _card(209.5, 104.8, 104.8, 1792),
    # "AMD Instinct MI250X" data sheet, halved: torch lists each of the two dies as a device.
    "AMD Instinct MI250X": _card(191.5, None, 47.9, 1638),
    # "AMD Instinct MI300X" and "MI325X" data sheets, for a card without partitions.
    "AMD Instinct MI300X": _card(1307.4, 653.7, 163.4, 5300),
    "AMD Instinct MI325X": _card(1307.4, 653.7, 163.4, 6000),
}


def find_card(device_name: str) -> Card | None:
    """Return the card with this device name of torch; None if it is not listed."""
    # Older drivers omit the vendor.
    return CARDS.get(device_name.removeprefix("NVIDIA "))


def peak_flops(device_name: str, precision: str, *, tf32: bool = False) -> float | None:
    """Return the peak FLOP/s of one device in `training.precision`; None if the card or its figure is not listed.

    tf32: whether torch uses TF32 for fp32 matrix products.
    """
    card = find_card(device_name)
    peaks = {} if card is None else {"bf16": card.bf16, "fp16": card.fp16, "fp32": card.fp32}
    if card is not None and tf32 and card.tf32 is not None:
        peaks["fp32"] = card.tf32
    peak = peaks.get(precision)
    return None if peak is None else peak * 1e12
