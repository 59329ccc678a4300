// What this machine can do at best: `peaks THREADS` prints lines of `what
// value`, in FLOPs and bytes per second. One multiply-add is two FLOPs; a copy
// counts what it reads and what it writes.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64; // of a vector register
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

// Independent sums: as many as hide the latency of a multiply-add and fit in
// the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSums = 24;
#else
constexpr int kSums = 12;
#endif

template <typename T>
struct Vector {
  typedef T type __attribute__((vector_size(kBytes)));
};

volatile double sink;
int threads = 1;

double now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Returns the seconds in which every thread does `work(thread)`.
double trial(const std::function<void(int)>& work) {
  std::atomic<int> ready{0};
  std::vector<double> start(threads), end(threads);
  std::vector<std::thread> pool;
  for (int i = 0; i < threads; ++i) {
    pool.emplace_back([&, i] {
      for (++ready; ready < threads;) {
      }
      start[i] = now();
      work(i);
      end[i] = now();
    });
  }
  for (auto& thread : pool) {
    thread.join();
  }
  return *std::max_element(end.begin(), end.end()) -
         *std::min_element(start.begin(), start.end());
}

// Runs many short trials and returns the seconds of the fastest: in the others,
// something else may have run on the machine too.
double best(const std::function<void(int)>& work, double seconds) {
  double least = 1e9;
  const double until = now() + seconds;
  do {
    least = std::min(least, trial(work));
  } while (now() < until);
  return least;
}

// Returns how many FLOPs per second a thread reaches that repeats
// sum = step(sum). One such step counts as `flops` of them.
template <typename V, typename Step>
double rate(Step step, double flops) {
  constexpr int kRounds = 200000;
  auto work = [&](int) {
    V sums[kSums];
    for (int i = 0; i < kSums; ++i) {
      sums[i] = V{};
      sums[i][0] = i; // sums that are equal would be computed once
    }
    for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 24
      for (int i = 0; i < kSums; ++i) {
        sums[i] = step(sums[i]);
      }
    }
    double total = 0;
    for (auto& sum : sums) {
      total += sum[0];
    }
    sink = total;
  };
  return threads * flops * kSums * kRounds / best(work, 0.4);
}

template <typename T>
double multiply_add() {
  using V = typename Vector<T>::type;
  volatile T factor = T(0.5),
             term = T(1); // unknown to the compiler, and the sums stay small
  const V x = V{} + T(factor), y = V{} + T(term);
  return rate<V>([=](V sum) { return sum * x + y; }, 2.0 * kBytes / sizeof(T));
}

#if defined(__AMX_BF16__)
// Tiles of 16 rows, of 32 numbers in bfloat16 or 16 sums each. Returns 0 if the
// system doesn't let a process have them.
double multiply_tiles() {
  constexpr int kPermission = 0x1023, kTileData = 18; // of arch_prctl
  if (syscall(SYS_arch_prctl, kPermission, kTileData) != 0) {
    return 0;
  }
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_of_a_row[16] = {};
    uint8_t rows[16] = {};
  } config;
  std::fill_n(config.bytes_of_a_row, 8, 64);
  std::fill_n(config.rows, 8, 16);
  constexpr int kRounds = 20000;
  auto work = [&](int) {
    _tile_loadconfig(&config); // all tiles are 0
    for (int round = 0; round < kRounds; ++round) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
  };
  return threads * 4.0 * kRounds * (2 * 16 * 16 * 32) / best(work, 0.4);
}
#endif

using Word = Vector<float>::type;

bool stream(Word* to, Word value) {
#if defined(__AVX512F__)
  _mm512_stream_ps(reinterpret_cast<float*>(to), value);
#elif defined(__AVX__)
  _mm256_stream_ps(reinterpret_cast<float*>(to), value);
#elif defined(__SSE__)
  _mm_stream_ps(reinterpret_cast<float*>(to), value);
#else
  return false; // plain stores are all there is
#endif
  return true;
}

// The words of [0, count) that thread i works on.
template <typename F>
void share(size_t count, int i, F f) {
  for (size_t at = count * i / threads, end = count * (i + 1) / threads;
       at < end;
       ++at) {
    f(at);
  }
}

// Prints the bytes per second for a working set of `bytes`.
void bandwidth(size_t bytes) {
  const size_t count = bytes / kBytes, half = count / 2;
  const int passes = std::max<size_t>(1, (16 << 20) / bytes);
  auto* data = static_cast<Word*>(std::aligned_alloc(4096, count * kBytes));
  if (!data) {
    throw std::bad_alloc();
  }
  const Word one = Word{} + 1.0f;
  auto report = [&](const char* kind, const std::function<void(int)>& work) {
    auto repeated = [&](int i) {
      for (int pass = 0; pass < passes; ++pass) {
        work(i);
      }
    };
    std::printf(
        "%s.%zu %.4g\n",
        kind,
        bytes,
        double(bytes) * passes / best(repeated, 0.1));
  };
  report("store", [&](int i) {
    share(count, i, [&](size_t at) { data[at] = one; });
  });
  report("read", [&](int i) {
    Word sums[8] = {};
    share(count / 8, i, [&](size_t at) {
      for (int j = 0; j < 8; ++j) {
        sums[j] += data[at * 8 + j];
      }
    });
    Word total = sums[0];
    for (int j = 1; j < 8; ++j) {
      total += sums[j];
    }
    sink = total[0];
  });
  report("copy", [&](int i) {
    share(half, i, [&](size_t at) { data[at] = data[half + at]; });
  });
  if (stream(data, one)) {
    report("store_nt", [&](int i) {
      share(count, i, [&](size_t at) { stream(data + at, one); });
    });
    report("copy_nt", [&](int i) {
      share(half, i, [&](size_t at) { stream(data + at, data[half + at]); });
    });
  }
  std::free(data);
}

// Stores to pages fresh from the kernel, as a large new tensor's are: no limit
// of the hardware, but what a tensor costs whose memory is not reused.
void fresh(const char* kind, size_t bytes, bool huge) {
  const size_t count = bytes / kBytes;
  double least = 1e9;
  for (int i = 0; i < 8; ++i) {
    void* data = mmap(
        nullptr,
        bytes,
        PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS,
        -1,
        0);
    if (data == MAP_FAILED) {
      throw std::bad_alloc();
    }
    if (huge) {
      madvise(data, bytes, MADV_HUGEPAGE); // no more than a wish
    }
    auto* words = static_cast<Word*>(data);
    auto work = [&](int thread) {
      share(count, thread, [&](size_t at) { words[at] = Word{} + 1.0f; });
    };
    least = std::min(least, trial(work));
    munmap(data, bytes);
  }
  std::printf("%s.%zu %.4g\n", kind, bytes, bytes / least);
}

} // namespace

int main(int argc, char** argv) {
  threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
  std::printf("flops.float32 %.4g\n", multiply_add<float>());
  std::printf("flops.float64 %.4g\n", multiply_add<double>());
#if defined(__AVX512BF16__)
  volatile short half = 0x3f00; // 0.5
  const auto x = (__m512bh)_mm512_set1_epi16(half);
  double pairs =
      rate<__m512>([=](__m512 sum) { return _mm512_dpbf16_ps(sum, x, x); }, 64);
#if defined(__AMX_BF16__)
  pairs = std::max(pairs, multiply_tiles());
#endif
  std::printf("flops.bfloat16 %.4g\n", pairs);
#endif
#if defined(__AVX512FP16__) || defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
  std::printf("flops.float16 %.4g\n", multiply_add<_Float16>());
#endif
  for (int log : {16, 20, 22, 24, 26, 28}) {
    bandwidth(size_t(1) << log);
  }
  fresh("fresh", 64 << 20, false);
  fresh("fresh_huge", 64 << 20, true);
}
