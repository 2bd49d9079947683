"""The message when an accelerator has no memory left: for torch's allocator, and for what allocates beside it."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed import DistBackendError

from megalite.errors import CheckpointError, MemoryExhausted
from megalite.monitor import memory
from megalite.monitor.memory import ExhaustedCard, MemoryUse, exhausted_memory_explained

GIB = 1 << 30
CARD = torch.device("cuda", 1)
ASKED = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.10 GiB."


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A card of 80 GiB, 1 of them free, on which torch used 60 of the 61 that it has reserved."""
    module = SimpleNamespace(mem_get_info=lambda _: (GIB, 80 * GIB), get_device_name=lambda _: "NVIDIA H100")
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(memory, "device_memory", lambda _: MemoryUse(0, 60 * GIB, 61 * GIB))
    monkeypatch.setattr(memory, "variables", dict)
    return monkeypatch


def message(error: Exception, device: torch.device = CARD) -> str:
    """Return what MemoryExhausted says in place of an error."""
    with (
        pytest.raises(MemoryExhausted) as exhausted,
        exhausted_memory_explained(device, lambda card: [card.name if card else "no card"]),
    ):
        raise error
    assert exhausted.value.__cause__ is error and exhausted.value.exit_code == 1
    return str(exhausted.value)


def test_the_message_has_the_card_and_the_lines_of_the_run() -> None:
    assert message(torch.OutOfMemoryError(ASKED)).splitlines() == [
        "out of memory on NVIDIA H100 (cuda:1): 2.50 GiB more do not fit",
        "  the card has 80.0 GiB, of which 1.0 GiB are free now; torch used up to 60.0 GiB and reserved 61.0 GiB",
        "  NVIDIA H100 (cuda:1)",
    ]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        DistBackendError("NCCL error: unhandled cuda error, Last error: Cuda failure 2 'out of memory'"),
    ],
)
def test_libraries_beside_torchs_allocator_are_heard_too(error: Exception) -> None:
    assert message(error).startswith("out of memory on NVIDIA H100 (cuda:1)\n")


@pytest.mark.parametrize(
    ("error", "free", "full"),
    [
        (RuntimeError("CUDA error: out of memory"), 9, False),
        (RuntimeError("CUDA error: out of memory"), 8, True),
        (torch.OutOfMemoryError(ASKED), 40, True),
    ],
)
def test_a_card_with_free_memory_is_not_blamed(
    card: pytest.MonkeyPatch, error: Exception, free: int, full: bool
) -> None:
    card.setattr(torch.get_device_module(CARD), "mem_get_info", lambda _: (free * GIB, 80 * GIB))
    said = []
    with (
        pytest.raises(MemoryExhausted) as exhausted,
        exhausted_memory_explained(CARD, lambda card: said.append(card) or []),
    ):
        raise error
    assert said[0].full == full
    text = str(exhausted.value)
    assert ("page-locked host memory or another allocation failed" in text) != full
    assert ("out of memory on NVIDIA" in text) == full


def test_the_cause_of_another_error_is_found() -> None:
    wrapped = CheckpointError("rank 0 could not load model")
    wrapped.__cause__ = torch.OutOfMemoryError(ASKED)
    assert "2.50 GiB more do not fit" in message(wrapped)


@pytest.mark.parametrize("fails", ["mem_get_info", "get_device_name", "device_memory"])
def test_a_card_that_does_not_answer_leaves_torchs_own_words(card: pytest.MonkeyPatch, fails: str) -> None:
    def fail(_: torch.device) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    card.setattr(memory if fails == "device_memory" else torch.get_device_module(CARD), fails, fail)
    assert message(torch.OutOfMemoryError(ASKED)).splitlines() == [
        f"out of memory on cuda:1: {ASKED}",
        "  no card",
    ]


def test_a_failing_explanation_does_not_replace_the_error() -> None:
    error = torch.OutOfMemoryError(ASKED)
    with (
        pytest.raises(MemoryExhausted) as exhausted,
        exhausted_memory_explained(CARD, lambda _: [{}["size"]]),
    ):
        raise error
    assert exhausted.value.__cause__ is error
    assert "2.50 GiB more do not fit" in str(exhausted.value) and "KeyError('size')" in str(exhausted.value)


@pytest.mark.parametrize(
    ("error", "device"),
    [
        (RuntimeError("DefaultCPUAllocator: out of memory"), torch.device("cpu")),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), CARD),
        (ValueError("out of memory"), CARD),
    ],
)
def test_other_errors_stay_as_they_are(error: Exception, device: torch.device) -> None:
    with pytest.raises(type(error)) as raised, exhausted_memory_explained(device, lambda _: []):
        raise error
    assert raised.value is error


FRAGMENTED = ExhaustedCard("card", 80 * GIB, 0, 60 * GIB, 70 * GIB, "")


@pytest.mark.parametrize("environ", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}])
def test_unused_pieces_are_said(card: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    card.setattr(memory, "variables", lambda: environ)
    assert any("10.0 GiB of that are unused pieces" in line for line in FRAGMENTED.full_lines)


@pytest.mark.parametrize(
    "environ",
    [
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:False"},
        {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"},
    ],
    ids=["they grow", "the user does not want it", "NCCL does not bear it"],
)
def test_segments_are_not_advised_to_grow(card: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    card.setattr(memory, "variables", lambda: environ)
    assert len(list(FRAGMENTED.full_lines)) == 2
