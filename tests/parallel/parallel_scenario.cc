#include "tests/parallel/parallel_scenario.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>

#include "engine/paged_cache.h"
#include "engine/parallel_engine.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/executor.h"
#include "tests/support/compare.h"
#include "tests/support/device_tensor.h"

namespace mla::test {
namespace {

constexpr DType kBf16 = DType::kBFloat16;
constexpr size_t kZone = 4096;  // behind the workspace

/// A new token of a step: request and position in its prompt's rows.
struct TokenAt {
  int32_t id = 0;
  int32_t position = 0;
};

void append_row(std::vector<float>& to, const std::vector<float>& from, int64_t row,
                int64_t columns) {
  to.insert(to.end(), from.begin() + row * columns, from.begin() + (row + 1) * columns);
}

/// One rank's life.
class RankRun {
 public:
  RankRun(const EngineConfig& config, const ParallelConfig& parallel, const Scenario& scenario,
          const ParallelOptions& options, Backend& backend, Communicator& communicator)
      : config_(config),
        parallel_(parallel),
        scenario_(scenario),
        options_(options),
        backend_(backend),
        cache_shard_(parallel.placement == CachePlacement::kSharded
                         ? parallel.shard
                         : ContextShard{.world = 1, .rank = 0, .interleave = 1}),
        num_pages_(pages_needed(scenario, config.page_size) +
                   static_cast<int32_t>(scenario.requests.size()) + 5),
        paged_(num_pages_, config.page_size),
        storage_(backend, scenario.dims, config.kv_cache_format, options.cache_scale, num_pages_,
                 config.page_size, scenario.num_layers),
        workspace_bytes_(parallel_layout(config, parallel, backend).total),
        workspace_(backend, workspace_bytes_ + kZone) {
    for (size_t r = 0; r < scenario.requests.size(); ++r) paged_.add();
    const LatentCache first = storage_.layer(0);
    backend.fill_bytes(first.data, kPoison, scenario.num_layers * num_pages_ * first.page_stride,
                       {});
    backend.fill_bytes(workspace_.data(), options.fill, workspace_.bytes(), {});
    engine_.emplace(config, parallel, backend, communicator,
                    workspace_.span().first(workspace_bytes_));
    for (int32_t layer = 0; layer < scenario.num_layers; ++layer) {
      weights_.emplace_back(backend, kBf16,
                            DeviceTensor::Shape{.rows = int64_t{scenario.dims.num_heads} *
                                                        scenario.dims.kv_head_dim(),
                                                .dim = scenario.dims.kv_lora_rank},
                            scenario.kv_b_proj[layer]);
    }
    write_prefixes();
  }

  void run_step(size_t s) {
    const std::vector<ScheduledRequest>& step = scenario_.steps[s];
    std::vector<int32_t> query_start_loc = {0}, context_lens, ids;
    std::vector<int64_t> slots;
    std::vector<TokenAt> tokens;
    for (const ScheduledRequest& r : step) {
      query_start_loc.push_back(query_start_loc.back() + r.query_len);
      context_lens.push_back(r.context_len);
      ids.push_back(r.id);
      grow(r.id, r.context_len + r.query_len);
      for (int32_t i = 0; i < r.query_len; ++i) {
        tokens.push_back({r.id, r.context_len + i});
        slots.push_back(slot_of(r.id, r.context_len + i));
      }
    }
    if (options_.change_batch) options_.change_batch(parallel_.shard.rank, context_lens);
    std::vector<int32_t> table_storage;
    const DeviceArray<int64_t> device_slots(backend_, slots);
    StepInputs inputs;
    inputs.batch = {query_start_loc, context_lens};
    inputs.num_pages = num_pages_;
    inputs.host_block_table = paged_.block_table(ids, table_storage);
    inputs.reject_duplicate_pages = true;
    inputs.slot_mapping = device_slots.data();
    inputs.host_slot_mapping = slots;
    engine_->begin_step(inputs);

    // The rows that this rank is given, with what must lie behind them.
    int64_t capacity = static_cast<int64_t>(tokens.size());
    if (parallel_.queries == QueryPlacement::kSplit) {
      std::vector<TokenAt> own;
      for (const QueryRows& rows :
           split_queries(inputs.batch, parallel_.shard.world, parallel_.shard.rank)) {
        const int32_t first = query_start_loc[rows.request] + rows.position;
        own.insert(own.end(), tokens.begin() + first, tokens.begin() + first + rows.length);
      }
      tokens = std::move(own);
      capacity = engine_->plan().block_rows;
    }
    std::vector<LayerResult>& layers = results.emplace_back();
    for (int32_t layer = 0; layer < scenario_.num_layers; ++layer) {
      if (options_.before_layer) options_.before_layer(parallel_.shard.rank, s);
      layers.push_back(run_layer(layer, tokens, capacity));
      const auto announced = engine_->plan().collectives(options_.out_dtype);
      announced_calls.insert(announced_calls.end(), announced.begin(), announced.end());
    }
    strategy = engine_->plan().strategy;
  }

  void check_zone() {
    std::vector<std::byte> zone(kZone);
    backend_.copy_to_host(zone.data(), workspace_.span().data() + workspace_bytes_, kZone, {});
    const std::vector<std::byte> untouched(kZone, std::byte{options_.fill});
    EXPECT_TRUE(same_bits(std::span<const std::byte>(zone), untouched))
        << "written past the workspace";
  }

  ScenarioResult results;
  std::vector<CollectiveCall> announced_calls;
  Strategy strategy = Strategy::kGatherKv;

 private:
  void grow(int32_t id, int32_t length) { paged_.grow(id, local_length(length, cache_shard_)); }

  int64_t slot_of(int32_t id, int32_t position) const {
    if (cache_shard_.world > 1 && owner_rank(position, cache_shard_) != cache_shard_.rank) {
      return -1;
    }
    return paged_.slot(id,
                       cache_shard_.world > 1 ? local_position(position, cache_shard_) : position);
  }

  void write_prefixes() {
    const ModelDims& dims = scenario_.dims;
    for (int32_t layer = 0; layer < scenario_.num_layers; ++layer) {
      std::vector<int64_t> slots;
      std::vector<float> rows;
      for (size_t r = 0; r < scenario_.requests.size(); ++r) {
        const auto id = static_cast<int32_t>(r);
        const Scenario::Request& request = scenario_.requests[r];
        grow(id, request.prefix_len);
        for (int32_t i = 0; i < request.prefix_len; ++i) {
          slots.push_back(slot_of(id, i));
          append_row(rows, request.rows[layer], i, dims.latent_dim());
        }
      }
      if (slots.empty()) return;
      const DeviceArray<int64_t> device_slots(backend_, slots);
      const auto count = static_cast<int64_t>(slots.size());
      const DeviceTensor tensor(backend_, kBf16, {.rows = count, .dim = dims.latent_dim()}, rows);
      backend_.write_latent_cache({.kv_lora_rank = dims.kv_lora_rank,
                                   .qk_rope_head_dim = dims.qk_rope_head_dim,
                                   .kv_c = tensor.const_rows(),
                                   .k_pe = tensor.const_rows(dims.kv_lora_rank),
                                   .slot_mapping = device_slots.data(),
                                   .num_tokens = {count},
                                   .kv_cache = storage_.layer(layer)},
                                  {});
    }
  }

  LayerResult run_layer(int32_t layer, const std::vector<TokenAt>& tokens, int64_t capacity) {
    const ModelDims& dims = scenario_.dims;
    const int64_t q_row = int64_t{dims.num_heads} * dims.qk_head_dim();
    const int64_t latent = dims.latent_dim();
    std::vector<float> q, rows;
    for (const TokenAt& token : tokens) {
      const Scenario::Request& request = scenario_.requests[token.id];
      append_row(q, request.q[layer], token.position - request.prefix_len, q_row);
      append_row(rows, request.rows[layer], token.position, latent);
    }
    q.resize(capacity * q_row, NAN);
    rows.resize(capacity * latent, NAN);

    const DeviceTensor q_tensor(
        backend_, kBf16, {.rows = capacity, .heads = dims.num_heads, .dim = dims.qk_head_dim()}, q);
    const DeviceTensor latent_tensor(
        backend_, kBf16,
        {.rows = capacity, .dim = latent, .row_stride = latent + (options_.strided ? 24 : 0)},
        rows);
    const auto count = static_cast<int64_t>(tokens.size());
    const int64_t gap = options_.strided ? 8 : 0;
    const DeviceTensor out(backend_, options_.out_dtype,
                           {.rows = count,
                            .heads = dims.num_heads,
                            .dim = dims.v_head_dim,
                            .row_stride = dims.num_heads * (dims.v_head_dim + gap) + 3 * gap,
                            .head_stride = dims.v_head_dim + gap});
    const DeviceTensor lse =
        DeviceTensor::lse(backend_, count, dims.num_heads, options_.lse_rows_first);

    LayerParams params;
    params.q = q_tensor.const_heads();
    params.kv_c = latent_tensor.const_rows();
    params.k_pe = latent_tensor.const_rows(dims.kv_lora_rank);
    params.kv_b_proj = weights_[layer].rows().data;
    params.kv_cache = storage_.layer(layer);
    params.out = out.heads();
    if (!options_.without_lse) params.lse = lse.lse();
    engine_->run_layer(params);
    engine_->wait();
    EXPECT_TRUE(out.padding_is_poison()) << "written beside out";
    EXPECT_TRUE(lse.padding_is_poison()) << "written beside lse";
    return {out.download(), lse.download()};
  }

  const EngineConfig& config_;
  const ParallelConfig& parallel_;
  const Scenario& scenario_;
  const ParallelOptions& options_;
  Backend& backend_;
  ContextShard cache_shard_;
  int32_t num_pages_;
  PagedRequests paged_;
  LatentCacheStorage storage_;
  size_t workspace_bytes_;
  DeviceBuffer workspace_;
  std::vector<DeviceTensor> weights_;
  std::optional<ParallelEngine> engine_;
};

/// The rows of all ranks' shares, in the batch's order.
ScenarioResult put_together(const Scenario& scenario, const std::vector<ScenarioResult>& by_rank) {
  const ModelDims& dims = scenario.dims;
  const auto world = static_cast<int32_t>(by_rank.size());
  const int64_t columns = int64_t{dims.num_heads} * dims.v_head_dim;
  ScenarioResult whole;
  for (size_t s = 0; s < scenario.steps.size(); ++s) {
    std::vector<int32_t> query_start_loc = {0}, context_lens;
    for (const ScheduledRequest& r : scenario.steps[s]) {
      query_start_loc.push_back(query_start_loc.back() + r.query_len);
      context_lens.push_back(r.context_len);
    }
    std::vector<LayerResult>& layers = whole.emplace_back();
    for (int32_t layer = 0; layer < scenario.num_layers; ++layer) {
      LayerResult& result = layers.emplace_back();
      result.out.assign(query_start_loc.back() * columns, NAN);
      result.lse.assign(int64_t{query_start_loc.back()} * dims.num_heads, NAN);
      for (int32_t rank = 0; rank < world; ++rank) {
        const LayerResult& own = by_rank[rank][s][layer];
        for (const QueryRows& rows : split_queries({query_start_loc, context_lens}, world, rank)) {
          const int64_t to = query_start_loc[rows.request] + rows.position;
          std::copy_n(own.out.begin() + rows.out_row * columns, rows.length * columns,
                      result.out.begin() + to * columns);
          std::copy_n(own.lse.begin() + int64_t{rows.out_row} * dims.num_heads,
                      int64_t{rows.length} * dims.num_heads,
                      result.lse.begin() + to * dims.num_heads);
        }
      }
    }
  }
  return whole;
}

}  // namespace

bool ParallelRun::ok() const {
  return std::ranges::all_of(outcomes, [](const RankOutcome& o) { return o.message.empty(); });
}

ParallelRun run_parallel(EngineConfig config, const ParallelConfig& parallel,
                         const Scenario& scenario, const ParallelOptions& options) {
  const int32_t world = parallel.shard.world;
  InProcessGroup group(world, options.time_limit);
  std::vector<ScenarioResult> results(static_cast<size_t>(world));
  std::vector<std::vector<CollectiveCall>> announced(static_cast<size_t>(world));
  ParallelRun run;
  run.outcomes = run_ranks(world, [&](int32_t rank) {
    InlineExecutor executor;
    const std::unique_ptr<Backend> cpu = make_cpu_backend(executor);
    std::unique_ptr<Backend> wrapped;
    if (options.wrap_backend) wrapped = options.wrap_backend(*cpu);
    ParallelConfig own = parallel;
    own.shard.rank = rank;
    const std::unique_ptr<Communicator> communicator = group.join(rank);
    RankRun rank_run(config, own, scenario, options, wrapped ? *wrapped : *cpu, *communicator);
    for (size_t s = 0; s < scenario.steps.size(); ++s) {
      if (options.before_step) options.before_step(rank, s);
      rank_run.run_step(s);
    }
    rank_run.check_zone();
    results[rank] = std::move(rank_run.results);
    announced[rank] = std::move(rank_run.announced_calls);
    if (rank == 0) run.strategy = rank_run.strategy;
  });
  for (int32_t rank = 0; rank < world; ++rank) run.calls.push_back(group.calls(rank));
  if (!run.ok()) return run;

  for (int32_t rank = 0; rank < world; ++rank) {
    EXPECT_EQ(run.calls[rank], announced[rank]) << "rank " << rank;
    EXPECT_EQ(run.calls[rank], run.calls[0]) << "rank " << rank;
  }
  if (parallel.queries == QueryPlacement::kSplit) {
    run.result = put_together(scenario, results);
    return run;
  }
  for (int32_t rank = 1; rank < world; ++rank) {
    EXPECT_TRUE(same_bits(results[rank], results[0])) << "rank " << rank;
  }
  run.result = std::move(results[0]);
  return run;
}

std::string describe(const ParallelConfig& parallel) {
  constexpr std::string_view kPolicies[] = {"auto", "gather_kv", "merge_partials"};
  return fmt::format("N {} I {} {} cache, {} queries, {}, small {}", parallel.shard.world,
                     parallel.shard.interleave, cache_placement_name(parallel.placement),
                     query_placement_name(parallel.queries),
                     kPolicies[static_cast<int>(parallel.strategy)], parallel.small_exchange_bytes);
}

}  // namespace mla::test
