// Gives AttnSweep.cu what it asks of CUDA, with one GPU: see machine.h.
#pragma once
#include <machine.h>

#include <algorithm>

#define CUDART_VERSION 13000

using cudaError_t = int;
using cudaStream_t = int;
using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

struct cudaDeviceProp {
  int major = 9, minor = 0, multiProcessorCount = 3;
};
struct cudaFuncAttributes {
  int ptxVersion = 90;
};
struct dim3 {
  dim3(unsigned x = 1) : x(x) {}
  unsigned x;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

enum { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum { cudaEnableDefault };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum { CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum { CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
enum cudaDriverEntryPointQueryResult {};

// Refuses what the driver does.
inline int cuTensorMapEncodeTiled(
    CUtensorMap* map,
    int,
    unsigned rank,
    void* data,
    const uint64_t* sizes,
    const uint64_t* strides,
    const uint32_t* box,
    const uint32_t* steps,
    int,
    int swizzle,
    int,
    int) {
  bool is_valid = rank == 5 && uintptr_t(data) % 16 == 0 && box[0] == 64 &&
                  box[1] <= 256 && swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  *map = {static_cast<uint8_t*>(data), {}, {2}, {box[0], box[1]}};
  for (int i = 0; i < 5; ++i) {
    map->sizes[i] = sizes[i];
    is_valid = is_valid && sizes[i] >= 1 && sizes[i] <= 1ull << 32 &&
               steps[i] == 1 && (i < 2 || box[i] == 1);
    if (i > 0) {
      map->strides[i] = strides[i - 1];
      is_valid =
          is_valid && strides[i - 1] % 16 == 0 && strides[i - 1] < 1ull << 40;
    }
  }
  return is_valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

inline cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, int, int, cudaDriverEntryPointQueryResult*) {
  *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  return 0;
}

inline cudaError_t cudaFuncGetAttributes(
    cudaFuncAttributes* found, const void*) {
  *found = {};
  return 0;
}

template <class F>
cudaError_t cudaFuncSetAttribute(F, int, int bytes) {
  require(bytes <= 232448, "too much shared memory");
  return 0;
}

inline int64_t launches = 0;

// Blocks run one after the other.
template <class A>
cudaError_t cudaLaunchKernelEx(
    const cudaLaunchConfig_t* config, void (*kernel)(A), const A& args) {
  ++launches;
  gridDim.x = config->gridDim.x;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    machine().run(config->blockDim.x, [&] { kernel(args); });
  }
  return 0;
}

namespace at::cuda {

inline cudaDeviceProp* getCurrentDeviceProperties() {
  static cudaDeviceProp properties;
  return &properties;
}

inline cudaDeviceProp* getDeviceProperties(int) {
  return getCurrentDeviceProperties();
}

} // namespace at::cuda
