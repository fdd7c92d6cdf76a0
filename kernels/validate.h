// The checks that an op makes before it launches, the same for every backend.
//
// They look at the params alone, not at backend memory. Throws kInvalidArgument or kUnsupported
// naming the value and the limit. A pointer may be null where the capacity says that nothing is
// there. Element alignment is always asked for, 16 bytes where the contract says so.
#ifndef KERNELS_VALIDATE_H_
#define KERNELS_VALIDATE_H_

#include "kernels/expand.h"
#include "kernels/latent_cache.h"
#include "kernels/merge_attn_states.h"
#include "kernels/prefill_attention.h"

namespace mla {

void validate(const WriteLatentCacheParams& params);
void validate(const GatherLatentParams& params);
void validate(const ExpandParams& params);
void validate(const AbsorbQueryParams& params);
void validate(const ProjectValueParams& params);
void validate(const PrefillAttentionParams& params);
void validate(const MaskEmptyContextParams& params);
void validate(const MergeAttnStatesParams& params);
void validate(const ClearPartialParams& params);

}  // namespace mla

#endif  // KERNELS_VALIDATE_H_
