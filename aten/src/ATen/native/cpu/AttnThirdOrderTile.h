#pragma once

#include <ATen/native/cpu/AttnSecondOrderTile.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// The inputs of a tile, their tangents u, and tangents w. One that is zero has
// no data.
template <typename S>
struct ThirdOrderInputs : TangentTile<S> {
  Matrix<const S> w_grad_output, w_q, w_k, w_v;
};

// The results of SecondOrderArgs, for the tangents u, differentiated along
// tangents w of q, k, v and grad_output. With A_u, S̄_u and so on the
// derivatives of attn and of the gradient of the scores:
//   output_tangent = A_uw v + A_u w_v + A_w u_v
//   grad_q = S̄_uw k + S̄_w u_k + S̄_u w_k
//   grad_k = S̄_uwᵀ q + S̄_wᵀ u_q + S̄_uᵀ w_q
//   grad_v = A_uwᵀ grad_output + A_uᵀ w_grad_output
// u and w each have a tangent of q or of k. grad_output may be missing, too.
template <typename S>
struct ThirdOrderArgs : SecondOrderArgs<S> {
  MatrixBatch<const S> w_grad_output, w_q, w_k, w_v;

  ThirdOrderInputs<S> tile(
      int64_t b, int64_t i, int64_t j, int64_t rows, int64_t cols) const {
    const auto block = [&](const auto& x, int64_t row, int64_t count) {
      return x ? x[b].block(row, 0, count, x[b].cols) : Matrix<const S>{};
    };
    return {
        SecondOrderArgs<S>::tile(b, i, j, rows, cols),
        block(w_grad_output, i, rows),
        block(w_q, i, rows),
        block(w_k, j, cols),
        block(w_v, j, cols)};
  }
};

// Computes the tiles of ThirdOrderArgs: attn and A_u as SecondOrderTile does,
// and what w makes of them.
template <typename Tiles>
class ThirdOrderTile : SecondOrderTile<Tiles> {
  using Base = SecondOrderTile<Tiles>;

 public:
  using S = typename Base::S;
  using T = typename Base::T;
  using Base::LONGEST, Base::MIN_TILE, Base::ROW_STEP;

  struct Layout : Base::Layout {
    int64_t x_w, attn_uw, scores_w, sums[2];

    Layout(const ThirdOrderArgs<S>& args, int64_t rows, int64_t cols)
        : Base::Layout(args, rows, cols) {
      auto& scratch = this->scratch;
      const auto size = this->tiles.tile_size;
      x_w = scratch.add(size);
      attn_uw = scratch.add(size);
      scores_w = scratch.add(size);
      const bool adds = args.w_grad_output || args.w_v;
      for (auto& sum : sums) {
        sum = scratch.add(adds ? size : 0);
      }
      this->size = scratch.size();
    }
  };

  ThirdOrderTile(const Layout& layout, T* scratch)
      : Base(layout, scratch), at_(layout) {}

  // Makes the tiles. With the products of q, k and their tangents
  //   X_u = u_q kᵀ + q u_kᵀ, X_w = w_q kᵀ + q w_kᵀ, X_uw = u_q w_kᵀ + w_q u_kᵀ
  // slope = scale (1 - attn²), or 0 where attn is masked, and bend = -2 scale
  // attn:
  //   A_u = slope X_u, A_w = slope X_w, A_uw = slope X_uw + bend A_u X_w
  // S̄_u, S̄_w and S̄_uw follow below, product by product.
  void start(const ThirdOrderInputs<S>& inputs, bool with_scores) {
    Base::start(inputs, false);
    w_ = inputs;
    w_.w_k = this->kept(w_.w_k);
    w_.w_v = this->kept(w_.w_v);
    x_w_ = this->tile_at(at_.x_w);
    attn_uw_ = this->tile_at(at_.attn_uw);
    scores_w_ = this->tile_at(at_.scores_w);
    has_mixed_ = exist(q_tangent_, w_.w_k) || exist(w_.w_q, k_tangent_);
    has_u_ = has_w_ = false;
    store_sum(x_w_, w_.w_q, x_.k, x_.q, w_.w_k, attn_uw_);
    if (has_mixed_) {
      store_sum(attn_uw_, q_tangent_, w_.w_k, w_.w_q, k_tangent_, scores_w_);
    }
    add_grad_output(with_scores && x_.grad_output.data != nullptr);
    if (with_scores) {
      add_tangents();
      for (const auto& tile : {scores_, scores_tangent_, scores_w_}) {
        this->mask(tile);
      }
    }
    this->mask(attn_uw_);
  }

  // Adds to one of SecondOrderArgs' gradients.
  template <typename O>
  void add(size_t gradient, bool accumulate, O* total) {
    const auto of_u = has_u_ ? scores_tangent_ : Own{};
    const auto of_w = has_w_ ? scores_w_ : Own{};
    if (gradient == 0) {
      this->add_products(
          true,
          {{scores_, x_.k}, {of_w, k_tangent_}, {of_u, w_.w_k}},
          accumulate,
          total);
    } else if (gradient == 1) {
      this->add_products(
          false,
          {{scores_, x_.q}, {of_w, q_tangent_}, {of_u, w_.w_q}},
          accumulate,
          total);
    } else if (gradient == 2) {
      this->add_products(
          false,
          {{attn_uw_, x_.grad_output}, {attn_tangent_, w_.w_grad_output}},
          accumulate,
          total);
    } else {
      if (v_tangent_.data != nullptr) {
        make_attn_w();
      }
      this->add_products(
          true,
          {{attn_uw_, x_.v}, {attn_tangent_, w_.w_v}, {x_w_, v_tangent_}},
          accumulate,
          total);
    }
  }

 private:
  using Base::attn_, Base::attn_tangent_, Base::k_tangent_, Base::q_tangent_,
      Base::scores_, Base::scores_tangent_, Base::tiles_, Base::v_tangent_,
      Base::x_;
  using typename Base::E, typename Base::Own;

  static bool exist(const Matrix<const S>& a, const Matrix<const S>& b) {
    return a.data != nullptr && b.data != nullptr;
  }

  // tile = a bᵀ + c dᵀ, or 0 where attn is masked. A product that lacks an
  // operand is 0. `other` is overwritten.
  void store_sum(
      const Own& tile,
      const Matrix<const S>& a,
      const Matrix<const S>& b,
      const Matrix<const S>& c,
      const Matrix<const S>& d,
      const Own& other) {
    for_products(
        tile,
        a,
        b,
        other,
        c,
        d,
        [tile](
            int64_t i,
            int64_t j,
            int64_t /*count*/,
            const Pair<T>& x,
            const Pair<T>& y)
            C10_ALWAYS_INLINE_ATTRIBUTE { Tiles::store(tile, i, j, x + y); });
    this->mask(tile);
  }

  // Calls fn for a bᵀ and c dᵀ, of which any operand may be missing.
  template <typename F>
  void for_products(
      const Own& first,
      const Matrix<const S>& a,
      const Matrix<const S>& b,
      const Own& second,
      const Matrix<const S>& c,
      const Matrix<const S>& d,
      const F& fn) {
    const Matrix<const S> none{};
    tiles_.scores(
        exist(a, b) ? a : none,
        b,
        first,
        c,
        exist(c, d) ? d : none,
        second,
        fn);
  }

  // Makes A_uw and, if `with_scores`, those terms of S̄_u, S̄_w and S̄_uw that
  // have P = grad_output vᵀ or P_u = grad_output u_vᵀ:
  //   S̄_u = slope P_u + bend A_u P
  //   S̄_w = slope bend X_w P
  //   S̄_uw = slope bend (X_w P_u + X_uw P) - 2 scale² (1 - 3 attn²) A_u X_w P
  void add_grad_output(bool with_scores) {
    const Pair<T> scale(static_cast<T>(x_.form.scale));
    const Pair<T> bend_of(static_cast<T>(-2 * x_.form.scale));
    const Pair<T> third_of(static_cast<T>(-2 * x_.form.scale * x_.form.scale));
    const Pair<T> one(T(1)), three(T(3));
    const bool has_v = with_scores && v_tangent_.data != nullptr;
    const Matrix<const S> grad =
        with_scores ? x_.grad_output : Matrix<const S>{};
    for_products(
        scores_,
        grad,
        x_.v,
        scores_tangent_,
        grad,
        v_tangent_,
        [&,
         has_mixed = has_mixed_,
         attn = attn_,
         attn_u = attn_tangent_,
         x_w = x_w_,
         attn_uw = attn_uw_,
         scores = scores_,
         scores_u = scores_tangent_,
         scores_w = scores_w_](
            int64_t i,
            int64_t j,
            int64_t count,
            const Pair<T>& p,
            const Pair<T>& p_u) C10_ALWAYS_INLINE_ATTRIBUTE {
          const auto y = Tiles::load(attn, i, j, count);
          const auto a_u = Tiles::load(attn_u, i, j, count);
          const auto bent = bend_of * y * Tiles::load(x_w, i, j, count);
          const auto slope = tanh_backward(scale, y);
          auto a_uw = bent * a_u;
          if (with_scores) {
            const auto third = third_of * (one - three * y * y);
            auto sum = third * a_u * Tiles::load(x_w, i, j, count) * p;
            auto sum_u = bend_of * y * a_u * p;
            if (has_v) {
              sum = sum + slope * bent * p_u;
              sum_u = sum_u + slope * p_u;
            }
            if (has_mixed) {
              const auto x_uw = Tiles::load(attn_uw, i, j, count);
              sum = sum + slope * bend_of * y * x_uw * p;
            }
            Tiles::store(scores, i, j, sum);
            Tiles::store(scores_u, i, j, sum_u);
            Tiles::store(scores_w, i, j, slope * bent * p);
          }
          if (has_mixed) {
            a_uw = a_uw + slope * Tiles::load(attn_uw, i, j, count);
          }
          Tiles::store(attn_uw, i, j, a_uw);
        });
    has_u_ = has_w_ = with_scores;
  }

  // Adds the terms that have P_w = grad_output w_vᵀ + w_grad_output vᵀ or
  // P_uw = w_grad_output u_vᵀ:
  //   S̄_w += slope P_w
  //   S̄_uw += bend A_u P_w + slope P_uw
  void add_tangents() {
    const auto& w_grad = w_.w_grad_output;
    if (!exist(x_.grad_output, w_.w_v) && w_grad.data == nullptr) {
      return;
    }
    const Pair<T> scale(static_cast<T>(x_.form.scale));
    const Pair<T> bend_of(static_cast<T>(-2 * x_.form.scale));
    const Pair<T> zero(T(0));
    const auto first = this->tile_at(at_.sums[0]);
    const auto second = this->tile_at(at_.sums[1]);
    const auto add = [&](bool adds,
                         bool of_w,
                         int64_t i,
                         int64_t j,
                         int64_t count,
                         const Pair<T>& p) C10_ALWAYS_INLINE_ATTRIBUTE {
      const auto y = Tiles::load(attn_, i, j, count);
      const auto slope = tanh_backward(scale, y);
      auto sum = adds ? Tiles::load(scores_, i, j, count) : zero;
      if (of_w) {
        const auto a_u = Tiles::load(attn_tangent_, i, j, count);
        auto sum_w = adds ? Tiles::load(scores_w_, i, j, count) : zero;
        Tiles::store(scores_w_, i, j, sum_w + slope * p);
        sum = sum + bend_of * y * a_u * p;
      } else {
        sum = sum + slope * p;
      }
      Tiles::store(scores_, i, j, sum);
    };
    for_products(
        first,
        x_.grad_output,
        w_.w_v,
        second,
        w_grad,
        x_.v,
        [&, adds = has_w_](
            int64_t i,
            int64_t j,
            int64_t count,
            const Pair<T>& x,
            const Pair<T>& y) C10_ALWAYS_INLINE_ATTRIBUTE {
          add(adds, true, i, j, count, x + y);
        });
    has_w_ = true;
    if (exist(w_grad, v_tangent_)) {
      tiles_.scores(
          w_grad,
          v_tangent_,
          first,
          [&](int64_t i, int64_t j, int64_t count, const Pair<T>& x)
              C10_ALWAYS_INLINE_ATTRIBUTE {
                add(true, false, i, j, count, x);
              });
    }
  }

  // A_w = slope X_w, in the place of X_w, which is not needed after this.
  void make_attn_w() {
    const Pair<T> scale(static_cast<T>(x_.form.scale));
    const Matrix<const S> none{};
    tiles_.scores(
        none,
        none,
        scores_w_,
        none,
        none,
        scores_w_,
        [&, attn = attn_, x_w = x_w_](
            int64_t i,
            int64_t j,
            int64_t count,
            const Pair<T>& /*x*/,
            const Pair<T>& /*y*/) C10_ALWAYS_INLINE_ATTRIBUTE {
          const auto y = Tiles::load(attn, i, j, count);
          const auto x = Tiles::load(x_w, i, j, count);
          Tiles::store(x_w, i, j, tanh_backward(scale, y) * x);
        });
  }

  const Layout& at_;
  ThirdOrderInputs<S> w_{};
  bool has_mixed_ = false, has_u_ = false, has_w_ = false;
  Own x_w_{}, attn_uw_{}, scores_w_{};
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
