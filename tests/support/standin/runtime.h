// Memory, streams and events of the stand-in accelerator, without torch.
//
// A device address cannot be read or written: it lies in a mapping without access rights. The bytes lie at the same
// offset of a second mapping (`host`), which only the stand-in's own kernels use.
//
// An asynchronous copy waits in the queue of its stream until something orders it: a kernel on that stream, a wait
// of another stream or of the host. Until then its destination holds 0xFF bytes (NaN, -1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace standin {

constexpr int kMaxDevices = 16;
constexpr int kPoison = 0xFF;

int device_count();
void set_device_count(int count);
int current_device();
int exchange_device(int device);

// ------------------------------------------------------------------------------------------------------ memory

struct MemoryStats {
  int64_t allocated = 0, peak = 0, blocks = 0, peak_blocks = 0, total_allocations = 0;
};

void* allocate(int device, size_t bytes);
void release(void* address);
bool is_device_address(const void* address);
int device_of(const void* address);
void* host(const void* address);
void record_stream(const void* address, int64_t stream);
MemoryStats memory_stats(int device);
void reset_peak(int device);
std::pair<size_t, size_t> memory_info(int device);  // free, total

void* pinned_allocate(size_t bytes);
void pinned_release(void* address);
bool is_pinned(const void* address);

// ----------------------------------------------------------------------------------------------------- streams

int64_t current_stream(int device);
int64_t exchange_stream(int device, int64_t stream);
int64_t new_stream(int device);

// Runs what waits in the current stream of the device: a kernel is about to run there.
void begin_kernel(int device);
// One more piece of work of the current stream follows, a copy, which does not wait for what is there already.
void begin_copy(int device);
// Both addresses as `host` gives them; `keep` lives until the copy ran.
void copy_later(int device, void* to, const void* from, size_t bytes, std::shared_ptr<void> keep);
// The host asks and waits.
bool query_stream(int device, int64_t stream);
void synchronize_stream(int device, int64_t stream);
void synchronize_device(int device);
size_t waiting_copies();

// How far each stream had come, as far as the holder knows.
using Clock = std::map<std::pair<int, int64_t>, uint64_t>;

struct Event {
  int device = -1;
  int64_t stream = 0;
  uint64_t position = 0;
  int64_t nanoseconds = 0;
  Clock clock;
};

void record_event(Event& event, int device, int64_t stream);
void wait_for_event(const Event& event, int device, int64_t stream);
void synchronize_event(const Event& event);
// False once for an event whose work waits; asking lets that work run, as time does on a device.
bool query_event(const Event& event);

// ---------------------------------------------------------------------------------------------------- order of uses

// The kernel that is about to run on the device's current stream reads or writes the block at the address.
void use(const void* address, bool writes);
// Says, and forgets, what nothing ordered: a stream that used a block while another one's write (or, to write, any
// use) may still have run, and a block that its owner let go while another stream may still have used it.
std::vector<std::string> take_hazards();

// -------------------------------------------------------------------------------------------- waits of the host

// Called for each operation in which the host waits for the device, before it waits; may throw.
using Watcher = void (*)(const char* kind);
void set_watcher(Watcher watcher);
void host_waits(const char* kind);

}  // namespace standin
