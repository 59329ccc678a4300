# PyTorch's CPU kernels are compiled once for each set of instructions that it chooses from when it
# runs. Sets `capabilities` to the names of those for MACHINE, the plain one first, and `flags_NAME` to
# what each is compiled with in PyTorch's own build.
set(capabilities DEFAULT)
if(MACHINE STREQUAL x86_64)
  list(APPEND capabilities AVX2 AVX512)
  set(flags_AVX2 -mavx2 -mfma -mf16c)
  set(flags_AVX512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma)
  add_compile_definitions(HAVE_AVX2_CPU_DEFINITION HAVE_AVX512_CPU_DEFINITION)
elseif(MACHINE STREQUAL aarch64)
  list(APPEND capabilities SVE256)
  set(flags_SVE256 -march=armv8-a+sve -msve-vector-bits=256 -DCPU_CAPABILITY_SVE
                   -D__ARM_FEATURE_BF16)
  add_compile_definitions(HAVE_SVE_CPU_DEFINITION HAVE_SVE256_CPU_DEFINITION)
endif()
foreach(capability ${capabilities})
  list(APPEND flags_${capability} -DCPU_CAPABILITY=${capability} -DCPU_CAPABILITY_${capability})
endforeach()
