// One thread block on a CPU: the Machine of core/attention_tiles.h and attention_gradients.h in the tests.
//
// Every GPU thread is a system thread or a fiber; warps and blocks synchronise where the instructions require it. mma
// and ldmatrix follow the fragment layouts of the PTX ISA. Asynchronous copies complete as early or as late as the
// rules allow. Shared memory starts as NaN; addresses are checked, and bank conflicts of ldmatrix are counted.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/fragments.h"
#include "core/scalar.h"

namespace emulator {

using Body = std::function<void(int)>;

// Runs and synchronises threads. meet(thread, first, count): waits until all of [first, first + count) have arrived.
class Crew {
 public:
  virtual ~Crew() = default;
  virtual bool run(int threads, const Body& body) = 0;  // false: deadlock
  virtual void meet(int thread, int first, int count) = 0;
};

// All fibers in one system thread; each warp runs as far as it can before the next one. Fast and deterministic.
class Fibers : public Crew {
 public:
  bool run(int threads, const Body& body) override {
    body_ = &body;
    fibers_.clear();
    fibers_.resize(threads);
    for (int i = 0; i < threads; ++i) {
      Fiber& fiber = fibers_[i];
      fiber.stack.reset(new char[kStack]);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = &scheduler_;
      makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Fibers::enter), 3, i,
                  static_cast<unsigned>(reinterpret_cast<uintptr_t>(this)),
                  static_cast<unsigned>(reinterpret_cast<uintptr_t>(this) >> 32));
    }
    for (bool moved = true; moved;) {
      moved = false;
      for (int warp = 0; warp < threads; warp += 32) {
        while (step(warp)) moved = true;
      }
    }
    return std::all_of(fibers_.begin(), fibers_.end(), [](const Fiber& fiber) { return fiber.done; });
  }

  void meet(int thread, int first, int count) override {
    fibers_[thread].met = {first, count};
    fibers_[thread].waits = true;
    swapcontext(&fibers_[thread].context, &scheduler_);
  }

 private:
  static constexpr size_t kStack = 1 << 16;
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    std::pair<int, int> met;
    bool waits = false, done = false;
  };

  static void enter(int thread, unsigned low, unsigned high) {
    auto* self = reinterpret_cast<Fibers*>(static_cast<uintptr_t>(low) | static_cast<uintptr_t>(high) << 32);
    (*self->body_)(thread);
    self->fibers_[thread].done = true;
  }

  // Runs the fibers of a warp until each waits; returns true if any fiber ran or was released.
  bool step(int warp) {
    bool moved = false;
    for (int i = warp; i < warp + 32; ++i) {
      if (fibers_[i].done || fibers_[i].waits) continue;
      swapcontext(&scheduler_, &fibers_[i].context);
      moved = true;
    }
    for (int i = warp; i < warp + 32; ++i) {
      if (fibers_[i].waits) moved |= let_go(fibers_[i].met);
    }
    return moved;
  }

  bool let_go(std::pair<int, int> group) {
    const auto begin = fibers_.begin() + group.first, end = begin + group.second;
    if (!std::all_of(begin, end, [&](const Fiber& fiber) { return fiber.waits && fiber.met == group; })) return false;
    std::for_each(begin, end, [](Fiber& fiber) { fiber.waits = false; });
    return true;
  }

  const Body* body_ = nullptr;
  std::vector<Fiber> fibers_;
  ucontext_t scheduler_;
};

// System threads with std::barrier, for ThreadSanitizer.
class Threads : public Crew {
 public:
  bool run(int threads, const Body& body) override {
    block_ = std::make_unique<std::barrier<>>(threads);
    warps_.clear();
    for (int i = 0; i < threads; i += 32) warps_.push_back(std::make_unique<std::barrier<>>(32));
    std::vector<std::thread> running;
    for (int i = 0; i < threads; ++i) running.emplace_back(body, i);
    for (std::thread& each : running) each.join();
    return true;
  }

  void meet(int, int first, int count) override {
    (count == 32 ? *warps_[first / 32] : *block_).arrive_and_wait();
  }

 private:
  std::unique_ptr<std::barrier<>> block_;
  std::vector<std::unique_ptr<std::barrier<>>> warps_;
};

struct Settings {
  bool late_copies = true;  // complete when they are waited for; else at once
  int left_out_sync = -1;   // the number of the sync() that each thread skips
};

struct Region {
  const void* begin;
  size_t bytes;
};

// The state that the threads of one block share.
struct Block {
  Crew& crew;
  Settings settings;
  std::vector<Region> memory;  // the accessible regions of global memory
  std::vector<unsigned char> shared;
  std::atomic<int> conflicts = 0;
  std::atomic<const char*> problem = nullptr;

  // Each thread's values for the other lanes of its warp; double-buffered, so that the next can be written meanwhile.
  struct Offer {
    uint32_t address, words[6];
    float value;
  };
  std::vector<Offer> offers[2];

  Block(Crew& crew, Settings settings, std::vector<Region> memory, int threads, size_t bytes)
      : crew(crew), settings(settings), memory(std::move(memory)), shared(bytes, 0xff) {
    offers[0].resize(threads);
    offers[1].resize(threads);
  }

  bool may_touch(const void* place, size_t bytes) {
    const auto at = reinterpret_cast<uintptr_t>(place);
    for (const Region& region : memory) {
      const auto begin = reinterpret_cast<uintptr_t>(region.begin);
      if (begin <= at && at + bytes <= begin + region.bytes) return at % bytes == 0 || fail("an unaligned address");
    }
    return fail("an address outside of global memory");
  }

  bool may_share(uint32_t address, uint32_t bytes) {
    if (address % bytes != 0) return fail("an unaligned shared address");
    return address + bytes <= shared.size() || fail("an address outside of shared memory");
  }

  bool fail(const char* what) {
    problem = what;
    return false;
  }
};

// One thread of the block.
template <int kThreads_>
class HostMachine {
 public:
  static constexpr int kThreads = kThreads_;

  HostMachine(Block& block, int thread) : block_(block), thread_(thread) {}

  int thread() const { return thread_; }
  int lane() const { return thread_ % 32; }
  uint32_t shared() const { return 0; }

  void sync() {
    if (syncs_++ != block_.settings.left_out_sync) block_.crew.meet(thread_, 0, kThreads);
  }
  void sync_warp() { meet_warp(); }

  template <int kBytes>
  void copy(uint32_t target, const void* source, bool there) {
    copies_.push_back({target, kBytes, there ? source : nullptr});
    if (!block_.settings.late_copies) wait_all();
  }

  void wait_all() {
    for (const Copy& copy : copies_) {
      if (!block_.may_share(copy.target, copy.bytes)) continue;
      if (copy.source == nullptr) {
        std::memset(&block_.shared[copy.target], 0, copy.bytes);
      } else if (block_.may_touch(copy.source, copy.bytes)) {
        std::memcpy(&block_.shared[copy.target], copy.source, copy.bytes);
      }
    }
    copies_.clear();
  }

  void load_matrix(uint32_t (&to)[4], uint32_t address) { load(to, address, false); }
  void load_matrix_transposed(uint32_t (&to)[4], uint32_t address) { load(to, address, true); }

  template <class Element>
  void multiply(float (&sums)[4], const uint32_t (&left)[4], uint32_t right_low, uint32_t right_high) {
    const auto offers = exchange({0, {left[0], left[1], left[2], left[3], right_low, right_high}, 0.0f});
    for (int i = 0; i < 4; ++i) {
      const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
      double sum = sums[i];
      for (int k = 0; k < 16; ++k) sum += left_number<Element>(offers, row, k) * right_number<Element>(offers, k, column);
      sums[i] = static_cast<float>(sum);
    }
  }

  template <class Element>
  uint32_t pack(float low, float high) {
    return ml::from_wide<Element>(low).bits | static_cast<uint32_t>(ml::from_wide<Element>(high).bits) << 16;
  }

  void store_shared(uint32_t address, uint32_t value) {
    if (block_.may_share(address, 4)) std::memcpy(&block_.shared[address], &value, 4);
  }

  uint32_t opaque(uint32_t value) { return value; }

  template <class Word>
  void load_pair(Word (&to)[2], uint32_t address) {
    if (block_.may_share(address, 8)) std::memcpy(to, &block_.shared[address], 8);
  }

  void store_chunk(void* target, uint32_t address) {
    if (block_.may_share(address, 16) && block_.may_touch(target, 16)) std::memcpy(target, &block_.shared[address], 16);
  }

  void add_pair(float* target, float first, float second) {
    if (!block_.may_touch(target, 8)) return;
    std::atomic_ref<float>(target[0]) += first;
    std::atomic_ref<float>(target[1]) += second;
  }

  float shuffle_xor(float value, int distance) { return exchange({0, {}, value})[lane() ^ distance].value; }
  float larger(float one, float other) { return std::fmax(one, other); }
  float exp2(float value) { return std::exp2(value); }
  float log2(float value) { return std::log2(value); }

 private:
  struct Copy {
    uint32_t target, bytes;
    const void* source;
  };

  void meet_warp() { block_.crew.meet(thread_, thread_ / 32 * 32, 32); }

  // Exchanges values within the warp; returns those of all its lanes.
  const Block::Offer* exchange(const Block::Offer& own) {
    Block::Offer* offers = block_.offers[exchanges_++ % 2].data();
    offers[thread_] = own;
    meet_warp();
    return offers + thread_ / 32 * 32;
  }

  // ldmatrix.x4: lanes 8 i to 8 i + 7 give the row addresses of matrix i; its element [row][column] ([column][row] if
  // transposed) goes to half column % 2 of register i of lane row * 4 + column / 2.
  void load(uint32_t (&to)[4], uint32_t address, bool transposed) {
    const Block::Offer* offers = exchange({address, {}, 0.0f});
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint32_t word = 0;
      for (int half = 0; half < 2; ++half) {
        int row = lane() / 4, column = lane() % 4 * 2 + half;
        if (transposed) std::swap(row, column);
        const uint32_t at = offers[matrix * 8 + row].address;
        uint16_t number = 0;
        if (block_.may_share(at, 16)) std::memcpy(&number, &block_.shared[at + column * 2], 2);
        word |= static_cast<uint32_t>(number) << half * 16;
      }
      to[matrix] = word;
      if (lane() == 0) count_conflicts(offers + matrix * 8);
    }
  }

  void count_conflicts(const Block::Offer* rows) {
    unsigned groups = 0;
    for (int row = 0; row < 8; ++row) groups |= 1u << rows[row].address / 16 % 8;
    if (groups != 0xff) ++block_.conflicts;
  }

  // The A operand: lane 4 g + t has rows g (registers 0, 2) and g + 8 (1, 3), columns 2 t and 2 t + 1 (0, 1) and 2 t +
  // 8 and 2 t + 9 (2, 3).
  template <class Element>
  static double left_number(const Block::Offer* offers, int row, int k) {
    return number<Element>(offers[row % 8 * 4 + k % 8 / 2].words[row / 8 + k / 8 * 2], k % 2);
  }

  // The B operand: lane 4 g + t has column g, rows 2 t and 2 t + 1 (register 0) and 2 t + 8 and 2 t + 9 (1).
  template <class Element>
  static double right_number(const Block::Offer* offers, int k, int column) {
    return number<Element>(offers[column * 4 + k % 8 / 2].words[4 + k / 8], k % 2);
  }

  template <class Element>
  static double number(uint32_t word, int half) {
    return ml::to_wide(Element{static_cast<uint16_t>(word >> half * 16)});
  }

  Block& block_;
  int thread_, syncs_ = 0, exchanges_ = 0;
  std::vector<Copy> copies_;
};

}  // namespace emulator
