#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>
#include <c10/util/irange.h>

#include <algorithm>

namespace at::native {

// The samples in an order in which those that share k and v follow each other.
class AttnSharedBatch {
 public:
  AttnSharedBatch(const Tensor& q, const Tensor& k) : batch_(q.sizes()) {
    const auto dims = q.dim() - 2;
    c10::DimVector shared;
    for (const auto i : c10::irange(dims)) {
      const bool is_shared = k.size(i) != q.size(i);
      (is_shared ? shared : order_).push_back(i);
      group_ *= is_shared ? q.size(i) : 1;
    }
    order_.append(shared.begin(), shared.end());
    order_.append({dims, dims + 1});
  }

  int64_t group() const {
    return group_;
  }

  // Returns a view of x whose batch dimensions are q's, in that order.
  Tensor operator()(const Tensor& x) const {
    if (group_ == 1 || !x.defined()) {
      return x;
    }
    c10::DimVector sizes(batch_.begin(), batch_.end());
    std::copy_n(x.sizes().end() - 2, 2, sizes.end() - 2);
    return x.expand(sizes).permute(order_);
  }

 private:
  c10::DimVector batch_, order_;
  int64_t group_ = 1;
};

} // namespace at::native
