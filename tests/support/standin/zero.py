"""The stand-in as a DeepSpeed accelerator, so that DeepSpeed's engine runs on it as on a GPU."""

import functools
from typing import Any

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.support.standin.device import NAME


class StandinAccelerator(CPU_Accelerator):  # type: ignore[misc]
    """Answers like DeepSpeed's CUDA accelerator; its compiled operators are the CPU's.

    The compiled operators read host addresses, so only those on host memory (offloaded states) can run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._name = NAME
        self._communication_backend_name = NAME
        self._module = torch.get_device_module(NAME)

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.device(NAME, device_index if device_index is not None else self.current_device())

    def set_device(self, device_index: int) -> None:
        torch.accelerator.set_device_index(device_index)

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        return f"{NAME}:{self.current_device()}"

    def device_count(self) -> int:
        return torch.accelerator.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        torch.accelerator.synchronize(device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        self._module.set_rng_state(new_state, NAME if device_index is None else device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return self._module.get_rng_state(NAME if device_index is None else device_index)

    def manual_seed(self, seed: int) -> None:
        self._module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self._module.manual_seed_all(seed)

    def default_generator(self, device_index: int) -> torch.Generator:
        return self._module.default_generators[device_index]

    @property
    def Stream(self) -> Any:
        return functools.partial(torch.Stream, NAME)

    def stream(self, stream: torch.Stream) -> Any:
        return stream

    def current_stream(self, device_index: int | None = None) -> torch.Stream:
        return torch.accelerator.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> torch.Stream:
        return torch.Stream(stream_id=0, device_index=self.current_device(), device_type=20)

    @property
    def Event(self) -> Any:
        return functools.partial(torch.Event, NAME)

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._module.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._module.max_memory_allocated(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        return self._module.mem_get_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return self._module.mem_get_info(device_index)[0]

    def is_fp16_supported(self) -> bool:
        return True

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        return tensor.pin_memory()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == NAME


def _tensor_of(dtype: torch.dtype) -> property:
    return property(lambda self: functools.partial(torch.tensor, dtype=dtype, device=NAME))


for _name, _dtype in {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.double,
    "FloatTensor": torch.float,
    "HalfTensor": torch.half,
    "IntTensor": torch.int,
    "LongTensor": torch.long,
}.items():
    setattr(StandinAccelerator, _name, _tensor_of(_dtype))


@functools.cache
def use_in_deepspeed() -> None:
    """Have DeepSpeed compute on the stand-in for the rest of the process."""
    set_accelerator(StandinAccelerator())
