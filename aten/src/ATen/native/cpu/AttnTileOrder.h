#pragma once

#include <ATen/native/cpu/AttnSchedule.h>

#include <algorithm>
#include <cstdint>

// In what order the tiles of attn add to the gradients.

namespace at::native {

// Note [Schedule of attn's backward]
// A tile adds to the rows of grad_q that it shares with the tiles right and
// left of it, and to the rows of grad_k and grad_v that it shares with those
// above and below. Sums whose order depended on the threads would differ from
// run to run, so each row block and each column block has an order of its
// tiles, and a tile waits for its turn, by a ticket.
//
// Threads take tiles in one order, and so a tile only ever waits for one that
// was taken before it: somebody is always at work. Tiles that are worked on at
// the same time should share neither rows nor columns. So row blocks come in
// groups, at most as many as there are column blocks, and the members of a
// group go through the columns shifted. Of 3 row blocks and 6 column blocks,
// the order in which tiles are taken, and the turns at their column block:
//
//   0  3  6  9 12 15        0  0  1  1  2  2
//  13 16  1  4  7 10        2  2  0  0  1  1
//   8 11 14 17  2  5        1  1  2  2  0  0
//
// The turn at its row block is the number of tiles that the row block has had.
class AttnTileOrder {
 public:
  struct Tile {
    int64_t row_block, col_block;
    int64_t row_turn; // among the tiles of this row block
    int64_t col_turn; // among those of this column block
  };

  AttnTileOrder(int64_t row_blocks, int64_t col_blocks)
      : row_blocks_(row_blocks), col_blocks_(col_blocks) {
    const auto most = std::min<int64_t>(col_blocks, MAX_MEMBERS);
    const auto groups = (row_blocks + most - 1) / most;
    members_ = (row_blocks + groups - 1) / groups;
    shift_ = col_blocks / members_;
  }

  // The tile that is taken as the ith.
  Tile operator[](int64_t i) const {
    const auto [group, in_group] = attn_divide(i, members_ * col_blocks_);
    const auto first = group * members_;
    const auto members = std::min(members_, row_blocks_ - first);
    const auto [row_turn, member] = attn_divide(in_group, members);
    const auto col_block =
        attn_divide(row_turn + member * shift_, col_blocks_).second;
    // Of the members, those that began at this column block or before it come
    // to it first, the last of them soonest.
    const auto before =
        std::min(members, attn_divide(col_block, shift_).first + 1);
    const auto place = attn_divide(before - 1 - member + members, members);
    return {first + member, col_block, row_turn, first + place.second};
  }

 private:
  static constexpr int64_t MAX_MEMBERS = 8;
  int64_t row_blocks_, col_blocks_, members_, shift_;
};

} // namespace at::native
