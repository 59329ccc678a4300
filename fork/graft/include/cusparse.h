// See cublas_v2.h.
#pragma once
typedef struct cusparseContext* cusparseHandle_t;
