#include "expert_rows.h"

#include <optional>

#include "bind/tensor.h"

namespace {

using ml::Tensor;
using Maybe = std::optional<Tensor>;

// Where the rows of each token are: places [T, k], each one of `rows`.
class Places {
 public:
  Places(const Tensor& like, const Tensor& given, int64_t rows) : places_(ml::contiguous(given)) {
    STD_TORCH_CHECK(
        places_.dim() == 2 && places_.scalar_type() == torch::headeronly::ScalarType::Long,
        "megalite: places must be int64 of two dims");
    ml::check_same_device(like, places_, "places");
    numbers_ = {
        static_cast<const int64_t*>(places_.const_data_ptr()), places_.size(0), places_.size(1), rows,
        ml::columns_of(like)};
    if (places_.is_cuda()) return;
    for (int64_t i = 0; i < places_.numel(); ++i) {
      const int64_t place = numbers_.places[i];
      STD_TORCH_CHECK(place >= 0 && place < rows, "megalite: place ", place, " is none of ", rows, " rows");
    }
  }

  const MegalitePlaces* get() const { return &numbers_; }
  int64_t tokens() const { return numbers_.tokens; }
  int64_t chosen() const { return numbers_.chosen; }

 private:
  Tensor places_;
  MegalitePlaces numbers_;
};

Tensor two_dims(const Tensor& given, const char* what) {
  STD_TORCH_CHECK(given.dim() == 2, "megalite: ", what, " must have two dims");
  return ml::contiguous(given);
}

Tensor expert_rows(Tensor given, Tensor given_places) {
  const Tensor tokens = two_dims(given, "tokens");
  const int64_t rows = given_places.numel();
  const Places places(tokens, given_places, rows);
  STD_TORCH_CHECK(places.tokens() == tokens.size(0), "megalite: places must be of ", tokens.size(0), " tokens");
  Tensor output = ml::new_empty(tokens, {rows, tokens.size(1)});
  ML_CALL(
      tokens, megalite_expert_rows, tokens.const_data_ptr(), output.mutable_data_ptr(), places.get(),
      ml::dtype_of(tokens));
  return output;
}

Tensor weights_of(const Tensor& rows, const Places& places, const Tensor& given) {
  ml::check_same_type(rows, given, "weights");
  ml::check_size(given, places.tokens() * places.chosen(), "weights");
  return ml::contiguous(given);
}

Tensor expert_sums(Tensor given, Maybe given_weights, Tensor given_places) {
  const Tensor rows = two_dims(given, "rows");
  const Places places(rows, given_places, rows.size(0));
  Maybe weights;
  if (given_weights.has_value()) weights = weights_of(rows, places, *given_weights);
  Tensor sums = ml::new_empty(rows, {places.tokens(), rows.size(1)});
  ML_CALL(
      rows, megalite_expert_sums, rows.const_data_ptr(),
      weights.has_value() ? weights->const_data_ptr() : nullptr, sums.mutable_data_ptr(), places.get(),
      ml::dtype_of(rows));
  return sums;
}

std::tuple<Tensor, Tensor> expert_sums_backward(
    Tensor given_grad, Tensor given, Tensor given_weights, Tensor given_places) {
  const Tensor grad = ml::contiguous(given_grad), rows = two_dims(given, "rows");
  ml::check_size(given_places, rows.size(0), "places");
  const Places places(rows, given_places, rows.size(0));
  const Tensor weights = weights_of(rows, places, given_weights);
  ml::check_same_type(rows, grad, "grad");
  ml::check_size(grad, places.tokens() * rows.size(1), "grad");
  Tensor rows_grad = ml::empty_like(rows), weights_grad = ml::empty_like(weights);
  ML_CALL(
      rows, megalite_expert_sums_backward, grad.const_data_ptr(), rows.const_data_ptr(), weights.const_data_ptr(),
      rows_grad.mutable_data_ptr(), weights_grad.mutable_data_ptr(), places.get(), ml::dtype_of(rows));
  return {rows_grad, weights_grad};
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("expert_rows", TORCH_BOX(&expert_rows));
  m.impl("expert_sums", TORCH_BOX(&expert_sums));
  m.impl("expert_sums_backward", TORCH_BOX(&expert_sums_backward));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(megalite, m) {
  m.def("expert_rows(Tensor tokens, Tensor places) -> Tensor rows");
  m.def("expert_sums(Tensor rows, Tensor? weights, Tensor places) -> Tensor tokens");
  m.def(
      "expert_sums_backward(Tensor grad, Tensor rows, Tensor weights, Tensor places) -> "
      "(Tensor rows_grad, Tensor weights_grad)");
}

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) { implement(m); }

#ifdef MEGALITE_CUDA
STABLE_TORCH_LIBRARY_IMPL(megalite, CUDA, m) { implement(m); }
#endif
