#include "tools/cli/verify.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "tests/oracle/oracle.h"

namespace mla::cli {
namespace {

constexpr double kMaxRelErr = 5e-3;
/// A wrong row is off by about its own size. This leaves room for chance in a request of one row.
constexpr double kMaxRequestRelErr = 1e-2;
constexpr double kMaxLseErr = 1e-3;  // times max(1, |LSE|)
/// bf16 rounds to within 2^-9 of a value; what is left is for float32 accumulation.
constexpr double kMaxExpandRelErr = 1.0 / 512 + 5e-5;

/// Rows of keys held in float32 at a time, unless one request alone has more.
constexpr int64_t kGroupRows = 65536;

/// std::max takes a NaN for small.
double max_or_nan(double a, double b) { return a > b || std::isnan(a) ? a : b; }

std::vector<float> to_floats(std::span<const uint16_t> bits) {
  std::vector<float> values(bits.size());
  std::transform(bits.begin(), bits.end(), values.begin(), bf16_value);
  return values;
}

/// [P + V, L] of one head.
std::vector<float> head_weight(const Session& session, int32_t layer, int32_t head) {
  const ModelDims& dims = session.config().dims;
  const int64_t rows = dims.kv_head_dim();
  const int64_t columns = dims.kv_lora_rank;
  std::vector<uint16_t> bits(static_cast<size_t>(rows * columns));
  for (int64_t row = 0; row < rows; ++row) {
    session.values().weight_row(layer, head * rows + row,
                                std::span(bits).subspan(row * columns, columns));
  }
  return to_floats(bits);
}

/// Whether the context of the plan's request r is attended in latent form.
bool is_absorbed(const StepPlan& plan, int32_t r) {
  return std::ranges::any_of(plan.chunks(), [&](const Chunk& chunk) {
    return chunk.path == Path::kAbsorb && r >= chunk.request_begin && r < chunk.request_end &&
           plan.host(chunk.seq_lens)[r - chunk.request_begin] > 0;
  });
}

int64_t count_scores(const Step& step, int64_t heads) {
  int64_t scores = 0;
  for (const ScheduledRequest& r : step) {
    const int64_t q = r.query_len;
    scores += q * r.context_len + q * (q + 1) / 2;
  }
  return scores * heads;
}

}  // namespace

double verify_bytes(const Workload& workload, const ModelDims& dims, int num_workers) {
  constexpr double kScoreRows = 64;  // that the oracle attends at a time, at the most
  double longest = 0.0;
  for (const PrefillRequest& request : workload.requests) {
    longest = std::max(longest, double(request.prefix_len) + request.prompt_len);
  }
  // Each worker expands one head of one request, twice while absorbed and new keys are put
  // together.
  const double latent = (longest + kGroupRows) * dims.latent_dim() * sizeof(float);
  const double keys = longest * dims.kv_head_dim() * sizeof(float) * 2;
  const double scores = longest * kScoreRows * sizeof(double);
  return latent + num_workers * (keys + scores);
}

/// The keys of one request, and which of its rows are checked.
struct Verifier::Request {
  ScheduledRequest scheduled;
  int64_t row_begin = 0;  // in the step
  bool absorbed = false;  // its context's keys and values are attended unrounded
  std::vector<int32_t> rows;
  std::vector<float> latent;  // [S, L], in position order
  std::vector<float> k_pe;    // [S, Rr]

  /// Keys that the last checked row sees.
  int64_t num_keys() const { return scheduled.context_len + rows.back() + 1; }
};

void Verifier::Errors::add(const Errors& other) {
  squared_error += other.squared_error;
  squared_reference += other.squared_reference;
  max_abs = max_or_nan(max_abs, other.max_abs);
  lse_max_abs = max_or_nan(lse_max_abs, other.lse_max_abs);
  lse_ok = lse_ok && other.lse_ok;
}

double Verifier::Errors::relative() const {
  return squared_error == 0.0 ? 0.0 : std::sqrt(squared_error / squared_reference);
}

std::vector<int32_t> Verifier::chosen_heads(int32_t num_heads) const {
  const int32_t count = sample_.max_heads == 0 ? num_heads : std::min(sample_.max_heads, num_heads);
  std::vector<int32_t> heads;
  heads.reserve(count);
  for (int32_t i = 0; i < count; ++i) {
    heads.push_back(count == 1 ? 0
                               : static_cast<int32_t>(int64_t{i} * (num_heads - 1) / (count - 1)));
  }
  return heads;
}

/// Rows of request `index` of the step. A sample has the first, the last, those on both sides of
/// every boundary between items of the plan, and some by chance.
std::vector<int32_t> Verifier::chosen_rows(const Session& session, size_t index, bool all) const {
  const StepPlan& plan = session.plan();
  const int32_t begin = plan.host(plan.query_start_loc())[index];
  const int32_t end = plan.host(plan.query_start_loc())[index + 1];
  const int32_t length = end - begin;
  std::vector<int32_t> rows;
  if (length == 0) return rows;
  if (all || length <= sample_.random_rows) {
    for (int32_t i = 0; i < length; ++i) rows.push_back(i);
    return rows;
  }
  rows = {0, length - 1};
  const auto add_boundaries = [&](BlockArray<AttentionItem> items) {
    for (const AttentionItem& item : plan.host(items)) {
      for (const int64_t row : {item.q_begin - 1, item.q_begin, item.q_begin + item.q_len - 1,
                                item.q_begin + item.q_len}) {
        if (row >= begin && row < end) rows.push_back(static_cast<int32_t>(row - begin));
      }
    }
  };
  // Items of absorbed passes count rows from their pass; a chunk's own are in the step's rows.
  for (const Chunk& chunk : plan.chunks()) add_boundaries(chunk.items);
  for (const NewTokenPiece& piece : plan.new_token_pieces()) {
    add_boundaries(piece.carried_items);
    add_boundaries(piece.final_items);
  }
  std::mt19937 random(static_cast<uint32_t>(checked_rows_ + begin));
  for (int32_t i = 0; i < sample_.random_rows; ++i) {
    rows.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(length)));
  }
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

/// Context as the cache holds it; the step's own tokens as they were given.
void Verifier::load_keys(const Session& session, int32_t layer, const HostLayer& host,
                         Request& request) const {
  const ModelDims& dims = session.config().dims;
  const int64_t l = dims.kv_lora_rank;
  const int64_t rr = dims.qk_rope_head_dim;
  const KvCacheFormat format = session.config().kv_cache_format;
  request.latent.resize(request.num_keys() * l);
  request.k_pe.resize(request.num_keys() * rr);
  executor_.parallel_for(request.num_keys(), [&](int64_t position, int) {
    std::vector<uint16_t> bits(l + rr);
    const int64_t context_len = request.scheduled.context_len;
    const bool in_cache = position < context_len;
    if (in_cache) {
      session.values().latent_row(layer, request.scheduled.id, position, bits);
    } else {
      const int64_t row = request.row_begin + position - context_len;
      std::copy_n(host.latent.begin() + row * (l + rr), l + rr, bits.begin());
    }
    std::vector<float> row = to_floats(bits);
    if (in_cache && format == KvCacheFormat::kFp8E4M3) {
      row = oracle::through_fp8_e4m3(row, kv_cache_scale_);
    } else if (in_cache && format == KvCacheFormat::kFp8DsMla) {
      row = oracle::through_fp8_ds_mla(row);
    }
    std::copy_n(row.begin(), l, request.latent.begin() + position * l);
    std::copy_n(row.begin() + l, rr, request.k_pe.begin() + position * rr);
  });
}

/// What attention reads: keys and values rounded to bf16, but for absorbed context, whose expansion
/// is never formed.
oracle::HeadKeys Verifier::expand_head(const Request& request, const ModelDims& dims,
                                       std::span<const float> weight) {
  const auto expand = [&](std::span<const float> latent, bool round) {
    return oracle::expand_head(latent, weight, dims.qk_nope_head_dim, dims.v_head_dim,
                               dims.kv_lora_rank, round);
  };
  const std::span<const float> latent = request.latent;
  if (!request.absorbed) return expand(latent, /*round=*/true);
  const size_t context = static_cast<size_t>(request.scheduled.context_len) * dims.kv_lora_rank;
  oracle::HeadKeys keys = expand(latent.first(context), /*round=*/false);
  const oracle::HeadKeys given = expand(latent.subspan(context), /*round=*/true);
  keys.k_nope.insert(keys.k_nope.end(), given.k_nope.begin(), given.k_nope.end());
  keys.v.insert(keys.v.end(), given.v.begin(), given.v.end());
  return keys;
}

Verifier::Errors Verifier::check_head(const Session& session, int32_t layer, int32_t head,
                                      const HostLayer& host, const Request& request) const {
  const ModelDims& dims = session.config().dims;
  const int64_t heads = dims.num_heads;
  const int64_t qk = dims.qk_head_dim();
  const int64_t v = dims.v_head_dim;
  const auto n = static_cast<int64_t>(request.rows.size());

  std::vector<float> q(n * qk);
  std::vector<int64_t> visible(n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = request.row_begin + request.rows[i];
    const auto* const source = &host.q[(row * heads + head) * qk];
    std::transform(source, source + qk, q.begin() + i * qk, bf16_value);
    visible[i] = int64_t{request.scheduled.context_len} + request.rows[i] + 1;
  }
  const oracle::HeadKeys keys = expand_head(request, dims, head_weight(session, layer, head));
  const oracle::HeadResult expected =
      oracle::attend_head(q, keys, request.k_pe, visible, dims.qk_nope_head_dim,
                          dims.qk_rope_head_dim, v, session.config().softmax_scale);

  Errors errors;
  const auto tokens = static_cast<int64_t>(host.lse.size()) / heads;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = request.row_begin + request.rows[i];
    const uint16_t* const out = &host.out[(row * heads + head) * v];
    for (int64_t d = 0; d < v; ++d) {
      const double reference = expected.out[i * v + d];
      const double error = bf16_value(out[d]) - reference;
      errors.squared_error += error * error;
      errors.squared_reference += reference * reference;
      errors.max_abs = max_or_nan(errors.max_abs, std::fabs(error));
    }
    const double lse_error = std::fabs(host.lse[head * tokens + row] - expected.lse[i]);
    errors.lse_max_abs = max_or_nan(errors.lse_max_abs, lse_error);
    errors.lse_ok &= lse_error <= kMaxLseErr * std::max(1.0, std::fabs(expected.lse[i]));
  }
  return errors;
}

void Verifier::check_layer(Session& session, int32_t layer) {
  const HostLayer& host = session.fetch_layer();
  const Step& step = session.step();
  const std::vector<int32_t> heads = chosen_heads(session.config().dims.num_heads);
  const bool all = count_scores(step, static_cast<int64_t>(heads.size())) <= sample_.max_scores;

  std::vector<Request> group;
  int64_t group_rows = 0;
  const auto check_group = [&] {
    const auto num_heads = static_cast<int64_t>(heads.size());
    std::vector<Errors> errors(group.size() * heads.size());
    executor_.parallel_for(static_cast<int64_t>(errors.size()), [&](int64_t i, int) {
      errors[i] = check_head(session, layer, heads[i % num_heads], host, group[i / num_heads]);
    });
    for (size_t r = 0; r < group.size(); ++r) {
      Errors of_request;
      for (int64_t h = 0; h < num_heads; ++h) of_request.add(errors[r * num_heads + h]);
      worst_request_ = max_or_nan(worst_request_, of_request.relative());
      total_.add(of_request);
    }
    group.clear();
    group_rows = 0;
  };

  int64_t row_begin = 0;
  for (size_t r = 0; r < step.size(); ++r) {
    Request request;
    request.scheduled = step[r];
    request.row_begin = row_begin;
    request.absorbed = is_absorbed(session.plan(), static_cast<int32_t>(r));
    request.rows = chosen_rows(session, r, all);
    row_begin += step[r].query_len;
    if (request.rows.empty()) continue;
    if (group_rows > 0 && group_rows + request.num_keys() > kGroupRows) check_group();
    load_keys(session, layer, host, request);
    group_rows += request.num_keys();
    checked_rows_ += static_cast<int64_t>(request.rows.size());
    group.push_back(std::move(request));
  }
  check_group();
  check_expansion(session, layer, host);
}

/// Evenly spread rows of the step's new tokens, every head.
void Verifier::check_expansion(Session& session, int32_t layer, const HostLayer& host) {
  const ModelDims& dims = session.config().dims;
  const int64_t latent_dim = dims.latent_dim();
  const int64_t l = dims.kv_lora_rank;
  const auto tokens = static_cast<int64_t>(host.latent.size()) / latent_dim;
  const int64_t n = std::min(tokens, Session::kMaxExpandRows);
  if (n == 0) return;

  std::vector<uint16_t> rows(n * latent_dim);
  std::vector<float> latent(n * l);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t token = n == 1 ? 0 : i * (tokens - 1) / (n - 1);
    const auto source = host.latent.begin() + token * latent_dim;
    std::copy_n(source, latent_dim, rows.begin() + i * latent_dim);
    std::transform(source, source + l, latent.begin() + i * l, bf16_value);
  }
  const std::vector<uint16_t> found = session.expand_rows(layer, rows);

  const int64_t p = dims.qk_nope_head_dim;
  const int64_t v = dims.v_head_dim;
  std::vector<Errors> errors(dims.num_heads);
  executor_.parallel_for(dims.num_heads, [&](int64_t head, int) {
    const oracle::HeadKeys keys = oracle::expand_head(
        latent, head_weight(session, layer, static_cast<int32_t>(head)), p, v, l, /*round=*/false);
    const auto add = [&](double reference, uint16_t bits) {
      const double error = bf16_value(bits) - reference;
      errors[head].squared_error += error * error;
      errors[head].squared_reference += reference * reference;
    };
    for (int64_t i = 0; i < n; ++i) {
      const uint16_t* const row = &found[(i * dims.num_heads + head) * (p + v)];
      for (int64_t d = 0; d < p; ++d) add(keys.k_nope[i * p + d], row[d]);
      for (int64_t d = 0; d < v; ++d) add(keys.v[i * v + d], row[p + d]);
    }
  });
  for (const Errors& of_head : errors) {
    squared_expand_error_ += of_head.squared_error;
    squared_expand_reference_ += of_head.squared_reference;
  }
}

VerifyReport Verifier::report() const {
  VerifyReport report;
  report.checked_rows = checked_rows_;
  report.max_abs_err = total_.max_abs;
  report.rel_err = total_.relative();
  report.worst_request_rel_err = worst_request_;
  report.lse_max_abs_err = total_.lse_max_abs;
  report.expand_rel_err = squared_expand_error_ == 0.0
                              ? 0.0
                              : std::sqrt(squared_expand_error_ / squared_expand_reference_);
  report.ok = report.rel_err <= kMaxRelErr && report.worst_request_rel_err <= kMaxRequestRelErr &&
              total_.lse_ok && report.expand_rel_err <= kMaxExpandRelErr;
  return report;
}

}  // namespace mla::cli
