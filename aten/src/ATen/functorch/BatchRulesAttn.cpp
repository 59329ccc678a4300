#include <ATen/functorch/BatchRulesHelper.h>
#include <ATen/native/Attn.h>

#include <array>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace at::functorch {

namespace {

using Bdim = std::optional<int64_t>;
using Operand = std::pair<Tensor, Bdim>;

// The sizes of one sample.
c10::SymDimVector sample_sizes(const Tensor& x, Bdim bdim) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  if (bdim.has_value()) {
    sizes.erase(sizes.begin() + *bdim);
  }
  return sizes;
}

// Gives each operand that is there the samples as its first dimension; a view,
// also of an operand that the samples share.
std::vector<Tensor> with_samples_in_front(std::vector<Operand> operands) {
  c10::SymInt size = 0;
  for (const auto& [x, bdim] : operands) {
    if (bdim.has_value()) {
      size = x.sym_size(*bdim);
    }
  }
  std::vector<Tensor> result;
  result.reserve(operands.size());
  for (const auto& [x, bdim] : operands) {
    if (!x.defined()) {
      result.emplace_back();
    } else if (bdim.has_value()) {
      result.push_back(x.movedim(*bdim, 0));
    } else {
      result.push_back(ensure_has_bdim(x, false, size));
    }
  }
  return result;
}

// Returns where a result has its samples: in front, if it is defined.
Bdim samples_of(const Tensor& x) {
  return x.defined() ? Bdim(0) : std::nullopt;
}

// The samples become one more of attn's batch dimensions. With two exceptions,
// which compute nothing twice:
//   q alone is batched: the rows of its B samples are the queries of one attn
//   v alone is batched: the columns of its B samples are the values of one attn
std::tuple<Tensor, Bdim, Tensor, Bdim> attn_batch_rule(
    const Tensor& q,
    Bdim q_bdim,
    const Tensor& k,
    Bdim k_bdim,
    const Tensor& v,
    Bdim v_bdim) {
  native::check_attn_inputs(
      q,
      k,
      v,
      sample_sizes(q, q_bdim),
      sample_sizes(k, k_bdim),
      sample_sizes(v, v_bdim));

  if (!k_bdim.has_value() && !v_bdim.has_value()) {
    const auto q_ = q.movedim(*q_bdim, -3); // (*, B, m, d)
    const auto rows = q_.sym_sizes().slice(q_.dim() - 3, 2);
    auto [output, attn] = at::attn(q_.flatten(-3, -2), k, v);
    output = output.unflatten_symint(-2, rows);
    attn = attn.unflatten_symint(-2, rows);
    const auto bdim = output.dim() - 3;
    return std::make_tuple(std::move(output), bdim, std::move(attn), bdim);
  }

  if (!q_bdim.has_value() && !k_bdim.has_value()) {
    const auto v_ = v.movedim(*v_bdim, -2); // (*, n, B, e)
    const auto columns = v_.sym_sizes().slice(v_.dim() - 2, 2);
    auto [output, attn] = at::attn(q, k, v_.flatten(-2, -1));
    output = output.unflatten_symint(-1, columns);
    const auto bdim = output.dim() - 2;
    return std::make_tuple(
        std::move(output), bdim, std::move(attn), std::nullopt);
  }

  const auto x = with_samples_in_front({{q, q_bdim}, {k, k_bdim}, {v, v_bdim}});
  auto [output, attn] = at::attn(x[0], x[1], x[2]);
  return std::make_tuple(std::move(output), 0, std::move(attn), 0);
}

// Every sample has gradients of its own, also for an operand that they share.
std::tuple<Tensor, Bdim, Tensor, Bdim, Tensor, Bdim> attn_backward_batch_rule(
    const std::optional<Tensor>& grad_output,
    Bdim grad_output_bdim,
    const std::optional<Tensor>& grad_attn,
    Bdim grad_attn_bdim,
    const Tensor& q,
    Bdim q_bdim,
    const Tensor& k,
    Bdim k_bdim,
    const Tensor& v,
    Bdim v_bdim,
    const Tensor& attn,
    Bdim attn_bdim,
    std::array<bool, 3> output_mask) {
  const auto x = with_samples_in_front(
      {{grad_output.value_or(Tensor()), grad_output_bdim},
       {grad_attn.value_or(Tensor()), grad_attn_bdim},
       {q, q_bdim},
       {k, k_bdim},
       {v, v_bdim},
       {attn, attn_bdim}});
  auto [grad_q, grad_k, grad_v] =
      at::_attn_backward(x[0], x[1], x[2], x[3], x[4], x[5], output_mask);
  return std::make_tuple(
      grad_q,
      samples_of(grad_q),
      grad_k,
      samples_of(grad_k),
      grad_v,
      samples_of(grad_v));
}

// The arguments of attn_output, or of one of its derivatives, for all samples.
// These become one more batch dimension, unless they share k and v, and their
// tangents, and no gradient of k or v is wanted. Then the rows of all samples
// are queries of one attn_output or, if it is causal, samples share k and v as
// heads of a group do.
class AttnOutputSamples {
 public:
  // `of_rows` are q and what has its rows, `of_keys` k, v and their tangents.
  AttnOutputSamples(
      const std::vector<Operand>& of_rows,
      const std::vector<Operand>& of_keys,
      bool is_causal,
      bool wants_key_gradients) {
    bool shares_keys = !wants_key_gradients;
    for (const auto& [x, bdim] : of_keys) {
      shares_keys = shares_keys && !bdim.has_value();
    }
    are_rows_ = shares_keys && !is_causal;
    if (are_rows_) {
      for (const auto& [x, bdim] : of_rows) {
        samples_ = bdim.has_value() ? x.sym_size(*bdim) : samples_;
      }
      const auto& [q, q_bdim] = of_rows[0];
      rows_ = sample_sizes(q, q_bdim).end()[-2];
      for (const auto& [x, bdim] : of_rows) {
        tensors_.push_back(x.defined() ? rows_of(x, bdim) : x);
      }
    } else {
      auto operands = of_rows;
      if (!shares_keys) {
        operands.insert(operands.end(), of_keys.begin(), of_keys.end());
      }
      tensors_ = with_samples_in_front(std::move(operands));
    }
    for (const auto& [x, bdim] : of_keys) {
      if (shares_keys) {
        tensors_.push_back(x.defined() && is_causal ? x.unsqueeze(0) : x);
      }
    }
  }

  // Returns an argument, in the order of the constructor.
  const Tensor& operator[](size_t i) const {
    return tensors_[i];
  }

  // Returns a result for all samples, and where it has them.
  Operand result(const Tensor& x) const {
    if (!x.defined() || !are_rows_) {
      return {x, samples_of(x)};
    }
    return {x.unflatten_symint(-2, {samples_, rows_}), x.dim() - 2};
  }

 private:
  // (*, m, d) of each sample, as (*, samples m, d)
  Tensor rows_of(const Tensor& x, Bdim bdim) const {
    if (bdim.has_value()) {
      return x.movedim(*bdim, -3).flatten(-3, -2);
    }
    c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
    sizes.insert(sizes.end() - 2, samples_);
    return x.unsqueeze(-3).expand_symint(sizes).flatten(-3, -2);
  }

  bool are_rows_ = false;
  c10::SymInt samples_ = 0, rows_ = 0;
  std::vector<Tensor> tensors_;
};

std::tuple<Tensor, Bdim> attn_output_batch_rule(
    const Tensor& q,
    Bdim q_bdim,
    const Tensor& k,
    Bdim k_bdim,
    const Tensor& v,
    Bdim v_bdim,
    bool is_causal,
    double scale) {
  native::check_attn_inputs(
      q,
      k,
      v,
      sample_sizes(q, q_bdim),
      sample_sizes(k, k_bdim),
      sample_sizes(v, v_bdim),
      "attn_output",
      /*grouped=*/true);
  const AttnOutputSamples x(
      {{q, q_bdim}}, {{k, k_bdim}, {v, v_bdim}}, is_causal, false);
  return x.result(at::attn_output(x[0], x[1], x[2], is_causal, scale));
}

std::tuple<Tensor, Bdim, Tensor, Bdim, Tensor, Bdim>
attn_output_backward_batch_rule(
    const Tensor& grad_output,
    Bdim grad_output_bdim,
    const Tensor& q,
    Bdim q_bdim,
    const Tensor& k,
    Bdim k_bdim,
    const Tensor& v,
    Bdim v_bdim,
    bool is_causal,
    double scale,
    std::array<bool, 3> output_mask) {
  const AttnOutputSamples x(
      {{q, q_bdim}, {grad_output, grad_output_bdim}},
      {{k, k_bdim}, {v, v_bdim}},
      is_causal,
      output_mask[1] || output_mask[2]);
  const auto [grad_q, grad_k, grad_v] = at::_attn_output_backward(
      x[1], x[0], x[2], x[3], is_causal, scale, output_mask);
  return std::tuple_cat(x.result(grad_q), x.result(grad_k), x.result(grad_v));
}

std::tuple<Tensor, Bdim> attn_output_jvp_batch_rule(
    const Tensor& q,
    Bdim q_bdim,
    const Tensor& k,
    Bdim k_bdim,
    const Tensor& v,
    Bdim v_bdim,
    const std::optional<Tensor>& q_tangent,
    Bdim q_tangent_bdim,
    const std::optional<Tensor>& k_tangent,
    Bdim k_tangent_bdim,
    const std::optional<Tensor>& v_tangent,
    Bdim v_tangent_bdim,
    bool is_causal,
    double scale) {
  const AttnOutputSamples x(
      {{q, q_bdim}, {q_tangent.value_or(Tensor()), q_tangent_bdim}},
      {{k, k_bdim},
       {v, v_bdim},
       {k_tangent.value_or(Tensor()), k_tangent_bdim},
       {v_tangent.value_or(Tensor()), v_tangent_bdim}},
      is_causal,
      false);
  return x.result(
      at::_attn_output_jvp(
          x[0], x[2], x[3], x[1], x[4], x[5], is_causal, scale));
}

std::tuple<Tensor, Bdim, Tensor, Bdim, Tensor, Bdim, Tensor, Bdim>
attn_output_double_backward_batch_rule(
    const Tensor& grad_output,
    Bdim grad_output_bdim,
    const Tensor& q,
    Bdim q_bdim,
    const Tensor& k,
    Bdim k_bdim,
    const Tensor& v,
    Bdim v_bdim,
    const std::optional<Tensor>& q_tangent,
    Bdim q_tangent_bdim,
    const std::optional<Tensor>& k_tangent,
    Bdim k_tangent_bdim,
    const std::optional<Tensor>& v_tangent,
    Bdim v_tangent_bdim,
    bool is_causal,
    double scale,
    std::array<bool, 4> output_mask) {
  const AttnOutputSamples x(
      {{q, q_bdim},
       {grad_output, grad_output_bdim},
       {q_tangent.value_or(Tensor()), q_tangent_bdim}},
      {{k, k_bdim},
       {v, v_bdim},
       {k_tangent.value_or(Tensor()), k_tangent_bdim},
       {v_tangent.value_or(Tensor()), v_tangent_bdim}},
      is_causal,
      output_mask[2] || output_mask[3]);
  const auto [output_tangent, grad_q, grad_k, grad_v] =
      at::_attn_output_double_backward(
          x[1],
          x[0],
          x[3],
          x[4],
          x[2],
          x[5],
          x[6],
          is_causal,
          scale,
          output_mask);
  return std::tuple_cat(
      x.result(output_tangent),
      x.result(grad_q),
      x.result(grad_k),
      x.result(grad_v));
}

std::tuple<Tensor, Bdim, Tensor, Bdim, Tensor, Bdim, Tensor, Bdim>
attn_output_triple_backward_batch_rule(
    const std::optional<Tensor>& grad_output,
    Bdim grad_output_bdim,
    const Tensor& q,
    Bdim q_bdim,
    const Tensor& k,
    Bdim k_bdim,
    const Tensor& v,
    Bdim v_bdim,
    const std::optional<Tensor>& u_q,
    Bdim u_q_bdim,
    const std::optional<Tensor>& u_k,
    Bdim u_k_bdim,
    const std::optional<Tensor>& u_v,
    Bdim u_v_bdim,
    const std::optional<Tensor>& w_grad_output,
    Bdim w_grad_output_bdim,
    const std::optional<Tensor>& w_q,
    Bdim w_q_bdim,
    const std::optional<Tensor>& w_k,
    Bdim w_k_bdim,
    const std::optional<Tensor>& w_v,
    Bdim w_v_bdim,
    bool is_causal,
    double scale,
    std::array<bool, 4> output_mask) {
  const AttnOutputSamples x(
      {{q, q_bdim},
       {grad_output.value_or(Tensor()), grad_output_bdim},
       {u_q.value_or(Tensor()), u_q_bdim},
       {w_grad_output.value_or(Tensor()), w_grad_output_bdim},
       {w_q.value_or(Tensor()), w_q_bdim}},
      {{k, k_bdim},
       {v, v_bdim},
       {u_k.value_or(Tensor()), u_k_bdim},
       {u_v.value_or(Tensor()), u_v_bdim},
       {w_k.value_or(Tensor()), w_k_bdim},
       {w_v.value_or(Tensor()), w_v_bdim}},
      is_causal,
      output_mask[2] || output_mask[3]);
  const auto [output_tangent, grad_q, grad_k, grad_v] =
      at::_attn_output_triple_backward(
          x[1],
          x[0],
          x[5],
          x[6],
          x[2],
          x[7],
          x[8],
          x[3],
          x[4],
          x[9],
          x[10],
          is_causal,
          scale,
          output_mask);
  return std::tuple_cat(
      x.result(output_tangent),
      x.result(grad_q),
      x.result(grad_k),
      x.result(grad_v));
}

} // namespace

TORCH_LIBRARY_IMPL(aten, FuncTorchBatched, m) {
  VMAP_SUPPORT(attn, attn_batch_rule);
  VMAP_SUPPORT(_attn_backward, attn_backward_batch_rule);
  VMAP_SUPPORT(attn_output, attn_output_batch_rule);
  VMAP_SUPPORT(_attn_output_backward, attn_output_backward_batch_rule);
  VMAP_SUPPORT(_attn_output_jvp, attn_output_jvp_batch_rule);
  VMAP_SUPPORT(
      _attn_output_double_backward, attn_output_double_backward_batch_rule);
  VMAP_SUPPORT(
      _attn_output_triple_backward, attn_output_triple_backward_batch_rule);
}

} // namespace at::functorch
