// A multiprocessor of compute capability 9.0, as far as AttnSweep.cuh uses it:
// a block's threads are fibers, of which one runs at a time, and which one is
// drawn. Copies by TMA and products by wgmma wait in a queue and are done at a
// moment that is drawn too, so that what overwrites a tile too early, or reads
// one too soon, gives wrong numbers. Where all wait there is an error.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __CUDA_ARCH_FEAT_SM90_ALL

inline struct {
  unsigned x;
} threadIdx, blockIdx, gridDim;

struct __nv_bfloat16 {
  uint16_t value;

  static float number(uint16_t bits) {
    return std::bit_cast<float>(uint32_t{bits} << 16);
  }
  static uint16_t bits(float x) { // to nearest, ties to even
    const auto all = std::bit_cast<uint32_t>(x);
    return x != x ? 0x7FFF : (all + 0x7FFF + (all >> 16 & 1)) >> 16;
  }
};

struct __half {
  uint16_t value;

  static float number(uint16_t bits) {
    return std::bit_cast<_Float16>(bits);
  }
  static uint16_t bits(float x) {
    return std::bit_cast<uint16_t>(static_cast<_Float16>(x));
  }
};

inline float __fdividef(float x, float y) {
  return x / y;
}

inline void require(bool holds, const char* otherwise) {
  if (!holds) {
    throw std::runtime_error(otherwise);
  }
}

// ---- TMA --------------------------------------------------------------------

struct CUtensorMap {
  uint8_t* data;
  uint64_t sizes[5], strides[5]; // bytes
  unsigned box[2];
};

// Returns where TMA and wgmma have a byte of a tile of 128-byte rows: the
// number of its 16 bytes is changed by that of its row.
inline uint32_t swizzled_by_hardware(uint32_t address) {
  return address ^ (address >> 7 & 7) << 4;
}

// A box of a matrix of 16-bit elements, 64 columns wide.
class Box {
 public:
  Box(const CUtensorMap& map, const int (&at)[5]) : map_(map) {
    std::copy(at, at + 5, at_);
  }

  int bytes() const {
    return map_.box[0] * map_.box[1] * 2;
  }

  // Calls fn(byte of the tile, element), where that is null beyond the matrix.
  template <class F>
  void each(F fn) const {
    for (unsigned row = 0; row < map_.box[1]; ++row) {
      for (unsigned column = 0; column < map_.box[0]; ++column) {
        int64_t place[] = {
            at_[0] + column, at_[1] + row, at_[2], at_[3], at_[4]};
        int64_t offset = 0;
        bool is_in = true;
        for (int i = 0; i < 5; ++i) {
          is_in = is_in && place[i] >= 0 && uint64_t(place[i]) < map_.sizes[i];
          offset += place[i] * map_.strides[i];
        }
        fn(swizzled_by_hardware(row * 128 + column * 2),
           is_in ? reinterpret_cast<uint16_t*>(map_.data + offset) : nullptr);
      }
    }
  }

 private:
  CUtensorMap map_;
  int at_[5];
};

// ---- a block ----------------------------------------------------------------

struct Barrier {
  int count, arrivals;
  int bytes = 0, phase = 0;
  bool is_shown = false;

  void change(int arrived, int expected) {
    arrivals -= arrived;
    bytes += expected;
    require(arrivals >= 0, "an arrival too many");
    if (arrivals == 0 && bytes == 0) {
      phase ^= 1;
      arrivals = count;
    }
  }
};

struct Product {
  int columns;
  bool adds, is_major;
  uint64_t a, b; // descriptors

  bool operator==(const Product&) const = default;
};

// The products of a warpgroup: they are done in order, when all of its threads
// have issued them.
struct Products {
  struct Entry {
    Product product;
    void (*run)(const Entry&);
    unsigned rank;
    int issued = 0;
    float* c[128];
    const uint32_t* a[128];
  };
  std::deque<Entry> queue;
  int done = 0;
};

struct Thread {
  ucontext_t context;
  std::function<bool()> is_ready; // or none
  bool has_ended = false;
  // Products issued; what that was at the end of each group
  int issued = 0;
  std::vector<int> groups;
  bool is_fenced = false;
  // Stores of each group that have not read their tile
  std::vector<std::shared_ptr<int>> stores{std::make_shared<int>(0)};
};

// Threads wait here for each other.
struct Meeting {
  int come = 0, round = 0;
};

// What the lanes of a warp do together.
struct Together {
  struct Lane {
    uint32_t* registers = nullptr;
    uint32_t address = 0;
  };
  std::array<Lane, 32> lanes;
  Meeting meeting;
};

class Machine {
 public:
  static constexpr uint32_t kBase = 528; // of shared memory: of any alignment
  static constexpr int kSize = 233472, kStack = 1 << 16;

  std::mt19937 random;
  std::map<uint64_t*, Barrier> barriers;

  // Runs a block: `body` is what each thread does.
  void run(int threads, std::function<void()> body);

  Thread& thread() {
    return threads_[current_];
  }

  Barrier& at(uint64_t* barrier) {
    const auto found = barriers.find(barrier);
    require(found != barriers.end(), "no barrier");
    return found->second;
  }

  template <typename T>
  T& at(uint32_t address) {
    require(
        address >= kBase && address + sizeof(T) <= kBase + kSize,
        "beyond shared memory");
    return *reinterpret_cast<T*>(memory_() + (address - kBase));
  }

  // Lets others run, perhaps.
  void pass() {
    if (random() % 32 == 0) {
      until([] { return true; });
    }
  }

  void until(std::function<bool()> is_ready) {
    thread().is_ready = std::move(is_ready);
    swapcontext(&thread().context, &main_);
  }

  void later(std::function<void()> copy) {
    copies_.push_back({rank(copies_are_early_), std::move(copy)});
    pass();
  }

  // Does fn(lanes) when all lanes of the warp have come.
  template <class F>
  void of_warp(Together::Lane lane, F fn) {
    auto& together = warps_[current_ / 32];
    together.lanes[current_ % 32] = lane;
    meet(together.meeting, 32, [&] { fn(together.lanes); });
  }

  void of_block() {
    meet(block_, threads_.size(), [] {});
  }

  Products& products_of_own() {
    return products_[current_ / 128];
  }

  template <typename T>
  void multiply(const Product& product, float* c, const uint32_t* a) {
    auto& own = products_of_own();
    require(thread().is_fenced, "no fence before a product");
    const int place = thread().issued++ - own.done;
    if (place == int(own.queue.size())) {
      own.queue.push_back(
          {product, &multiply_now<T>, rank(products_are_early_)});
    }
    auto& entry = own.queue[place];
    require(entry.product == product, "a warpgroup's products differ");
    entry.c[current_ % 128] = c;
    entry.a[current_ % 128] = a;
    ++entry.issued;
    pass();
  }

  // A lane of this warp has written here, unseen by TMA.
  void hide(uint32_t address, int lane) {
    unshown_[address / 16] = current_ / 32 * 32 + lane + 1;
  }
  bool is_unshown(uint32_t address) const {
    return unshown_[address / 16] != 0;
  }
  void show_writes() {
    std::replace(unshown_.begin(), unshown_.end(), current_ + 1, 0);
  }

 private:
  static uint8_t* memory_();
  static void enter();

  template <typename T>
  static void multiply_now(const Products::Entry& entry);

  // Returns when `count` threads have come, the last of which does fn().
  template <class F>
  void meet(Meeting& meeting, int count, F fn) {
    const int round = meeting.round;
    if (++meeting.come == count) {
      fn();
      meeting = {0, round + 1};
    } else {
      until([&meeting, round] { return meeting.round != round; });
    }
  }

  unsigned rank(bool is_early) {
    return unsigned(random()) >> (is_early ? 6 : 0);
  }

  bool do_one_later();

  std::deque<Thread> threads_;
  std::vector<uint8_t> stacks_;
  std::function<void()> body_;
  ucontext_t main_;
  int current_ = 0;
  std::string fault_;
  struct Copy {
    unsigned rank;
    std::function<void()> run;
  };
  std::vector<Copy> copies_;
  std::array<Products, 4> products_;
  std::array<Together, 16> warps_;
  bool copies_are_early_, products_are_early_;
  Meeting block_;
  std::vector<int> unshown_;
};

inline Machine& machine() {
  static Machine machine;
  return machine;
}

inline void __syncthreads() {
  machine().of_block();
}

namespace at::native::attn_sweep {
alignas(16) inline uint8_t memory[Machine::kSize];
}

inline uint8_t* Machine::memory_() {
  return at::native::attn_sweep::memory;
}

// c = [c +] A B, as the layouts of wgmma have it.
template <typename T>
void Machine::multiply_now(const Products::Entry& entry) {
  const auto& [columns, adds, is_major, a, b] = entry.product;
  const auto element =
      [](uint64_t descriptor, int row, int column, bool major) {
        const auto offset = [&](int bit) {
          return (descriptor >> bit & 0x3FFF) << 4;
        };
        require(descriptor >> 62 == 1, "not swizzled by 128 bytes");
        // Rows of 128 bytes, 8 to an atom. If major, columns go on in another.
        const auto place =
            offset(0) + row / 8 * offset(32) + row % 8 * 128 +
            (major ? column / 64 * offset(16) + column % 64 * 2 : column * 2);
        return T::number(machine().at<uint16_t>(swizzled_by_hardware(place)));
      };
  float left[64][16];
  for (int row = 0; row < 64; ++row) {
    for (int k = 0; k < 16; ++k) {
      if (entry.a[0] == nullptr) {
        left[row][k] = element(a, row, k, false);
      } else {
        const int thread = row / 16 * 32 + row % 8 * 4 + k % 8 / 2;
        const auto pair = entry.a[thread][row % 16 / 8 + k / 8 * 2];
        left[row][k] = T::number(k % 2 ? pair >> 16 : pair & 0xFFFF);
      }
    }
  }
  for (int column = 0; column < columns; ++column) {
    float right[16];
    for (int k = 0; k < 16; ++k) {
      right[k] =
          is_major ? element(b, k, column, true) : element(b, column, k, false);
    }
    for (int row = 0; row < 64; ++row) {
      const int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
      float& c =
          entry.c[thread][column / 8 * 4 + row % 16 / 8 * 2 + column % 2];
      float sum = adds ? c : 0;
      for (int k = 0; k < 16; ++k) {
        sum += left[row][k] * right[k];
      }
      c = sum;
    }
  }
}

// Does the copy or product that is due and has the lowest rank, which was drawn
// when it was issued, so that one may be late for long. Returns false if there
// is none.
inline bool Machine::do_one_later() {
  Products* first = nullptr;
  for (auto& own : products_) {
    const bool is_due = !own.queue.empty() && own.queue.front().issued == 128;
    if (is_due &&
        (!first || own.queue.front().rank < first->queue.front().rank)) {
      first = &own;
    }
  }
  const auto copy = std::min_element(
      copies_.begin(), copies_.end(), [](const Copy& x, const Copy& y) {
        return x.rank < y.rank;
      });
  if (copy != copies_.end() &&
      (!first || copy->rank < first->queue.front().rank)) {
    copy->run();
    copies_.erase(copy);
  } else if (first) {
    first->queue.front().run(first->queue.front());
    first->queue.pop_front();
    ++first->done;
  } else {
    return false;
  }
  return true;
}

inline void Machine::enter() {
  auto& self = machine();
  try {
    self.body_();
    for (const auto& unread : self.thread().stores) {
      require(*unread == 0, "a thread ends while TMA reads its tile");
    }
  } catch (const std::exception& e) {
    self.fault_ = e.what();
  }
  self.thread().has_ended = true;
  setcontext(&self.main_);
}

inline void Machine::run(int threads, std::function<void()> body) {
  body_ = std::move(body);
  fault_.clear();
  barriers.clear();
  copies_.clear();
  products_ = {};
  warps_ = {};
  block_ = {};
  unshown_.assign((kBase + kSize) / 16 + 1, 0);
  std::memset(memory_(), 0xFF, kSize);
  stacks_.resize(size_t{kStack} * threads);
  threads_.clear();
  threads_.resize(threads);
  for (int i = 0; i < threads; ++i) {
    auto& context = threads_[i].context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks_.data() + size_t{kStack} * i;
    context.uc_stack.ss_size = kStack;
    makecontext(&context, &Machine::enter, 0);
  }
  // How soon copies and products are done (0: not before all threads wait), and
  // who is first asked to run.
  const int soon = std::array{0, 0, 5, 60}[random() % 4];
  const int first = random() % threads;
  copies_are_early_ = random() % 3 == 0;
  products_are_early_ = random() % 2 == 0;
  int left = threads;
  while (left > 0 && fault_.empty()) {
    if (int(random() % 100) < soon) {
      try {
        do_one_later();
      } catch (const std::exception& e) {
        fault_ = e.what();
        break;
      }
    }
    const int start = random() % 2 ? first : random() % threads;
    int found = -1;
    for (int i = 0; i < threads && found < 0; ++i) {
      const int which = (start + i) % threads;
      auto& thread = threads_[which];
      if (!thread.has_ended && (!thread.is_ready || thread.is_ready())) {
        found = which;
      }
    }
    if (found < 0) {
      if (!do_one_later()) {
        fault_ = "all wait";
      }
      continue;
    }
    current_ = threadIdx.x = found;
    thread().is_ready = nullptr;
    swapcontext(&main_, &thread().context);
    left -= thread().has_ended;
  }
  while (fault_.empty() && do_one_later()) {
  }
  require(fault_.empty(), fault_.c_str());
}
