#pragma once

#include <ATen/core/Tensor.h>

namespace at::native {

// at::empty, of a large tensor on a CPU in huge pages.
Tensor empty_in_huge_pages(IntArrayRef sizes, const TensorOptions& options);

} // namespace at::native
