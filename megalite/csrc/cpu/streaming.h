// Non-temporal stores for outputs that would leave the caches before they are read again: an ordinary store first reads
// the cache line that it fills, a third of the memory traffic of a norm or a rotation.
#pragma once

#include <omp.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace ml {

constexpr int64_t kLineBytes = 64;
// Outputs are streamed if a thread's share is larger than this many times its L2 cache. Measured together with the next
// reader, 4096 x 1024 in float32 on two cores with 1.25 MiB of L2 each: norms take 0.90 of the CPU time, with the
// matrix product that follows 0.98; rotations of packed heads 0.73, with the attention that follows 0.96. For smaller
// outputs the reader loses as much as the writer gains; activations gain nothing at any size.
constexpr int64_t kCaches = 4;

// Whether to stream an output of `count` values, written by all threads together.
template <typename T>
bool outgrows_caches(int64_t count) {
  static const int64_t told = sysconf(_SC_LEVEL2_CACHE_SIZE), cache = told > 0 ? told : 1 << 20;
  return count * static_cast<int64_t>(sizeof(T)) > kCaches * cache * omp_get_max_threads();
}

inline void stream_line(char* to, const char* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX__)
  for (int i = 0; i < 2; ++i) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + i, half);
  }
#else
  memcpy(to, from, kLineBytes);
#endif
}

// Copies `source`, which is in a cache, to memory: whole cache lines by non-temporal stores. Prefetches as many bytes
// at each `next` meanwhile, which may lie past the end of its tensor.
template <typename T, typename... Next>
void stream(T* target, const T* source, int64_t count, const Next*... next) {
  char* to = reinterpret_cast<char*>(target);
  const char* from = reinterpret_cast<const char*>(source);
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  const int64_t before = -reinterpret_cast<intptr_t>(to) & (kLineBytes - 1);
  int64_t i = before < bytes ? before : bytes;
  memcpy(to, from, i);
  for (; i + kLineBytes <= bytes; i += kLineBytes) {
    (__builtin_prefetch(reinterpret_cast<const char*>(next) + i, 0, 2), ...);
    stream_line(to + i, from + i);
  }
  memcpy(to + i, from + i, bytes - i);
}

// Each thread that streamed must call this before another thread reads the output.
inline void end_streams() {
#ifdef __AVX__
  _mm_sfence();
#endif
}

}  // namespace ml
