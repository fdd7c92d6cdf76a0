// The ops of the CPU backend. Params have been through kernels/validate.h; what can only be told
// from memory (items, page ids, slots) is checked here, before anything is written.
#ifndef KERNELS_CPU_OPS_H_
#define KERNELS_CPU_OPS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "kernels/executor.h"
#include "kernels/expand.h"
#include "kernels/latent_cache.h"
#include "kernels/merge_attn_states.h"
#include "kernels/prefill_attention.h"

namespace mla::cpu {

/// The length that a count stands for now.
inline int64_t length(const Count& count) {
  if (count.actual == nullptr) return count.capacity;
  return std::clamp<int64_t>(*count.actual, 0, count.capacity);
}

/// Executor::parallel_for with a task by reference: a std::function of the task itself would
/// allocate.
template <typename Task>
void parallel_for(Executor& executor, int64_t count, const Task& task) {
  executor.parallel_for(count, std::cref(task));
}

// cache.cc
void write_latent_cache(const WriteLatentCacheParams& params, Executor& executor);
void gather_latent(const GatherLatentParams& params, Executor& executor);

// expand.cc
size_t expand_scratch_bytes(const ModelDims& dims, int num_workers);
void expand(const ExpandParams& params, Executor& executor, std::span<std::byte> scratch);
void absorb_query(const AbsorbQueryParams& params, Executor& executor,
                  std::span<std::byte> scratch);
void project_value(const ProjectValueParams& params, Executor& executor,
                   std::span<std::byte> scratch);

// attention.cc
size_t attention_scratch_bytes(int64_t qk_head_dim, int64_t v_head_dim, int64_t num_items,
                               int num_workers);
void prefill_attention(const PrefillAttentionParams& params, Executor& executor,
                       std::span<std::byte> scratch);

// merge.cc
void mask_empty_context(const MaskEmptyContextParams& params, Executor& executor);
void merge_attn_states(const MergeAttnStatesParams& params, Executor& executor);
void clear_partial(const ClearPartialParams& params, Executor& executor);

}  // namespace mla::cpu

#endif  // KERNELS_CPU_OPS_H_
