// The operators: a few have their own kernels, all others use the CPU's kernel on the same memory.
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/view_native.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <unordered_set>

#include "device.h"
#include "generator.h"
#include "runtime.h"

namespace standin {
namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// Operators that make the host wait, because the shape of their result, or control flow, depends on values.
const std::unordered_set<std::string> kWaits = {
    "aten::nonzero",      "aten::masked_select",      "aten::_unique",   "aten::_unique2",
    "aten::unique_dim",   "aten::unique_consecutive", "aten::bincount",  "aten::unique_dim_consecutive",
    "aten::equal",        "aten::nonzero_numpy",      "aten::histc",     "aten::linalg_inv_ex",
    "aten::_linalg_eigh", "aten::_linalg_svd",        "aten::linalg_eig"};
// Operators that accept CPU index tensors on CUDA.
const std::unordered_set<std::string> kIndexing = {"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                                   "aten::index_put", "aten::_unsafe_index"};
// Operators that accept zero-dimensional CPU tensors on CUDA, as do all pointwise operators.
const std::unordered_set<std::string> kTakesScalars = {
    "aten::fill_",          "aten::masked_fill_",  "aten::masked_fill", "aten::where",         "aten::_foreach_mul",
    "aten::_foreach_mul_",  "aten::_foreach_add",  "aten::_foreach_add_", "aten::_foreach_div", "aten::_foreach_div_",
    "aten::_fused_adamw_",  "aten::_fused_adam_",  "aten::_fused_sgd_", "aten::index_fill_",   "aten::lerp_",
    "aten::masked_scatter", "aten::index_put_",    "aten::index_put",   "aten::_index_put_impl_"};

// ------------------------------------------------------------------------------------------ the same memory, twice

// CPU tensors for the arguments of one call; device tensors that share memory also share it as CPU tensors.
class HostSide {
 public:
  at::Tensor view(const at::Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    for (const auto& [seen, its_view] : tensors_)
      if (seen.is_same(tensor)) return its_view;
    at::Tensor made = view_on(storage_for(tensor.storage()), tensor);
    tensors_.emplace_back(tensor, made);
    return made;
  }

  static at::Tensor view_on(const c10::Storage& storage, const at::Tensor& tensor) {
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    impl->_set_conj(tensor.is_conj());
    impl->_set_neg(tensor.is_neg());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return made;
  }

  static c10::Storage host_storage(const c10::Storage& ours, bool keep) {
    void* address = host(ours.data());
    c10::DataPtr data(address, c10::DeviceType::CPU);
    if (keep) {
      data = c10::DataPtr(address, new c10::Storage(ours), [](void* it) { delete static_cast<c10::Storage*>(it); },
                          c10::DeviceType::CPU);
    }
    return c10::Storage(c10::Storage::use_byte_size_t{}, ours.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true);
  }

  // A kernel may have resized its output arguments.
  void take_back_sizes() {
    for (auto& [ours, theirs] : storages_) {
      if (theirs.data() == host(ours.data()) && theirs.nbytes() == ours.nbytes()) continue;
      auto* impl = ours.unsafeGetStorageImpl();
      impl->set_data_ptr_noswap(c10::GetAllocator(kType)->allocate(theirs.nbytes()));
      impl->set_nbytes(theirs.nbytes());
      if (theirs.nbytes() > 0) std::memcpy(host(ours.data()), theirs.data(), theirs.nbytes());
    }
    for (auto& [ours, theirs] : tensors_) {
      if (ours.sizes() == theirs.sizes() && ours.strides() == theirs.strides() &&
          ours.storage_offset() == theirs.storage_offset())
        continue;
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(theirs.sizes(), theirs.strides(), theirs.storage_offset());
    }
  }

  // Returns a kernel's result as a device tensor: an argument, a view of an argument, or a new tensor.
  at::Tensor take_back(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (const auto& [ours, theirs] : tensors_)
      if (theirs.is_same(tensor)) return ours;
    for (const auto& [ours, theirs] : storages_)
      if (theirs.is_alias_of(tensor.storage())) return tensor_of_ours(ours, tensor);
    const c10::Storage& from = tensor.storage();
    c10::DataPtr data = c10::GetAllocator(kType)->allocate(from.nbytes());
    if (from.nbytes() > 0) std::memcpy(host(data.get()), from.data(), from.nbytes());
    c10::Storage made(c10::Storage::use_byte_size_t{}, from.nbytes(), std::move(data), c10::GetAllocator(kType), true);
    storages_.emplace_back(made, from);
    return tensor_of_ours(made, tensor);
  }

 private:
  c10::Storage storage_for(const c10::Storage& ours) {
    for (const auto& [seen, theirs] : storages_)
      if (seen.is_alias_of(ours)) return theirs;
    storages_.emplace_back(ours, host_storage(ours, false));
    return storages_.back().second;
  }

  static at::Tensor tensor_of_ours(const c10::Storage& storage, const at::Tensor& like) {
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), kKeys, like.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    impl->_set_conj(like.is_conj());
    impl->_set_neg(like.is_neg());
    return made;
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
};

// ---------------------------------------------------------------------------------------------------- every operator

template <typename Visit>
void for_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) visit(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef())
      if (item.isTensor()) visit(item.toTensor());
  }
}

// Returns the device of the call. Refuses arguments that a GPU would refuse.
c10::Device common_device(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const std::string& name = op.schema().name();
  const bool scalars = op.hasTag(at::Tag::pointwise) || kTakesScalars.count(name) > 0;
  std::optional<c10::Device> device, named;
  std::optional<c10::Device> other;
  for (size_t place = 0; place < arguments.size(); ++place) {
    const c10::IValue& value = arguments[place];
    if (value.isDevice()) named = value.toDevice();
    const bool index = place == 1 && kIndexing.count(name) > 0;
    for_tensors(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      const bool forgiven = tensor.is_cpu() && (index || (scalars && tensor.dim() == 0));
      if (is_ours(tensor) && !device) {
        device = tensor.device();
      } else if (!forgiven && (!is_ours(tensor) || tensor.device() != *device)) {
        other = tensor.device();
      }
    });
  }
  if (!device) device = named && named->type() == kType ? named : c10::Device(kType);
  if (!device->has_index()) device = c10::Device(kType, static_cast<c10::DeviceIndex>(current_device()));
  TORCH_CHECK(!other, "Expected all tensors to be on the same device, but found at least two devices, ", *device,
              " and ", *other, "! (when checking an argument of ", name, ")");
  return *device;
}

c10::IValue to_host(const c10::IValue& value, HostSide& host_side) {
  if (value.isTensor()) return host_side.view(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(host_side.view(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const c10::IValue& item : value.toListRef())
      list.push_back(item.isTensor() ? std::make_optional(host_side.view(item.toTensor())) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(c10::kCPU);
  if (value.isGenerator() && value.toGenerator().defined() && value.toGenerator().device().type() == kType)
    return host_generator(value.toGenerator());
  return value;
}

c10::IValue to_device(const c10::IValue& value, HostSide& host_side) {
  if (value.isTensor()) return host_side.take_back(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(host_side.take_back(tensor));
    return list;
  }
  return value;
}

void use_tensors(const c10::IValue& value, const c10::Argument& argument) {
  const bool writes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  for_tensors(value, [&](const at::Tensor& tensor) {
    if (is_ours(tensor)) use(tensor.storage().data(), writes);
  });
}

bool takes_a_generator(const c10::Argument& argument) {
  return argument.type()->str().find("Generator") != std::string::npos;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const c10::Device device = common_device(op, torch::jit::last(*stack, count));
  const bool waits = kWaits.count(schema.name()) > 0;
  if (waits) host_waits("data-dependent");
  TORCH_CHECK(schema.name() != "aten::_pin_memory", "cannot pin a tensor of the device, only dense CPU tensors");
  const c10::DeviceGuard on_device(device);
  begin_kernel(device.index());
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  HostSide host_side;
  const size_t first = stack->size() - count;
  for (size_t place = 0; place < count; ++place) {
    c10::IValue& value = (*stack)[first + place];
    use_tensors(value, schema.arguments()[place]);
    if (value.isNone() && takes_a_generator(schema.arguments()[place]))
      value = host_generator(default_generator(device.index()));
    else
      value = to_host(value, host_side);
  }
  if (waits) synchronize_stream(device.index(), current_stream(device.index()));
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  host_side.take_back_sizes();
  const size_t returns = schema.returns().size();
  for (size_t place = stack->size() - returns; place < stack->size(); ++place)
    (*stack)[place] = to_device((*stack)[place], host_side);
}

// -------------------------------------------------------------------------------------------------- memory and copies

c10::Device wanted_device(std::optional<c10::Device> device) {
  if (device && device->has_index()) {
    TORCH_CHECK(device->index() < device_count(), "standin: invalid device ordinal ",
                static_cast<int>(device->index()));
    return *device;
  }
  return {kType, static_cast<c10::DeviceIndex>(current_device())};
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(wanted_device(device));
  return at::detail::empty_generic(size, c10::GetAllocator(kType), kKeys, at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(wanted_device(device));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kType), kKeys, at::dtype_or_default(dtype));
}

bool is_one_block(const at::Tensor& from, const at::Tensor& to) {
  return from.dtype() == to.dtype() && from.sizes() == to.sizes() && from.strides() == to.strides() &&
         to.is_non_overlapping_and_dense() && !from.is_neg() && !to.is_neg() && !from.is_conj() && !to.is_conj();
}

const char* start_of(const at::Tensor& tensor) {
  return static_cast<const char*>(host(tensor.storage().data())) + tensor.storage_offset() * tensor.element_size();
}

void use_both(const at::Tensor& from, const at::Tensor& to) {
  if (is_ours(from)) use(from.storage().data(), false);
  if (is_ours(to)) use(to.storage().data(), true);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::Device device = is_ours(to) ? to.device() : from.device();
  const bool from_host = from.is_cpu(), to_host = to.is_cpu();
  const at::Tensor& on_host = from_host ? from : to;
  at::Tensor source = from;
  if (non_blocking && to_host && to.dtype() != from.dtype() && to.is_pinned()) source = from.to(to.scalar_type());
  if ((from_host || to_host) && non_blocking && to.numel() > 0 && is_one_block(source, to) && on_host.is_pinned()) {
    const c10::Storage pinned = on_host.storage();
    begin_copy(device.index());
    use_both(source, to);
    copy_later(device.index(), const_cast<char*>(start_of(to)), start_of(source), to.nbytes(),
               std::make_shared<c10::Storage>(pinned));
    return to;
  }
  // Copies from pageable memory are staged at once by the driver; copies to pageable memory make the host wait.
  const bool waits = to_host || (from_host && !non_blocking);
  if (waits) host_waits(to_host ? "copy to host" : "copy to device");
  if (is_ours(from)) begin_kernel(from.device().index());
  if (is_ours(to)) begin_kernel(to.device().index());
  use_both(from, to);
  if (waits) synchronize_stream(device.index(), current_stream(device.index()));
  host_view(to).copy_(host_view(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  host_waits("item");
  begin_kernel(tensor.device().index());
  use(tensor.storage().data(), false);
  synchronize_stream(tensor.device().index(), current_stream(tensor.device().index()));
  return host_view(tensor).item();
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  if (self.sizes() == size) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t needed = (impl->numel() + impl->storage_offset()) * self.element_size();
  if (impl->numel() > 0 && needed > self.storage().nbytes()) {
    const c10::DeviceGuard guard(self.device());
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const int64_t elements = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_storage(self, std::move(storage), 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t{}, 0, c10::GetAllocator(kType), true);
  return set_storage(self, std::move(none), 0, {0}, {});
}

void record_tensor_stream(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr().get_context(), stream.id());
}

// Dropout has its own kernel on CUDA, while the CPU composes it: draw the mask from the device's generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  at::Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1.0 - p)), mask};
}

// Chooses the same SDPA kernel as the CPU, so that both compute the same.
int64_t attention_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool grouped) {
  HostSide host_side;
  at::Tensor views[3] = {host_side.view(query), host_side.view(key), host_side.view(value)};
  for (int place = 0; place < 3; ++place)
    views[place].set_requires_grad((place == 0 ? query : place == 1 ? key : value).requires_grad());
  const auto its_mask = mask ? std::make_optional(host_side.view(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(views[0], views[1], views[2], its_mask, dropout, causal, scale, grouped);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", resize);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_tensor_stream);
  m.impl("native_dropout", native_dropout);
  // CPU and CUDA have kernels of these; for a new device torch would compose them of other operators.
  for (const char* name : {"silu_backward", "mish_backward", "native_layer_norm", "native_group_norm", "addr", "addr.out",
                           "all.dims", "all.dims_out", "any.dims", "any.dims_out", "linalg__powsum", "_stack"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace

at::Tensor host_view(const at::Tensor& tensor) {
  return is_ours(tensor) ? HostSide::view_on(HostSide::host_storage(tensor.storage(), true), tensor) : tensor;
}

}  // namespace standin

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &standin::attention_choice)
}
