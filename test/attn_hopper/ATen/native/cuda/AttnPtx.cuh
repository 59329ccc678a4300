// The instructions of AttnPtx.cuh, done by a CPU: see machine.h. What PTX calls
// asynchronous happens later, at a moment that is drawn.
#pragma once
#include <machine.h>

#include <cmath>
#include <type_traits>

namespace at::native::attn_sweep {

using std::min;

// ---- threads ----------------------------------------------------------------

template <int kMost>
void give_registers() {}

template <int kMost>
void take_registers() {}

inline int of_warp(int x) {
  return x;
}

inline void warp_wait() {
  machine().of_warp({}, [](auto&) {});
}

inline void hide(int&) {}

template <int n>
void pin(float (&)[n]) {
  asm volatile("" ::: "memory");
}

inline uint32_t address(const void* p) {
  return Machine::kBase + (static_cast<const uint8_t*>(p) - memory);
}

// ---- mbarrier ---------------------------------------------------------------

inline void init(uint64_t* barrier, int arrivals) {
  machine().barriers[barrier] = {arrivals, arrivals};
}

inline void show_barriers() {
  for (auto& [_, barrier] : machine().barriers) {
    barrier.is_shown = true;
  }
}

inline void arrive(uint64_t* barrier) {
  machine().at(barrier).change(1, 0);
  machine().pass();
}

inline void expect(uint64_t* barrier, int bytes) {
  machine().at(barrier).change(1, bytes);
  machine().pass();
}

inline void wait(uint64_t* barrier, int parity) {
  auto& found = machine().at(barrier);
  machine().until([&found, parity] { return found.phase != parity; });
}

// ---- TMA --------------------------------------------------------------------

using Place = int[5];

template <bool kOnce>
void load_box(
    uint32_t to, const CUtensorMap* map, const Place& from, uint64_t* full) {
  auto& barrier = machine().at(full);
  require(barrier.is_shown, "TMA does not see the barrier");
  require(to % 1024 == 0, "a tile is not where its swizzle begins");
  machine().later([=, &barrier, box = Box(*map, from)] {
    box.each([&](int byte, uint16_t* element) {
      machine().at<uint16_t>(to + byte) = element ? *element : 0;
    });
    barrier.change(0, -box.bytes());
  });
}

inline void store_box(uint32_t from, const CUtensorMap* map, const Place& to) {
  require(from % 1024 == 0, "a tile is not where its swizzle begins");
  auto& unread = machine().thread().stores.back();
  ++*unread;
  machine().later([=, box = Box(*map, to)] {
    box.each([&](int byte, uint16_t* element) {
      require(!machine().is_unshown(from + byte), "TMA does not see a write");
      if (element) {
        *element = machine().at<uint16_t>(from + byte);
      }
    });
    --*unread;
  });
}

inline void store_commit() {
  machine().thread().stores.push_back(std::make_shared<int>(0));
}

template <int kPending>
void store_wait() {
  const auto& stores = machine().thread().stores; // the last one is open
  const int most = stores.size() - 1 - kPending;
  machine().until([&, most] {
    return std::all_of(
        stores.begin(), stores.begin() + std::max(most, 0), [](auto& unread) {
          return *unread == 0;
        });
  });
}

inline void show_writes() {
  machine().show_writes();
}

// ---- wgmma ------------------------------------------------------------------

inline void wgmma_fence() {
  machine().thread().is_fenced = true;
}

inline void wgmma_commit() {
  auto& thread = machine().thread();
  thread.groups.push_back(thread.issued);
  thread.is_fenced = false;
  machine().pass();
}

template <int kPending>
void wgmma_wait() {
  const auto& groups = machine().thread().groups;
  const int place = groups.size() - 1 - kPending;
  const int wanted = place < 0 ? 0 : groups[place];
  const auto& own = machine().products_of_own();
  machine().until([&own, wanted] { return own.done >= wanted; });
}

template <bool kAdd, typename T, int n>
void multiply(T, float (&c)[n], uint64_t a, uint64_t b) {
  machine().multiply<T>({2 * n, kAdd, false, a, b}, c, nullptr);
}

template <bool kAdd, bool kMajor, typename T, int n>
void multiply(T, float (&c)[n], const uint32_t* a, uint64_t b) {
  machine().multiply<T>({2 * n, kAdd, kMajor, 0, b}, c, a);
}

// ---- tiles between registers and shared memory ------------------------------

template <bool kTransposed>
void read(uint32_t* a, uint32_t from) {
  machine().of_warp({a, from}, [](auto& lanes) {
    for (int i = 0; i < 128; ++i) { // register i / 32 of lane i % 32
      const int matrix = i / 32, lane = i % 32;
      uint32_t pair = 0;
      for (int e = 0; e < 2; ++e) {
        const int row = kTransposed ? lane % 4 * 2 + e : lane / 4;
        const int column = kTransposed ? lane / 4 : lane % 4 * 2 + e;
        const auto place = lanes[matrix * 8 + row].address + column * 2;
        pair |= uint32_t{machine().at<uint16_t>(place)} << 16 * e;
      }
      lanes[lane].registers[matrix] = pair;
    }
  });
}

inline void write(uint32_t to, const uint32_t* a) {
  machine().of_warp({const_cast<uint32_t*>(a), to}, [](auto& lanes) {
    for (int i = 0; i < 128; ++i) {
      const int matrix = i / 32, lane = i % 32;
      const auto place = lanes[matrix * 8 + lane / 4].address + lane % 4 * 4;
      machine().at<uint32_t>(place) = lanes[lane].registers[matrix];
      machine().hide(place, lane);
    }
  });
}

template <typename T>
uint32_t pack(float low, float high) {
  return uint32_t{T::bits(low)} | uint32_t{T::bits(high)} << 16;
}

template <typename T>
float unpack(uint32_t pair, int i) {
  return T::number(i ? pair >> 16 : pair & 0xFFFF);
}

inline float tanh_approx(float x) {
  return std::tanh(x);
}

} // namespace at::native::attn_sweep
