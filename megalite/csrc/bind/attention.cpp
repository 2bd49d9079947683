#include "attention.h"

#include <algorithm>
#include <optional>

#include "bind/tensor.h"

namespace {

using ml::Tensor;
using Maybe = std::optional<Tensor>;

// Returns the tensor, or a copy if the kernels cannot read it: the head dim must be contiguous, and on a GPU addresses
// and strides must be multiples of 16 bytes.
Tensor readable(const Tensor& tensor) {
  const bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0 && tensor.stride(0) % 8 == 0 &&
                       tensor.stride(1) % 8 == 0;
  const bool readable = tensor.stride(2) == 1 && (aligned || !tensor.is_cuda());
  if (readable) return tensor;
  return tensor.is_contiguous() ? torch::stable::clone(tensor) : torch::stable::contiguous(tensor);
}

// Returns the tensor, or a copy, contiguous and on a GPU aligned to 16 bytes.
Tensor aligned_contiguous(const Tensor& given) {
  const Tensor tensor = ml::contiguous(given);
  const bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  return aligned || !tensor.is_cuda() ? tensor : torch::stable::clone(tensor);
}

void check_starts(const Tensor& starts, const Tensor& query, int64_t tokens, int64_t longest, const char* what) {
  STD_TORCH_CHECK(
      starts.is_cuda() == query.is_cuda() && starts.get_device_index() == query.get_device_index(), "megalite: ", what,
      " is on another device than attention's query");
  STD_TORCH_CHECK(
      starts.scalar_type() == torch::headeronly::ScalarType::Int && starts.dim() == 1 && starts.is_contiguous() &&
          starts.numel() > 0,
      "megalite: ", what, " must be a contiguous int32 vector of sequences + 1 elements");
  if (starts.is_cuda()) return;  // checking the values would need a device sync
  const auto* places = static_cast<const int32_t*>(starts.const_data_ptr());
  const int64_t last = starts.numel() - 1;
  STD_TORCH_CHECK(
      places[0] == 0 && places[last] == tokens, "megalite: ", what, " must go from 0 to the number of tokens, ",
      tokens);
  for (int64_t i = 0; i < last; ++i) {
    const int64_t length = places[i + 1] - places[i];
    STD_TORCH_CHECK(
        0 <= length && length <= longest, "megalite: ", what, " has a sequence of ", length, " tokens, not 0 to ",
        longest);
  }
}

struct Inputs {
  Tensor query, key, value, query_starts, key_starts;
};

// Where each of `rows` rows of queries and of keys begins, in positions; first_query = -1: aligned at the ends.
struct Positions {
  int64_t rows, first_query, first_key;
};

void set_positions(const Positions& at, MegaliteAttention& a) {
  constexpr int64_t kFarthest = 1 << 30;
  STD_TORCH_CHECK(at.rows > 0, "megalite: attention over ", at.rows, " rows");
  STD_TORCH_CHECK(
      a.queries % at.rows == 0 && a.keys % at.rows == 0, "megalite: ", a.queries, " queries and ", a.keys,
      " keys cannot be split into ", at.rows, " rows of equal length");
  STD_TORCH_CHECK(
      -1 <= at.first_query && at.first_query < kFarthest && 0 <= at.first_key && at.first_key < kFarthest &&
          (at.first_query >= 0 || at.first_key == 0),
      "megalite: attention's first_query is ", at.first_query, " and first_key ", at.first_key,
      "; they must be positions, or -1 and 0");
  const int64_t queries = a.queries / at.rows, keys = a.keys / at.rows;
  a.query_row = std::max<int64_t>(queries, 1), a.key_row = std::max<int64_t>(keys, 1);
  a.positioned = at.first_query >= 0, a.first_key = at.first_key;
  a.first_query = a.positioned ? at.first_query : keys - queries;
}

// The dropout arguments; with dropped = 0 there is no dropout and the other fields are unused.
struct Drop {
  Maybe samples;
  int64_t dropped, key_low, key_high, first_head;
};

void set_dropout(const Drop& drop, const Tensor& query, int64_t rows, MegaliteAttention& a) {
  if (drop.dropped == 0) return;
  STD_TORCH_CHECK(
      0 < drop.dropped && drop.dropped < 65536, "megalite: dropped must be 0 to 65535, not ", drop.dropped);
  STD_TORCH_CHECK(drop.samples.has_value(), "megalite: attention with dropout needs samples");
  const Tensor& samples = *drop.samples;
  STD_TORCH_CHECK(
      samples.is_cuda() == query.is_cuda() && samples.get_device_index() == query.get_device_index(),
      "megalite: samples are on another device than attention's query");
  STD_TORCH_CHECK(
      samples.scalar_type() == torch::headeronly::ScalarType::Long && samples.dim() == 1 &&
          samples.is_contiguous() && samples.numel() == rows,
      "megalite: samples must be a contiguous int64 vector, one element per row of the batch");
  a.samples = static_cast<const int64_t*>(samples.const_data_ptr());
  a.dropped = drop.dropped, a.first_head = drop.first_head;
  a.drop_key_low = drop.key_low, a.drop_key_high = drop.key_high;
}

// Checks the operators' arguments and returns them as the kernels' struct.
MegaliteAttention checked_arguments(
    Inputs& inputs, int64_t longest_query, int64_t longest_key, int64_t left, int64_t right, double scale,
    const Drop& drop, const Positions& positions) {
  for (const Tensor* each : {&inputs.key, &inputs.value}) {
    ml::check_same_type(inputs.query, *each, "attention's key or value");
    STD_TORCH_CHECK(each->dim() == 3, "megalite: attention takes [tokens, heads, head size]");
  }
  const Tensor &query = inputs.query, &key = inputs.key, &value = inputs.value;
  STD_TORCH_CHECK(
      query.dim() == 3 && query.size(2) == key.size(2) && query.size(2) == value.size(2) &&
          key.size(0) == value.size(0) && key.size(1) == value.size(1),
      "megalite: attention's query, key and value have incompatible shapes");
  STD_TORCH_CHECK(
      key.size(1) > 0 && query.size(1) % key.size(1) == 0, "megalite: ", query.size(1),
      " heads are not a multiple of ", key.size(1), " key-value heads");
  constexpr int64_t kMostHeads = 65535;  // the largest gridDim.y
  STD_TORCH_CHECK(
      query.size(1) <= kMostHeads || !query.is_cuda(), "megalite: attention over ", query.size(1), " heads; its CUDA ",
      "kernels support at most ", kMostHeads);
  STD_TORCH_CHECK(scale > 0, "megalite: attention's scale must be above 0, not ", scale);
  check_starts(inputs.query_starts, query, query.size(0), longest_query, "query_starts");
  check_starts(inputs.key_starts, query, key.size(0), longest_key, "key_starts");
  STD_TORCH_CHECK(
      inputs.query_starts.numel() == inputs.key_starts.numel(),
      "megalite: query_starts and key_starts must have the same length");
  constexpr int64_t kFarthest = 1 << 30;
  STD_TORCH_CHECK(
      query.size(0) < kFarthest && key.size(0) < kFarthest, "megalite: attention supports fewer than 2^30 tokens");
  inputs.query = readable(query);
  inputs.key = readable(key);
  inputs.value = readable(value);
  MegaliteAttention a{};
  a.sequences = inputs.query_starts.numel() - 1;
  a.queries = query.size(0), a.keys = key.size(0);
  a.longest_query = longest_query, a.longest_key = longest_key;
  a.heads = query.size(1), a.kv_heads = key.size(1), a.head_size = query.size(2);
  a.left = std::min(left, kFarthest), a.right = std::min(right, kFarthest), a.scale = scale;
  a.query = query.const_data_ptr(), a.key = key.const_data_ptr(), a.value = value.const_data_ptr();
  a.query_token = query.stride(0), a.query_head = query.stride(1);
  a.key_token = key.stride(0), a.key_head = key.stride(1);
  a.value_token = value.stride(0), a.value_head = value.stride(1);
  a.query_starts = static_cast<const int32_t*>(inputs.query_starts.const_data_ptr());
  a.key_starts = static_cast<const int32_t*>(inputs.key_starts.const_data_ptr());
  set_positions(positions, a);
  set_dropout(drop, query, positions.rows, a);
  return a;
}

using OnCpu = int (*)(const MegaliteAttention*, int);
using OnCuda = int (*)(const MegaliteAttention*, int, void*);

struct Kernels {
  OnCpu cpu;
  OnCuda cuda_64, cuda_96, cuda_128, cuda_256;
  const char* name;

  OnCuda cuda(int64_t head_size) const {
    switch (head_size) {
      case 64: return cuda_64;
      case 96: return cuda_96;
      case 128: return cuda_128;
      case 256: return cuda_256;
      default: return nullptr;
    }
  }
};

#ifdef MEGALITE_CUDA
constexpr Kernels kForward{
    megalite_attention_forward_cpu,      megalite_attention_forward_64_cuda,  megalite_attention_forward_96_cuda,
    megalite_attention_forward_128_cuda, megalite_attention_forward_256_cuda, "attention_forward"};
constexpr Kernels kBackward{
    megalite_attention_backward_cpu,      megalite_attention_backward_64_cuda,  megalite_attention_backward_96_cuda,
    megalite_attention_backward_128_cuda, megalite_attention_backward_256_cuda, "attention_backward"};
#else
constexpr Kernels kForward{megalite_attention_forward_cpu, nullptr, nullptr, nullptr, nullptr, "attention_forward"};
constexpr Kernels kBackward{megalite_attention_backward_cpu, nullptr, nullptr, nullptr, nullptr, "attention_backward"};
#endif

// Calls the CPU kernel, or the CUDA kernel on the tensor's device and current stream.
void call(const Kernels& kernels, const Tensor& tensor, const MegaliteAttention& a) {
  const int dtype = ml::dtype_of(tensor);
  if (!tensor.is_cuda()) return ml::check(kernels.cpu(&a, dtype), kernels.name);
  const OnCuda kernel = kernels.cuda(a.head_size);
  if (kernel == nullptr) return ml::check(ml::kUnsupported, kernels.name);
  const ml::OnDevice device(tensor);
  ml::check(kernel(&a, dtype, device.stream()), kernels.name);
}

std::tuple<Tensor, Tensor> forward(
    Tensor query, Tensor key, Tensor value, Tensor query_starts, Tensor key_starts, int64_t longest_query,
    int64_t longest_key, int64_t left, int64_t right, double scale, bool,  // deterministic: only for the backward
    Maybe samples, int64_t dropped, int64_t drop_key_low, int64_t drop_key_high, int64_t first_head, int64_t rows,
    int64_t first_query, int64_t first_key) {
  Inputs inputs{query, key, value, query_starts, key_starts};
  const Drop drop{samples, dropped, drop_key_low, drop_key_high, first_head};
  MegaliteAttention a = checked_arguments(
      inputs, longest_query, longest_key, left, right, scale, drop, {rows, first_query, first_key});
  Tensor output = ml::new_empty(query, {a.queries, a.heads, a.head_size});
  Tensor lse = ml::new_empty(query, {a.heads, a.queries}, ml::wide_type(query));
  a.output = output.mutable_data_ptr(), a.lse = lse.mutable_data_ptr();
  call(kForward, query, a);
  return {output, lse};
}

std::tuple<Tensor, Tensor, Tensor> backward(
    Tensor output_grad, Maybe lse_grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse,
    Tensor query_starts, Tensor key_starts, int64_t longest_query, int64_t longest_key, int64_t left, int64_t right,
    double scale, bool deterministic, Maybe samples, int64_t dropped, int64_t drop_key_low, int64_t drop_key_high,
    int64_t first_head, int64_t rows, int64_t first_query, int64_t first_key) {
  Inputs inputs{query, key, value, query_starts, key_starts};
  const Drop drop{samples, dropped, drop_key_low, drop_key_high, first_head};
  MegaliteAttention a = checked_arguments(
      inputs, longest_query, longest_key, left, right, scale, drop, {rows, first_query, first_key});
  const int64_t numbers = a.queries * a.heads * a.head_size, log_sums = a.heads * a.queries;
  ml::check_same_type(query, output_grad, "the gradient of attention's output");
  ml::check_same_type(query, output, "attention's output");
  ml::check_size(output_grad, numbers, "the gradient of attention's output");
  ml::check_size(output, numbers, "attention's output");
  ml::check_size(lse, log_sums, "attention's log-sum-exps");
  STD_TORCH_CHECK(
      lse.scalar_type() == ml::wide_type(query) && lse.is_cuda() == query.is_cuda(),
      "megalite: attention's log-sum-exps have another dtype or device");
  output_grad = aligned_contiguous(output_grad);
  output = aligned_contiguous(output);
  lse = ml::contiguous(lse);
  a.output = const_cast<void*>(output.const_data_ptr()), a.output_grad = output_grad.const_data_ptr();
  a.lse = const_cast<void*>(lse.const_data_ptr());
  if (lse_grad) {
    ml::check_same_type(lse, *lse_grad, "the gradient of attention's log-sum-exps");
    ml::check_size(*lse_grad, log_sums, "the gradient of attention's log-sum-exps");
    lse_grad = ml::contiguous(*lse_grad);
    a.lse_grad = lse_grad->const_data_ptr();
  }
  Tensor query_grad = ml::new_empty(query, {a.queries, a.heads, a.head_size});
  Tensor key_grad = ml::new_empty(key, {a.keys, a.kv_heads, a.head_size});
  Tensor value_grad = ml::new_empty(value, {a.keys, a.kv_heads, a.head_size});
  a.query_grad = query_grad.mutable_data_ptr(), a.key_grad = key_grad.mutable_data_ptr();
  a.value_grad = value_grad.mutable_data_ptr();
  Tensor statistics = lse, sums = lse;  // workspaces that only CUDA needs
  if (query.is_cuda()) {
    statistics = ml::new_empty(lse, {a.dropped > 0 ? 4 : 2, a.heads, a.queries});
    a.statistics = static_cast<float*>(statistics.mutable_data_ptr());
    if (!deterministic && a.dropped == 0 && a.head_size <= 128) {
      sums = ml::new_empty(lse, {numbers});
      a.query_sums = static_cast<float*>(sums.mutable_data_ptr());
    }
  }
  call(kBackward, query, a);
  return {query_grad, key_grad, value_grad};
}

#ifdef MEGALITE_CUDA
int64_t shared_memory(int64_t head_size, bool dropout, bool backward, bool any_order, int64_t limit) {
  switch (head_size) {
    case 64: return megalite_attention_shared_64_cuda(backward, dropout, any_order, limit);
    case 96: return megalite_attention_shared_96_cuda(backward, dropout, any_order, limit);
    case 128: return megalite_attention_shared_128_cuda(backward, dropout, any_order, limit);
    case 256: return megalite_attention_shared_256_cuda(backward, dropout, any_order, limit);
    default:
      STD_TORCH_CHECK(
          false, "megalite: attention's CUDA kernels support head sizes 64, 96, 128 and 256, not ", head_size);
  }
}
#endif

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("attention_forward", TORCH_BOX(&forward));
  m.impl("attention_backward", TORCH_BOX(&backward));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(megalite, m) {
  m.def(
      "attention_forward(Tensor query, Tensor key, Tensor value, Tensor query_starts, Tensor key_starts, "
      "int longest_query, int longest_key, int left, int right, float scale, bool deterministic, "
      "Tensor? samples, int dropped, int drop_key_low, int drop_key_high, int first_head, "
      "int rows, int first_query, int first_key) -> "
      "(Tensor output, Tensor lse)");
  m.def(
      "attention_backward(Tensor output_grad, Tensor? lse_grad, Tensor query, Tensor key, Tensor value, "
      "Tensor output, Tensor lse, Tensor query_starts, Tensor key_starts, int longest_query, int longest_key, "
      "int left, int right, float scale, bool deterministic, "
      "Tensor? samples, int dropped, int drop_key_low, int drop_key_high, int first_head, "
      "int rows, int first_query, int first_key) -> "
      "(Tensor query_grad, Tensor key_grad, Tensor value_grad)");
}

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) { implement(m); }

#ifdef MEGALITE_CUDA
STABLE_TORCH_LIBRARY_IMPL(megalite, CUDA, m) { implement(m); }

// The largest shared memory of the CUDA kernels in bytes per block, on a chip that allows `limit` bytes per block.
STABLE_TORCH_LIBRARY_FRAGMENT(megalite, m) {
  m.def(
      "attention_shared_memory(int head_size, bool dropout, bool backward, bool any_order, int limit) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(megalite, CompositeExplicitAutograd, m) {
  m.impl("attention_shared_memory", TORCH_BOX(&shared_memory));
}
#endif
