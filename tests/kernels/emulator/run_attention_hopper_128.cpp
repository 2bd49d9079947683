// Runs the emulated Hopper forward under -fsanitize=thread: circular buffers used twice, and a document's last tile.
#include <vector>

#include "attention.h"
#include "core/scalar.h"
#include "cuda_runtime.h"

int main() {
  constexpr int kTokens = 450, kHead = 128;
  const int32_t starts[] = {0, 400, kTokens};
  const std::vector<uint16_t> numbers(kTokens * kHead, ml::from_wide<ml::bf16>(0.5f).bits);
  std::vector<uint16_t> output(kTokens * kHead);
  std::vector<float> lse(kTokens);
  MegaliteAttention a{};
  a.sequences = 2, a.queries = a.keys = kTokens, a.longest_query = 128, a.longest_key = 400;
  a.heads = a.kv_heads = 1, a.head_size = kHead, a.left = a.right = -1, a.scale = 0.125;
  a.query = a.key = a.value = numbers.data();
  a.query_token = a.query_head = a.key_token = a.key_head = a.value_token = a.value_head = kHead;
  a.query_starts = a.key_starts = starts, a.query_row = a.key_row = kTokens;
  a.output = output.data(), a.lse = lse.data();
  for (unsigned order = 0; order < 3; ++order) {
    megalite_emulator_order = order;
    megalite_attention_forward_hopper_128_cuda(&a, ml::kBFloat16, nullptr);
  }
  std::puts("done");
}
