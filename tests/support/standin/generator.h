// Random numbers of the stand-in: each device wraps a CPU generator, so that CPU kernels can draw from it.
#pragma once

#include <ATen/core/Generator.h>

namespace standin {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
// Returns the CPU generator inside a device generator.
at::Generator host_generator(const at::Generator& generator);

}  // namespace standin
