// The plan of one step: which rows of which request's context go through the workspace together,
// and which attention items they make. Built once a step on the host, reused by every layer.
//
//   StepPlan plan;  // reused: no allocation once it has seen the largest step
//   build_plan(config, batch, /*table=*/nullptr, plan);
//   for (const Chunk& chunk : plan.chunks()) use(plan.host(chunk.cu_seq_lens));
//
// Every array that a kernel reads lies in one contiguous block, so that one copy carries the plan
// to the device; a BlockArray is an offset into it, valid on both sides.
//
// Thread-safety: build_plan is reentrant on distinct plans; a built plan may be read by any thread.
#ifndef METADATA_PLAN_H_
#define METADATA_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "metadata/attention_item.h"
#include "metadata/batch.h"
#include "metadata/context_parallel.h"
#include "metadata/model.h"
#include "metadata/plan_share.h"
#include "metadata/schedule.h"

namespace mla {

/// How contexts are cut into chunks of at most W rows.
enum class Schedule {
  kPacked,   // whole contexts in request order; one is cut only where the chunk is full
  kUniform,  // chunk c covers the same position range [c*m, (c+1)*m) of every request
  kFixed,    // cut points at multiples of split_tokens inside each request, whatever the batch
};
std::string_view schedule_name(Schedule schedule);  // "packed", "uniform", "fixed"
Schedule find_schedule(std::string_view name);      // throws kInvalidArgument

/// How a request's context is attended.
enum class Path {
  kExpand,  // expand latent rows to per-head K and V, attend at P + Rr / V
  kAbsorb,  // fold W_UK into q and W_UV into the output, attend the latent rows at L + Rr / L
};
std::string_view path_name(Path path);  // "expand", "absorb"

enum class PathPolicy { kAuto, kExpand, kAbsorb };
PathPolicy find_path_policy(std::string_view name);  // "auto", "expand", "absorb"

/// The path with fewer FLOPs for a request of `query_len` new tokens over `context_len` cached
/// ones: absorbed attention spends 2(2L+Rr) a score instead of 2(P+Rr+V), and 2L(P+V) a query
/// instead of a context row. A function of the request alone, so `fixed` stays batch-invariant.
Path cheaper_path(const ModelDims& dims, int32_t query_len, int32_t context_len);

/// Items of absorbed chunks are cut at multiples of this many query rows of their request, so that
/// one absorbed pass needs memory for so many rows at most. `auto` gives a request the absorb path
/// below about 171 rows (see cheaper_path), so one pass is the rule.
inline constexpr int32_t kAbsorbRows = 256;

struct PlanConfig {
  ModelDims dims;
  int32_t workspace_tokens = 0;  // [W] latent rows resident on this rank, >= page_size
  int32_t page_size = 0;
  Schedule schedule = Schedule::kPacked;
  int32_t split_tokens = 0;  // kFixed only, a multiple of page_size, at most W;
                             // 0: the largest page multiple <= min(W, 4096)
  PathPolicy path = PathPolicy::kExpand;
  ContextShard shard = {};  // world 1: the whole context lives here
};

/// Capacities for which a plan's block layout, and so a captured CUDA graph, is fixed. All zero:
/// no class; the block is as small as the plan. Within a class every chunk's range is all requests
/// and only the expand path is planned.
struct ShapeClass {
  int32_t max_requests = 0;
  int32_t max_query_tokens = 0;
  int32_t max_chunks = 0;
  int32_t max_pages = 0;  // entries of a block-table row carried in the block; 0: none carried

  bool enabled() const { return max_requests > 0; }
  bool operator==(const ShapeClass&) const = default;
};

/// `size` elements of T at `offset` bytes from the start of the plan's block.
template <typename T>
struct BlockArray {
  uint32_t offset = 0;
  int32_t size = 0;
};

/// The lengths that kernels launched for a shape class read in device memory instead of taking
/// them as arguments. `items` counts what attends, `final_items` what a new-token piece finishes.
struct ChunkCounts {
  int32_t requests = 0;
  int32_t rows = 0;
  int32_t items = 0;
  int32_t final_items = 0;
};

/// Rows that come together from all ranks, each of which sends a block of `padded_rows`: row i of
/// the result is row sources[i] of what arrives.
struct RowAssembly {
  int32_t padded_rows = 0;      // 0: nothing to assemble
  BlockArray<int32_t> bounds;   // 0, 0 and the number of rows: they are one span from 0 on
  BlockArray<int32_t> sources;  // [rows]
};

/// Some rows of the contexts of requests [request_begin, request_end): for each at most one span.
/// Requests without a span are trimmed at both ends (kUniform trims only those without any
/// context); inside they have length 0. Under context parallelism, lengths and starts are those of
/// this rank (where the chunk is assembled from all ranks: of the whole context), ranges are the
/// same on all.
struct Chunk {
  Path path = Path::kExpand;
  int32_t request_begin = 0;  // n = request_end - request_begin
  int32_t request_end = 0;
  int32_t token_begin = 0;  // query rows of these requests
  int32_t token_end = 0;
  int32_t seq_tot = 0;              // rows in the chunk, <= W
  int32_t max_seq_len = 0;          // longest span
  int32_t max_query_len = 0;        // longest q_len over items
  bool has_empty_context = false;   // some request of the range has no keys here, on this rank
  BlockArray<int32_t> starts;       // [n] first position of the span in the rank's cache
  BlockArray<int32_t> seq_lens;     // [n]
  BlockArray<int32_t> cu_seq_lens;  // [n+1], rebased: first 0, last seq_tot
  BlockArray<AttentionItem> items;  // requests with new tokens and keys in this chunk, in order
  BlockArray<ChunkCounts> counts;   // [1]
  int32_t pass_begin = 0;   // kAbsorb: [pass_begin, pass_end) of StepPlan::absorb_passes(), which
  int32_t pass_end = 0;     // share out the items
  RowAssembly assembly;     // PlanShare::assemble_chunks, where a new token sees the chunk
  int32_t stored_rows = 0;  // what this rank sends of an assembled chunk
  BlockArray<int32_t> stored_starts;       // [n] positions in the rank's cache
  BlockArray<int32_t> stored_cu_seq_lens;  // [n+1]
};

/// Query rows [row_begin, row_end) of an absorbed chunk, at most kAbsorbRows of them: what goes
/// through the absorbed workspace together. q_begin and out_row of its items count from row_begin.
struct AbsorbPass {
  int32_t row_begin = 0;
  int32_t row_end = 0;
  int32_t max_query_len = 0;
  BlockArray<AttentionItem> items;
};

/// A contiguous range of at most W new-token rows, expanded together and attended causally.
/// With more than one piece, a request's later rows also see the earlier pieces in full.
struct NewTokenPiece {
  int32_t row_begin = 0;  // rows of kv_c and k_pe; key row 0 of the items is row_begin
  int32_t row_end = 0;
  int32_t out_row_begin = 0;  // what final_items write: the same rows, but for a PlanShare
  int32_t out_row_end = 0;
  int32_t max_query_len = 0;
  int32_t max_seq_len = 0;
  BlockArray<AttentionItem> carried_items;  // later rows of the same requests: unmasked, merged
                                            // into the running partial
  BlockArray<AttentionItem> final_items;    // the piece's own rows: causal, written to `out`
  BlockArray<ChunkCounts> counts;           // [1]
};

class StepPlan {
 public:
  int32_t num_requests() const { return num_requests_; }
  int32_t num_query_tokens() const { return num_query_tokens_; }
  int64_t num_context_tokens() const { return num_context_tokens_; }  // on this rank
  int32_t max_query_len() const { return max_query_len_; }

  /// In merge order: expanded chunks, then absorbed ones; positions of one request ascend.
  std::span<const Chunk> chunks() const { return {chunks_.data(), num_chunks_}; }
  std::span<const NewTokenPiece> new_token_pieces() const { return {pieces_.data(), num_pieces_}; }

  /// The same, and after them the shape class's unused slots, whose counts are 0: what a captured
  /// graph launches. Without a class there are none.
  std::span<const Chunk> chunk_slots() const { return chunks_; }
  std::span<const NewTokenPiece> new_token_slots() const { return pieces_; }

  std::span<const AbsorbPass> absorb_passes() const { return passes_; }

  /// Where results of the context stand: PlanShare's row blocks, else one block, whose row starts
  /// are query_start_loc().
  int32_t num_row_blocks() const { return num_row_blocks_; }
  BlockArray<int32_t> context_row_starts() const { return context_row_starts_; }
  /// Rows that the new-token pieces write: all T, or this rank's share.
  int32_t num_out_rows() const { return num_out_rows_; }
  /// How the new tokens of all ranks come together, and the slots 0, 1, ... that this rank's are
  /// packed into before.
  const RowAssembly& new_token_assembly() const { return new_token_assembly_; }
  BlockArray<int64_t> packing_slots() const { return packing_slots_; }  // [num_out_rows()]

  /// In a shape class both arrays go on for its unused requests, which have no tokens, and for a
  /// last one (entry max_requests + 1) without context, whose new tokens are the rows from T to
  /// max_query_tokens.
  BlockArray<int32_t> query_start_loc() const { return query_start_loc_; }      // [R+1]
  BlockArray<int32_t> context_start_loc() const { return context_start_loc_; }  // [R+1], this rank
  /// [R, block_table_stride()] where a host table was given, else size 0.
  BlockArray<int32_t> block_table() const { return block_table_; }
  int32_t block_table_stride() const { return block_table_stride_; }

  const PlanConfig& config() const { return config_; }
  const ShapeClass& shape_class() const { return shape_class_; }

  /// The block: 16-byte aligned host memory; its layout depends on the shape class alone where
  /// there is one. Block offsets of arrays are multiples of 16.
  std::span<const std::byte> block() const { return {block_.data(), block_size_}; }
  template <typename T>
  std::span<const T> host(BlockArray<T> array) const {
    return {reinterpret_cast<const T*>(block_.data() + array.offset),
            static_cast<size_t>(array.size)};
  }

  /// Equal for equal schedules on every platform; ranks compare it. Covers the config (rank
  /// apart) and the batch, not the local lengths.
  uint64_t hash() const { return hash_; }

 private:
  friend class PlanBuilder;

  PlanConfig config_;
  ShapeClass shape_class_;
  int32_t num_requests_ = 0;
  int32_t num_query_tokens_ = 0;
  int64_t num_context_tokens_ = 0;
  int32_t max_query_len_ = 0;
  size_t num_chunks_ = 0;  // the rest are unused slots of the class
  size_t num_pieces_ = 0;
  std::vector<Chunk> chunks_;
  std::vector<NewTokenPiece> pieces_;
  std::vector<AbsorbPass> passes_;
  std::vector<std::byte> block_;  // never shrinks, so that growing back into it clears nothing
  size_t block_size_ = 0;
  BlockArray<int32_t> query_start_loc_;
  BlockArray<int32_t> context_start_loc_;
  BlockArray<int32_t> block_table_;
  int32_t block_table_stride_ = 0;
  int32_t num_row_blocks_ = 1;
  int32_t num_out_rows_ = 0;
  BlockArray<int32_t> context_row_starts_;
  RowAssembly new_token_assembly_;
  BlockArray<int64_t> packing_slots_;
  uint64_t hash_ = 0;

  // Working memory of build_plan, kept so that later steps allocate nothing.
  std::vector<Path> paths_;            // [R]
  std::vector<int32_t> context_lens_;  // [R], of the requests of one path
  ScheduleCuts cuts_;
  std::vector<AttentionItem> carried_items_;  // of one piece
  std::vector<AttentionItem> final_items_;
  std::vector<int32_t> next_rows_;  // [world] of one assembled chunk
};

/// The device-side address of a plan's array, `base` being where the block was copied.
template <typename T>
const T* block_pointer(const std::byte* base, BlockArray<T> array) {
  return reinterpret_cast<const T*>(base + array.offset);
}

/// Throws kInvalidArgument for a config that no batch can be planned with: W below one page,
/// split_tokens not a page multiple or above W, bad dims or shard.
void validate_plan_config(const PlanConfig& config);

/// split_tokens, or its default where it is 0.
int32_t effective_split_tokens(const PlanConfig& config);

/// Checks config and batch, then fills `plan`. `table`, where given, is copied into the block
/// (its used part; ids are checked by validate_block_table, not here). Linear in requests, spans
/// and the chunks' arrays. Throws kInvalidArgument, also
/// for a plan outside `shape_class`, naming the capacity; `plan` is then empty. No allocation once
/// `plan` has grown.
///
/// With a `share`, the plan is a rank's of a context-parallel group: chunks are those of the
/// share's cuts, and items those of its rows. Only the expand path and no class (kUnsupported).
void build_plan(const PlanConfig& config, const Batch& batch, const HostBlockTable* table,
                StepPlan& plan, const ShapeClass& shape_class = {},
                const PlanShare* share = nullptr);

/// Bytes of the block of any plan of the class.
int64_t plan_block_bytes(const PlanConfig& config, const ShapeClass& shape_class);

}  // namespace mla

#endif  // METADATA_PLAN_H_
