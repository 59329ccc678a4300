// @@ after: #include <ATen/native/Activation.h>
#include <ATen/native/Attn.h>
// @@ before: } // namespace torch::autograd::generated::details
// The derivatives of attn. A tensor that is undefined or a ZeroTensor is zero
// in these formulas: no product with it is computed, and a result that is zero
// is undefined.
static bool attn_is_zero(const Tensor& x) {
  return !x.defined() || x._is_zerotensor();
}

static Tensor attn_add(const Tensor& x, const Tensor& y) {
  if (attn_is_zero(x) || attn_is_zero(y)) {
    return attn_is_zero(x) ? (attn_is_zero(y) ? Tensor() : y) : x;
  }
  return x + y;
}

static Tensor attn_mul(const Tensor& x, const Tensor& y) {
  return attn_is_zero(x) || attn_is_zero(y) ? Tensor() : x * y;
}

static Tensor attn_matmul(const Tensor& x, const Tensor& y) {
  return attn_is_zero(x) || attn_is_zero(y) ? Tensor() : at::matmul(x, y);
}

static Tensor attn_mT(const Tensor& x) {
  return attn_is_zero(x) ? Tensor() : x.mT();
}

static Tensor attn_conj(const Tensor& x) {
  return attn_is_zero(x) ? Tensor() : x.conj();
}

static Tensor attn_mH(const Tensor& x) {
  return attn_conj(attn_mT(x));
}

// Either gradient may be undefined, that is zero; with both undefined, so are
// all results.
std::tuple<Tensor, Tensor, Tensor> attn_backward(
    const Tensor& grad_output,
    const Tensor& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    std::array<bool, 3> grad_input_mask) {
  if (!grad_output.defined() && !grad_attn.defined()) {
    return std::make_tuple(Tensor(), Tensor(), Tensor());
  }
  return at::_attn_backward(
      grad_output, grad_attn, q, k, v, attn, grad_input_mask);
}

// scores_t = q_t kᵀ + q k_tᵀ
static Tensor attn_scores_jvp(
    const Tensor& q_p,
    const Tensor& q_t,
    const Tensor& k_p,
    const Tensor& k_t) {
  return attn_add(attn_matmul(q_t, attn_mT(k_p)), attn_matmul(q_p, attn_mT(k_t)));
}

// attn_t = (1 - attn²) ∘ scores_t, output_t = attn_t v + attn v_t
std::tuple<Tensor, Tensor> attn_jvp(
    const Tensor& q_p,
    const Tensor& q_t,
    const Tensor& k_p,
    const Tensor& k_t,
    const Tensor& v_p,
    const Tensor& v_t,
    const Tensor& attn) {
  auto attn_t = attn_scores_jvp(q_p, q_t, k_p, k_t);
  if (attn_t.defined()) {
    attn_t = (1 - attn * attn) * attn_t;
  }
  auto output_t = attn_add(attn_matmul(attn_t, v_p), attn_matmul(attn, v_t));
  return std::make_tuple(std::move(output_t), std::move(attn_t));
}

// G = G_o vᴴ + G_a, the whole gradient of attn
static Tensor attn_grad(
    const Tensor& grad_output,
    const Tensor& grad_attn,
    const Tensor& v) {
  return attn_add(attn_matmul(grad_output, v.mH()), grad_attn);
}

// For U the gradients of grad_q, grad_k and grad_v, and attn an input of its
// own. With S_t = U_q kᵀ + q U_kᵀ, A_t = (1 - attn²) ∘ S_t, G = G_o vᴴ + G_a
// and S̄ = G ∘ conj(1 - attn²), the gradients are
//   of G_o: A_t v + attn U_v    of G_a: A_t
//   of q: S̄ conj(U_k)    of k: S̄ᵀ conj(U_q)    of v: A_tᴴ G_o
//   of attn: G_o U_vᴴ - 2 G ∘ conj(attn ∘ S_t)
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attn_double_backward(
    const Tensor& u_q,
    const Tensor& u_k,
    const Tensor& u_v,
    const std::optional<Tensor>& grad_output_opt,
    const std::optional<Tensor>& grad_attn_opt,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    std::array<bool, 6> grad_input_mask) {
  const Tensor grad_output = grad_output_opt.value_or(Tensor());
  const Tensor grad_attn = grad_attn_opt.value_or(Tensor());
  const auto
      [needs_grad_output,
       needs_grad_attn,
       needs_q,
       needs_k,
       needs_v,
       needs_attn] = grad_input_mask;
  const Tensor slope = 1 - attn * attn;
  Tensor scores_t, attn_t, grad, grad_scores;
  if (needs_grad_output || needs_grad_attn || needs_v || needs_attn) {
    scores_t = attn_scores_jvp(q, u_q, k, u_k);
    attn_t = attn_mul(slope, scores_t);
  }
  if (needs_q || needs_k || needs_attn) {
    grad = attn_grad(grad_output, grad_attn, v);
    grad_scores = attn_mul(grad, slope.conj());
  }

  Tensor w_grad_output, w_grad_attn, w_q, w_k, w_v, w_attn;
  if (needs_grad_output) {
    w_grad_output = attn_add(attn_matmul(attn_t, v), attn_matmul(attn, u_v));
  }
  if (needs_grad_attn) {
    w_grad_attn = attn_t;
  }
  if (needs_q) {
    w_q = attn_matmul(grad_scores, attn_conj(u_k));
  }
  if (needs_k) {
    w_k = attn_matmul(attn_mT(grad_scores), attn_conj(u_q));
  }
  if (needs_v) {
    w_v = attn_matmul(attn_mH(attn_t), grad_output);
  }
  if (needs_attn) {
    w_attn = attn_add(
        attn_matmul(grad_output, attn_mH(u_v)),
        attn_mul(grad, attn_conj(attn_mul(-2 * attn, scores_t))));
  }
  return std::make_tuple(w_grad_output, w_grad_attn, w_q, w_k, w_v, w_attn);
}

// The tangents of grad_q = S̄ conj(k), grad_k = S̄ᵀ conj(q) and grad_v = attnᴴ
// G_o. With D = conj(1 - attn²), S̄ = G ∘ D and G = G_o vᴴ + G_a:
//   grad_q_t = S̄_t conj(k) + S̄ conj(k_t)
//   grad_k_t = S̄_tᵀ conj(q) + S̄ᵀ conj(q_t)
//   S̄_t = G_t ∘ D - 2 G ∘ conj(attn ∘ attn_t)
//   G_t = G_o_t vᴴ + G_o v_tᴴ + G_a_t
//   grad_v_t = attn_tᴴ G_o + attnᴴ G_o_t
// G, which the backward keeps nowhere, is computed again where a tangent needs
// it.
std::tuple<Tensor, Tensor, Tensor> attn_backward_jvp(
    const Tensor& grad_output_p,
    const Tensor& grad_output_t,
    const Tensor& grad_attn_p,
    const Tensor& grad_attn_t,
    const Tensor& q_p,
    const Tensor& q_t,
    const Tensor& k_p,
    const Tensor& k_t,
    const Tensor& v_p,
    const Tensor& v_t,
    const Tensor& attn_p,
    const Tensor& attn_t,
    std::array<bool, 3> output_mask) {
  const auto [needs_q, needs_k, needs_v] = output_mask;
  Tensor grad_q_t, grad_k_t, grad_v_t;
  if (needs_q || needs_k) {
    const auto slope = (1 - attn_p * attn_p).conj();
    const auto grad_t = attn_add(
        attn_grad(grad_output_t, grad_attn_t, v_p),
        attn_matmul(grad_output_p, attn_mH(v_t)));
    Tensor grad;
    if (!attn_is_zero(attn_t) || (needs_q && !attn_is_zero(k_t)) ||
        (needs_k && !attn_is_zero(q_t))) {
      grad = attn_grad(grad_output_p, grad_attn_p, v_p);
    }
    const auto scores = attn_mul(grad, slope);
    const auto scores_t = attn_add(
        attn_mul(grad_t, slope),
        attn_mul(grad, attn_conj(attn_mul(-2 * attn_p, attn_t))));
    if (needs_q) {
      grad_q_t = attn_add(
          attn_matmul(scores_t, k_p.conj()),
          attn_matmul(scores, attn_conj(k_t)));
    }
    if (needs_k) {
      grad_k_t = attn_add(
          attn_matmul(attn_mT(scores_t), q_p.conj()),
          attn_matmul(attn_mT(scores), attn_conj(q_t)));
    }
  }
  if (needs_v) {
    grad_v_t = attn_add(
        attn_matmul(attn_mH(attn_t), grad_output_p),
        attn_matmul(attn_p.mH(), grad_output_t));
  }
  return std::make_tuple(
      std::move(grad_q_t), std::move(grad_k_t), std::move(grad_v_t));
}

// The derivatives of attn_output. All are derivatives of the number L = <G,
// attn_output(q, k, v)>, by G, q, k and v or along tangents of these, and second
// derivatives don't depend on their order. With D(u) the derivative along
// tangents u of q, k and v, and D(w) along tangents w of these and of G:
//   attn_output                  the gradient of L by G
//   _attn_output_backward        those by q, k and v
//   _attn_output_jvp             that of D(u) L by G
//   _attn_output_double_backward all of D(u) L
//   _attn_output_triple_backward     all of D(w) D(u) L
// The tangent of a gradient of L is the gradient of its tangent. And a product
// of gradients with tangents w is D(w) L. So these operators are enough for all
// of third order, and for much of fourth. The rest is composed.
using AttnTensors = std::array<Tensor, 3>; // of q, k and v
using AttnGrads = std::array<Tensor, 4>; // by G, q, k and v

static std::optional<Tensor> attn_unless_zero(const Tensor& x) {
  return attn_is_zero(x) ? std::nullopt : std::optional<Tensor>(x);
}

static bool attn_are_zero(const AttnTensors& u) {
  return attn_is_zero(u[0]) && attn_is_zero(u[1]) && attn_is_zero(u[2]);
}

static AttnGrads attn_add_each(const AttnGrads& x, const AttnGrads& y) {
  return {
      attn_add(x[0], y[0]),
      attn_add(x[1], y[1]),
      attn_add(x[2], y[2]),
      attn_add(x[3], y[3])};
}

namespace {

// The gradients of L and of its derivatives at q, k and v. Only those of `mask`
// are made.
struct AttnOutputAt {
  using Mask = std::array<bool, 4>;

  AttnTensors x;
  bool is_causal;
  double scale;

  static bool any(const Mask& mask) {
    return mask[0] || mask[1] || mask[2] || mask[3];
  }

  // D(u) attn_output
  Tensor jvp(const AttnTensors& u) const {
    return attn_are_zero(u) ? Tensor()
                            : at::_attn_output_jvp(
                                  x[0],
                                  x[1],
                                  x[2],
                                  attn_unless_zero(u[0]),
                                  attn_unless_zero(u[1]),
                                  attn_unless_zero(u[2]),
                                  is_causal,
                                  scale);
  }

  // of L, but for that by G
  AttnGrads first(const Tensor& grad, const Mask& mask) const {
    if (attn_is_zero(grad) || !(mask[1] || mask[2] || mask[3])) {
      return {};
    }
    auto [q, k, v] = at::_attn_output_backward(
        grad, x[0], x[1], x[2], is_causal, scale, {mask[1], mask[2], mask[3]});
    return {Tensor(), q, k, v};
  }

  // of D(u) L
  AttnGrads second(const Tensor& grad, const AttnTensors& u, const Mask& mask)
      const {
    if (attn_are_zero(u) || !any(mask)) {
      return {};
    }
    if (attn_is_zero(grad)) {
      return {mask[0] ? jvp(u) : Tensor()};
    }
    auto [output, q, k, v] = at::_attn_output_double_backward(
        grad,
        x[0],
        x[1],
        x[2],
        attn_unless_zero(u[0]),
        attn_unless_zero(u[1]),
        attn_unless_zero(u[2]),
        is_causal,
        scale,
        mask);
    return {output, q, k, v};
  }

  // of D(w) D(u) L
  AttnGrads third(
      const Tensor& grad,
      const AttnTensors& u,
      const Tensor& w_grad,
      const AttnTensors& w,
      const Mask& mask) const {
    if (attn_are_zero(w)) { // L is linear in G
      return attn_is_zero(w_grad)
          ? AttnGrads()
          : second(w_grad, u, {false, mask[1], mask[2], mask[3]});
    }
    if (attn_are_zero(u) || !any(mask)) {
      return {};
    }
    auto [output, q, k, v] = at::_attn_output_triple_backward(
        attn_unless_zero(grad),
        x[0],
        x[1],
        x[2],
        attn_unless_zero(u[0]),
        attn_unless_zero(u[1]),
        attn_unless_zero(u[2]),
        attn_unless_zero(w_grad),
        attn_unless_zero(w[0]),
        attn_unless_zero(w[1]),
        attn_unless_zero(w[2]),
        is_causal,
        scale,
        mask);
    return {output, q, k, v};
  }

  // of D(h) D(w) D(u) L
  AttnGrads fourth(
      const Tensor& grad,
      const AttnTensors& u,
      const Tensor& w_grad,
      const AttnTensors& w,
      const Tensor& h_grad,
      const AttnTensors& h,
      const Mask& mask) const {
    const Mask of_inputs{false, mask[1], mask[2], mask[3]};
    if (attn_are_zero(u) || (attn_are_zero(w) && attn_are_zero(h)) ||
        !any(mask)) {
      return {};
    }
    if (attn_are_zero(w)) {
      return third(w_grad, u, {}, h, of_inputs);
    }
    if (attn_are_zero(h)) {
      return third(h_grad, u, {}, w, of_inputs);
    }
    const auto jet = [](std::initializer_list<Tensor> parts) {
      at::native::AttnJet jet(8);
      size_t set = 0;
      for (const auto& part : parts) {
        jet[set] = attn_unless_zero(part).value_or(Tensor());
        set = set == 0 ? 1 : 2 * set;
      }
      return jet;
    };
    return at::native::attn_output_derivatives(
        jet({grad, Tensor(), w_grad, h_grad}),
        jet({x[0], u[0], w[0], h[0]}),
        jet({x[1], u[1], w[1], h[1]}),
        jet({x[2], u[2], w[2], h[2]}),
        is_causal,
        scale,
        mask);
  }
};

} // namespace

Tensor attn_output_jvp(
    const AttnTensors& x, const AttnTensors& u, bool is_causal, double scale) {
  return AttnOutputAt{x, is_causal, scale}.jvp(u);
}

// The gradients of <u, those of L> = D(u) L
std::tuple<Tensor, Tensor, Tensor, Tensor> attn_output_double_backward(
    const AttnTensors& u,
    const Tensor& grad,
    const AttnTensors& x,
    bool is_causal,
    double scale,
    std::array<bool, 4> mask) {
  return std::tuple_cat(
      AttnOutputAt{x, is_causal, scale}.second(grad, u, mask));
}

// L is linear in G, whose tangent stands in its place.
std::tuple<Tensor, Tensor, Tensor> attn_output_backward_jvp(
    const Tensor& grad,
    const Tensor& grad_t,
    const AttnTensors& x,
    const AttnTensors& x_t,
    bool is_causal,
    double scale,
    std::array<bool, 3> mask) {
  const AttnOutputAt at{x, is_causal, scale};
  const AttnOutputAt::Mask of_inputs{false, mask[0], mask[1], mask[2]};
  const auto [none, q, k, v] = attn_add_each(
      at.second(grad, x_t, of_inputs), at.first(grad_t, of_inputs));
  return {q, k, v};
}

// The gradients of <G, D(u) attn_output> = D(u) L by q, k and v, and by u.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
attn_output_jvp_backward(
    const Tensor& grad,
    const AttnTensors& x,
    const AttnTensors& u,
    bool is_causal,
    double scale,
    std::array<bool, 6> mask) {
  const AttnOutputAt at{x, is_causal, scale};
  const auto [none, q, k, v] =
      at.second(grad, u, {false, mask[0], mask[1], mask[2]});
  const auto [no, u_q, u_k, u_v] =
      at.first(grad, {false, mask[3], mask[4], mask[5]});
  return {q, k, v, u_q, u_k, u_v};
}

// D(u) attn_output is linear in u, whose tangents stand in its place.
Tensor attn_output_jvp_jvp(
    const AttnTensors& x,
    const AttnTensors& x_t,
    const AttnTensors& u,
    const AttnTensors& u_t,
    bool is_causal,
    double scale) {
  const AttnOutputAt at{x, is_causal, scale};
  const auto along = at.third({}, u, {}, x_t, {true, false, false, false});
  return attn_add(along[0], at.jvp(u_t));
}

// The gradients of <w, those of D(u) L> = D(w) D(u) L, by G, q, k and v, and
// by u, which are those of D(w) L.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
attn_output_double_backward_backward(
    const Tensor& w_grad,
    const AttnTensors& w,
    const Tensor& grad,
    const AttnTensors& x,
    const AttnTensors& u,
    bool is_causal,
    double scale,
    std::array<bool, 7> mask) {
  const AttnOutputAt at{x, is_causal, scale};
  const AttnOutputAt::Mask of_u{false, mask[4], mask[5], mask[6]};
  const auto [none, u_q, u_k, u_v] =
      attn_add_each(at.second(grad, w, of_u), at.first(w_grad, of_u));
  return std::tuple_cat(
      at.third(grad, u, w_grad, w, {mask[0], mask[1], mask[2], mask[3]}),
      std::make_tuple(u_q, u_k, u_v));
}

// The tangents of the gradients of D(u) L, which is linear in u, too.
std::tuple<Tensor, Tensor, Tensor, Tensor> attn_output_double_backward_jvp(
    const Tensor& grad,
    const Tensor& grad_t,
    const AttnTensors& x,
    const AttnTensors& x_t,
    const AttnTensors& u,
    const AttnTensors& u_t,
    bool is_causal,
    double scale,
    std::array<bool, 4> mask) {
  const AttnOutputAt at{x, is_causal, scale};
  return std::tuple_cat(attn_add_each(
      at.third(grad, u, grad_t, x_t, mask), at.second(grad, u_t, mask)));
}

// The gradients of <h, those of D(w) D(u) L> = D(h) D(w) D(u) L by G, q, k and
// v; by u, as those of D(h) D(w) L, but u has no part of G; and by w, which are
// those of D(h) D(u) L.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
attn_output_triple_backward_backward(
    const Tensor& h_grad,
    const AttnTensors& h,
    const Tensor& grad,
    const AttnTensors& x,
    const AttnTensors& u,
    const Tensor& w_grad,
    const AttnTensors& w,
    bool is_causal,
    double scale,
    std::array<bool, 11> mask) {
  const AttnOutputAt at{x, is_causal, scale};
  const AttnOutputAt::Mask of_inputs{mask[0], mask[1], mask[2], mask[3]},
      of_u{false, mask[4], mask[5], mask[6]},
      of_w{mask[7], mask[8], mask[9], mask[10]};
  const auto [none, u_q, u_k, u_v] = attn_add_each(
      at.third(grad, w, h_grad, h, of_u), at.second(w_grad, h, of_u));
  return std::tuple_cat(
      at.fourth(grad, u, w_grad, w, h_grad, h, of_inputs),
      std::make_tuple(u_q, u_k, u_v),
      at.third(grad, u, h_grad, h, of_w));
}

// The tangents of the gradients of D(w) D(u) L, which is linear in u and in w.
std::tuple<Tensor, Tensor, Tensor, Tensor> attn_output_triple_backward_jvp(
    const Tensor& grad,
    const Tensor& grad_t,
    const AttnTensors& x,
    const AttnTensors& x_t,
    const AttnTensors& u,
    const AttnTensors& u_t,
    const Tensor& w_grad,
    const Tensor& w_grad_t,
    const AttnTensors& w,
    const AttnTensors& w_t,
    bool is_causal,
    double scale,
    std::array<bool, 4> mask) {
  const AttnOutputAt at{x, is_causal, scale};
  const auto of_tangents = attn_add_each(
      at.third(grad, u_t, w_grad, w, mask),
      at.third(grad, u, w_grad_t, w_t, mask));
  return std::tuple_cat(attn_add_each(
      at.fourth(grad, u, w_grad, w, grad_t, x_t, mask), of_tangents));
}
