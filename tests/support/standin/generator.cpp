#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <array>

#include "runtime.h"

namespace standin {
namespace {

struct GeneratorImpl final : c10::GeneratorImpl {
  at::Generator inner;

  GeneratorImpl(int device, at::Generator from)
      : c10::GeneratorImpl({c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)},
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(from)) {}
  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new GeneratorImpl(device().index(), inner.clone()); }
};

}  // namespace

at::Generator new_generator(int device) {
  return at::make_generator<GeneratorImpl>(device, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(int device) {
  static std::array<at::Generator, kMaxDevices> all = [] {
    std::array<at::Generator, kMaxDevices> made;
    for (int index = 0; index < kMaxDevices; ++index) made[index] = new_generator(index);
    return made;
  }();
  return all.at(device);
}

at::Generator host_generator(const at::Generator& generator) {
  return at::check_generator<GeneratorImpl>(generator)->inner;
}

}  // namespace standin
