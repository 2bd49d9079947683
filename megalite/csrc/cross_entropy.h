// Softmax cross entropy of logits [rows, columns] of one shard of the vocabulary, contiguous, of any DType; what is
// called wide has the type Wide<T>.
//
// labels: [rows], ids of the whole vocabulary; column 0 is the id `first_id`. on_label, uniform: the target
// distribution's share of the label, and of every id.
// Returns 0, ml::kUnsupported, or the cudaError_t.
#pragma once

#include <cstdint>

extern "C" {

// statistics: wide [3, rows]: the maximum of the row, sum(exp(logit - maximum)), sum(target * (logit - maximum)); of a
// row whose weight (wide [rows]) is 0 they are 0, 1, 0, whatever it holds.
int megalite_cross_entropy_statistics_cpu(const void* logits, const int64_t* labels, const void* weights,
                                          void* statistics, int64_t rows, int64_t columns, int64_t first_id,
                                          double on_label, double uniform, int dtype);
int megalite_cross_entropy_statistics_cuda(const void* logits, const int64_t* labels, const void* weights,
                                           void* statistics, int64_t rows, int64_t columns, int64_t first_id,
                                           double on_label, double uniform, int dtype, void* stream);

// Writes exp(logit - maximum) * factor - weight * target over the logits; maximum, factor, weight: wide [rows].
// A row whose factor and weight are 0 becomes 0, whatever it holds.
int megalite_cross_entropy_gradient_cpu(void* logits, const int64_t* labels, const void* maximum, const void* factor,
                                        const void* weight, int64_t rows, int64_t columns, int64_t first_id,
                                        double on_label, double uniform, int dtype);
int megalite_cross_entropy_gradient_cuda(void* logits, const int64_t* labels, const void* maximum, const void* factor,
                                         const void* weight, int64_t rows, int64_t columns, int64_t first_id,
                                         double on_label, double uniform, int dtype, void* stream);

// Both at once, of the whole vocabulary: losses (wide [rows]) are weight * (log(sum(exp(logit))) - sum(target * logit) +
// z_loss * log(sum(exp(logit)))^2), and their sum's gradient is written over the logits. Of a row whose weight is 0 both
// are 0, whatever it holds. float32 and float64 only: a narrower gradient can not be multiplied afterwards without loss.
int megalite_cross_entropy_losses_cpu(void* logits, const int64_t* labels, const void* weights, void* losses,
                                      int64_t rows, int64_t columns, int64_t first_id, double on_label, double uniform,
                                      double z_loss, int dtype);
}
