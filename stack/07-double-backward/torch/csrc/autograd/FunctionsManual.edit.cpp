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
  return attn_add(attn_matmul(q_t, k_p.mT()), attn_matmul(q_p, attn_mT(k_t)));
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
