#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstdint>

// Stands in for PyTorch's header of this name, which AttnBrgemm.h includes.
// brgemm is not on the stable ABI, so the package leaves it out: it is never
// available, and the compiler drops what would call it.

namespace at::native::cpublas {

constexpr bool could_pack(c10::ScalarType /*dtype*/) {
  return false;
}

template <typename... Args>
void brgemm(const Args&... /*args*/) {}

inline void brgemm_release() {}

} // namespace at::native::cpublas
