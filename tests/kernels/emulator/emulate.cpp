// Entry points of the tests: comparison of bands with a naive mask, and the attention kernels on emulated threads.
#include "emulate.h"

namespace {

using ml::Band;
using ml::Range;

bool naive(const Band& band, int query, int key) {
  const int distance = key - (query + band.shift);
  return (band.left < 0 || distance >= -band.left) && (band.right < 0 || distance <= band.right);
}

// Whether `range` spans exactly the indices below `count` for which `seen` is true; empty if there are none.
template <class Seen>
bool exactly(Range range, int count, const Seen& seen) {
  for (int i = 0; i < count; ++i) {
    if (seen(i) != range.holds(i)) return false;
  }
  return range.empty() || (range.begin >= 0 && range.end <= count);
}

bool rows_and_columns_agree(const Band& band) {
  for (int query = 0; query < band.queries; ++query) {
    if (!exactly(band.keys_of(query), band.keys, [&](int key) { return naive(band, query, key); })) return false;
  }
  for (int key = 0; key < band.keys; ++key) {
    if (!exactly(band.queries_of(key), band.queries, [&](int query) { return naive(band, query, key); })) return false;
  }
  return true;
}

// Returns the number of visible pairs of these queries and keys.
int seen_pairs(const Band& band, Range queries, Range keys) {
  int pairs = 0;
  for (int query = queries.begin; query < queries.end; ++query) {
    for (int key = keys.begin; key < keys.end; ++key) pairs += naive(band, query, key);
  }
  return pairs;
}

bool blocks_agree(const Band& band, int rows, int columns) {
  for (int query = 0; query < band.queries; query += rows) {
    const Range queries{query, ml::at_most(query + rows, band.queries)};
    const Range seen = band.keys_of_block(queries.begin, queries.end);
    for (int key = 0; key < band.keys; key += columns) {
      const Range keys{key, ml::at_most(key + columns, band.keys)};
      const int pairs = seen_pairs(band, queries, keys);
      const bool visited = !seen.empty() && seen.begin / columns * columns <= key && key < seen.end;
      const Range seeing = band.queries_of_block(keys.begin, keys.end);
      const bool passes = !seeing.empty() && seeing.begin / rows * rows <= query && query < seeing.end;
      if (pairs > 0 && (!visited || !passes)) return false;
      const bool full = pairs == (queries.end - query) * columns;
      if (band.full(query, queries.end, key, key + columns) != full) return false;
    }
  }
  return true;
}

template <class Element, int kHead, bool kDrops>
void run(emulator::Grid& grid, const MegaliteAttention& a, bool backward, int shared) {
  if (!backward) return grid.forward<ml::ForwardShapeOf<Element, kHead, kDrops>>(a);
  grid.statistics<Element, kHead, kDrops>(a);
  ml::for_backward_shapes<Element, kHead, kDrops>(a.query_sums != nullptr, shared, [&](auto shape) {
    using Shape = decltype(shape);
    if (Shape::kSharedBytes > shared) grid.report.problem = "more shared memory than a block may have";
    if constexpr (Shape::kBlocksOfKeys) {
      grid.key_gradients<Shape>(a);
    } else {
      grid.query_gradients<Shape>(a);
    }
    return 0;
  });
}

template <class Element, int kHead>
void run_of_size(emulator::Grid& grid, const MegaliteAttention& a, bool backward, int shared) {
  if (a.head_size != kHead) return;
  if (a.dropped > 0) return run<Element, kHead, true>(grid, a, backward, shared);
  run<Element, kHead, false>(grid, a, backward, shared);
}

template <class Element>
void run_any(emulator::Grid& grid, const MegaliteAttention& a, bool backward, int shared) {
  run_of_size<Element, 64>(grid, a, backward, shared);
  run_of_size<Element, 96>(grid, a, backward, shared);
  run_of_size<Element, 128>(grid, a, backward, shared);
  run_of_size<Element, 256>(grid, a, backward, shared);
}

}  // namespace

extern "C" {

// Compares every band of up to `limit` queries and keys, by elements and by blocks, with the naive mask. Returns the
// number of comparisons; writes the first band that differs to `wrong`: queries, keys, left, right, shift.
int compare_bands(int limit, int* wrong) {
  int compared = 0;
  const auto agrees = [](const Band& band) {
    bool agree = rows_and_columns_agree(band);
    for (int sizes = 0; sizes < 12 && agree; ++sizes) agree = blocks_agree(band, 1 + sizes / 3, 1 + sizes % 3);
    return agree;
  };
  for (int queries = 0; queries <= limit; ++queries) {
    for (int keys = 0; keys <= limit; ++keys) {
      for (int left = -1; left <= limit; ++left) {
        for (int right = -1; right <= limit; ++right) {
          // Aligned at the ends, and with all keys before, around and after the queries.
          for (int shift : {keys - queries, -limit - 1, -2, 3, limit + 1}) {
            if (!agrees({queries, keys, left, right, shift})) {
              const int what[5] = {queries, keys, left, right, shift};
              std::copy(what, what + 5, wrong);
              return compared;
            }
            ++compared;
          }
        }
      }
    }
  }
  return compared;
}

// Words of core/counter.h: a row's random state, and whether each of its first `keys` keys is kept.
void draw(
    uint32_t position, uint32_t head, int64_t sample, uint32_t key_low, uint32_t key_high, int64_t dropped, int keys,
    uint32_t first_key, uint32_t* row, uint8_t* kept) {
  const ml::DropRow drawn = ml::drop_row(position, head, sample, key_low, key_high);
  row[0] = drawn.start, row[1] = drawn.tweak;
  for (int i = 0; i < keys; ++i) {
    kept[i] = ml::drop_word(drawn, ml::drop_step(first_key + i)) >= ml::drop_threshold(dropped);
  }
}

// Runs the forward or the backward kernels for chips with `shared` bytes of shared memory per block; `begins` and
// `bytes` list the memory that they may access.
void emulate(
    const MegaliteAttention* attention, int dtype, int backward, int late_copies, int left_out_sync, int shared,
    int regions, const void* const* begins, const int64_t* bytes, emulator::Report* report) {
  std::vector<emulator::Region> memory;
  for (int i = 0; i < regions; ++i) memory.push_back({begins[i], static_cast<size_t>(bytes[i])});
  emulator::Fibers fibers;
  emulator::Grid grid(fibers, {late_copies != 0, left_out_sync}, memory);
  const auto& a = *attention;
  if (dtype == ml::kBFloat16) run_any<ml::bf16>(grid, a, backward, shared);
  if (dtype == ml::kFloat16) run_any<ml::fp16>(grid, a, backward, shared);
  *report = grid.report;
}
}
