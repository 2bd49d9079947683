#include "rotary.h"

#include <optional>

#include "bind/tensor.h"

namespace {

using ml::Tensor;
using Maybe = std::optional<Tensor>;

// Returns [batch, sequence, heads, head_dim] with its own strides, or a copy if the last dim is not contiguous.
Tensor heads_of(const Tensor& given, const char* what) {
  STD_TORCH_CHECK(given.dim() == 4, "megalite: ", what, " has ", given.dim(), " dims, not 4");
  return given.stride(3) == 1 ? given : ml::contiguous(given);
}

// Describes `count` heads, read from head `from_first` on and written to head `to_first` on.
MegaliteHeads part_of(
    const Tensor& from, int64_t from_first, const Tensor& to, int64_t to_first, int64_t count, bool turns) {
  constexpr int64_t bytes[] = {4, 8, 2, 2};  // size of each ml::DType
  const int64_t size = bytes[ml::dtype_of(from)];
  return {
      static_cast<const char*>(from.const_data_ptr()) + from_first * from.stride(2) * size,
      static_cast<char*>(to.mutable_data_ptr()) + to_first * to.stride(2) * size,
      {from.stride(0), from.stride(1), from.stride(2)},
      {to.stride(0), to.stride(1), to.stride(2)},
      count,
      turns};
}

// The angles of one call; owns the tensors to which they point.
class Angles {
 public:
  Angles(
      const Tensor& of, const Tensor& cosines, const Tensor& sines, const Maybe& positions, bool interleaved,
      bool inverse)
      : of_(of), cosines_(ml::contiguous(cosines)), sines_(ml::contiguous(sines)) {
    const int64_t batch = of.size(0), sequence = of.size(1), head_dim = of.size(3);
    STD_TORCH_CHECK(head_dim > 0 && head_dim % 2 == 0, "megalite: head_dim must be even and positive, not ", head_dim);
    ml::check_same_type(of, cosines_, "cosines");
    ml::check_same_type(of, sines_, "sines");
    ml::check_size(sines_, cosines_.numel(), "sines");
    STD_TORCH_CHECK(
        ml::columns_of(cosines_) == head_dim / 2, "megalite: cosines have ", ml::columns_of(cosines_),
        " columns, not head_dim / 2 = ", head_dim / 2);
    const int64_t rows = ml::rows_of(cosines_);
    int64_t entries = rows;
    if (positions.has_value()) {
      positions_ = ml::contiguous(*positions);
      STD_TORCH_CHECK(
          positions_->scalar_type() == torch::headeronly::ScalarType::Long, "megalite: positions must be int64");
      STD_TORCH_CHECK(
          positions_->is_cuda() == of.is_cuda() && positions_->get_device_index() == of.get_device_index(),
          "megalite: positions are on another device");
      entries = positions_->numel();
      if (!of.is_cuda()) check_positions(rows);
    }
    STD_TORCH_CHECK(
        entries == sequence || entries == batch * sequence, "megalite: ", entries, " rows of angles for ", batch,
        " x ", sequence, " tokens");
    angles_ = {
        cosines_.const_data_ptr(),
        sines_.const_data_ptr(),
        positions_.has_value() ? static_cast<const int64_t*>(positions_->const_data_ptr()) : nullptr,
        rows,
        entries == sequence ? 0 : sequence,
        interleaved,
        inverse};
  }

  void turn(const MegaliteHeads* parts, int count) const {
    ML_CALL(
        of_, megalite_rotary, parts, count, &angles_, of_.size(0), of_.size(1), of_.size(3), ml::dtype_of(of_));
  }

 private:
  void check_positions(int64_t rows) const {
    const auto* each = static_cast<const int64_t*>(positions_->const_data_ptr());
    for (int64_t i = 0; i < positions_->numel(); ++i) {
      STD_TORCH_CHECK(
          each[i] >= 0 && each[i] < rows, "megalite: position ", each[i], " is outside of the ", rows,
          " rows of cosines");
    }
  }

  Tensor of_, cosines_, sines_;
  Maybe positions_;
  MegaliteAngles angles_;
};

std::tuple<Tensor, Tensor, Tensor> rotary_split(
    Tensor packed, int64_t heads, int64_t key_value_heads, Tensor cosines, Tensor sines, Maybe positions,
    bool interleaved) {
  const Tensor qkv = heads_of(packed, "qkv");
  STD_TORCH_CHECK(
      qkv.size(2) == heads + 2 * key_value_heads, "megalite: qkv has ", qkv.size(2), " heads, not ", heads, " + 2 x ",
      key_value_heads);
  const int64_t batch = qkv.size(0), sequence = qkv.size(1), head_dim = qkv.size(3);
  Tensor query = ml::new_empty(qkv, {batch, sequence, heads, head_dim});
  Tensor key = ml::new_empty(qkv, {batch, sequence, key_value_heads, head_dim});
  Tensor value = ml::empty_like(key);
  const MegaliteHeads parts[] = {
      part_of(qkv, 0, query, 0, heads, true),
      part_of(qkv, heads, key, 0, key_value_heads, true),
      part_of(qkv, heads + key_value_heads, value, 0, key_value_heads, false)};
  Angles(qkv, cosines, sines, positions, interleaved, false).turn(parts, 3);
  return {query, key, value};
}

Tensor rotary_split_backward(
    Tensor query_grad, Tensor key_grad, Tensor value_grad, Tensor cosines, Tensor sines, Maybe positions,
    bool interleaved) {
  const Tensor query = heads_of(query_grad, "query_grad"), key = heads_of(key_grad, "key_grad");
  const Tensor value = heads_of(value_grad, "value_grad");
  const int64_t batch = query.size(0), sequence = query.size(1), head_dim = query.size(3);
  const int64_t heads = query.size(2), key_value_heads = key.size(2);
  ml::check_same_type(query, key, "key_grad");
  ml::check_same_type(query, value, "value_grad");
  ml::check_size(key, batch * sequence * key_value_heads * head_dim, "key_grad");
  ml::check_size(value, key.numel(), "value_grad");
  Tensor qkv = ml::new_empty(query, {batch, sequence, heads + 2 * key_value_heads, head_dim});
  const MegaliteHeads parts[] = {
      part_of(query, 0, qkv, 0, heads, true),
      part_of(key, 0, qkv, heads, key_value_heads, true),
      part_of(value, 0, qkv, heads + key_value_heads, key_value_heads, false)};
  Angles(query, cosines, sines, positions, interleaved, true).turn(parts, 3);
  return qkv;
}

std::tuple<Tensor, Tensor> rotary(
    Tensor given_query, Tensor given_key, Tensor cosines, Tensor sines, Maybe positions, bool interleaved,
    bool inverse) {
  const Tensor query = heads_of(given_query, "query"), key = heads_of(given_key, "key");
  const int64_t batch = query.size(0), sequence = query.size(1), head_dim = query.size(3);
  ml::check_same_type(query, key, "key");
  ml::check_size(key, batch * sequence * key.size(2) * head_dim, "key");
  Tensor turned_query = ml::new_empty(query, {batch, sequence, query.size(2), head_dim});
  Tensor turned_key = ml::new_empty(query, {batch, sequence, key.size(2), head_dim});
  const MegaliteHeads parts[] = {
      part_of(query, 0, turned_query, 0, query.size(2), true), part_of(key, 0, turned_key, 0, key.size(2), true)};
  Angles(query, cosines, sines, positions, interleaved, inverse).turn(parts, 2);
  return {turned_query, turned_key};
}

void rotary_in_place(Tensor heads, Tensor cosines, Tensor sines, Maybe positions, bool interleaved) {
  STD_TORCH_CHECK(
      heads.dim() == 4 && heads.stride(3) == 1, "megalite: heads must have 4 dims and a contiguous last dim");
  const MegaliteHeads part = part_of(heads, 0, heads, 0, heads.size(2), true);
  Angles(heads, cosines, sines, positions, interleaved, false).turn(&part, 1);
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("rotary_split", TORCH_BOX(&rotary_split));
  m.impl("rotary_split_backward", TORCH_BOX(&rotary_split_backward));
  m.impl("rotary", TORCH_BOX(&rotary));
  m.impl("rotary_", TORCH_BOX(&rotary_in_place));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(megalite, m) {
  m.def(
      "rotary_split(Tensor qkv, int heads, int key_value_heads, Tensor cosines, Tensor sines, Tensor? positions, "
      "bool interleaved) -> (Tensor query, Tensor key, Tensor value)");
  m.def(
      "rotary_split_backward(Tensor query_grad, Tensor key_grad, Tensor value_grad, Tensor cosines, Tensor sines, "
      "Tensor? positions, bool interleaved) -> Tensor qkv_grad");
  m.def(
      "rotary(Tensor query, Tensor key, Tensor cosines, Tensor sines, Tensor? positions, bool interleaved, "
      "bool inverse) -> (Tensor query, Tensor key)");
  m.def(
      "rotary_(Tensor(a!) heads, Tensor cosines, Tensor sines, Tensor? positions, bool interleaved) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) { implement(m); }

#ifdef MEGALITE_CUDA
STABLE_TORCH_LIBRARY_IMPL(megalite, CUDA, m) { implement(m); }
#endif
