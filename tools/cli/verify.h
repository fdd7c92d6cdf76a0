// Checks a run's results against the float64 oracle.
#ifndef TOOLS_CLI_VERIFY_H_
#define TOOLS_CLI_VERIFY_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/executor.h"
#include "metadata/model.h"
#include "tests/oracle/oracle.h"
#include "tools/cli/session.h"
#include "tools/cli/workload.h"

namespace mla::cli {

struct VerifyReport {
  int64_t checked_rows = 0;  // query rows, each with all heads, summed over layers and steps
  double max_abs_err = 0.0;
  double rel_err = 0.0;  // Frobenius norm of the error over that of the reference
  /// The same of the worst single (request, step, layer): a fault in one small request can't hide
  /// behind the others.
  double worst_request_rel_err = 0.0;
  double lse_max_abs_err = 0.0;
  double expand_rel_err = 0.0;  // of sampled rows of the expansion, against unrounded float64
  bool ok = true;
};

/// How much of a step is checked.
struct VerifySample {
  int64_t max_scores = int64_t{1} << 28;  // of one layer of one step; beyond, rows are sampled
  int32_t random_rows = 64;               // of each request, where rows are sampled
  int32_t max_heads = 0;                  // evenly spread; 0: all
};

/// Memory that a Verifier takes at most, on top of the session's.
double verify_bytes(const Workload& workload, const ModelDims& dims, int num_workers);

class Verifier {
 public:
  Verifier(float kv_cache_scale, Executor& executor, VerifySample sample = {})
      : kv_cache_scale_(kv_cache_scale), executor_(executor), sample_(sample) {}

  /// Checks the layer that the session has just run.
  void check_layer(Session& session, int32_t layer);
  VerifyReport report() const;

 private:
  struct Request;
  struct Errors {
    double squared_error = 0.0;
    double squared_reference = 0.0;
    double max_abs = 0.0;
    double lse_max_abs = 0.0;
    bool lse_ok = true;
    void add(const Errors& other);
    double relative() const;
  };

  std::vector<int32_t> chosen_heads(int32_t num_heads) const;
  std::vector<int32_t> chosen_rows(const Session& session, size_t index, bool all) const;
  void load_keys(const Session& session, int32_t layer, const HostLayer& host,
                 Request& request) const;
  static oracle::HeadKeys expand_head(const Request& request, const ModelDims& dims,
                                      std::span<const float> weight);
  Errors check_head(const Session& session, int32_t layer, int32_t head, const HostLayer& host,
                    const Request& request) const;
  void check_expansion(Session& session, int32_t layer, const HostLayer& host);

  float kv_cache_scale_;
  Executor& executor_;
  VerifySample sample_;
  Errors total_;
  double worst_request_ = 0.0;
  double squared_expand_error_ = 0.0;
  double squared_expand_reference_ = 0.0;
  int64_t checked_rows_ = 0;
};

}  // namespace mla::cli

#endif  // TOOLS_CLI_VERIFY_H_
