#include "group.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstring>

#include "device.h"
#include "runtime.h"

namespace standin {
namespace {

using c10::intrusive_ptr;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;

// Completes when all of its parts complete; keeps the device's tensors alive, as NCCL does during a collective.
struct Joined final : Work {
  std::vector<intrusive_ptr<Work>> parts;
  Tensors outputs;
  bool host_waits_too;

  Joined(std::vector<intrusive_ptr<Work>> works, Tensors tensors, bool wait_on_host)
      : parts(std::move(works)), outputs(std::move(tensors)), host_waits_too(wait_on_host) {}
  bool isCompleted() override {
    for (auto& part : parts)
      if (!part->isCompleted()) return false;
    return true;
  }
  bool isSuccess() const override {
    for (auto& part : parts)
      if (!part->isSuccess()) return false;
    return true;
  }
  int sourceRank() const override { return parts.at(0)->sourceRank(); }
  Tensors result() override { return outputs; }
  bool wait(std::chrono::milliseconds timeout) override {
    if (host_waits_too) host_waits("barrier");
    for (auto& part : parts) part->wait(timeout);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override {
    for (auto& part : parts) part->abort();
  }
  intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs));
    return future;
  }
};

class Group final : public c10d::Backend {
 public:
  explicit Group(intrusive_ptr<c10d::Backend> inner)
      : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "standin"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    coalescing_ = true;
    coalesced_.clear();
  }
  intrusive_ptr<Work> endCoalescing() override {
    coalescing_ = false;
    return c10::make_intrusive<Joined>(std::exchange(coalesced_, {}), Tensors{}, false);
  }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }
  void abort() override { inner_->abort(); }
  void shutdown() override { inner_->shutdown(); }

  intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensors views = checked(tensors);
    return begun(inner_->broadcast(views, options), tensors);
  }
  intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Tensors views = checked(tensors);
    return begun(inner_->allreduce(views, options), tensors);
  }
  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    Tensors views = checked(tensors);
    std::vector<intrusive_ptr<Work>> works;
    c10d::AllreduceOptions each;
    each.reduceOp = options.reduceOp;
    each.timeout = options.timeout;
    for (at::Tensor& view : views) {
      Tensors one{view};
      works.push_back(inner_->allreduce(one, each));
    }
    return begun(std::move(works), tensors);
  }
  intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Tensors views = checked(tensors);
    return begun(inner_->reduce(views, options), tensors);
  }
  intrusive_ptr<Work> allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Tensors from = checked(inputs, false);
    Lists to = checked(outputs);
    return begun(inner_->allgather(to, from, options), outputs.at(0));
  }
  intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& options) override {
    at::Tensor from = checked(input, false), to = checked(output);
    return begun(inner_->_allgather_base(to, from, options), {output});
  }
  intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) override {
    std::vector<intrusive_ptr<Work>> works;
    for (size_t place = 0; place < outputs.size(); ++place) {
      at::Tensor from = checked(inputs[place], false), to = checked(outputs[place]);
      works.push_back(inner_->_allgather_base(to, from, options));
    }
    return begun(std::move(works), outputs);
  }
  intrusive_ptr<Work> gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Tensors from = checked(inputs, false);
    Lists to = checked(outputs);
    return begun(inner_->gather(to, from, options), outputs.empty() ? Tensors{} : outputs[0]);
  }
  intrusive_ptr<Work> scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    Lists from = checked(inputs, false);
    Tensors to = checked(outputs);
    return begun(inner_->scatter(to, from, options), outputs);
  }
  intrusive_ptr<Work> reduce_scatter(Tensors& outputs, Lists& inputs,
                                     const c10d::ReduceScatterOptions& options) override {
    Lists from = checked(inputs, false);
    Tensors to = checked(outputs);
    return begun(inner_->reduce_scatter(to, from, options), outputs);
  }
  intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& options) override {
    at::Tensor from = checked(input, false), to = checked(output);
    return begun(inner_->_reduce_scatter_base(to, from, options), {output});
  }
  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& options) override {
    std::vector<intrusive_ptr<Work>> works;
    for (size_t place = 0; place < outputs.size(); ++place) {
      at::Tensor from = checked(inputs[place], false), to = checked(outputs[place]);
      works.push_back(inner_->_reduce_scatter_base(to, from, options));
    }
    return begun(std::move(works), outputs);
  }
  intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                    std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    at::Tensor from = checked(input, false), to = checked(output);
    return begun(inner_->alltoall_base(to, from, output_sizes, input_sizes, options), {output});
  }
  // Without tags, like NCCL: messages between two ranks arrive in the order in which they were sent.
  intrusive_ptr<Work> send(Tensors& tensors, int rank, int) override {
    Tensors views = checked(tensors, false);
    return begun(inner_->send(views, rank, 0), tensors);
  }
  intrusive_ptr<Work> recv(Tensors& tensors, int rank, int) override {
    Tensors views = checked(tensors);
    for (at::Tensor& view : views)
      if (view.is_contiguous()) std::memset(view.data_ptr(), kPoison, view.nbytes());
    return begun(inner_->recv(views, rank, 0), tensors);
  }
  intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    c10d::BarrierOptions plain;
    plain.timeout = options.timeout;
    synchronize_device(current_device());
    return c10::make_intrusive<Joined>(std::vector{inner_->barrier(plain)}, Tensors{}, true);
  }

 private:
  // Returns the CPU view of a tensor of the group's own device, after completing earlier work of its stream.
  at::Tensor checked(const at::Tensor& tensor, bool writes = true) {
    TORCH_CHECK(is_ours(tensor), "No backend type associated with device type ", tensor.device().type());
    TORCH_CHECK(tensor.is_non_overlapping_and_dense() || tensor.is_contiguous(), "Tensors must be contiguous");
    const c10::DeviceIndex device = tensor.device().index();
    if (device_ < 0) device_ = device;
    TORCH_CHECK(device == device_, "Rank ", rank_, " gave its group a tensor of standin:", static_cast<int>(device),
                ", but first one of standin:", static_cast<int>(device_),
                "; a rank of a group has one device. Call torch.accelerator.set_device_index first.");
    begin_kernel(device);
    use(tensor.storage().data(), writes);
    return host_view(tensor);
  }
  Tensors checked(const Tensors& tensors, bool writes = true) {
    Tensors views;
    for (const at::Tensor& tensor : tensors) views.push_back(checked(tensor, writes));
    return views;
  }
  Lists checked(const Lists& lists, bool writes = true) {
    Lists views;
    for (const Tensors& tensors : lists) views.push_back(checked(tensors, writes));
    return views;
  }
  intrusive_ptr<Work> begun(intrusive_ptr<Work> work, Tensors tensors) {
    return begun(std::vector{std::move(work)}, std::move(tensors));
  }
  intrusive_ptr<Work> begun(std::vector<intrusive_ptr<Work>> works, Tensors tensors) {
    if (coalescing_) coalesced_.insert(coalesced_.end(), works.begin(), works.end());
    return c10::make_intrusive<Joined>(std::move(works), std::move(tensors), false);
  }

  intrusive_ptr<c10d::Backend> inner_;
  c10::DeviceIndex device_ = -1;
  bool coalescing_ = false;
  std::vector<intrusive_ptr<Work>> coalesced_;
};

}  // namespace

intrusive_ptr<c10d::Backend> make_group(intrusive_ptr<c10d::Backend> inner) {
  return c10::make_intrusive<Group>(std::move(inner));
}

}  // namespace standin
