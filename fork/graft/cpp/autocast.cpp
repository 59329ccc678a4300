// The surroundings that autocast.edit.cpp has in upstream's
// torch/csrc/jit/passes/autocast.cpp: a pass of TorchScript, whose list of
// operators is compiled into libtorch_cpu.
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/autocast.h>

#include <graft_ops.h>

#include <dlfcn.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace graft {

using torch::jit::Block;
using torch::jit::Node;

// Whether the edit adds the node's operator to the list, which is that of
// matmul.
static bool is_listed(const Node* node) {
  if (!node->kind().is_aten()) {
    return false;
  }
  switch (place_of(node->kind().toUnqualString())) {
#include GRAFT_EDIT
    return !node->schema().is_mutable();
    default:
      return false;
  }
}

// While it lives, there is a matmul(x, x) for each tensor x of an operator of
// ours, before it. Where upstream's pass has cast x for the one, the other is
// left with that.
class StandIns {
 public:
  explicit StandIns(Block* block) {
    add(block);
  }
  StandIns(const StandIns&) = delete;
  StandIns& operator=(const StandIns&) = delete;

  ~StandIns() {
    for (const auto& [op, index, product] : all_) {
      op->replaceInput(index, product->input(0));
      product->destroy();
    }
  }

 private:
  struct StandIn {
    Node* op;
    size_t index; // of x among its inputs
    Node* product;
  };

  void add(Block* block) {
    for (Node* op : block->nodes()) {
      for (size_t i = 0; is_listed(op) && i < op->inputs().size(); ++i) {
        if (auto* x = op->input(i); x->type()->cast<c10::TensorType>()) {
          auto* product = op->owningGraph()->create(c10::aten::matmul, {x, x});
          all_.push_back({op, i, product->insertBefore(op)});
        }
      }
      for (Block* inner : op->blocks()) {
        add(inner);
      }
    }
  }

  std::vector<StandIn> all_;
};

} // namespace graft

namespace torch::jit {

// Called instead of upstream's: this library comes before libtorch_cpu, which
// calls what is found first of this name.
void Autocast(const std::shared_ptr<Graph>& graph) {
  static const auto upstreams = reinterpret_cast<decltype(&Autocast)>(
      dlsym(RTLD_NEXT, "_ZN5torch3jit8AutocastERKSt10shared_ptrINS0_5GraphEE"));
  TORCH_CHECK(upstreams, "libtorch_cpu has no torch::jit::Autocast");
  const graft::StandIns stand_ins(graph->block());
  upstreams(graph);
}

} // namespace torch::jit
