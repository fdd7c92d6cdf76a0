#include <array>

#include "metadata/error.h"
#include "parallel/partition.h"

namespace mla {
namespace {

template <typename Value, size_t kCount>
Value find(std::string_view what, std::string_view name,
           const std::array<std::pair<std::string_view, Value>, kCount>& known) {
  std::string names;
  for (const auto& [known_name, value] : known) {
    if (known_name == name) return value;
    names += (names.empty() ? "" : ", ") + std::string(known_name);
  }
  throw_error(ErrorCode::kInvalidArgument, "unknown {} '{}'; known: {}", what, name, names);
}

}  // namespace

std::string_view cache_placement_name(CachePlacement placement) {
  return placement == CachePlacement::kSharded ? "sharded" : "replicated";
}

CachePlacement find_cache_placement(std::string_view name) {
  using Entry = std::pair<std::string_view, CachePlacement>;
  return find("cache placement", name,
              std::array{Entry{"sharded", CachePlacement::kSharded},
                         Entry{"replicated", CachePlacement::kReplicated}});
}

std::string_view query_placement_name(QueryPlacement placement) {
  return placement == QueryPlacement::kReplicated ? "replicated" : "split";
}

QueryPlacement find_query_placement(std::string_view name) {
  using Entry = std::pair<std::string_view, QueryPlacement>;
  return find("query placement", name,
              std::array{Entry{"replicated", QueryPlacement::kReplicated},
                         Entry{"split", QueryPlacement::kSplit}});
}

std::string_view strategy_name(Strategy strategy) {
  return strategy == Strategy::kGatherKv ? "gather_kv" : "merge_partials";
}

StrategyPolicy find_strategy_policy(std::string_view name) {
  using Entry = std::pair<std::string_view, StrategyPolicy>;
  return find("strategy", name,
              std::array{Entry{"auto", StrategyPolicy::kAuto},
                         Entry{"gather_kv", StrategyPolicy::kGatherKv},
                         Entry{"merge_partials", StrategyPolicy::kMergePartials}});
}

void validate_parallel_config(const ParallelConfig& config) {
  validate_shard(config.shard);
  validate_rates(config.rates);
  if (config.small_exchange_bytes < 0) {
    throw_error(ErrorCode::kInvalidArgument, "small_exchange_bytes is {}, at least 0",
                config.small_exchange_bytes);
  }
}

}  // namespace mla
