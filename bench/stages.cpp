// Times the stages of torch.attn's forward on tiles, by the kernel's own
// functions: stages.py.

#include <ATen/native/cpu/AttnFmaTiles.h>
#include <ATen/native/cpu/AttnForwardTile.h>

#include <chrono>
#include <cstdlib>
#include <memory>

namespace {

using namespace at::native::attn_cpu;
using T = float;
using Fma = FmaProducts<T>;
using Kernel = ForwardTile<FmaTiles<T>>;

constexpr int64_t TASK_ROWS = 1024, ROWS = 96,
                  COLS = NC;         // of a task, of a tile
constexpr int64_t STORED = 16 << 20; // floats of an attn that no cache holds

struct Memory {
  std::unique_ptr<T, void (*)(void*)> data;
  explicit Memory(int64_t size)
      : data(
            static_cast<T*>(
                std::aligned_alloc(64, (size + 63) / 64 * 64 * sizeof(T))),
            std::free) {
    for (int64_t i = 0; i < size; ++i) {
      data.get()[i] = static_cast<T>(i * 37 % 101 - 50) / 100;
    }
  }
  operator T*() const {
    return data.get();
  }
  Matrix<const T> matrix(int64_t rows, int64_t cols) const {
    return {data.get(), rows, cols, cols, 1};
  }
};

double now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(time).count();
}

// Returns the seconds of a call, the least of some tens.
template <typename F>
double seconds(const F& fn) {
  double least = 1e9;
  for (const double end = now() + 0.05; now() < end;) {
    constexpr int CALLS = 10;
    const double begin = now();
    for (int i = 0; i < CALLS; ++i) {
      fn();
    }
    least = std::min(least, (now() - begin) / CALLS);
  }
  return least;
}

} // namespace

// Cycles a second: additions that wait for each other take one each. Those of a
// constant would not: recent processors add it where registers are renamed.
extern "C" double frequency() {
  constexpr int64_t ADDITIONS = 10'000'000;
  return ADDITIONS / seconds([] {
           int64_t sum = 0;
           const int64_t one = 1;
           for (int64_t i = 0; i < ADDITIONS / 10; ++i) {
             asm volatile(
                 "add %1, %0\n add %1, %0\n add %1, %0\n add %1, %0\n"
                 "add %1, %0\n add %1, %0\n add %1, %0\n add %1, %0\n"
                 "add %1, %0\n add %1, %0\n"
                 : "+r"(sum)
                 : "r"(one));
           }
         });
}

// Writes the seconds for one element of attn: packing k and v, scores, tanh,
// storing attn, output, all of it by the kernel, and ATen's tanh.
extern "C" void stages(int64_t d, double* found) {
  const Memory q(TASK_ROWS * d), k(COLS * d), v(COLS * d), out(TASK_ROWS * d);
  const Memory attn(STORED);
  const Kernel::Layout layout(TASK_ROWS, TASK_ROWS, COLS, d, d);
  const Memory scratch(layout.size), k_panels(Fma::packed_size(d, COLS)),
      v_panels(Fma::packed_size(COLS, d));
  const auto rows = q.matrix(ROWS, d), keys = k.matrix(COLS, d),
             values = v.matrix(COLS, d);
  FmaTiles<T> tiles(layout.tiles, scratch);
  const auto tile = tiles.tile(scratch + layout.tile, ROWS, COLS);
  const auto tanh =
      [](int64_t count, const Pair<T>& x)
          C10_ALWAYS_INLINE_ATTRIBUTE { return attn_tanh_for<T>(x, count); };

  found[0] = seconds([&] {
               Fma::pack(k_panels, keys.t());
               if (!FewColumns<T>::fits(d)) {
                 Fma::right(v_panels, values, TASK_ROWS);
               }
             }) /
             (TASK_ROWS * COLS);
  tiles.multiply(false, rows, keys, tile);
  found[1] =
      seconds([&] { tiles.multiply(true, rows, keys, tile); }) / (ROWS * COLS);
  found[2] = seconds([&] { tiles.map(tile, {}, false, tanh); }) / (ROWS * COLS);
  int64_t place = 0;
  const auto next_attn = [&](int64_t tile_rows) {
    place = place + tile_rows * COLS > STORED ? 0 : place;
    const Matrix<T> result{attn + place, tile_rows, COLS, COLS, 1};
    place += tile_rows * COLS;
    return result;
  };
  const double stored =
      seconds([&] { tiles.map(tile, next_attn(ROWS), true, tanh); });
  found[3] = std::max(0.0, stored / (ROWS * COLS) - found[2]);
  const auto add = [&](bool next) {
    tiles.add(next, true, true, tile, values, TASK_ROWS, static_cast<T*>(out));
  };
  add(false);
  found[4] = seconds([&] { add(true); }) / (ROWS * COLS);
  Kernel kernel(layout, scratch);
  found[5] = seconds([&] {
               kernel.forward(
                   true,
                   q.matrix(TASK_ROWS, d),
                   keys,
                   values,
                   next_attn(TASK_ROWS),
                   Form{},
                   true,
                   static_cast<T*>(out));
             }) /
             (TASK_ROWS * COLS);
  const auto aten_tanh = [](int64_t /*count*/, const Pair<T>& x)
                             C10_ALWAYS_INLINE_ATTRIBUTE { return x.tanh(); };
  found[6] =
      seconds([&] { tiles.map(tile, {}, false, aten_tanh); }) / (ROWS * COLS);
}
