#include "runtime.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

namespace standin {
namespace {

constexpr size_t kDeviceBytes = size_t{8} << 30;  // address space, not memory
constexpr size_t kAlignment = 256;

std::recursive_mutex mutex;
std::vector<std::shared_ptr<void>> finished;  // objects kept alive by completed copies
thread_local int depth = 0;

// Releases `finished` after the mutex: a tensor's destructor may wait for Python, and Python for the mutex.
class Lock {
 public:
  Lock() {
    mutex.lock();
    ++depth;
  }
  ~Lock() {
    std::vector<std::shared_ptr<void>> released;
    if (--depth == 0) released.swap(finished);
    mutex.unlock();
  }
  Lock(const Lock&) = delete;
};

int devices = 8;
size_t memory_limit = 0;
std::atomic<Watcher> watcher{nullptr};
thread_local int thread_device = 0;
thread_local int64_t thread_streams[kMaxDevices] = {};

struct Range {
  const char* begin;
  const char* end;
  bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
};

Range range_of(const void* address, size_t bytes) {
  return {static_cast<const char*>(address), static_cast<const char*>(address) + bytes};
}

// A block returns to the free list with its last reference: its owner's, or a queued copy's.
struct Block {
  int device;
  int64_t stream;
  size_t offset, bytes, capacity;
  std::vector<int64_t> recorded;
  Clock reads;
  std::pair<int, int64_t> writer{-1, 0};
  uint64_t written = 0;
  Range range() const;
  ~Block();
};

struct Item {
  uint64_t position;
  char* to = nullptr;  // set for a copy
  const char* from = nullptr;
  size_t bytes = 0;
  std::shared_ptr<void> keep;
  int64_t other = -1;  // a wait for this stream of the device `other_device`, up to `other_position`
  int other_device = 0;
  uint64_t other_position = 0;
};

struct Stream {
  std::deque<Item> items;
  uint64_t issued = 0, done = 0;
  Clock clock;
};

struct Device {
  size_t used = 0;
  std::map<std::pair<int64_t, size_t>, std::vector<size_t>> free_offsets;  // of (stream, capacity)
  MemoryStats stats;
  std::map<int64_t, Stream> streams;
  int64_t last_stream = 0;
};

struct State {
  char* protected_base;
  char* host_base;
  Device device[kMaxDevices];
  std::unordered_map<const void*, std::shared_ptr<Block>> blocks;
  std::map<const char*, size_t> pinned;
  Clock host_clock;
  std::vector<std::string> hazards;
};

char* reserve(int access) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* base = mmap(nullptr, kDeviceBytes * kMaxDevices, access, flags, -1, 0);
  if (base == MAP_FAILED) throw std::runtime_error("standin: no address space for the devices' memory");
  return static_cast<char*>(base);
}

State& state() {
  // Never destroyed: tensors of a module's top level are released after static objects.
  static State* it = new State{reserve(PROT_NONE), reserve(PROT_READ | PROT_WRITE), {}, {}, {}, {}, {}};
  return *it;
}

size_t capacity_for(size_t bytes) {
  size_t capacity = kAlignment;
  while (capacity < bytes) capacity *= 2;
  if (capacity <= 4096) return capacity;
  const size_t step = capacity / 8;  // at most a seventh of a block is unused
  return (bytes + step - 1) / step * step;
}

Range Block::range() const { return range_of(state().host_base + device * kDeviceBytes + offset, bytes); }

Block::~Block() {
  Lock lock;
  std::memset(const_cast<char*>(range().begin), kPoison, bytes);
  state().device[device].free_offsets[{stream, capacity}].push_back(offset);
}

Stream& stream_of(int device, int64_t stream) { return state().device[device].streams[stream]; }

void run_until(int device, int64_t stream, uint64_t position) {
  Stream& it = stream_of(device, stream);
  while (!it.items.empty() && it.items.front().position <= position) {
    Item item = std::move(it.items.front());
    it.items.pop_front();
    if (item.other >= 0) run_until(item.other_device, item.other, item.other_position);
    if (item.to != nullptr) std::memcpy(item.to, item.from, item.bytes);
    it.done = item.position;
    if (item.keep != nullptr) finished.push_back(std::move(item.keep));
  }
  if (it.items.empty()) it.done = it.issued;
}

// Whether pending work of the stream, up to a position, reads or writes the range.
bool uses(int device, int64_t stream, uint64_t position, const Range& range) {
  for (const Item& item : stream_of(device, stream).items) {
    if (item.position > position) break;
    if (item.to != nullptr) {
      if (range_of(item.to, item.bytes).overlaps(range) || range_of(item.from, item.bytes).overlaps(range)) return true;
    } else if (item.other >= 0 && uses(item.other_device, item.other, item.other_position, range)) {
      return true;
    }
  }
  return false;
}

void learn(Clock& clock, const Clock& other) {
  for (const auto& [stream, position] : other) clock[stream] = std::max(clock[stream], position);
}

uint64_t position_in(const Clock& clock, const std::pair<int, int64_t>& stream) {
  const auto found = clock.find(stream);
  return found == clock.end() ? 0 : found->second;
}

std::string name_of(const std::pair<int, int64_t>& stream) {
  return "stream " + std::to_string(stream.second) + " of standin:" + std::to_string(stream.first);
}

void report(const Block& block, const std::string& what) {
  if (state().hazards.size() < 20) state().hazards.push_back(std::to_string(block.bytes) + " bytes " + what);
}

// Adds work to the stream, ordered after all work that the host knows to be complete.
uint64_t advance(int device, int64_t stream) {
  Clock& clock = stream_of(device, stream).clock;
  learn(clock, state().host_clock);
  return ++clock[{device, stream}];
}

}  // namespace

int device_count() { return devices; }
void set_device_count(int count) { devices = std::min(std::max(count, 0), kMaxDevices); }
int current_device() { return thread_device; }

int exchange_device(int device) {
  const int before = thread_device;
  if (device >= 0) {
    if (device >= devices) throw std::runtime_error("standin: invalid device ordinal " + std::to_string(device));
    thread_device = device;
  }
  return before;
}

void* allocate(int device, size_t bytes) {
  if (bytes == 0) return nullptr;
  Lock lock;
  Device& it = state().device[device];
  const int64_t stream = thread_streams[device];
  const size_t capacity = capacity_for(bytes);
  auto& free_offsets = it.free_offsets[{stream, capacity}];
  size_t offset = 0;
  if (!free_offsets.empty()) {
    offset = free_offsets.back();
    free_offsets.pop_back();
  } else {
    if (it.used + capacity > kDeviceBytes) throw std::runtime_error("standin: out of memory");
    offset = it.used;
    it.used += capacity;
    std::memset(state().host_base + device * kDeviceBytes + offset, kPoison, bytes);
  }
  char* address = state().protected_base + device * kDeviceBytes + offset;
  state().blocks[address].reset(new Block{device, stream, offset, bytes, capacity, {}});
  it.stats.allocated += static_cast<int64_t>(bytes);
  it.stats.blocks += 1;
  it.stats.total_allocations += 1;
  it.stats.peak = std::max(it.stats.peak, it.stats.allocated);
  it.stats.peak_blocks = std::max(it.stats.peak_blocks, it.stats.blocks);
  return address;
}

void release(void* address) {
  if (address == nullptr) return;
  Lock lock;
  const auto found = state().blocks.find(address);
  if (found == state().blocks.end()) return;
  const std::shared_ptr<Block> block = std::move(found->second);
  state().blocks.erase(found);
  Device& it = state().device[block->device];
  it.stats.allocated -= static_cast<int64_t>(block->bytes);
  it.stats.blocks -= 1;
  const std::pair<int, int64_t> owner{block->device, block->stream};
  Clock uses_of_it = block->reads;
  if (block->written > 0) learn(uses_of_it, {{block->writer, block->written}});
  for (const auto& [stream, position] : uses_of_it) {
    const bool recorded =
        std::count(block->recorded.begin(), block->recorded.end(), stream.second) > 0 && stream.first == owner.first;
    const bool known = position_in(stream_of(owner.first, owner.second).clock, stream) >= position ||
                       position_in(state().host_clock, stream) >= position;
    if (stream != owner && !recorded && !known)
      report(*block, "of " + name_of(owner) + " were freed while " + name_of(stream) + " may use them: no record_stream");
  }
  // Work of the block's own stream and of the recorded streams still sees its content; other streams read poison.
  std::vector<int64_t> streams = block->recorded;
  streams.push_back(block->stream);
  for (const int64_t stream : streams) {
    Stream& waiting = stream_of(block->device, stream);
    if (uses(block->device, stream, waiting.issued, block->range())) {
      Item item;
      item.position = ++waiting.issued;
      item.keep = block;
      waiting.items.push_back(std::move(item));
    }
  }
}

bool is_device_address(const void* address) {
  const char* at = static_cast<const char*>(address);
  return at >= state().protected_base && at < state().protected_base + kDeviceBytes * kMaxDevices;
}

int device_of(const void* address) {
  return static_cast<int>((static_cast<const char*>(address) - state().protected_base) / kDeviceBytes);
}

void* host(const void* address) {
  if (address == nullptr || !is_device_address(address)) return const_cast<void*>(address);
  return state().host_base + (static_cast<const char*>(address) - state().protected_base);
}

void record_stream(const void* address, int64_t stream) {
  Lock lock;
  const auto found = state().blocks.find(address);
  if (found != state().blocks.end()) found->second->recorded.push_back(stream);
}

MemoryStats memory_stats(int device) {
  Lock lock;
  return state().device[device].stats;
}

void reset_peak(int device) {
  Lock lock;
  MemoryStats& stats = state().device[device].stats;
  stats.peak = stats.allocated;
  stats.peak_blocks = stats.blocks;
}

std::pair<size_t, size_t> memory_info(int device) {
  Lock lock;
  const size_t used = static_cast<size_t>(state().device[device].stats.allocated);
  if (memory_limit == 0) return {kDeviceBytes - state().device[device].used, kDeviceBytes};
  return {memory_limit - std::min(memory_limit, used), memory_limit};
}

void set_memory_limit(size_t bytes) {
  Lock lock;
  memory_limit = bytes;
}

bool fits(int device, size_t bytes) {
  Lock lock;
  return memory_limit == 0 || static_cast<size_t>(state().device[device].stats.allocated) + bytes <= memory_limit;
}

void* pinned_allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* address = std::aligned_alloc(kAlignment, rounded);
  if (address == nullptr) throw std::bad_alloc();
  std::memset(address, kPoison, rounded);
  Lock lock;
  state().pinned[static_cast<char*>(address)] = rounded;
  return address;
}

void pinned_release(void* address) {
  if (address == nullptr) return;
  Lock lock;
  const auto found = state().pinned.find(static_cast<char*>(address));
  std::memset(address, kPoison, found->second);
  state().pinned.erase(found);
  std::free(address);
}

bool is_pinned(const void* address) {
  const char* at = static_cast<const char*>(address);
  Lock lock;
  auto after = state().pinned.upper_bound(at);
  return after != state().pinned.begin() && (--after, at < after->first + after->second);
}

int64_t current_stream(int device) { return thread_streams[device]; }

int64_t exchange_stream(int device, int64_t stream) { return std::exchange(thread_streams[device], stream); }

int64_t new_stream(int device) {
  Lock lock;
  return ++state().device[device].last_stream;
}

void begin_kernel(int device) {
  Lock lock;
  const int64_t stream = thread_streams[device];
  run_until(device, stream, stream_of(device, stream).issued);
  advance(device, stream);
}

void begin_copy(int device) {
  Lock lock;
  advance(device, thread_streams[device]);
}

void use(const void* address, bool writes) {
  Lock lock;
  const auto found = state().blocks.find(address);
  if (found == state().blocks.end()) return;
  Block& block = *found->second;
  const std::pair<int, int64_t> user{block.device, thread_streams[block.device]};
  const Clock& clock = stream_of(user.first, user.second).clock;
  const uint64_t now = position_in(clock, user);
  if (block.written > 0 && block.writer != user && position_in(clock, block.writer) < block.written)
    report(block, std::string(writes ? "are written" : "are read") + " by " + name_of(user) + " while " +
                      name_of(block.writer) + " may still write them: no wait");
  if (writes) {
    for (const auto& [reader, position] : block.reads)
      if (reader != user && position_in(clock, reader) < position)
        report(block, "are written by " + name_of(user) + " while " + name_of(reader) + " may still read them: no wait");
    block.reads.clear();
    block.writer = user;
    block.written = now;
  } else {
    block.reads[user] = now;
  }
}

std::vector<std::string> take_hazards() {
  Lock lock;
  return std::exchange(state().hazards, {});
}

void copy_later(int device, void* to, const void* from, size_t bytes, std::shared_ptr<void> keep) {
  Lock lock;
  const int64_t stream = thread_streams[device];
  Stream& it = stream_of(device, stream);
  // Earlier work, before this copy, still needs the bytes that the poison would overwrite.
  if (uses(device, stream, it.issued, range_of(to, bytes))) run_until(device, stream, it.issued);
  std::memset(to, kPoison, bytes);
  Item item;
  item.position = ++it.issued;
  item.to = static_cast<char*>(to);
  item.from = static_cast<const char*>(from);
  item.bytes = bytes;
  item.keep = std::move(keep);
  it.items.push_back(std::move(item));
}

void synchronize_stream(int device, int64_t stream) {
  Lock lock;
  Stream& it = stream_of(device, stream);
  run_until(device, stream, it.issued);
  learn(state().host_clock, it.clock);
}

bool query_stream(int device, int64_t stream) {
  Lock lock;
  const bool done = stream_of(device, stream).items.empty();
  synchronize_stream(device, stream);
  return done;
}

void synchronize_device(int device) {
  Lock lock;
  for (auto& [stream, it] : state().device[device].streams) synchronize_stream(device, stream);
}

size_t waiting_copies() {
  Lock lock;
  size_t count = 0;
  for (Device& device : state().device)
    for (auto& [stream, it] : device.streams)
      for (const Item& item : it.items) count += item.to != nullptr;
  return count;
}

void record_event(Event& event, int device, int64_t stream) {
  Lock lock;
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  advance(device, stream);
  const Stream& it = stream_of(device, stream);
  event = {device, stream, it.issued, std::chrono::nanoseconds(now).count(), it.clock};
}

void wait_for_event(const Event& event, int device, int64_t stream) {
  Lock lock;
  const bool ordered = event.device == device && event.stream == stream;
  if (event.device < 0 || ordered) return;
  Stream& it = stream_of(device, stream);
  learn(it.clock, event.clock);
  if (stream_of(event.device, event.stream).done >= event.position) return;
  Item item;
  item.position = ++it.issued;
  item.other = event.stream;
  item.other_device = event.device;
  item.other_position = event.position;
  it.items.push_back(std::move(item));
}

void synchronize_event(const Event& event) {
  if (event.device < 0) return;
  Lock lock;
  run_until(event.device, event.stream, event.position);
  learn(state().host_clock, event.clock);
}

bool query_event(const Event& event) {
  if (event.device < 0) return true;
  Lock lock;
  const bool done = stream_of(event.device, event.stream).done >= event.position;
  synchronize_event(event);
  return done;
}

void set_watcher(Watcher other) { watcher = other; }

void host_waits(const char* kind) {
  if (const Watcher call = watcher.load()) call(kind);
}

}  // namespace standin
