"""A stand-in accelerator: computes on the CPU, in memory of its own, by the rules of a GPU.

`use_standin()` makes torch know the device "standin" for the rest of the process; processes that shall compute on the
CPU as well are others (see `RankPool`). What a GPU refuses or gets wrong, this device does:

- an operator with tensors of two devices is refused; no address of the device can be read by the host;
- an asynchronous copy happens when its stream, an event after it or the device is waited for, and its destination
  holds 0xFF bytes (NaN, -1) until then; freed memory does as well;
- a stream that uses what another one may still write, and memory that is freed while another stream may use it without
  record_stream, are kept as hazards (`use_standin().take_hazards()`), by which a task of the pool fails;
- `count_syncs()` counts what makes the host wait for the device, and `refuse_syncs()` refuses it;
- the process group "standin" takes tensors of its rank's own device alone.
"""

from tests.support.standin.device import use_standin
from tests.support.standin.syncs import SyncRefused, Syncs, count_syncs, refuse_syncs

__all__ = ["SyncRefused", "Syncs", "count_syncs", "refuse_syncs", "use_standin"]
