// The Python module `_standin`.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "generator.h"
#include "group.h"
#include "runtime.h"

namespace py = pybind11;

namespace standin {
namespace {

// Called with the kind of each host wait; None: no watcher. Never released, because it is used until the process ends.
PyObject* python_watcher = nullptr;

void call_watcher(const char* kind) {
  py::gil_scoped_acquire gil;
  if (python_watcher != nullptr) py::reinterpret_borrow<py::function>(python_watcher)(kind);
}

void watch(const py::object& watcher) {
  python_watcher = watcher.is_none() ? nullptr : py::object(watcher).release().ptr();
  set_watcher(watcher.is_none() ? nullptr : &call_watcher);
}

// Resets the calling thread's state to that of a new process: no pending work, device 0, its default stream.
void reset() {
  for (int device = 0; device < kMaxDevices; ++device) {
    synchronize_device(device);
    exchange_stream(device, 0);
  }
  exchange_device(0);
  take_hazards();
}

py::dict stats(int device) {
  const MemoryStats now = memory_stats(device);
  py::dict result;
  result["allocated"] = now.allocated;
  result["peak"] = now.peak;
  result["blocks"] = now.blocks;
  return result;
}

}  // namespace
}  // namespace standin

PYBIND11_MODULE(_standin, m) {
  m.def("register", &standin::register_device);
  m.def("device_count", &standin::device_count);
  m.def("set_device_count", &standin::set_device_count);
  m.def("default_generator", &standin::default_generator, py::return_value_policy::copy);
  m.def("reset", &standin::reset);
  m.def("watch", &standin::watch);
  m.def("take_hazards", &standin::take_hazards);
  m.def("waiting_copies", &standin::waiting_copies);
  m.def("memory_stats", &standin::stats);
  m.def("reset_peak", &standin::reset_peak);
  m.def("memory_info", &standin::memory_info);
  m.def("set_memory_limit", &standin::set_memory_limit);
  m.def("make_group", &standin::make_group);
}
