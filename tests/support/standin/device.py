"""The Python part of the device: its module `torch.standin`, and the name of its process group."""

import functools
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.standin import build

NAME = "standin"
DEVICES = 8


@functools.cache
def use_standin(devices: int = DEVICES) -> ModuleType:
    """Register the device with this process, before its first backward; return the compiled module."""
    compiled = build.load()
    compiled.set_device_count(devices)
    torch.utils.rename_privateuse1_backend(NAME)
    compiled.register()
    torch._register_device_module(NAME, _device_module(compiled))
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(NAME, functools.partial(_group, compiled), devices=[NAME])
    return compiled


def _group(compiled: ModuleType, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return compiled.make_group(dist.ProcessGroupGloo(store, rank, size, timeout))


def _device_module(compiled: ModuleType) -> ModuleType:
    module = ModuleType(f"torch.{NAME}")
    accelerator = torch.accelerator

    def index(device: Any = None) -> int:
        if device is None:
            return accelerator.current_device_index()
        if isinstance(device, int):
            return device
        found = torch.device(device).index
        return accelerator.current_device_index() if found is None else found

    def generator(device: Any = None) -> torch.Generator:
        return module.default_generators[index(device)]

    def get_rng_state(device: Any = NAME) -> Tensor:
        return generator(device).get_state()

    def set_rng_state(state: Tensor, device: Any = NAME) -> None:
        generator(device).set_state(state)

    def manual_seed(seed: int) -> None:
        generator().manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for each in module.default_generators:
            each.manual_seed(seed)

    def get_device_properties(device: Any = None) -> SimpleNamespace:
        place = index(device)
        total = compiled.memory_info(place)[1]
        return SimpleNamespace(
            name="stand-in", uuid=f"{NAME}-{place}", total_memory=total, multi_processor_count=1
        )

    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=lambda: None,
        _lazy_init=lambda: None,
        _is_in_bad_fork=lambda: False,
        device_count=compiled.device_count,
        current_device=accelerator.current_device_index,
        set_device=lambda device: accelerator.set_device_index(index(device)),
        device=lambda device: accelerator.device_index(index(device)),
        synchronize=accelerator.synchronize,
        Stream=functools.partial(torch.Stream, NAME),
        Event=functools.partial(torch.Event, NAME),
        current_stream=accelerator.current_stream,
        set_stream=accelerator.set_stream,
        stream=lambda stream: stream,
        default_generators=tuple(map(compiled.default_generator, range(compiled.device_count()))),
        manual_seed=manual_seed,
        manual_seed_all=manual_seed_all,
        get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
        initial_seed=lambda: generator().initial_seed(),
        memory_allocated=lambda device=None: compiled.memory_stats(index(device))["allocated"],
        max_memory_allocated=lambda device=None: compiled.memory_stats(index(device))["peak"],
        memory_reserved=lambda device=None: compiled.memory_stats(index(device))["allocated"],
        max_memory_reserved=lambda device=None: compiled.memory_stats(index(device))["peak"],
        reset_peak_memory_stats=lambda device=None: compiled.reset_peak(index(device)),
        mem_get_info=lambda device=None: compiled.memory_info(index(device)),
        empty_cache=lambda: None,
        get_device_properties=get_device_properties,
        get_device_name=lambda device=None: "stand-in",
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        is_bf16_supported=lambda including_emulation=True: True,
    )
    return module
