// The part of the CUDA runtime that host code compiled by nvcc calls, without a GPU: checks the chip's limits and
// passes each launch to a function of the test, which interprets the kernel's PTX.
#include <cstring>
#include <map>
#include <string>

#include "chip.h"

namespace {

struct Extent3 {
  unsigned x, y, z;
};

struct Configuration {
  Extent3 grid, block;
  size_t shared;
  void* stream;
};

struct Entry {
  std::string name;
  size_t allowed_shared = emulator::kSharedWithoutAsking;
};

using Launch = int (*)(const char* name, const unsigned* grid, const unsigned* block, size_t shared, void** arguments);
using Fits = int (*)(const char* name, unsigned threads, size_t shared, size_t allowed);

Launch launched = nullptr;
Fits fits = nullptr;
std::map<const void*, Entry>& entries() {
  static std::map<const void*, Entry> all;
  return all;
}
Configuration pushed;

enum Attribute { kMostDynamicShared = 8 };
enum DeviceAttribute { kMostSharedOptIn = 97, kMajor = 75, kMinor = 76 };

}  // namespace

extern "C" {

void megalite_ptx_runtime(Launch launch, Fits check) { launched = launch, fits = check; }
int megalite_ptx_chip(int capability) { return emulator::choose_chip(capability); }
void megalite_ptx_most_shared(size_t bytes) { emulator::chip.most_shared = bytes; }

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  entries()[host].name = name;
}

unsigned __cudaPushCallConfiguration(Extent3 grid, Extent3 block, size_t shared, void* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}

int __cudaPopCallConfiguration(Extent3* grid, Extent3* block, size_t* shared, void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
  *static_cast<void**>(stream) = pushed.stream;
  return 0;
}

int __cudaGetKernel(void** kernel, const void* host) {
  *kernel = const_cast<void*>(host);
  return 0;
}

int __cudaLaunchKernel(void* host, Extent3 grid, Extent3 block, void** arguments, size_t shared, void*) {
  const Entry& entry = entries().at(host);
  const int error = emulator::refused(
      {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared, entry.allowed_shared);
  if (error != emulator::kSuccess) return emulator::remember(error);
  if (const int wrong = fits(entry.name.c_str(), block.x * block.y * block.z, shared, emulator::chip.most_shared)) {
    return emulator::remember(wrong);
  }
  return emulator::remember(launched(entry.name.c_str(), &grid.x, &block.x, shared, arguments));
}

int cudaGetLastError() { return emulator::take_last_error(); }
int cudaPeekAtLastError() { return emulator::last_error; }
const char* cudaGetErrorString(int) { return "an error of the emulated runtime"; }

int cudaFuncSetAttribute(const void* host, int which, int value) {
  if (which != kMostDynamicShared || value < 0 || size_t(value) > emulator::chip.most_shared) {
    return emulator::remember(emulator::kInvalidValue);
  }
  entries().at(host).allowed_shared = value;
  return emulator::kSuccess;
}

int cudaGetDevice(int* device) { return *device = 0; }

int cudaDeviceGetAttribute(int* value, int which, int) {
  switch (which) {
    case kMajor: *value = emulator::chip.capability / 10; return emulator::kSuccess;
    case kMinor: *value = emulator::chip.capability % 10; return emulator::kSuccess;
    case kMostSharedOptIn: *value = int(emulator::chip.most_shared); return emulator::kSuccess;
    default: return emulator::remember(emulator::kInvalidValue);
  }
}

int cudaMemsetAsync(void* begin, int value, size_t bytes, void*) {
  std::memset(begin, value, bytes);
  return emulator::kSuccess;
}
}
