// See cublas_v2.h.
#pragma once
typedef struct cusolverDnContext* cusolverDnHandle_t;
