# @@ only: source
# @@ before: set(GEN_ROCM_FLAG)
  # AttnSweep.cu is for compute capability 9.0 with all that it alone has. For
  # others it has kernels without a body.
  if(USE_CUDA)
    torch_cuda_get_nvcc_gencode_flag(attn_arch_flags)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.0 AND
      attn_arch_flags MATCHES "compute_90")
      set_source_files_properties(
        "${CMAKE_CURRENT_LIST_DIR}/../aten/src/ATen/native/cuda/AttnSweep.cu"
        PROPERTIES COMPILE_FLAGS "-gencode arch=compute_90a,code=sm_90a")
    endif()
  endif()
