// The C interface of a stack of decoder layers for the new tokens of a decode step. dtype: ml::DType. CPU only.
#pragma once

#include <cstdint>

#include "decode_attention.h"
#include "rotary.h"

// A linear: weight [out, in] of `dtype`, or int8 with scales [out]; bias: [out] of `dtype`, or null.
struct MegaliteLinear {
  const void* weight;
  const float* scales;  // null unless the weight is int8
  const void* bias;
  int64_t out, in;
};

// A norm of rows, as of norms.h.
struct MegaliteNorm {
  const void *weight, *bias;
};

// One layer: a norm before each block, and a residual sum behind it.
struct MegaliteDecodeLayer {
  MegaliteNorm before_attention, before_mlp;
  MegaliteLinear query_key_value, output, up, down;  // up: gate, then up, if `gated`
  int64_t window;                                    // as of MegaliteDecodeAttention
  MegaliteAngles angles;                             // one row of angles a row; cosines null: no rotation
  void* cache;
};

struct MegaliteDecodeLayers {
  const MegaliteDecodeLayer* layers;
  int64_t count, hidden_size;
  double eps;
  int gated, activation;               // ml::Activation
  MegaliteDecodeAttention attention;   // of all layers: sizes, lengths, prefix, scale, softcap; the rest is unused
};

extern "C" {

// hidden [rows, hidden_size] in place, by the operators of norms.h, few_rows.h, rotary.h, decode_attention.h and
// activations.h: to the bit what they compute one by one.
int megalite_decode_layers_cpu(const MegaliteDecodeLayers* stack, void* hidden, int dtype);

}
