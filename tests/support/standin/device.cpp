// The parts of a torch device: allocators, the guard with its streams and events, the hooks, random numbers.
#include "device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "generator.h"
#include "runtime.h"

namespace standin {
namespace {

c10::Device device_at(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }
int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

std::string size_text(size_t bytes) {
  char text[32];
  if (bytes <= 1024) return std::to_string(bytes) + " bytes";
  if (bytes <= 1 << 20) std::snprintf(text, sizeof text, "%.2f KiB", static_cast<double>(bytes) / (1 << 10));
  else std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    // In the words of CUDA's allocator.
    TORCH_CHECK_WITH(OutOfMemoryError, fits(device, bytes), "standin out of memory. Tried to allocate ",
                     size_text(bytes), ". GPU ", device, " has a total capacity of ",
                     size_text(memory_info(device).second), ".");
    void* address = standin::allocate(device, bytes);
    return {address, address, &release, device_at(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    begin_kernel(current_device());
    std::memcpy(host(to), host(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data.get_context(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const MemoryStats now = memory_stats(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes[0], &stats.reserved_bytes[0], &stats.active_bytes[0]}) {
      bytes->current = now.allocated;
      bytes->peak = now.peak;
    }
    stats.allocation[0].current = now.blocks;
    stats.allocation[0].peak = now.peak_blocks;
    stats.allocation[0].allocated = now.total_allocations;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override { return memory_info(device); }
};

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = pinned_allocate(bytes);
    return {address, address, &pinned_release, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &pinned_release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override { return device_at(exchange_device(device.index())); }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange_device(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  static c10::Stream stream_at(c10::Device device, int64_t stream) {
    return c10::Stream(c10::Stream::UNSAFE, device_at(index_of(device)), stream);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_at(device, current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_at(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_at(device, new_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_at(stream.device(), exchange_stream(stream.device_index(), stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override {
    return query_stream(stream.device_index(), stream.id());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits("stream");
    synchronize_stream(stream.device_index(), stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    host_waits("device");
    synchronize_device(device < 0 ? current_device() : device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    record_event(*static_cast<Event*>(*event), stream.device_index(), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait_for_event(*static_cast<Event*>(event), stream.device_index(), stream.id());
  }
  bool queryEvent(void* event) const override { return event == nullptr || query_event(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    host_waits("event");
    if (event != nullptr) synchronize_event(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "Both events must be recorded before their time is taken");
    return 1e-6 * static_cast<double>(static_cast<Event*>(second)->nanoseconds - static_cast<Event*>(first)->nanoseconds);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data.get_context(), stream.id());
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(kType); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(is_device_address(data), "Not an address of the stand-in's memory");
    return device_at(device_of(data));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const int device = storage.device().index();
    begin_kernel(device);
    const int before = standin::exchange_device(device);
    c10::DataPtr data = c10::GetAllocator(kType)->allocate(bytes);
    standin::exchange_device(before);
    std::memcpy(host(data.get()), host(storage.data()), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

}  // namespace

void register_device() {
  static Allocator allocator;
  static PinnedAllocator pinned;
  static Guard guard;
  static Hooks hooks;
  c10::SetAllocator(kType, &allocator);
  at::setHostAllocator(kType, &pinned);
  c10::impl::registerDeviceGuard(kType, &guard);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

}  // namespace standin
