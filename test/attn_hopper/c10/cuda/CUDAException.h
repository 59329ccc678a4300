#pragma once
#define C10_CUDA_CHECK(call) require((call) == 0, #call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK()
