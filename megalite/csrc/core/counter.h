// Counter-based random numbers: a pure function of key and indices, equal bit for bit to megalite/ops/counter.py.
#pragma once

#include "core/scalar.h"

namespace ml {

struct Words {
  uint32_t word[4];
};

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
ML_HD Words philox(Words counter, uint32_t key_low, uint32_t key_high) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t low = counter.word[0] * uint64_t{0xD2511F53u}, high = counter.word[2] * uint64_t{0xCD9E8D57u};
    counter = {{static_cast<uint32_t>(high >> 32) ^ counter.word[1] ^ key_low, static_cast<uint32_t>(high),
                static_cast<uint32_t>(low >> 32) ^ counter.word[3] ^ key_high, static_cast<uint32_t>(low)}};
    key_low += 0x9E3779B9u, key_high += 0xBB67AE85u;
  }
  return counter;
}

// The random state of one row of an attention matrix: 64 bits of Philox per row, then a few instructions per key.
struct DropRow {
  uint32_t start, tweak;
};

ML_HD DropRow drop_row(uint32_t position, uint32_t head, int64_t sample, uint32_t key_low, uint32_t key_high) {
  const uint64_t whole = static_cast<uint64_t>(sample);
  const Words drawn = philox(
      {{position, head, static_cast<uint32_t>(whole), static_cast<uint32_t>(whole >> 32)}}, key_low, key_high);
  return {drawn.word[0], drawn.word[1]};
}

// The offset of a key's word in the row's Weyl sequence.
ML_HD uint32_t drop_step(uint32_t key_position) { return key_position * 0x9E3779B9u; }

// A mixed Weyl sequence (Steele et al., "Fast splittable pseudorandom number generators", 2014). The mixer is
// "lowbias32" by C. Wellons without its last step, which does not change the high half; only the high half of the word
// is used.
ML_HD int32_t drop_word(DropRow row, uint32_t step) {
  uint32_t x = row.start + step;
  x = (x ^ x >> 16 ^ row.tweak) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return static_cast<int32_t>(x);
}

// A probability is kept if its word is at least this threshold: `dropped` of 65536 equally likely values are below it.
ML_HD int32_t drop_threshold(int64_t dropped) { return static_cast<int32_t>((dropped - 32768) * 65536); }

}  // namespace ml
