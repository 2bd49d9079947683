// Softmax cross entropy of the logits of one vocabulary shard: [rows, columns], contiguous, any DType. "wide" means the
// type Wide<T>.
//
// labels: [rows], ids of the full vocabulary; column 0 is id `first_id`. on_label, uniform: the target probability of
// the label, and the one of every id (label smoothing).
// Functions return 0, ml::kUnsupported, or the cudaError_t.
#pragma once

#include <cstdint>

extern "C" {

// statistics: wide [3, rows]: the maximum of the row, sum(exp(logit - maximum)), sum(target * (logit - maximum)); they
// are 0, 1, 0 for a row whose weight (wide [rows]) is 0, even if its logits are NaN.
int megalite_cross_entropy_statistics_cpu(const void* logits, const int64_t* labels, const void* weights,
                                          void* statistics, int64_t rows, int64_t columns, int64_t first_id,
                                          double on_label, double uniform, int dtype);
int megalite_cross_entropy_statistics_cuda(const void* logits, const int64_t* labels, const void* weights,
                                           void* statistics, int64_t rows, int64_t columns, int64_t first_id,
                                           double on_label, double uniform, int dtype, void* stream);

// Overwrites the logits with exp(logit - maximum) * factor - weight * target; maximum, factor, weight: wide [rows].
// A row with factor and weight 0 becomes 0, even if its logits are NaN.
int megalite_cross_entropy_gradient_cpu(void* logits, const int64_t* labels, const void* maximum, const void* factor,
                                        const void* weight, int64_t rows, int64_t columns, int64_t first_id,
                                        double on_label, double uniform, int dtype);
int megalite_cross_entropy_gradient_cuda(void* logits, const int64_t* labels, const void* maximum, const void* factor,
                                         const void* weight, int64_t rows, int64_t columns, int64_t first_id,
                                         double on_label, double uniform, int dtype, void* stream);

// Forward and backward in one, for the full vocabulary: losses (wide [rows]) are weight * (log(sum(exp(logit))) -
// sum(target * logit) + z_loss * log(sum(exp(logit)))^2), and the logits are overwritten with the gradient of their
// sum. Both are 0 for a row with weight 0, even if its logits are NaN. float32 and float64 only: scaling a bf16 or fp16
// gradient afterwards would round it twice.
int megalite_cross_entropy_losses_cpu(void* logits, const int64_t* labels, const void* weights, void* losses,
                                      int64_t rows, int64_t columns, int64_t first_id, double on_label, double uniform,
                                      double z_loss, int dtype);
}
