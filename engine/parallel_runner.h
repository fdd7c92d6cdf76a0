// One layer of one step on one rank of a context-parallel group: the stages of AttentionRunner,
// with the exchanges between them.
#ifndef ENGINE_PARALLEL_RUNNER_H_
#define ENGINE_PARALLEL_RUNNER_H_

#include <cstddef>
#include <span>

#include "engine/attention_runner.h"
#include "engine/config.h"
#include "kernels/backend.h"
#include "parallel/communicator.h"
#include "parallel/partition.h"

namespace mla {

/// A rank's workspace. With W rows a chunk, T new tokens a step at most, N ranks, and E rows of
/// exchanges, N blocks of ceil(T / N) (split queries: of max_split_rows):
struct ParallelLayout {
  WorkspaceLayout base;     // AttentionRunner's, for E new tokens and no absorb path
  size_t gathered = 0;      // what is gathered of a chunk, [N, W] stored rows, or of new tokens
  size_t new_tokens = 0;    // split queries: [T, L + Rr] bf16, all new tokens in order
  size_t queries = 0;       // split queries, partials merged: [E, H, P + Rr] bf16, of all ranks
  size_t received_out = 0;  // partials merged: of all ranks, [E, H, V] float32 (kFixed: N * T rows)
  size_t received_lse = 0;  // as many rows: [rows, H] float32
  size_t total = 0;
};
ParallelLayout parallel_layout(const EngineConfig& config, const ParallelConfig& parallel,
                               const Backend& backend);

/// Per layer, in stream order and on every rank alike (see RankPlan::collectives):
///   split queries: all_gather of the new latent rows, and of the queries if partials are merged;
///   write_latent_cache; the context chunks, each all_gathered where latent rows travel;
///   merge_partials: all_to_all of partials by who finishes the rows, then their merge in rank
///   order (all_gather where every rank finishes all rows); the new tokens of this rank; replicated
///   queries: all_gather of the results, where shared out.
/// One runner is used from one thread at a time, on the thread of its communicator.
class ParallelRunner : private AttentionRunner {
 public:
  /// `workspace`: parallel_layout(...).total bytes of backend memory, 256-byte aligned. Throws
  /// kInvalidArgument, also where the communicator's rank or size is not the config's, and
  /// kUnsupported for a shape class or the absorb path.
  ParallelRunner(const EngineConfig& config, const ParallelConfig& parallel, Backend& backend,
                 Communicator& communicator, std::span<std::byte> workspace);

  /// `layer` with split queries: q, kv_c and k_pe are this rank's rows, as split_queries gives
  /// them; q is contiguous, with memory for plan.block_rows rows behind it; out and lse get those
  /// rows. Throws kInvalidArgument before anything is launched or written, kCommunication from
  /// exchanges.
  void run_layer(const DevicePlan& step, const RankPlan& plan, const LayerParams& layer,
                 Stream stream);

 private:
  /// [rows, H, V] and [rows, H] in one block a rank.
  struct Partials {
    HeadRows out;
    Lse lse;
  };

  void validate_split(const RankPlan& plan, const LayerParams& layer) const;
  Partials partials(std::byte* out, float* lse, DType dtype) const;
  Partials partials_from(const Partials& view, int64_t row) const;

  void assemble_new_tokens(const RankPlan& plan, Call& call);
  void assemble_chunk(const RankPlan& plan, const Call& call, const Chunk& chunk);
  void assemble_rows(const Call& call, const RowAssembly& assembly, int64_t rows, size_t row_bytes,
                     LatentCache stored, Rows target);
  void attend_context(const RankPlan& plan, const Call& call, int64_t rows);
  void attend_and_merge_context(const RankPlan& plan, Call& call);
  void gather_results(const RankPlan& plan, const Call& call, const Partials& results,
                      const LayerParams& layer);

  ParallelConfig parallel_;
  Communicator* communicator_;
  std::byte* gathered_ = nullptr;
  std::byte* new_tokens_ = nullptr;
  std::byte* queries_ = nullptr;
  std::byte* received_out_ = nullptr;
  float* received_lse_ = nullptr;
};

}  // namespace mla

#endif  // ENGINE_PARALLEL_RUNNER_H_
