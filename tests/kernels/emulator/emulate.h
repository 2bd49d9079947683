// The grids of the attention kernels, block by block on emulated threads.
#pragma once

#include "core/attention_gradients.h"
#include "host_machine.h"

namespace emulator {

struct Report {
  int conflicts = 0;
  const char* problem = nullptr;
};

class Grid {
 public:
  Grid(Crew& crew, Settings settings, std::vector<Region> memory)
      : crew_(crew), settings_(settings), memory_(std::move(memory)) {}

  Report report;

  template <class Shape>
  void forward(const MegaliteAttention& a) {
    over<Shape>(a, a.longest_query, Shape::kRows, a.heads, [&](auto& machine, int block, int head, int sequence) {
      ml::attention_forward<Shape>(machine, a, block, head, sequence);
    });
  }

  template <class Element, int kHead, bool kDrops>
  void statistics(const MegaliteAttention& a) {
    for (int64_t row = 0; row < a.queries * a.heads; ++row) {
      block<32>(0, [&](auto& machine) {
        ml::attention_statistics<Element, kHead, kDrops>(machine, a, row / a.heads, row % a.heads);
      });
    }
  }

  template <class Shape>
  void key_gradients(const MegaliteAttention& a) {
    over<Shape>(a, a.longest_key, Shape::kKeys, a.kv_heads, [&](auto& machine, int block, int head, int sequence) {
      ml::attention_key_gradients<Shape>(machine, a, block, head, sequence);
    });
  }

  template <class Shape>
  void query_gradients(const MegaliteAttention& a) {
    over<Shape>(a, a.longest_query, Shape::kRows, a.heads, [&](auto& machine, int block, int head, int sequence) {
      ml::attention_query_gradients<Shape>(machine, a, block, head, sequence);
    });
  }

 private:
  template <class Shape, class Kernel>
  void over(const MegaliteAttention& a, int64_t longest, int rows, int64_t heads, const Kernel& kernel) {
    for (int sequence = 0; sequence < a.sequences; ++sequence) {
      for (int head = 0; head < heads; ++head) {
        for (int index = 0; index * rows < longest; ++index) {
          block<Shape::kThreads>(
              Shape::kSharedBytes, [&](auto& machine) { kernel(machine, index, head, sequence); });
        }
      }
    }
  }

  template <int kThreads, class Run>
  void block(size_t bytes, const Run& run) {
    Block block(crew_, settings_, memory_, kThreads, bytes);
    const bool finished = crew_.run(kThreads, [&](int thread) {
      HostMachine<kThreads> machine(block, thread);
      run(machine);
    });
    report.conflicts += block.conflicts;
    if (block.problem != nullptr) report.problem = block.problem;
    if (!finished) report.problem = "threads that wait for each other";
  }

  Crew& crew_;
  Settings settings_;
  std::vector<Region> memory_;
};

}  // namespace emulator
