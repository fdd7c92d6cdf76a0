// Backends that are wrong on purpose. Suites that stay green on one of these can't find the fault
// it stands for; tests/mutants sees to it that they turn red.
#ifndef TESTS_SUPPORT_MUTANT_BACKEND_H_
#define TESTS_SUPPORT_MUTANT_BACKEND_H_

#include <memory>
#include <string_view>

#include "kernels/backend.h"

namespace mla::test {

/// `backend` must work on host memory. Null for an unknown name. The mutants:
///   no_fault          none: suites must notice the fault, not that a mutant has a merge of its own
///   mask_off          mask_empty_context does nothing
///   base2_lse         merge_attn_states takes its LSE for base-2 logarithms
///   offset32          merge_attn_states forms element offsets in 32 bits
///   multiply_weight0  merge_attn_states multiplies the side of weight 0 instead of skipping it
///   top_left_causal   prefill_attention aligns the causal mask with the first key
std::unique_ptr<Backend> make_mutant_backend(std::unique_ptr<Backend> backend,
                                             std::string_view mutant);

}  // namespace mla::test

#endif  // TESTS_SUPPORT_MUTANT_BACKEND_H_
