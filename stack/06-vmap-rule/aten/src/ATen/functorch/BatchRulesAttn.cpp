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

} // namespace

TORCH_LIBRARY_IMPL(aten, FuncTorchBatched, m) {
  VMAP_SUPPORT(attn, attn_batch_rule);
}

} // namespace at::functorch
