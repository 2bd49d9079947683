"""A stand-in accelerator: computes on the CPU, in separate memory, by the rules of a GPU.

`use_standin()` registers the device "standin" with torch for the rest of the process; tests on the CPU use other
processes (see `RankPool`). The device reproduces the failures of a GPU:

- an operator with tensors of two devices is refused; the host cannot read device addresses;
- an asynchronous copy is executed when its stream, an event after it or the device is waited for; until then its
  destination holds 0xFF bytes (NaN, -1), as does freed memory;
- hazards fail a task of the pool (`use_standin().take_hazards()`): a stream uses data that another stream may still
  write, or memory is freed while another stream may use it without record_stream;
- beyond `use_standin().set_memory_limit(bytes)` an allocation raises torch.OutOfMemoryError;
- `count_syncs()` counts the host's waits for the device, and `refuse_syncs()` refuses them;
- the process group "standin" accepts only tensors of its rank's own device.
"""

from tests.support.standin.device import use_standin
from tests.support.standin.syncs import SyncRefused, Syncs, count_syncs, refuse_syncs

__all__ = ["SyncRefused", "Syncs", "count_syncs", "refuse_syncs", "use_standin"]
