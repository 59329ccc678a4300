// CUDA on a CPU, as far as attn's kernels go: a block's threads take turns, a
// warp's instructions are exchanges between 32 of them. Shared memory is
// watched for races, and asynchronous copies arrive as late as they may.
#pragma once

#include <csetjmp>
#include <ucontext.h>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __align__(bytes)
#define __launch_bounds__(...)
#define C10_CUDA_CHECK(x) TORCH_INTERNAL_ASSERT((x) == 0)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() emulator::check()

struct uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct Index {
  unsigned x;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};
using std::max;
using std::min;
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return {x, y, z, w};
}

struct cudaDeviceProp {
  int major, multiProcessorCount;
  size_t sharedMemPerBlockOptin;
};
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };

namespace emulator {
inline int current; // thread
}

struct ThreadIndex {
  struct {
    operator unsigned() const {
      return emulator::current;
    }
  } x;
};
inline ThreadIndex threadIdx;
inline Index blockIdx;

namespace emulator {

constexpr int kThreads = 1024, kShared = 227 << 10;
inline int major = 9, room = kShared, processors = 1, launches = 0;

// The current device, and the one that all tensors are on.
constexpr int kDevice = 1;
inline int device = 0;

inline void check_device(const char* what) {
  TORCH_CHECK(
      device == kDevice, what, ": the tensors are not on the current device");
}

// What is known of 4 bytes of shared memory since a barrier.
struct Chunk {
  int written = -1, read = -1;       // by this thread; or many
  int written_at = -1, read_at = -1; // how many barriers came before
  bool pending = false;              // a copy is under way
};
constexpr int kMany = -2;

struct Copy {
  uint32_t to;
  uint4 value;
};

struct Thread {
  ucontext_t context; // where it begins
  jmp_buf place; // where it goes on: a switch by it asks nothing of the kernel
  std::vector<char> stack;
  bool begun, done;
  int barriers;                          // how many it passed
  std::vector<std::vector<Copy>> groups; // of copies under way
  uint32_t out[6];                       // what the warp's others read
};

// Threads that wait for one another.
struct Meeting {
  int come, times; // how many are to come; how often all came
};

inline std::vector<Thread> threads;
inline Meeting block, warps[kThreads / 32];
inline jmp_buf scheduler;
inline int size, alive; // threads of the block; those that have not ended
inline bool moved;      // since all threads had their last turn
inline std::function<void()> body;
inline std::string error;
inline std::vector<Chunk> chunks(kShared / 4);
alignas(16) inline char memory[kShared];
inline int bytes; // of shared memory that the kernel asked for

inline void fail(const std::string& what) {
  if (error.empty()) {
    error = what;
  }
}

inline void check() {
  const std::string what = std::exchange(error, {});
  TORCH_CHECK(what.empty(), what);
}

inline void yield() {
  if (!_setjmp(threads[current].place)) {
    _longjmp(scheduler, 1);
  }
}

inline void meet(Meeting& meeting, int count) {
  const int times = meeting.times;
  if (++meeting.come == count) {
    meeting = {0, times + 1};
  }
  while (meeting.times == times) {
    yield();
  }
  moved = true;
}

inline void barrier() {
  meet(block, alive);
  ++threads[current].barriers;
}

// This thread's part of a warp's instruction, of which all have what the others
// gave.
inline Thread* exchange(std::initializer_list<uint32_t> out) {
  std::copy(out.begin(), out.end(), threads[current].out);
  meet(warps[current / 32], 32);
  return &threads[current / 32 * 32];
}

// The end of such an instruction: none of the others changes what it gave
// before.
inline void exchanged() {
  meet(warps[current / 32], 32);
}

// The state of `count` bytes; null if they are not all there.
inline Chunk* chunks_of(uint32_t address, uint32_t count) {
  if (address % count || address + count > static_cast<uint32_t>(bytes)) {
    fail(
        "shared memory: " + std::to_string(count) + " bytes at " +
        std::to_string(address) + " of " + std::to_string(bytes));
    return nullptr;
  }
  return &chunks[address / 4];
}

inline void note_write(Chunk& chunk) {
  const int now = threads[current].barriers;
  const bool others_read =
      chunk.read_at == now && (chunk.read == kMany || chunk.read != current);
  if (others_read || (chunk.written_at == now && chunk.written != current)) {
    fail("race: a write to shared memory");
  }
  chunk.written = current;
  chunk.written_at = now;
}

inline void note_read(Chunk& chunk) {
  const int now = threads[current].barriers;
  if (chunk.pending || (chunk.written_at == now && chunk.written != current)) {
    fail("race: a read of shared memory");
  }
  chunk.read = chunk.read_at == now && chunk.read != current ? kMany : current;
  chunk.read_at = now;
}

template <typename X>
void store(uint32_t to, X value) {
  if (Chunk* of = chunks_of(to, sizeof(X))) {
    std::for_each(of, of + (sizeof(X) + 3) / 4, note_write);
    std::memcpy(memory + to, &value, sizeof(X));
  }
}

template <typename X>
X load(uint32_t from) {
  X x{};
  if (Chunk* of = chunks_of(from, sizeof(X))) {
    std::for_each(of, of + (sizeof(X) + 3) / 4, note_read);
    std::memcpy(&x, memory + from, sizeof(X));
  }
  return x;
}

inline void run_thread() {
  body();
  threads[current].done = true;
  --alive;
  _longjmp(scheduler, 1);
}

// Lets a thread run until it waits for another, or ends.
inline void take_turn(Thread& thread) {
  if (_setjmp(scheduler)) {
    return;
  }
  if (thread.begun) {
    _longjmp(thread.place, 1);
  }
  thread.begun = true;
  setcontext(&thread.context);
}

template <typename Args>
auto launch(
    void (*kernel)(Args),
    int blocks,
    int block_size,
    int shared,
    int /*stream*/) {
  return [=](const Args& args) {
    check_device("a launch");
    ++launches;
    threads.resize(kThreads);
    size = block_size;
    bytes = shared;
    std::fill(std::begin(warps), std::end(warps), Meeting{});
    for (int i = 0; i < blocks; ++i) {
      std::fill(chunks.begin(), chunks.end(), Chunk{});
      std::memset(memory, 0xff, sizeof(memory)); // NaN
      blockIdx.x = i;
      body = [&] { kernel(args); };
      alive = size;
      block = {};
      for (int j = 0; j < size; ++j) {
        Thread& t = threads[j];
        t.stack.resize(128 << 10);
        t.begun = t.done = false;
        t.barriers = 0;
        t.groups.assign(1, {});
        getcontext(&t.context);
        t.context.uc_stack.ss_sp = t.stack.data();
        t.context.uc_stack.ss_size = t.stack.size();
        t.context.uc_link = nullptr;
        makecontext(&t.context, run_thread, 0);
      }
      for (bool busy = true; busy;) {
        busy = moved = false;
        for (current = 0; current < size; ++current) {
          if (!threads[current].done) {
            busy = true;
            take_turn(threads[current]);
            moved = moved || threads[current].done;
          }
        }
        if (busy && !moved) {
          fail(
              "deadlock: not all threads came to a barrier or a warp's "
              "instruction");
          return;
        }
      }
    }
  };
}

} // namespace emulator

inline void __trap() {
  emulator::fail("trap");
}

inline void __syncthreads() {
  emulator::barrier();
}

// What is read or written once goes past the caches.
inline uint4 __ldcs(const uint4* from) {
  uint4 x;
  std::memcpy(&x, from, 16);
  return x;
}

inline void __stcs(uint4* to, uint4 x) {
  if (reinterpret_cast<uintptr_t>(to) % 16) {
    emulator::fail("misaligned store");
  }
  std::memcpy(to, &x, 16);
}

inline uint32_t __float_as_uint(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  return word;
}

inline float __uint_as_float(uint32_t word) {
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

inline float __expf(float x) {
  return std::exp(x);
}

inline float __fdividef(float x, float y) {
  return x / y;
}

inline uint64_t __cvta_generic_to_shared(const void* /*shared*/) {
  return 0;
}

using cudaError_t = int;
template <typename F>
cudaError_t cudaFuncSetAttribute(F* /*kernel*/, int /*name*/, int /*value*/) {
  return 0;
}

namespace at::cuda {
inline cudaDeviceProp* getCurrentDeviceProperties() {
  emulator::check_device("properties");
  static cudaDeviceProp properties;
  properties = {emulator::major, emulator::processors, size_t(emulator::room)};
  return &properties;
}
} // namespace at::cuda

namespace c10::cuda {
inline int getCurrentCUDAStream() {
  return 0;
}

class CUDAGuard {
  const int before = std::exchange(emulator::device, emulator::kDevice);

 public:
  explicit CUDAGuard(c10::Device /*of a tensor*/) {}
  ~CUDAGuard() {
    emulator::device = before;
  }
};
} // namespace c10::cuda

namespace at::native::attn_tiles {

inline uint4 shared[1];

inline float to_float(__nv_bfloat16, uint32_t bits) {
  const uint32_t word = bits << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

inline float to_float(__half, uint32_t bits) {
  return c10::detail::fp16_ieee_to_fp32_value(bits & 0xffff);
}

inline uint16_t to_bits(__nv_bfloat16, float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  return x != x ? 0x7fc0 : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

inline uint16_t to_bits(__half, float x) {
  return c10::detail::fp16_ieee_from_fp32_value(x);
}

template <typename T>
uint32_t pack(float x, float y) {
  return to_bits(T{}, x) | static_cast<uint32_t>(to_bits(T{}, y)) << 16;
}

template <typename T>
float2 unpack(uint32_t both) {
  return {to_float(T{}, both & 0xffff), to_float(T{}, both >> 16)};
}

template <typename T>
using Fragment = T[2][2];

// The hardware's sums of a product's terms are cut off, not rounded.
template <typename T>
void mma(Fragment<float>& c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const emulator::Thread* warp =
      emulator::exchange({a[0], a[1], a[2], a[3], b0, b1});
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const auto half = [](uint32_t word, int i) {
    return to_float(T{}, i ? word >> 16 : word & 0xffff);
  };
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
    float& to = c[i / 2][i % 2];
    double sum = to;
    for (int k = 0; k < 16; ++k) {
      const uint32_t x =
          warp[row % 8 * 4 + k % 8 / 2].out[row / 8 + 2 * (k / 8)];
      const uint32_t y = warp[column * 4 + k % 8 / 2].out[4 + k / 8];
      sum += static_cast<double>(half(x, k % 2)) * half(y, k % 2);
    }
    to = static_cast<float>(sum);
    if (std::abs(to) > std::abs(sum)) {
      to = std::nextafter(to, 0.0f);
    }
  }
  emulator::exchanged();
}

inline void load_matrices(
    uint32_t (&x)[4], uint32_t address, bool transposed = false) {
  const emulator::Thread* warp = emulator::exchange({address});
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    x[i] = 0;
    for (int half = 0; half < 2; ++half) {
      int row = lane / 4, column = lane % 4 * 2 + half;
      if (transposed) {
        std::swap(row, column);
      }
      x[i] |= static_cast<uint32_t>(emulator::load<uint16_t>(
                  warp[8 * i + row].out[0] + 2 * column))
              << 16 * half;
    }
  }
  emulator::exchanged();
}

inline void load_transposed(uint32_t (&x)[4], uint32_t address) {
  load_matrices(x, address, true);
}

inline void store_shared(uint32_t to, uint4 x) {
  emulator::store(to, x);
}

// Arrives when it is waited for; reading from there before, and until a
// barrier, is a race.
inline void copy_async(uint32_t to, const void* from, int count) {
  if (count && reinterpret_cast<uintptr_t>(from) % 16) {
    emulator::fail("misaligned copy");
  }
  emulator::Copy copy{to, {}};
  if (count) {
    std::memcpy(&copy.value, from, count);
  }
  if (emulator::Chunk* of = emulator::chunks_of(to, 16)) {
    for (int i = 0; i < 4; ++i) {
      emulator::note_write(of[i]);
      of[i].pending = true;
    }
    emulator::threads[emulator::current].groups.back().push_back(copy);
  }
}

inline void copy_async_if(bool within, uint32_t to, const void* from) {
  copy_async(to, from, within ? 16 : 0);
}

inline void commit() {
  emulator::threads[emulator::current].groups.emplace_back();
}

template <int pending>
void wait() {
  auto& groups = emulator::threads[emulator::current].groups;
  while (groups.size() > pending + 1) {
    for (const emulator::Copy& copy : groups.front()) {
      emulator::Chunk* of = emulator::chunks_of(copy.to, 16);
      std::for_each(
          of, of + 4, [](emulator::Chunk& chunk) { chunk.pending = false; });
      emulator::store(copy.to, copy.value);
    }
    groups.erase(groups.begin());
  }
}

inline float to_tf32(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  if ((word & 0x7f800000) != 0x7f800000) {
    word = (word + 0x1000) & 0xffffe000;
  }
  std::memcpy(&x, &word, 4);
  return x;
}

inline double to_tf32(double x) {
  return x;
}

template <typename T>
void mma(Fragment<T>& c, const Fragment<T>& a, const T (&b)[2]) {
  const auto word = [](T x, int i) {
    uint64_t bits = 0;
    std::memcpy(&bits, &x, sizeof(T));
    return static_cast<uint32_t>(bits >> 32 * i);
  };
  emulator::Thread* warp = nullptr;
  T all[32][6];
  const T mine[6] = {a[0][0], a[0][1], a[1][0], a[1][1], b[0], b[1]};
  for (int i = 0; i < 6; i += 3) {
    warp = emulator::exchange(
        {word(mine[i], 0),
         word(mine[i], 1),
         word(mine[i + 1], 0),
         word(mine[i + 1], 1),
         word(mine[i + 2], 0),
         word(mine[i + 2], 1)});
    for (int lane = 0; lane < 32; ++lane) {
      for (int j = 0; j < 3; ++j) {
        std::memcpy(&all[lane][i + j], &warp[lane].out[2 * j], sizeof(T));
      }
    }
    emulator::exchanged();
  }
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) {
      long double sum = c[i][j];
      for (int k = 0; k < 8; ++k) {
        T x = all[4 * g + k / 2][2 * i + k % 2],
          y = all[4 * (2 * t + j) + k / 2][4 + k % 2];
        if constexpr (std::is_same_v<T, float>) { // what is beyond is not
                                                  // looked at
          uint32_t words[2];
          std::memcpy(&words[0], &x, 4);
          std::memcpy(&words[1], &y, 4);
          words[0] &= 0xffffe000;
          words[1] &= 0xffffe000;
          std::memcpy(&x, &words[0], 4);
          std::memcpy(&y, &words[1], 4);
        }
        sum += static_cast<long double>(x) * y;
      }
      c[i][j] = static_cast<T>(sum);
      if (std::is_same_v<T, float> && std::abs(c[i][j]) > std::abs(sum)) {
        c[i][j] = std::nextafter(c[i][j], T(0));
      }
    }
  }
}

template <typename T>
void load_pair(T (&x)[2], uint32_t address) {
  struct alignas(2 * sizeof(T)) Two {
    T x[2];
  };
  const Two both = emulator::load<Two>(address);
  x[0] = both.x[0];
  x[1] = both.x[1];
}

template <typename T>
T load_shared(uint32_t address) {
  return emulator::load<T>(address);
}

inline void store_shared(uint32_t to, float x) {
  emulator::store(to, x);
}

inline void store_shared(uint32_t to, double x) {
  emulator::store(to, x);
}

template <typename T>
void load_pair(T (&x)[2], const T* from) {
  if (reinterpret_cast<uintptr_t>(from) % (2 * sizeof(T))) {
    emulator::fail("misaligned load");
  }
  x[0] = from[0];
  x[1] = from[1];
}

template <typename T>
void store_pair(T* to, const T (&x)[2]) {
  if (reinterpret_cast<uintptr_t>(to) % (2 * sizeof(T))) {
    emulator::fail("misaligned store");
  }
  to[0] = x[0];
  to[1] = x[1];
}

// 12 bits of it: off by up to 2^-11.
inline float tanh_approx(float x) {
  const float y = std::tanh(x);
  uint32_t word;
  std::memcpy(&word, &y, 4);
  word &= 0xfffff000;
  float cut;
  std::memcpy(&cut, &word, 4);
  return cut;
}

} // namespace at::native::attn_tiles
