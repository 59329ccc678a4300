// Stands in for NVIDIA's header, which ATen/cuda/CUDAContextLight.h includes
// for this alone, and which need not be there.
#pragma once
typedef struct cublasContext* cublasHandle_t;
