"""A copy in the background arrives when it is waited for, not before; waits of the host are counted and refused."""

from collections.abc import Callable

import pytest
import torch

from tests.support.standin import SyncRefused, count_syncs, refuse_syncs, use_standin

CHECKS: list[Callable[[], None]] = []
VALUES = [1.0, 2.0, 3.0]


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Runs in a worker that has the device."""
    CHECKS.append(function)
    return function


@pytest.mark.parametrize("function", CHECKS, ids=lambda function: function.__name__)
def test_streams(devices, function):
    devices.run(function)


def pinned() -> torch.Tensor:
    return torch.tensor(VALUES).pin_memory()


def hazards() -> str:
    """Return and clear the hazards so far, which would otherwise fail the task."""
    return "\n".join(use_standin().take_hazards())


def is_poison(tensor: torch.Tensor) -> bool:
    return bool(torch.isnan(tensor).all())


@check
def a_copy_to_the_device_without_a_wait_is_not_there() -> None:
    side = torch.Stream("standin")
    with side:
        copied = pinned().to("standin", non_blocking=True)
    assert is_poison(copied + 1)
    assert "12 bytes are read by stream 0" in hazards()
    torch.accelerator.current_stream().wait_stream(side)
    assert (copied + 1).tolist() == [2.0, 3.0, 4.0]


@check
def every_kind_of_wait_brings_it() -> None:
    side = torch.Stream("standin")
    event = torch.Event("standin")
    waits: list[Callable[[], object]] = [
        side.synchronize,
        event.synchronize,
        lambda: event.wait(torch.accelerator.current_stream()),
        lambda: torch.accelerator.current_stream().wait_event(event),
        lambda: torch.accelerator.current_stream().wait_stream(side),
        torch.accelerator.synchronize,
        lambda: (event.query(), event.query()),
        lambda: (side.query(), side.query()),
    ]
    for wait in waits:
        with side:
            copied = pinned().to("standin", non_blocking=True)
            event.record(side)
        wait()
        assert (copied + 0).tolist() == VALUES


@check
def a_kernel_on_the_copys_own_stream_comes_after_it() -> None:
    side = torch.Stream("standin")
    with side:
        copied = pinned().to("standin", non_blocking=True)
        assert (copied * 2).tolist() == [2.0, 4.0, 6.0]


@check
def an_event_before_the_copy_does_not_wait_for_it() -> None:
    side, early = torch.Stream("standin"), torch.Event("standin")
    with side:
        first = pinned().to("standin", non_blocking=True)
        early.record(side)
        second = pinned().to("standin", non_blocking=True)
    torch.accelerator.current_stream().wait_event(early)
    assert (first + 0).tolist() == VALUES
    assert is_poison(second + 0)
    assert "no wait" in hazards()


@check
def waits_are_passed_on_from_stream_to_stream() -> None:
    one, other = torch.Stream("standin"), torch.Stream("standin")
    with one:
        copied = pinned().to("standin", non_blocking=True)
    other.wait_stream(one)
    torch.accelerator.current_stream().wait_stream(other)
    assert (copied + 0).tolist() == VALUES


@check
def a_copy_to_the_host_is_there_after_its_event() -> None:
    number = torch.tensor(VALUES).to("standin")
    on_host = torch.zeros(3, pin_memory=True)
    on_host.copy_(number, non_blocking=True)
    done = torch.accelerator.current_stream().record_event()
    del number
    assert is_poison(on_host)
    done.synchronize()
    assert on_host.tolist() == VALUES


@check
def a_source_that_changes_too_early_is_copied_as_it_is_then() -> None:
    source = pinned()
    copied = source.to("standin", non_blocking=True)
    source.fill_(9)
    assert (copied + 0).tolist() == [9.0, 9.0, 9.0]


@check
def pinned_memory_that_is_let_go_lives_until_the_copy_ran() -> None:
    side = torch.Stream("standin")
    with side:
        copied = pinned().to("standin", non_blocking=True)
    others = [torch.zeros(3, pin_memory=True) for _ in range(20)]
    side.synchronize()
    assert (copied + 0).tolist() == VALUES
    assert len(others) == 20


@check
def pageable_memory_is_read_at_once() -> None:
    source = torch.tensor(VALUES)
    copied = source.to("standin", non_blocking=True)
    source.fill_(9)
    assert (copied + 0).tolist() == VALUES
    assert torch.zeros(3).copy_(copied, non_blocking=True).tolist() == VALUES
    # Where torch makes the memory itself, it makes it pinned.
    assert is_poison(copied.to("cpu", non_blocking=True))


@check
def memory_that_another_stream_reads_needs_record_stream() -> None:
    for recorded in (False, True):
        source, on_host = torch.tensor(VALUES).to("standin"), torch.zeros(3, pin_memory=True)
        side = torch.Stream("standin")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            on_host.copy_(source, non_blocking=True)
        if recorded:
            source.record_stream(side)
        del source
        assert hazards() == "" if recorded else "no record_stream" in hazards()
        side.synchronize()
        assert on_host.tolist() == VALUES if recorded else is_poison(on_host)


@check
def a_block_that_a_kernel_of_another_stream_reads_needs_record_stream() -> None:
    for recorded in (False, True):
        side = torch.Stream("standin")
        with side:
            copied = pinned().to("standin", non_blocking=True)
        torch.accelerator.current_stream().wait_stream(side)
        result = copied * 2
        if recorded:
            copied.record_stream(torch.accelerator.current_stream())
        del copied
        assert hazards() == "" if recorded else "freed while stream 0" in hazards()
        assert result.tolist() == [2.0, 4.0, 6.0]


@check
def kernels_of_two_streams_on_one_tensor_need_a_wait() -> None:
    shared, side = torch.zeros(3, device="standin"), torch.Stream("standin")
    for waits in (False, True):
        if waits:
            side.wait_stream(torch.accelerator.current_stream())
        with side:
            shared.add_(1)
        if waits:
            torch.accelerator.current_stream().wait_stream(side)
        shared.add_(1)
        assert hazards() == "" if waits else "may still write them" in hazards()
        torch.accelerator.synchronize()


@check
def memory_of_its_own_stream_is_kept_for_the_copy() -> None:
    on_host = torch.zeros(3, pin_memory=True)
    source = torch.tensor(VALUES).to("standin")
    on_host.copy_(source * 2, non_blocking=True)
    others = [torch.zeros(3).to("standin") for _ in range(3)]
    torch.accelerator.synchronize()
    assert on_host.tolist() == [2.0, 4.0, 6.0]
    assert len(others) == 3


@check
def pinned_memory_is_known() -> None:
    assert pinned().is_pinned()
    assert pinned()[1:].is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.empty(3).is_pinned()
    with pytest.raises(RuntimeError, match="pin"):
        torch.empty(3, device="standin").pin_memory()


@check
def waits_of_the_host_are_counted_by_kind_and_line() -> None:
    number, side = torch.ones(4, device="standin"), torch.Stream("standin")
    with count_syncs() as quiet:
        copied = pinned().to("standin", non_blocking=True)
        (copied + number[:3]).sum().backward  # noqa: B018
        torch.zeros(3, pin_memory=True).copy_(copied, non_blocking=True)
        torch.accelerator.current_stream().wait_event(side.record_event())
    assert quiet.total == 0, str(quiet)
    with count_syncs() as syncs:
        number.sum().item()
        float(number[0])
        number.tolist()
        torch.ones(2).to("standin")
        number.nonzero()
        side.synchronize()
        side.record_event().synchronize()
        torch.accelerator.synchronize()
    assert syncs.kinds == {
        "item": 2,
        "copy to host": 1,
        "copy to device": 1,
        "data-dependent": 1,
        "stream": 1,
        "event": 1,
        "device": 1,
    }
    assert all("test_streams.py:" in line for _, line in syncs.lines), str(syncs)


@check
def a_wait_of_the_host_is_refused() -> None:
    number = torch.ones(4, device="standin")
    with pytest.raises(SyncRefused, match=r"item\) at .*test_streams.py"), refuse_syncs():
        number.sum().item()
    assert number.sum().item() == 4


@check
def events_tell_time() -> None:
    start, end = (torch.Event("standin", enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    assert start.elapsed_time(end) >= 0
    assert use_standin().waiting_copies() == 0
