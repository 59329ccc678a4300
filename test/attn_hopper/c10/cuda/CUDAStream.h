#pragma once
namespace c10::cuda {
inline int getCurrentCUDAStream() {
  return 0;
}
} // namespace c10::cuda
