// A stack of decoder layers for the new tokens of a decode step: the same operators without a call from Python each.
#include "decode_layers.h"

#include <algorithm>
#include <vector>

#include "activations.h"
#include "core/scalar.h"
#include "few_rows.h"
#include "norms.h"

namespace {

using namespace ml;

// to [rows, columns] += what [rows or 1, columns], rounded as a torch sum.
template <typename T>
void add(T* to, const T* what, int64_t rows, int64_t columns, bool broadcast) {
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = broadcast ? what : what + row * columns;
    T* sum = to + row * columns;
    for (int64_t i = 0; i < columns; ++i) sum[i] = from_wide<T>(to_wide(sum[i]) + to_wide(from[i]));
  }
}

// The values between the operators of a layer, each [rows, ...].
template <typename T>
struct Space {
  std::vector<T> sum, normed, heads, attended, block, up, activated;
  std::vector<Wide<T>> mean, inverse;
};

template <typename T>
class Stack {
 public:
  Stack(const MegaliteDecodeLayers& stack, int dtype) : stack_(stack), rows_(stack.attention.rows), dtype_(dtype) {
    int64_t packed = 0, up = 0;
    for (int64_t i = 0; i < stack.count; ++i) {
      packed = std::max(packed, stack.layers[i].query_key_value.out);
      up = std::max(up, stack.layers[i].up.out);
    }
    const int64_t size = rows_ * stack.hidden_size;
    space_.sum.resize(size), space_.normed.resize(size), space_.block.resize(size);
    space_.heads.resize(rows_ * packed), space_.attended.resize(rows_ * packed);
    space_.up.resize(rows_ * up), space_.activated.resize(rows_ * up);
    space_.mean.resize(rows_), space_.inverse.resize(rows_);
  }

  // Returns the first error code of an operator, or 0.
  int run(T* hidden) {
    for (int64_t i = 0; i < stack_.count && error_ == 0; ++i) layer(stack_.layers[i], hidden);
    return error_;
  }

 private:
  void layer(const MegaliteDecodeLayer& layer, T* hidden) {
    const int64_t size = stack_.hidden_size;
    norm(layer.before_attention, hidden, nullptr, nullptr);
    linear(layer.query_key_value, space_.normed.data(), space_.heads.data());
    attend(layer);
    linear(layer.output, space_.attended.data(), space_.block.data());
    norm(layer.before_mlp, space_.block.data(), hidden, space_.sum.data());
    const MegaliteLinear& up = layer.up;
    if (stack_.gated) {
      linear(up, space_.normed.data(), space_.up.data());
      const void* gate_up = space_.up.data();
      check(megalite_glu_cpu(gate_up, space_.activated.data(), rows_, up.out / 2, stack_.activation, dtype_));
    } else {
      linear({up.weight, up.scales, nullptr, up.out, up.in}, space_.normed.data(), space_.up.data());
      const void* inputs = space_.up.data();
      check(megalite_bias_gelu_cpu(
          inputs, up.bias, space_.activated.data(), rows_, up.out, stack_.activation, dtype_));
    }
    linear(layer.down, space_.activated.data(), hidden);
    add(hidden, space_.sum.data(), rows_, size, false);
  }

  void norm(const MegaliteNorm& norm, const T* x, const T* residual, T* sum) {
    void* mean = norm.bias == nullptr ? nullptr : space_.mean.data();
    check(megalite_norm_forward_cpu(
        x, residual, norm.weight, norm.bias, sum, space_.normed.data(), mean, space_.inverse.data(), rows_,
        stack_.hidden_size, stack_.eps, dtype_));
  }

  void linear(const MegaliteLinear& linear, const T* inputs, T* output) {
    check(megalite_few_rows_linear_cpu(
        inputs, linear.weight, linear.scales, output, rows_, linear.out, linear.in, linear.scales != nullptr, dtype_));
    if (linear.bias != nullptr) add(output, static_cast<const T*>(linear.bias), rows_, linear.out, true);
  }

  void attend(const MegaliteDecodeLayer& layer) {
    MegaliteDecodeAttention a = stack_.attention;
    const int64_t size = a.head_size, packed = layer.query_key_value.out;
    T* query = space_.heads.data();
    if (layer.angles.cosines != nullptr) {
      const int64_t strides[3] = {rows_ * packed, packed, size};
      MegaliteHeads turned{query, query, {}, {}, a.heads + a.kv_heads, 1};
      std::copy(strides, strides + 3, turned.from_strides);
      std::copy(strides, strides + 3, turned.to_strides);
      check(megalite_rotary_cpu(&turned, 1, &layer.angles, 1, rows_, size, dtype_));
    }
    a.query = query, a.key = query + a.heads * size, a.value = query + (a.heads + a.kv_heads) * size;
    a.query_row = a.key_row = a.value_row = packed;
    a.query_head = a.key_head = a.value_head = size;
    a.window = layer.window, a.cache = layer.cache, a.output = space_.attended.data();
    check(megalite_decode_attention_cpu(&a, dtype_));
  }

  void check(int code) {
    if (error_ == 0) error_ = code;
  }

  const MegaliteDecodeLayers& stack_;
  int64_t rows_;
  int dtype_, error_ = 0;
  Space<T> space_;
};

}  // namespace

extern "C" int megalite_decode_layers_cpu(const MegaliteDecodeLayers* stack, void* hidden, int dtype) {
  int error = 0;
  const int unsupported = for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    error = Stack<T>(*stack, dtype).run(static_cast<T*>(hidden));
  });
  return unsupported ? unsupported : error;
}
