#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/EmptyTensor.h>
#include <ATen/native/AttnHugePages.h>
#include <c10/core/CPUAllocator.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/empty.h>
#endif

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>

namespace at::native {

namespace {

// Large memory in huge pages, for one fault for each small page takes longer
// than computing what is in it. It is mapped for the tensor alone: the advice
// cannot be taken back, so memory of malloc's would have it for the next owner.
// From this size on malloc too maps each block by itself, unless it is told
// otherwise.
class HugePages final : public c10::Allocator {
 public:
  static constexpr size_t MIN_SIZE = size_t(32) << 20;

  c10::DataPtr allocate(size_t size) override {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (size >= MIN_SIZE) {
      if (char* data = map(size)) {
        c10::profiledCPUMemoryReporter().New(data, size);
        return {data, data, &free, c10::Device(c10::DeviceType::CPU)};
      }
    }
#endif
    return c10::GetCPUAllocator()->allocate(size);
  }
  void copy_data(void* dst, const void* src, size_t size) const override {
    default_copy_data(dst, src, size);
  }

#if defined(__linux__) && defined(MADV_HUGEPAGE)
 private:
  static constexpr size_t HUGE = size_t(2) << 20;

  static size_t page() {
    return static_cast<size_t>(sysconf(_SC_PAGESIZE));
  }

  // A small page with the size of the whole mapping, then the memory, which
  // begins with a huge page.
  static char* map(size_t size) {
    const auto before = page();
    const auto used = before + (size + before - 1) / before * before;
    void* const mapping = mmap(
        nullptr,
        used + HUGE,
        PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS,
        -1,
        0);
    if (mapping == MAP_FAILED) {
      return nullptr; // malloc may have some left, and else has the message
    }
    auto* const begin = static_cast<char*>(mapping);
    const auto end_of_first = reinterpret_cast<uintptr_t>(begin) + before;
    const auto skipped = (HUGE - end_of_first % HUGE) % HUGE;
    char* const first = begin + skipped;
    if (skipped > 0) {
      munmap(begin, skipped);
    }
    if (skipped < HUGE) {
      munmap(first + used, HUGE - skipped);
    }
    new (first) size_t(used);
    madvise(first + before, used - before, MADV_HUGEPAGE); // or not
    return first + before;
  }

  static void free(void* data) {
    c10::profiledCPUMemoryReporter().Delete(data);
    char* const first = static_cast<char*>(data) - page();
    munmap(first, *reinterpret_cast<size_t*>(first));
  }
#endif
};

} // namespace

Tensor empty_in_huge_pages(IntArrayRef sizes, const TensorOptions& options) {
  // A program may have an allocator of its own.
  if (!options.device().is_cpu() ||
      c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) {
    return at::empty(sizes, options);
  }
  static HugePages huge_pages;
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  return at::detail::empty_generic(
      sizes, &huge_pages, keys, dtype, std::nullopt);
}

} // namespace at::native
