// Bindings of the optimizer's operators, on lists of tensors of different sizes.
#include "adamw.h"

#include "bind/tensor.h"

namespace {

using ml::Tensor;
using List = std::vector<Tensor>;

// Pointers and sizes of a list of contiguous tensors of one dtype and device.
struct Pointers {
  std::vector<void*> data;
  std::vector<int64_t> sizes;

  int64_t count() const { return int64_t(data.size()); }
};

void check_list(const List& list, const List& sized_as, const char* what) {
  STD_TORCH_CHECK(list.size() == sized_as.size(), "megalite: ", what, " has ", list.size(), " tensors, not ",
                  sized_as.size());
  for (size_t i = 0; i < list.size(); ++i) {
    ml::check_same_type(list[0], list[i], what);
    ml::check_size(list[i], sized_as[i].numel(), what);
    STD_TORCH_CHECK(list[i].is_contiguous(), "megalite: ", what, " has a tensor that is not contiguous");
    STD_TORCH_CHECK(list[i].is_cuda() == sized_as[i].is_cuda() &&
                        list[i].get_device_index() == sized_as[i].get_device_index(),
                    "megalite: ", what, " is on another device than the weights");
  }
}

Pointers read(const List& list) {
  Pointers found;
  for (const Tensor& tensor : list) {
    found.data.push_back(const_cast<void*>(tensor.const_data_ptr()));
    found.sizes.push_back(tensor.numel());
  }
  return found;
}

Pointers written(const List& list) {
  Pointers found;
  for (const Tensor& tensor : list) {
    found.data.push_back(tensor.mutable_data_ptr());
    found.sizes.push_back(tensor.numel());
  }
  return found;
}

List contiguous(const List& list) {
  List found;
  for (const Tensor& tensor : list) found.push_back(ml::contiguous(tensor));
  return found;
}

struct SumBuffers {
  Tensor partials, total;
};

SumBuffers sum_buffers(const List& tensors, const Pointers& pointers) {
  const int64_t chunks = megalite_adamw_chunks(pointers.sizes.data(), pointers.count());
  constexpr auto kDouble = torch::headeronly::ScalarType::Double;
  return {ml::new_empty(tensors[0], {chunks}, kDouble), ml::new_empty(tensors[0], {}, kDouble)};
}

List list_of_squares(const List& given) {
  STD_TORCH_CHECK(!given.empty(), "megalite: sum_of_squares needs at least one tensor");
  List tensors = contiguous(given);
  check_list(tensors, tensors, "sum_of_squares");
  return tensors;
}

Tensor sum_of_squares_cpu(List given) {
  const List tensors = list_of_squares(given);
  const Pointers pointers = read(tensors);
  SumBuffers buffers = sum_buffers(tensors, pointers);
  ml::check(megalite_adamw_sum_of_squares_cpu(pointers.data.data(), pointers.sizes.data(), pointers.count(),
                                              static_cast<double*>(buffers.partials.mutable_data_ptr()),
                                              static_cast<double*>(buffers.total.mutable_data_ptr()),
                                              ml::dtype_of(tensors[0])),
            "sum_of_squares");
  return buffers.total;
}

// The checked lists of one update; at least one weight.
struct Update {
  Pointers weights, copies, gradients, means, squares;
  List held;  // gradients that had to be made contiguous
  int weight_dtype, gradient_dtype, copy_dtype;

  static Update of(const List& weights, const List& copies, const List& gradients, const List& means,
                   const List& squares) {
    Update made;
    made.held = contiguous(gradients);
    check_list(weights, weights, "weights");
    check_list(made.held, weights, "gradients");
    check_list(means, weights, "exp_avgs");
    check_list(squares, weights, "exp_avg_sqs");
    ml::check_same_type(weights[0], means[0], "exp_avgs");
    ml::check_same_type(weights[0], squares[0], "exp_avg_sqs");
    if (!copies.empty()) check_list(copies, weights, "copies");
    made.weights = written(weights), made.copies = written(copies), made.gradients = read(made.held);
    made.means = written(means), made.squares = written(squares);
    made.weight_dtype = ml::dtype_of(weights[0]);
    made.gradient_dtype = ml::dtype_of(made.held[0]);
    made.copy_dtype = copies.empty() ? 0 : ml::dtype_of(copies[0]);
    return made;
  }

  void* const* copy_pointers() const { return copies.data.empty() ? nullptr : copies.data.data(); }
};

void update_cpu(List weights, List copies, List gradients, List means, List squares, double learning_rate,
                double beta1, double beta2, double eps, double weight_decay, double step, double gradient_scale) {
  if (weights.empty()) return;
  const Update lists = Update::of(weights, copies, gradients, means, squares);
  ml::check(megalite_adamw_update_cpu(lists.weights.data.data(), lists.copy_pointers(), lists.gradients.data.data(),
                                      lists.means.data.data(), lists.squares.data.data(),
                                      lists.weights.sizes.data(), lists.weights.count(), learning_rate, beta1, beta2,
                                      eps, weight_decay, step, gradient_scale, lists.weight_dtype,
                                      lists.gradient_dtype, lists.copy_dtype),
            "adamw_");
}

Tensor summand(const Tensor& total, const Tensor& gradient) {
  ml::check_size(gradient, total.numel(), "gradient");
  STD_TORCH_CHECK(total.is_contiguous(), "megalite: accumulate_ needs a contiguous sum");
  STD_TORCH_CHECK(total.is_cuda() == gradient.is_cuda() && total.get_device_index() == gradient.get_device_index(),
                  "megalite: the gradient is on another device than the sum");
  return ml::contiguous(gradient);
}

void accumulate_cpu(Tensor total, Tensor given) {
  const Tensor gradient = summand(total, given);
  ml::check(megalite_adamw_accumulate_cpu(total.mutable_data_ptr(), gradient.const_data_ptr(), total.numel(),
                                          ml::dtype_of(total), ml::dtype_of(gradient)),
            "accumulate_");
}

#ifdef MEGALITE_CUDA
Tensor sum_of_squares_cuda(List given) {
  const List tensors = list_of_squares(given);
  const ml::OnDevice device(tensors[0]);
  const Pointers pointers = read(tensors);
  SumBuffers buffers = sum_buffers(tensors, pointers);
  ml::check(megalite_adamw_sum_of_squares_cuda(pointers.data.data(), pointers.sizes.data(), pointers.count(),
                                               static_cast<double*>(buffers.partials.mutable_data_ptr()),
                                               static_cast<double*>(buffers.total.mutable_data_ptr()),
                                               ml::dtype_of(tensors[0]), device.stream()),
            "sum_of_squares");
  return buffers.total;
}

void update_cuda(List weights, List copies, List gradients, List means, List squares, double learning_rate,
                 double beta1, double beta2, double eps, double weight_decay, double step, double gradient_scale) {
  if (weights.empty()) return;
  const ml::OnDevice device(weights[0]);
  const Update lists = Update::of(weights, copies, gradients, means, squares);
  ml::check(megalite_adamw_update_cuda(lists.weights.data.data(), lists.copy_pointers(), lists.gradients.data.data(),
                                       lists.means.data.data(), lists.squares.data.data(),
                                       lists.weights.sizes.data(), lists.weights.count(), learning_rate, beta1,
                                       beta2, eps, weight_decay, step, gradient_scale, lists.weight_dtype,
                                       lists.gradient_dtype, lists.copy_dtype, device.stream()),
            "adamw_");
}

void accumulate_cuda(Tensor total, Tensor given) {
  const ml::OnDevice device(total);
  const Tensor gradient = summand(total, given);
  ml::check(megalite_adamw_accumulate_cuda(total.mutable_data_ptr(), gradient.const_data_ptr(), total.numel(),
                                           ml::dtype_of(total), ml::dtype_of(gradient), device.stream()),
            "accumulate_");
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(megalite, m) {
  m.def("sum_of_squares(Tensor[] tensors) -> Tensor");
  m.def(
      "adamw_(Tensor(a!)[] weights, Tensor(b!)[] copies, Tensor[] gradients, Tensor(c!)[] exp_avgs,"
      " Tensor(d!)[] exp_avg_sqs, float learning_rate, float beta1, float beta2, float eps, float weight_decay,"
      " float step, float gradient_scale) -> ()");
  m.def("accumulate_(Tensor(a!) total, Tensor gradient) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) {
  m.impl("sum_of_squares", TORCH_BOX(&sum_of_squares_cpu));
  m.impl("adamw_", TORCH_BOX(&update_cpu));
  m.impl("accumulate_", TORCH_BOX(&accumulate_cpu));
}

#ifdef MEGALITE_CUDA
STABLE_TORCH_LIBRARY_IMPL(megalite, CUDA, m) {
  m.impl("sum_of_squares", TORCH_BOX(&sum_of_squares_cuda));
  m.impl("adamw_", TORCH_BOX(&update_cuda));
  m.impl("accumulate_", TORCH_BOX(&accumulate_cuda));
}
#endif
