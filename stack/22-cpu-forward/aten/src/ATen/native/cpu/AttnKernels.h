#pragma once

#include <ATen/native/cpu/AttnFmaTiles.h>
#include <ATen/native/cpu/AttnForward.h>
#include <ATen/native/cpu/AttnForwardTile.h>

// Note [Tiles of attn]
// attn, its gradient and the gradient of the scores are m x n. Only attn is
// written to memory, once, if it is wanted. The others exist only as tiles,
// blocks of some rows and at most NC columns, in the scratch memory of a
// thread. Every sum over a tile starts from zero, and the sums of tiles are
// added in the order of tiles, whichever threads compute them. So results don't
// depend on the number of threads. Scratch memory is bounded: d and e are at
// most ATTN_MAX_WIDTH.
//
// The kernels know no Tensor. From the outside in:
//   AttnKernel.cpp       what ATen calls, by the stubs of AttnKernel.h
//   AttnKernel.h         the stubs, and which inputs the kernels take
//   AttnTensors.h        tensors to pointers, sizes and strides; ATen's Runtime
//   AttnKernels.h        which tiles for which dtype and sizes
//   AttnForward.h        the tasks of the forward, some rows each
//   AttnBackward.h       the tasks of the backward, a tile each
//   AttnBackwardArgs.h   what the backward is given
//   AttnSchedule.h       Runtime; tasks in order, ordered sums, scratch memory
//   AttnForwardTile.h    the forward of a task, tile by tile
//   AttnTile.h           attn of a tile: tanh, and what is masked
//   AttnMaskedOperand.h  what a tile that is masked in part is multiplied with
//   AttnFmaTiles.h       tiles in the precision of sums, multiplied by FMA
//   AttnScores.h         q kᵀ of a tile
//   AttnDot.h            q kᵀ by dot products, for few rows
//   AttnFewColumns.h     a product of few columns, transposed
//   AttnOneRow.h         one row of attn times rows of a matrix
//   AttnFma.h            the micro-kernel, and products made of it
//   AttnVnni.h           products of pairs of bfloat16 or half
//   AttnPairs.h          the same by VDPBF16PS
//   AttnBrgemm.h         the same by oneDNN, which has AMX
//   AttnTanh.h           tanh of vectors in registers
//   AttnCopy.h           packing, transposes
//   AttnVec.h            loads and stores by vectors
//   AttnMatrix.h         pointers, sizes and strides
//
// What is computed is written once, as a class of a tile, for any Tiles: how
// tiles are kept in memory, made and multiplied. To add a micro-kernel, write
// FmaProducts::kernel for other registers. To add a kind of tiles, write a
// class like FmaTiles and choose it in with_tiles, where the first that fits is
// taken; FMA fits all. It defines
//   S, T       the precision of tensors, and of sums
//   Tile       a Matrix of what a tile keeps: numbers of T or S
//   Layout     the scratch memory that it needs for tiles of a TileShape
//   ROW_STEP   the rows of a task are a multiple of it
//   LONGEST    a tile of few rows or columns is up to this many times longer
//   MIN_TILE   a tile has at least this many rows and columns, if attn does
//   COPIES     whether a matrix of the caller must be copied to be a tile
// is constructed for each task, from a layout and memory, and has
//   tiles      in memory, or given by the caller; as a block of attn, for they
//              may be transposed; loads and stores of their vectors
//   make       tile = fn(a bᵀ), also in a matrix of the caller
//   scores     calls fn with the vectors of a product a bᵀ, or of two
//   add        out (+)= tile x, or tileᵀ x

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

template <typename Tiles>
struct TilesOf {
  using type = Tiles;
};

// Calls fn with the kind of tiles that is the fastest for these sizes.
template <typename S, typename F>
void with_tiles(bool /*backward*/, const Sizes& /*sizes*/, const F& fn) {
  fn(TilesOf<FmaTiles<S>>());
}

// attn = tanh(q kᵀ), output = attn v
template <typename S>
void forward(const ForwardArgs<S>& args, const Runtime& runtime) {
  with_tiles<S>(false, args.sizes, [&](auto tiles) {
    forward_by<S, ForwardTile<typename decltype(tiles)::type>>(args, runtime);
  });
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
