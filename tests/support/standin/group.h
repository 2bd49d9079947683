// The process group of the stand-in: gloo on the devices' memory, with NCCL's rules.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace standin {

// inner: a gloo backend of the same ranks. Refuses tensors of any device but the first one used.
c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> inner);

}  // namespace standin
