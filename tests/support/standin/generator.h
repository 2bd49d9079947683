// Random numbers of the stand-in: per device the stream of a CPU generator, so that a CPU kernel can draw from it.
#pragma once

#include <ATen/core/Generator.h>

namespace standin {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
// The CPU generator inside one of ours.
at::Generator host_generator(const at::Generator& generator);

}  // namespace standin
