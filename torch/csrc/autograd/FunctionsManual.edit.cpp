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
// tangents u of q, k and v:
//   attn_output                  the gradient of L by G
//   _attn_output_backward        those by q, k and v
//   _attn_output_jvp             that of D(u) L by G
//   _attn_output_double_backward all of D(u) L
// The tangent of a gradient of L is the gradient of its tangent. And a product
// of gradients with tangents w is D(w) L. So a third formula is needed first for
// the derivatives of _attn_output_double_backward.
using AttnTensors = std::array<Tensor, 3>; // q, k and v, or tangents of them
using AttnGrads = std::array<Tensor, 4>; // by grad_output, q, k and v

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

// The sum over the batch dimensions that `like` has 1 in place of.
static Tensor attn_sum_to(const Tensor& x, const Tensor& like) {
  return attn_is_zero(x) ? Tensor() : at::sum_to(x, like.sym_sizes());
}

// D(u) attn_output
Tensor attn_output_jvp(
    const AttnTensors& x, const AttnTensors& u, bool is_causal, double scale) {
  if (attn_are_zero(u)) {
    return Tensor();
  }
  const auto [q, k, v] = x;
  return at::_attn_output_jvp(
      q,
      k,
      v,
      attn_unless_zero(u[0]),
      attn_unless_zero(u[1]),
      attn_unless_zero(u[2]),
      is_causal,
      scale);
}

// The gradients of L by q, k and v, after one that is zero.
static AttnGrads attn_output_first_order(
    const Tensor& grad,
    const AttnTensors& x,
    bool is_causal,
    double scale,
    std::array<bool, 3> mask) {
  if (attn_is_zero(grad) || !(mask[0] || mask[1] || mask[2])) {
    return {};
  }
  auto [q, k, v] =
      at::_attn_output_backward(grad, x[0], x[1], x[2], is_causal, scale, mask);
  return {Tensor(), q, k, v};
}

// The gradients of D(u) L.
static AttnGrads attn_output_second_order(
    const Tensor& grad,
    const AttnTensors& x,
    const AttnTensors& u,
    bool is_causal,
    double scale,
    std::array<bool, 4> mask) {
  if (attn_are_zero(u) || !(mask[0] || mask[1] || mask[2] || mask[3])) {
    return {};
  }
  if (attn_is_zero(grad)) {
    return {mask[0] ? attn_output_jvp(x, u, is_causal, scale) : Tensor()};
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

// The gradients of D(w) D(u) L, where w has a tangent of G too. With slope =
// scale (1 - attn²), or 0 where attn is masked, and
//   S_u = u_q kᵀ + q u_kᵀ, S_w = w_q kᵀ + q w_kᵀ, S_uw = u_q w_kᵀ + w_q u_kᵀ
//   A_u = slope ∘ S_u, A_w = slope ∘ S_w
//   A_uw = slope ∘ (S_uw - 2 scale attn ∘ S_u ∘ S_w)
// the first is D(w) D(u) attn_output = A_uw v + A_u w_v + A_w u_v. With
//   P = G vᵀ, P_u = G u_vᵀ, P_w = G w_vᵀ + w_G vᵀ, P_uw = w_G u_vᵀ
// those by q kᵀ, S_u and S_w are, for real numbers,
//   X = slope ∘ (P_uw - 2 scale attn ∘ (P_w ∘ S_u + P_u ∘ S_w + P ∘ S_uw)
//       - 2 scale² (1 - 3 attn²) ∘ P ∘ S_u ∘ S_w)
//   X_u = slope ∘ (P_w - 2 scale attn ∘ P ∘ S_w)
//   X_w = slope ∘ (P_u - 2 scale attn ∘ P ∘ S_u)
// and by q: X k + X_u u_k + X_w w_k, by k: Xᵀ q + X_uᵀ u_q + X_wᵀ w_q, by v:
// A_uwᵀ G + A_uᵀ w_G.
static AttnGrads attn_output_third_order(
    const Tensor& grad,
    const AttnTensors& inputs,
    const AttnTensors& u,
    const Tensor& w_grad,
    const AttnTensors& w,
    bool is_causal,
    double scale,
    std::array<bool, 4> mask) {
  if (attn_are_zero(u) || (attn_are_zero(w) && attn_is_zero(w_grad)) ||
      !(mask[0] || mask[1] || mask[2] || mask[3])) {
    return {};
  }
  const auto sum = [](const Tensor& a, const Tensor& b, const Tensor& c) {
    return attn_add(attn_add(a, b), c);
  };
  const auto times = [](const Tensor& a, const Tensor& b) {
    return attn_mul(a, attn_conj(b));
  };
  const auto& [q, k, v] = inputs;
  const auto& [u_q, u_k, u_v] = u;
  const auto& [w_q, w_k, w_v] = w;
  const auto attn = (at::matmul(q, k.mT()) * scale).tanh();
  auto slope = (1 - attn * attn) * scale;
  if (is_causal) {
    slope = slope.tril();
  }
  const auto bend = -2 * scale * attn;
  const auto s_u = attn_scores_jvp(q, u_q, k, u_k);
  const auto s_w = attn_scores_jvp(q, w_q, k, w_k);
  const auto s_uw = attn_scores_jvp(u_q, w_q, u_k, w_k);
  const auto s_u_s_w = attn_mul(s_u, s_w);
  const auto a_u = attn_mul(slope, s_u);
  const auto a_uw = attn_mul(slope, attn_add(s_uw, attn_mul(bend, s_u_s_w)));

  AttnGrads found;
  if (mask[0]) {
    const auto a_w = attn_mul(slope, s_w);
    found[0] =
        sum(attn_matmul(a_uw, v), attn_matmul(a_u, w_v), attn_matmul(a_w, u_v));
  }
  if (mask[1] || mask[2]) {
    const auto p = attn_matmul(grad, attn_mH(v));
    const auto p_u = attn_matmul(grad, attn_mH(u_v));
    const auto p_w = attn_add(
        attn_matmul(grad, attn_mH(w_v)), attn_matmul(w_grad, attn_mH(v)));
    const auto p_uw = attn_matmul(w_grad, attn_mH(u_v));
    const auto bent = sum(times(p_w, s_u), times(p_u, s_w), times(p, s_uw));
    const auto third = -2 * scale * scale * (1 - 3 * attn * attn);
    const auto x = times(
        sum(p_uw, times(bent, bend), times(times(p, s_u_s_w), third)), slope);
    const auto x_u = times(attn_add(p_w, times(times(p, s_w), bend)), slope);
    const auto x_w = times(attn_add(p_u, times(times(p, s_u), bend)), slope);
    const auto add_up = [&](const Tensor& a,
                            const Tensor& a_u,
                            const Tensor& a_w,
                            const AttnTensors& b) {
      return sum(
          attn_matmul(a, attn_conj(b[0])),
          attn_matmul(a_u, attn_conj(b[1])),
          attn_matmul(a_w, attn_conj(b[2])));
    };
    if (mask[1]) {
      found[1] = add_up(x, x_u, x_w, {k, u_k, w_k});
    }
    if (mask[2]) {
      found[2] = attn_sum_to(
          add_up(attn_mT(x), attn_mT(x_u), attn_mT(x_w), {q, u_q, w_q}), k);
    }
  }
  if (mask[3]) {
    const auto of_u = attn_matmul(attn_mH(a_u), w_grad);
    found[3] = attn_sum_to(attn_add(attn_matmul(attn_mH(a_uw), grad), of_u), v);
  }
  return found;
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
      attn_output_second_order(grad, x, u, is_causal, scale, mask));
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
  auto [none, q, k, v] = attn_add_each(
      attn_output_second_order(
          grad, x, x_t, is_causal, scale, {false, mask[0], mask[1], mask[2]}),
      attn_output_first_order(grad_t, x, is_causal, scale, mask));
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
  auto [none, q, k, v] = attn_output_second_order(
      grad, x, u, is_causal, scale, {false, mask[0], mask[1], mask[2]});
  auto [no, u_q, u_k, u_v] = attn_output_first_order(
      grad, x, is_causal, scale, {mask[3], mask[4], mask[5]});
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
  const auto along = attn_output_third_order(
      {}, x, u, {}, x_t, is_causal, scale, {true, false, false, false});
  return attn_add(along[0], attn_output_jvp(x, u_t, is_causal, scale));
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
  const auto by_inputs = attn_output_third_order(
      grad,
      x,
      u,
      w_grad,
      w,
      is_causal,
      scale,
      {mask[0], mask[1], mask[2], mask[3]});
  const auto by_u = attn_output_backward_jvp(
      grad, w_grad, x, w, is_causal, scale, {mask[4], mask[5], mask[6]});
  return std::tuple_cat(by_inputs, by_u);
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
  return std::tuple_cat(attn_add_each(
      attn_output_third_order(
          grad, x, u, grad_t, x_t, is_causal, scale, mask),
      attn_output_second_order(grad, x, u_t, is_causal, scale, mask)));
}
