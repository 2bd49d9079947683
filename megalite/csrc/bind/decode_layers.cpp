#include "decode_layers.h"

#include <vector>

#include "bind/lengths.h"
#include "bind/tensor.h"

namespace {

using ml::Tensor;
using torch::headeronly::ScalarType;

// Bits of `present`: which of the tensors of a layer are given, in this order.
enum Given {
  kNormBias = 1,
  kQueryKeyValueScale = 2,
  kQueryKeyValueBias = 4,
  kOutputScale = 8,
  kOutputBias = 16,
  kUpScale = 32,
  kUpBias = 64,
  kDownScale = 128,
  kDownBias = 256
};

// Hands out the tensors of the layers in order, checked.
class Tensors {
 public:
  Tensors(const std::vector<Tensor>& tensors, const Tensor& hidden, int64_t present)
      : tensors_(tensors), hidden_(hidden), present_(present) {}

  const Tensor& next(const char* what) {
    STD_TORCH_CHECK(at_ < tensors_.size(), "megalite: there is no tensor for ", what);
    const Tensor& found = tensors_[at_++];
    STD_TORCH_CHECK(found.is_contiguous(), "megalite: ", what, " must be contiguous");
    return found;
  }

  const void* vector(int64_t size, const char* what) {
    const Tensor& found = next(what);
    ml::check_same_type(hidden_, found, what);
    ml::check_size(found, size, what);
    return found.const_data_ptr();
  }

  MegaliteNorm norm(int64_t size, const char* what) {
    const void* weight = vector(size, what);
    return {weight, present_ & kNormBias ? vector(size, what) : nullptr};
  }

  MegaliteLinear linear(int64_t in, int64_t scale, int64_t bias, const char* what) {
    const Tensor& weight = next(what);
    STD_TORCH_CHECK(
        weight.dim() == 2 && weight.size(1) == in, "megalite: the weight of ", what, " must be [out, ", in, "]");
    const int64_t out = weight.size(0);
    const float* scales = nullptr;
    if (present_ & scale) {
      STD_TORCH_CHECK(weight.scalar_type() == ScalarType::Char, "megalite: the weight of ", what, " must be int8");
      const Tensor& found = next(what);
      STD_TORCH_CHECK(
          found.scalar_type() == ScalarType::Float && found.numel() == out, "megalite: the scale of ", what,
          " must be float32 [", out, "]");
      scales = static_cast<const float*>(found.const_data_ptr());
    } else {
      ml::check_same_type(hidden_, weight, what);
    }
    return {weight.const_data_ptr(), scales, present_ & bias ? vector(out, what) : nullptr, out, in};
  }

  bool all_used() const { return at_ == tensors_.size(); }

 private:
  const std::vector<Tensor>& tensors_;
  const Tensor& hidden_;
  int64_t present_;
  size_t at_ = 0;
};

Tensor decode_layers(
    Tensor given, std::vector<Tensor> tensors, std::vector<Tensor> caches, Tensor given_lengths,
    std::vector<Tensor> angles, std::vector<int64_t> windows, std::vector<int64_t> turns, int64_t present,
    int64_t heads, int64_t prefix, int64_t activation, bool gated, double eps, double scale, double softcap) {
  STD_TORCH_CHECK(given.dim() == 2, "megalite: hidden must be [rows, hidden_size]");
  STD_TORCH_CHECK(
      !caches.empty() && windows.size() == caches.size() && turns.size() == caches.size(),
      "megalite: each layer needs a cache, a window and a rotation");
  const Tensor& first = caches[0];
  STD_TORCH_CHECK(
      first.dim() == 5 && first.size(0) == 2, "megalite: a cache must be [2, slots, kv_heads, room, head_size]");
  const int64_t rows = given.size(0), size = given.size(1), slots = first.size(1), kv_heads = first.size(2);
  const int64_t room = first.size(3), head_size = first.size(4);
  STD_TORCH_CHECK(rows <= slots, "megalite: ", rows, " rows, but the cache has ", slots, " slots");
  STD_TORCH_CHECK(heads % kv_heads == 0, "megalite: ", heads, " heads are no multiple of ", kv_heads);
  const Tensor lengths = ml::checked_lengths(given_lengths, rows, prefix, room);
  for (const Tensor& table : angles) {
    ml::check_same_type(given, table, "angles");
    ml::check_size(table, rows * head_size / 2, "angles");
    STD_TORCH_CHECK(table.is_contiguous(), "megalite: angles must be contiguous");
  }

  Tensors left(tensors, given, present);
  std::vector<MegaliteDecodeLayer> layers;
  for (size_t i = 0; i < caches.size(); ++i) {
    const Tensor& cache = caches[i];
    ml::check_same_type(given, cache, "cache");
    STD_TORCH_CHECK(cache.is_contiguous(), "megalite: a cache must be contiguous");
    ml::check_size(cache, first.numel(), "cache");
    MegaliteDecodeLayer layer{};
    layer.before_attention = left.norm(size, "the norm before attention");
    layer.query_key_value = left.linear(size, kQueryKeyValueScale, kQueryKeyValueBias, "query, key and value");
    STD_TORCH_CHECK(
        layer.query_key_value.out == (heads + 2 * kv_heads) * head_size, "megalite: query, key and value have ",
        layer.query_key_value.out, " rows, not ", (heads + 2 * kv_heads) * head_size);
    layer.output = left.linear(heads * head_size, kOutputScale, kOutputBias, "the output of attention");
    layer.before_mlp = left.norm(size, "the norm before the MLP");
    layer.up = left.linear(size, kUpScale, kUpBias, "the MLP's input");
    layer.down = left.linear(gated ? layer.up.out / 2 : layer.up.out, kDownScale, kDownBias, "the MLP's output");
    STD_TORCH_CHECK(
        layer.output.out == size && layer.down.out == size, "megalite: a block's output must be [rows, ", size, "]");
    layer.window = windows[i];
    STD_TORCH_CHECK(layer.window == -1 || layer.window > 0, "megalite: a window must be positive, or -1 for none");
    if (turns[i] >= 0) {
      const size_t at = 2 * static_cast<size_t>(turns[i]);
      STD_TORCH_CHECK(at + 1 < angles.size(), "megalite: there are no angles number ", turns[i]);
      layer.angles = {angles[at].const_data_ptr(), angles[at + 1].const_data_ptr(), nullptr, rows, 0, 0, 0};
    }
    layer.cache = cache.mutable_data_ptr();
    layers.push_back(layer);
  }
  STD_TORCH_CHECK(left.all_used(), "megalite: more tensors are given than the layers have");

  MegaliteDecodeLayers stack{};
  stack.layers = layers.data(), stack.count = static_cast<int64_t>(layers.size()), stack.hidden_size = size;
  stack.eps = eps, stack.gated = gated, stack.activation = static_cast<int>(activation);
  MegaliteDecodeAttention& attention = stack.attention;
  attention.rows = rows, attention.heads = heads, attention.kv_heads = kv_heads, attention.head_size = head_size;
  attention.slots = slots, attention.room = room, attention.prefix = prefix;
  attention.lengths = static_cast<const int64_t*>(lengths.const_data_ptr());
  attention.scale = scale, attention.softcap = softcap;
  Tensor hidden = torch::stable::clone(ml::contiguous(given));
  ml::check(megalite_decode_layers_cpu(&stack, hidden.mutable_data_ptr(), ml::dtype_of(hidden)), "decode_layers");
  return hidden;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(megalite, m) {
  m.def(
      "decode_layers(Tensor hidden, Tensor[] tensors, Tensor(a!)[] caches, Tensor lengths, Tensor[] angles, "
      "int[] windows, int[] turns, int present, int heads, int prefix, int activation, bool gated, float eps, "
      "float scale, float softcap) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) { m.impl("decode_layers", TORCH_BOX(&decode_layers)); }
