// The C interface of gated activations and of bias + GELU. activation: ml::Activation; dtype: ml::DType.
#pragma once

#include <cstdint>

extern "C" {

// gate_up [rows, 2 features] (gate first) -> activation(gate) * up [rows, features]
int megalite_glu_cpu(
    const void* gate_up, void* out, int64_t rows, int64_t features, int activation, int dtype);
int megalite_glu_cuda(
    const void* gate_up, void* out, int64_t rows, int64_t features, int activation, int dtype, void* stream);

// grad [rows, features], gate_up -> gate_up_grad [rows, 2 features]
int megalite_glu_backward_cpu(
    const void* grad, const void* gate_up, void* gate_up_grad, int64_t rows, int64_t features, int activation,
    int dtype);
int megalite_glu_backward_cuda(
    const void* grad, const void* gate_up, void* gate_up_grad, int64_t rows, int64_t features, int activation,
    int dtype, void* stream);

// inputs [rows, features], bias [features] or null -> gelu(inputs + bias); kGelu and kGeluTanh only
int megalite_bias_gelu_cpu(
    const void* inputs, const void* bias, void* out, int64_t rows, int64_t features, int activation, int dtype);
int megalite_bias_gelu_cuda(
    const void* inputs, const void* bias, void* out, int64_t rows, int64_t features, int activation, int dtype,
    void* stream);

// The number of row blocks for the bias gradient; depends on the rows only, not on the threads.
int64_t megalite_bias_blocks(int64_t rows);

// inputs_grad [rows, features]; bias_grad [features] and partials [bias_blocks(rows), features] of Wide<dtype>, null
// if bias is null.
int megalite_bias_gelu_backward_cpu(
    const void* grad, const void* inputs, const void* bias, void* inputs_grad, void* bias_grad, void* partials,
    int64_t rows, int64_t features, int activation, int dtype);
int megalite_bias_gelu_backward_cuda(
    const void* grad, const void* inputs, const void* bias, void* inputs_grad, void* bias_grad, void* partials,
    int64_t rows, int64_t features, int activation, int dtype, void* stream);

}
