// Fused multiply-add for the PTX interpreter: a * b + c rounded once, to nearest or down.
#include <cfenv>
#include <cmath>
#include <cstdint>

extern "C" {

void megalite_fma_f32(int64_t count, const float* a, const float* b, const float* c, float* result) {
  for (int64_t i = 0; i < count; ++i) result[i] = std::fma(a[i], b[i], c[i]);
}

void megalite_fma_f64(int64_t count, const double* a, const double* b, const double* c, double* result) {
  for (int64_t i = 0; i < count; ++i) result[i] = std::fma(a[i], b[i], c[i]);
}

void megalite_fma_down_f32(int64_t count, const float* a, const float* b, const float* c, float* result) {
  std::fesetround(FE_DOWNWARD);
  for (int64_t i = 0; i < count; ++i) result[i] = std::fma(a[i], b[i], c[i]);
  std::fesetround(FE_TONEAREST);
}
}
