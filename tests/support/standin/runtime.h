// Memory, streams and events of the stand-in accelerator, without torch.
//
// Device addresses are in a mapping without access rights. Their bytes are at the same offset of a second mapping
// (`host`), which only the stand-in's own kernels use.
//
// An asynchronous copy stays in the queue of its stream until something orders it: a kernel on that stream, or a wait
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
std::pair<size_t, size_t> memory_info(int device);
// Lets each device hold that many bytes from now on; 0: as many as it has addresses.
void set_memory_limit(size_t bytes);
// Whether another allocation fits below the limit.
bool fits(int device, size_t bytes);  // free, total

void* pinned_allocate(size_t bytes);
void pinned_release(void* address);
bool is_pinned(const void* address);

// ----------------------------------------------------------------------------------------------------- streams

int64_t current_stream(int device);
int64_t exchange_stream(int device, int64_t stream);
int64_t new_stream(int device);

// Runs the pending work of the device's current stream, before a kernel runs there.
void begin_kernel(int device);
// Announces a copy on the current stream, which does not execute earlier work yet.
void begin_copy(int device);
// Queues a copy between host addresses (see `host`); `keep` lives until the copy has run.
void copy_later(int device, void* to, const void* from, size_t bytes, std::shared_ptr<void> keep);
// Queries and waits of the host.
bool query_stream(int device, int64_t stream);
void synchronize_stream(int device, int64_t stream);
void synchronize_device(int device);
size_t waiting_copies();

// The known progress of each stream.
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
// Returns false once for an event with pending work; the query runs that work, as time does on a device.
bool query_event(const Event& event);

// ---------------------------------------------------------------------------------------------------- order of uses

// Records that the next kernel on the device's current stream reads or writes the block at the address.
void use(const void* address, bool writes);
// Returns and clears the hazards: a stream used a block while another stream's write (or, for a write, any use) could
// still be running, or a block was freed while another stream could still be using it.
std::vector<std::string> take_hazards();

// -------------------------------------------------------------------------------------------- waits of the host

// Called before each operation in which the host waits for the device; may throw.
using Watcher = void (*)(const char* kind);
void set_watcher(Watcher watcher);
void host_waits(const char* kind);

}  // namespace standin
