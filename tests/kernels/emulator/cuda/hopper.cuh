// Replaces csrc/cuda/hopper.cuh: the instructions as the PTX ISA defines them, on emulated threads.
//
// Copies and products run asynchronously to the threads: at once, or only when no thread can continue, depending on the
// order (0: at once; 1: late, copies last; others: random). Until then sums and the targets of copies are NaN, and an
// access to sums or operands is reported. To ThreadSanitizer they are separate threads, ordered only by barriers.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "core/scalar.h"
#include "cuda/device_machine.cuh"

namespace emulator {

constexpr uint32_t kPoison = 0x7fa0deadu;  // a NaN that arithmetic does not produce
constexpr int kGroup = 128, kMostGroups = kMostThreads / kGroup;

inline void run_as(void* agent, auto action) {
  void* own = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(agent, __tsan_switch_to_fiber_no_sync);
  action();
  __tsan_switch_to_fiber(own, __tsan_switch_to_fiber_no_sync);
}

EMULATOR_UNSEEN inline void wait_for_change(Barrier& barrier) {
  Fiber& self = *block.running;
  self.waits_at = &barrier;
  self.generation = barrier.generation;
  __tsan_switch_to_fiber(block.known, __tsan_switch_to_fiber_no_sync);
  swapcontext(&self.context, &block.scheduler);
  self.waits_at = nullptr;
}

// The 128-byte swizzle: XORs bits 4 to 6 of an address with bits 7 to 9.
EMULATOR_UNSEEN inline uint32_t exchanged(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

struct CountingBarrier {
  uint32_t address = 0;
  int arrivals = 0, pending = 0;
  int64_t bytes = 0;
  bool published = false;
  Barrier phase;  // its generation is the number of completed phases

  EMULATOR_UNSEEN void end_if_complete() {
    if (pending > 0 || bytes != 0) return;
    pending = arrivals;
    ++phase.generation;
  }
};

struct Copy {
  bool under_way = false;
  CUtensorMap map;  // a copy, because the issuing thread may end before the copy runs
  uint32_t target = 0;
  CountingBarrier* barrier = nullptr;
  int at[3];
  char issued;  // to the sanitizer
};

struct Operands {  // one thread's operands of one product, and the address of its sums
  float* sums;
  const uint32_t* left;
  uint32_t words[4];
  uint64_t left_tile, right_tile;
  bool add;
  struct Sums* kept;
};

// A thread's sums while products add to them; copied to the thread's array by the wait.
struct Sums {
  float* place = nullptr;
  int count = 0, last = 0;  // number of sums; the last product that adds to them
  float values[64];
};

struct Product {
  int registered = 0, columns = 0;
  bool from_registers = false, is_bf16 = false;
  Operands of[kGroup];
  char issued, done;
};

struct Group {
  static constexpr int kQueue = 64;
  Product queue[kQueue];
  int executed = 0;
  int issued[kGroup], commits[kGroup], committed[kGroup][8];  // the ends of the last eight committed groups
  int waited[kGroup];  // the number of products that have been waited for
  bool begun[kGroup];
  Sums sums[kGroup][4];
  Barrier progress;
  void* agent = nullptr;
  float left[64][16], right[16][256];
};

struct Numbered {
  Barrier barrier;
  int expected = 0;
};

struct Hopper : Beside {
  static constexpr int kBarriers = 64, kCopies = 64, kZeros = 1024;
  CountingBarrier barriers[kBarriers];
  Copy copies[kCopies];
  Group groups[kMostGroups];
  Numbered numbered[16];
  uint32_t zeros[kMostThreads][kZeros];
  int zero_count[kMostThreads], registers[kMostThreads];
  int threads = 0;
  void* copier = nullptr;
  uint32_t state = 1;

  EMULATOR_UNSEEN void begin(int count) override {
    threads = count;
    state = (megalite_emulator_order + 1) * 2654435761u;
    for (auto& each : barriers) each = {};
    for (auto& each : copies) each.under_way = false;
    for (auto& each : numbered) each = {};
    for (Group& group : groups) {
      group.executed = 0;
      for (Product& each : group.queue) each.registered = 0;
      for (int i = 0; i < kGroup; ++i) {
        group.issued[i] = group.commits[i] = group.waited[i] = 0, group.begun[i] = false;
        for (Sums& each : group.sums[i]) each.place = nullptr;
      }
      if (group.agent == nullptr) group.agent = __tsan_create_fiber(0);
    }
    for (int i = 0; i < count; ++i) zero_count[i] = 0, registers[i] = 65536 / count / 8 * 8;
    if (copier == nullptr) copier = __tsan_create_fiber(0);
  }

  EMULATOR_UNSEEN void end() override {
    int taken = 0;
    for (int i = 0; i < threads; ++i) {
      taken += registers[i];
      if (registers[i] != registers[i / kGroup * kGroup]) fail("warps of a group with different counts of registers");
    }
    if (taken > 65536) fail("more registers than there are");
    for (const Numbered& each : numbered) {
      if (each.barrier.arrived != 0) fail("a numbered barrier that not all came to");
    }
    for (const Copy& each : copies) {
      if (each.under_way) fail("a copy that nobody waited for");
    }
    for (const Group& group : groups) {
      if (group.queue[group.executed % Group::kQueue].registered != 0) fail("products that nobody waited for");
    }
    for (int i = 0; i < threads; ++i) {
      if (zero_count[i] != 0) fail("stores that nobody published");
    }
  }

  EMULATOR_UNSEEN uint32_t random() {  // Marsaglia, "Xorshift RNGs", 2003
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    return state >> 8;
  }

  EMULATOR_UNSEEN bool late() {
    return megalite_emulator_order == 1 || (megalite_emulator_order > 1 && random() % 2 == 1);
  }

  EMULATOR_UNSEEN bool step() override {
    const bool copies_first = megalite_emulator_order != 1 && random() % 2 == 0;
    return copies_first ? copied() || multiplied() : multiplied() || copied();
  }

  EMULATOR_UNSEEN bool copied() {
    int count = 0, chosen[kCopies];
    for (int i = 0; i < kCopies; ++i) {
      if (copies[i].under_way) chosen[count++] = i;
    }
    if (count > 0) land(copies[chosen[random() % count]]);
    return count > 0;
  }

  EMULATOR_UNSEEN bool multiplied() {
    const unsigned first = random();
    for (int i = 0; i < kMostGroups; ++i) {
      if (execute(groups[(first + i) % kMostGroups])) return true;
    }
    return false;
  }

  EMULATOR_UNSEEN CountingBarrier& at(uint32_t address) {
    for (auto& each : barriers) {
      if (each.arrivals != 0 && each.address == address) return each;
    }
    fail("a barrier that was not made");
    return barriers[0];
  }

  EMULATOR_UNSEEN void land(Copy& copy) {
    run_as(copier, [&] {
      __tsan_acquire(&copy.issued);
      each_chunk(copy, false);
      __tsan_release(&copy.barrier->phase.order[copy.barrier->phase.generation % 2]);
    });
    const CUtensorMap& map = copy.map;
    copy.under_way = false;
    copy.barrier->bytes -= static_cast<int64_t>(map.box[0]) * map.box[1] * map.box[2] * 2;
    copy.barrier->end_if_complete();
  }

  // Writes the box row by row, with zeros outside of the tensor; poisoned: writes NaN instead.
  static void each_chunk(const Copy& copy, bool poisoned) {
    const CUtensorMap& map = copy.map;
    uint32_t offset = 0;
    for (uint32_t z = 0; z < map.box[2]; ++z) {
      for (uint32_t y = 0; y < map.box[1]; ++y) {
        for (uint32_t x = 0; x < map.box[0]; ++x, offset += 2) {
          const int64_t place[3] = {copy.at[0] + int64_t(x), copy.at[1] + int64_t(y), copy.at[2] + int64_t(z)};
          bool inside = true;
          for (int i = 0; i < 3; ++i) inside = inside && 0 <= place[i] && place[i] < int64_t(map.sizes[i]);
          const auto* source = map.begin + place[0] * 2 + place[1] * int64_t(map.strides[0]) +
                               place[2] * int64_t(map.strides[1]);
          const bool swizzled = map.swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
          const uint32_t target = swizzled ? exchanged(copy.target + offset) : copy.target + offset;
          const uint16_t number = poisoned ? 0x7fff : inside ? *reinterpret_cast<const uint16_t*>(source) : 0;
          *reinterpret_cast<uint16_t*>(shared_place(target, 2)) = number;
        }
      }
    }
  }

  // Executes the warpgroup's next product if all its threads have issued it.
  EMULATOR_UNSEEN bool execute(Group& group) {
    Product& product = group.queue[group.executed % Group::kQueue];
    if (product.registered != kGroup) return false;
    run_as(group.agent, [&] {
      __tsan_acquire(&product.issued);
      product.is_bf16 ? multiply<ml::bf16>(group, product) : multiply<ml::fp16>(group, product);
      __tsan_release(&product.done);
    });
    product.registered = 0;
    ++group.executed;
    ++group.progress.generation;
    return true;
  }

  // Reads an element of a tile. Its descriptor (PTX ISA, "Matrix descriptor"): bits 0 to 13 the address, 16 to 29 and
  // 32 to 45 the leading and the stride byte offset, all in units of 16 bytes; 49 to 51 the base offset; 62 and 63 the
  // swizzle mode, 1 for 128 bytes. The elements of a row of 128 bytes are contiguous, as are eight rows; the next eight
  // rows are one stride offset away, the next 64 columns one leading offset.
  template <class Element>
  static float number(uint64_t tile, int row, int column) {
    if (tile >> 62 != 1 || (tile & 0x3fffc000c000c000u) != 0) fail("a descriptor that is none of exchanged tiles");
    const uint32_t start = (tile & 0x3fff) << 4, stride = (tile >> 32 & 0x3fff) << 4;
    const uint32_t leading = (tile >> 16 & 0x3fff) << 4;
    const uint32_t offset = row % 8 * 128 + row / 8 * stride + column % 64 * 2 + column / 64 * leading;
    return ml::to_wide(Element{*reinterpret_cast<const uint16_t*>(shared_place(exchanged(start + offset), 2))});
  }

  template <class Element>
  static void multiply(Group& group, Product& product) {
    auto& left = group.left;
    auto& right = group.right;
    for (const Operands& each : product.of) {
      if (each.left_tile != product.of[0].left_tile || each.right_tile != product.of[0].right_tile) {
        fail("a group's threads have different descriptors");
      }
    }
    for (int k = 0; k < 16; ++k) {
      for (int m = 0; m < 64; ++m) {
        // A fragment in registers: lane 4 g + t has rows g (words 0, 2) and g + 8 (1, 3), columns 2 t and 2 t + 1
        // (words 0, 1) and 2 t + 8 and 2 t + 9 (2, 3).
        const int owner = m / 16 * 32 + m % 8 * 4 + k % 8 / 2, word = m % 16 / 8 + k / 8 * 2;
        left[m][k] = product.from_registers
                         ? ml::to_wide(Element{static_cast<uint16_t>(product.of[owner].words[word] >> k % 2 * 16)})
                         : number<Element>(product.of[0].left_tile, m, k);
      }
      for (int n = 0; n < product.columns; ++n) {
        const uint64_t tile = product.of[0].right_tile;
        right[k][n] = product.from_registers ? number<Element>(tile, k, n) : number<Element>(tile, n, k);
      }
    }
    double sums[256];
    for (int m = 0; m < 64; ++m) {
      for (int n = 0; n < product.columns; ++n) sums[n] = 0;
      for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < product.columns; ++n) sums[n] += double{left[m][k]} * right[k][n];
      }
      // Sum i of lane 4 g + t of a warp: row g of the warp's 16, or g + 8 if i / 2 is odd; column 8 (i / 4) + 2 t + i %
      // 2.
      for (int n = 0; n < product.columns; ++n) {
        const Operands& own = product.of[m / 16 * 32 + m % 8 * 4 + n % 8 / 2];
        float& sum = own.kept->values[n / 8 * 4 + m % 16 / 8 * 2 + n % 2];
        sum = static_cast<float>(own.add ? sum + sums[n] : sums[n]);
      }
    }
  }

  // Registers a thread's part of a product; the product is ready once all threads of the warpgroup have issued it.
  EMULATOR_UNSEEN void issue(
      float* sums, int columns, const uint32_t* left, uint64_t left_tile, uint64_t right_tile, bool add, bool is_bf16) {
    const unsigned number = block.running->number, lane = number % kGroup;
    Group& group = groups[number / kGroup];
    if (!group.begun[lane]) fail("products that were not begun");
    const int index = group.issued[lane]++;
    Product& product = group.queue[index % Group::kQueue];
    if (index - group.executed >= Group::kQueue) return fail("too many products at once");
    product.columns = columns, product.from_registers = left != nullptr, product.is_bf16 = is_bf16;
    Operands& own = product.of[lane];
    own = {sums, left, {}, left_tile, right_tile, add, keep(group.sums[lane], sums, columns / 2)};
    own.kept->last = index;
    for (int i = 0; left != nullptr && i < 4; ++i) own.words[i] = left[i];
    __tsan_release(&product.issued);
    if (++product.registered == kGroup && !late()) execute(group);
  }

  EMULATOR_UNSEEN static Sums* keep(Sums (&all)[4], float* place, int count) {
    Sums* found = nullptr;
    for (Sums& each : all) {
      if (each.place == place || (found == nullptr && each.place == nullptr)) found = &each;
      if (each.place == place) break;
    }
    if (found == nullptr) {
      fail("more sums under way than are waited for");
      found = &all[0];
    }
    if (found->place == place) {
      check_poison(*found);
      return found;
    }
    found->place = place, found->count = count;
    for (int i = 0; i < count; ++i) {
      found->values[i] = place[i];
      reinterpret_cast<volatile uint32_t*>(place)[i] = kPoison;
    }
    return found;
  }

  EMULATOR_UNSEEN static void check_poison(const Sums& sums) {
    for (int i = 0; i < sums.count; ++i) {
      if (reinterpret_cast<const volatile uint32_t*>(sums.place)[i] != kPoison) fail("sums were touched too early");
    }
  }

  EMULATOR_UNSEEN void wait(int under, float* sums) {
    const unsigned number = block.running->number, lane = number % kGroup;
    Group& group = groups[number / kGroup];
    const int commits = group.commits[lane];
    const int needed = commits > under ? group.committed[lane][(commits - under - 1) % 8] : 0;
    while (group.executed < needed) wait_for_change(group.progress);
    for (; group.waited[lane] < needed; ++group.waited[lane]) {
      Product& product = group.queue[group.waited[lane] % Group::kQueue];
      __tsan_acquire(&product.done);
      const Operands& own = product.of[lane];
      for (int i = 0; own.left != nullptr && i < 4; ++i) {
        if (own.left[i] != own.words[i]) fail("operands were touched while a product read them");
      }
    }
    group.begun[lane] = false;
    for (Sums& each : group.sums[lane]) {
      if (each.place != sums) continue;
      if (each.last >= needed) fail("sums whose products are still under way");
      check_poison(each);
      for (int i = 0; i < each.count; ++i) sums[i] = each.values[i];
      each.place = nullptr;
    }
  }
};

inline Hopper& hopper() {
  static Hopper* one = new Hopper;
  return *one;
}

// Including this header enables asynchronous copies and products in emulated blocks.
inline const bool kBeside = (beside = &hopper(), true);

}  // namespace emulator

namespace ml::hopper {

constexpr int kGroup = emulator::kGroup;

inline int uniform(int value) {
  const int first = __shfl_sync(0xffffffffu, value, 0);
  if (first != value) emulator::fail("a value that is not the same in all lanes");
  return first;
}

EMULATOR_UNSEEN inline void init_barrier(uint32_t address, int arrivals) {
  emulator::shared_place(address, 8);
  for (auto& each : emulator::hopper().barriers) {
    if (each.arrivals != 0 && each.address == address) emulator::fail("a barrier that is made twice");
    if (each.arrivals != 0) continue;
    each.address = address, each.arrivals = each.pending = arrivals;
    return;
  }
  emulator::fail("too many barriers");
}

EMULATOR_UNSEEN inline void publish_barriers() {
  for (auto& each : emulator::hopper().barriers) each.published = true;
}

EMULATOR_UNSEEN inline void arrive_expecting(uint32_t address, uint32_t bytes) {
  auto& barrier = emulator::hopper().at(address);
  __tsan_release(&barrier.phase.order[barrier.phase.generation % 2]);
  if (barrier.pending == 0) emulator::fail("more arrivals at a barrier than it was made for");
  --barrier.pending;
  barrier.bytes += bytes;
  barrier.end_if_complete();
}

EMULATOR_UNSEEN inline void arrive(uint32_t address) { arrive_expecting(address, 0); }

EMULATOR_UNSEEN inline void wait(uint32_t address, uint32_t parity) {
  auto& barrier = emulator::hopper().at(address);
  while (barrier.phase.generation % 2 == parity) emulator::wait_for_change(barrier.phase);
  __tsan_acquire(&barrier.phase.order[parity]);
}

EMULATOR_UNSEEN inline void load_box(
    uint32_t target, const CUtensorMap* map, uint32_t barrier, int column, int head, int token) {
  auto& machine = emulator::hopper();
  if (target % 128 != 0) emulator::fail("a copy to where boxes cannot lie");
  for (auto& each : machine.copies) {
    if (each.under_way) continue;
    each.under_way = true, each.map = *map, each.target = target, each.barrier = &machine.at(barrier);
    each.at[0] = column, each.at[1] = head, each.at[2] = token;
    if (!each.barrier->published) emulator::fail("a barrier that was not published");
    __tsan_release(&each.issued);
    if (!machine.late()) return machine.land(each);
    emulator::run_as(machine.copier, [&] {
      __tsan_acquire(&each.issued);
      machine.each_chunk(each, true);
    });
    return;
  }
  emulator::fail("too many copies at once");
}

// Stores are invisible to products and copies (the async proxy) until publish_stores().
EMULATOR_UNSEEN inline void store_zeros(uint32_t address) {
  auto& machine = emulator::hopper();
  const unsigned thread = emulator::block.running->number;
  machine.zeros[thread][machine.zero_count[thread]++ % emulator::Hopper::kZeros] = address;
}

inline void publish_stores() {
  auto& machine = emulator::hopper();
  const unsigned thread = emulator::block.running->number;
  for (int i = 0; i < machine.zero_count[thread]; ++i) {
    auto* place = reinterpret_cast<uint64_t*>(emulator::shared_place(machine.zeros[thread][i], 16));
    place[0] = place[1] = 0;
  }
  machine.zero_count[thread] = 0;
}

EMULATOR_UNSEEN inline void meet(int number, int threads, bool waits) {
  auto& each = emulator::hopper().numbered[number];
  if (number < 1 || number > 15 || threads % 32 != 0) emulator::fail("a barrier of a number or size that none has");
  if (each.barrier.arrived > 0 && each.expected != threads) emulator::fail("a numbered barrier of two sizes");
  each.expected = threads;
  char* order = &each.barrier.order[each.barrier.generation % 2];
  __tsan_release(order);
  if (++each.barrier.arrived == threads) {
    each.barrier.arrived = 0;
    ++each.barrier.generation;
  } else if (waits) {
    emulator::wait_for_change(each.barrier);
  }
  if (waits) __tsan_acquire(order);
}

inline void sync(int number, int threads) { meet(number, threads, true); }
inline void arrive(int number, int threads) { meet(number, threads, false); }

EMULATOR_UNSEEN inline void set_registers(int count, bool more) {
  int& own = emulator::hopper().registers[emulator::block.running->number];
  if (count % 8 != 0 || count < 24 || count > 256) emulator::fail("a count of registers that is none");
  if (more ? count < own : count > own) emulator::fail("registers change in the other direction");
  own = count;
}

template <int kCount>
void take_registers() {
  set_registers(kCount, true);
}

template <int kCount>
void leave_registers() {
  set_registers(kCount, false);
}

EMULATOR_UNSEEN inline void begin_products() {
  const unsigned number = emulator::block.running->number;
  emulator::hopper().groups[number / kGroup].begun[number % kGroup] = true;
}

EMULATOR_UNSEEN inline void commit_products() {
  const unsigned number = emulator::block.running->number, lane = number % kGroup;
  auto& group = emulator::hopper().groups[number / kGroup];
  group.committed[lane][group.commits[lane]++ % 8] = group.issued[lane];
}

template <int kUnder, int kBlocks>
void wait_products(float (&sums)[kBlocks][4]) {
  emulator::hopper().wait(kUnder, &sums[0][0]);
}

inline void before_products(float) {}
inline void prefetch_map(const CUtensorMap*) {}

template <class Element, int kBlocks>
void add_product(float (&sums)[kBlocks][4], uint64_t left_tile, uint64_t right_tile, bool add) {
  emulator::hopper().issue(
      &sums[0][0], kBlocks * 8, nullptr, left_tile, right_tile, add, std::is_same_v<Element, bf16>);
}

template <class Element, int kBlocks>
void add_product(float (&sums)[kBlocks][4], const uint32_t (&left_words)[4], uint64_t right_tile) {
  emulator::hopper().issue(
      &sums[0][0], kBlocks * 8, left_words, 0, right_tile, true, std::is_same_v<Element, bf16>);
}

}  // namespace ml::hopper
