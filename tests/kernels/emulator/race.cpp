// The attention kernels on system threads, for ThreadSanitizer.
//
//     race KERNEL LATE LEFT_OUT      KERNEL: forward, dropping, keys, queries; LEFT_OUT: the barrier to skip, or -1
#include <cstdlib>
#include <random>
#include <string_view>

#include "emulate.h"

namespace {

// Small thread blocks that loop over three tiles, so that every buffer is reused.
using Forward = ml::ForwardShape<ml::bf16, 64, 2, 1, 16>;
using Dropping = ml::ForwardShape<ml::bf16, 64, 2, 1, 16, true>;
using Keys = ml::KeyShape<ml::bf16, 64, 4, 1, 64, true>;
using Queries = ml::QueryShape<ml::bf16, 64, 2, 1, 16>;

struct Tensors {
  std::vector<uint16_t> query, key, value, output, output_grad, query_grad, key_grad, value_grad;
  std::vector<float> lse, statistics, query_sums;
  int32_t query_starts[2], key_starts[2];
  int64_t sample = 7;
  MegaliteAttention told{};

  Tensors(int queries, int keys) : query_starts{0, queries}, key_starts{0, keys} {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (auto* each : {&query, &output, &output_grad, &query_grad}) each->resize(queries * 64);
    for (auto* each : {&key, &value, &key_grad, &value_grad}) each->resize(keys * 64);
    for (auto* each : {&query, &key, &value, &output, &output_grad}) {
      for (uint16_t& number : *each) number = ml::from_wide<ml::bf16>(normal(random)).bits;
    }
    lse.resize(queries, 5.0f);
    statistics.resize(2 * queries, 5.0f);
    query_sums.resize(queries * 64);
    told.sequences = told.heads = told.kv_heads = 1;
    told.queries = told.longest_query = queries, told.keys = told.longest_key = keys;
    told.head_size = 64, told.left = told.right = -1, told.scale = 0.125;
    told.query = query.data(), told.key = key.data(), told.value = value.data();
    told.query_token = told.query_head = told.key_token = told.key_head = told.value_token = told.value_head = 64;
    told.query_row = queries, told.key_row = keys, told.first_query = keys - queries;
    told.samples = &sample, told.dropped = 9999;
    told.query_starts = query_starts, told.key_starts = key_starts;
    told.output = output.data(), told.lse = lse.data(), told.output_grad = output_grad.data();
    told.query_grad = query_grad.data(), told.key_grad = key_grad.data(), told.value_grad = value_grad.data();
    told.statistics = statistics.data(), told.query_sums = query_sums.data();
  }

  std::vector<emulator::Region> memory() const {
    std::vector<emulator::Region> all;
    for (auto* each : {&query, &key, &value, &output, &output_grad, &query_grad, &key_grad, &value_grad}) {
      all.push_back({each->data(), each->size() * 2});
    }
    all.push_back({&sample, sizeof sample});
    for (auto* each : {&lse, &statistics, &query_sums}) all.push_back({each->data(), each->size() * 4});
    return all;
  }
};

}  // namespace

int main(int, char** words) {
  const std::string_view kernel = words[1];
  const bool by_keys = kernel == "keys";
  Tensors tensors(by_keys ? 192 : 32, by_keys ? 64 : 48);
  emulator::Threads threads;
  emulator::Grid grid(threads, {std::atoi(words[2]) != 0, std::atoi(words[3])}, tensors.memory());
  if (kernel == "forward") grid.forward<Forward>(tensors.told);
  if (kernel == "dropping") grid.forward<Dropping>(tensors.told);
  if (kernel == "keys") grid.key_gradients<Keys>(tensors.told);
  if (kernel == "queries") grid.query_gradients<Queries>(tensors.told);
  if (grid.report.problem != nullptr) std::puts(grid.report.problem);
  return grid.report.problem != nullptr;
}
