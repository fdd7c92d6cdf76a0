#include "metadata/schedule.h"

#include <algorithm>
#include <numeric>

#include "metadata/error.h"
#include "metadata/plan.h"

namespace mla {
namespace {

int64_t round_down(int64_t x, int64_t multiple) { return x - x % multiple; }

// A plan's memory follows from these counts. A step with more would take minutes to plan and many
// to launch: a workspace far too small for its contexts is refused before it takes all memory.
constexpr size_t kMaxSpans = size_t{1} << 22;
constexpr size_t kMaxChunks = size_t{1} << 20;

void check_count(size_t count, size_t limit, const char* what) {
  if (count > limit) {
    throw_error(ErrorCode::kInvalidArgument,
                "the step is cut into more than {} {}: workspace_tokens is too small for it", limit,
                what);
  }
}

/// Collects spans into chunks.
class ChunkWriter {
 public:
  explicit ChunkWriter(ScheduleCuts& cuts) : cuts_(cuts), first_(num_spans()) {}

  bool empty() const { return first_ == num_spans(); }
  int32_t last_request() const { return cuts_.spans.back().request; }
  void add(const Span& span) { *add(1) = span; }
  /// `count` spans at once, for the caller to write.
  Span* add(size_t count) {
    const size_t size = cuts_.spans.size();
    check_count(size + count, kMaxSpans, "spans");
    cuts_.spans.resize(size + count);
    return cuts_.spans.data() + size;
  }

  /// Closes the chunk over the requests of its spans.
  void close() {
    if (!empty()) close(cuts_.spans[first_].request, last_request() + 1);
  }
  void close(int32_t request_begin, int32_t request_end) {
    if (empty()) return;
    check_count(cuts_.chunks.size() + 1, kMaxChunks, "chunks");
    cuts_.chunks.push_back({first_, num_spans(), request_begin, request_end});
    first_ = num_spans();
  }

 private:
  int32_t num_spans() const { return static_cast<int32_t>(cuts_.spans.size()); }

  ScheduleCuts& cuts_;
  int32_t first_;
};

/// Whole contexts in order; one is cut only where the chunk is full.
void cut_packed(const PlanConfig& config, std::span<const int32_t> lengths, ScheduleCuts& cuts) {
  const int64_t w = config.workspace_tokens;
  const int64_t interleave = config.shard.interleave;
  const int64_t cycle = interleave * config.shard.world;
  int64_t alignment = config.page_size;
  const bool aligns_cycles =
      config.shard.world > 1 && cycle <= w && std::lcm(alignment, cycle) <= w;
  if (aligns_cycles) alignment = std::lcm(alignment, cycle);

  ChunkWriter chunk(cuts);
  int64_t room = w;
  for (int32_t r = 0; r < static_cast<int32_t>(lengths.size()); ++r) {
    int32_t begin = 0;
    while (begin < lengths[r]) {
      int32_t end = lengths[r];
      if (most_local_rows(end - begin, config.shard) > room) {
        const int64_t fits = room / interleave * cycle + room % interleave;  // tokens
        end = static_cast<int32_t>(round_down(begin + fits, alignment));
      }
      if (end > begin) {
        chunk.add({r, begin, end});
        room -= most_local_rows(end - begin, config.shard);
        begin = end;
      }
      if (begin < lengths[r]) {
        chunk.close();
        room = w;
      }
    }
  }
  chunk.close();
}

/// Cuts every context at multiples of `step`, and takes as many requests together as surely fit.
/// `keep_range`: a group's later chunks keep all its requests, those that are done with length 0.
void cut_evenly(const PlanConfig& config, std::span<const int32_t> lengths, int32_t step,
                bool keep_range, ScheduleCuts& cuts) {
  const auto num_requests = static_cast<int32_t>(lengths.size());
  ChunkWriter chunk(cuts);
  std::vector<int32_t>& group = cuts.unfinished;
  int32_t r = 0;
  while (r < num_requests) {
    group.clear();
    int64_t rows = 0;
    for (; r < num_requests; ++r) {
      if (lengths[r] == 0) continue;
      rows += most_local_rows(std::min(lengths[r], step), config.shard);
      if (rows > config.workspace_tokens) break;
      group.push_back(r);
    }
    if (group.empty()) return;  // the rest has no context: a step of one request always fits

    const int32_t group_begin = group.front();
    const int32_t group_end = group.back() + 1;
    for (int64_t position = 0; !group.empty(); position += step) {
      const auto begin = static_cast<int32_t>(position);
      size_t unfinished = 0;
      Span* span = chunk.add(group.size());
      for (const int32_t i : group) {
        const int32_t rest = lengths[i] - begin;
        *span++ = {i, begin, begin + std::min(rest, step)};
        if (rest > step) group[unfinished++] = i;
      }
      group.resize(unfinished);
      keep_range ? chunk.close(group_begin, group_end) : chunk.close();
    }
  }
}

}  // namespace

int32_t most_local_rows(int32_t tokens, const ContextShard& shard) {
  // Whole cycles give every rank the same, wherever they begin; of the rest no rank has more than
  // `interleave`. Rank 0 of a span that begins a cycle has just that.
  return local_length(tokens, {shard.world, 0, shard.interleave});
}

void cut_contexts(const PlanConfig& config, std::span<const int32_t> lengths, ScheduleCuts& cuts) {
  switch (config.schedule) {
    case Schedule::kPacked:
      cut_packed(config, lengths, cuts);
      return;
    case Schedule::kUniform: {
      const auto with_context =
          std::count_if(lengths.begin(), lengths.end(), [](int32_t length) { return length > 0; });
      if (with_context == 0) return;
      const auto even = static_cast<int32_t>(
          round_down(config.workspace_tokens / with_context, config.page_size));
      cut_evenly(config, lengths, std::max(even, config.page_size), /*keep_range=*/true, cuts);
      return;
    }
    case Schedule::kFixed:
      cut_evenly(config, lengths, effective_split_tokens(config), /*keep_range=*/false, cuts);
      return;
  }
}

void cut_new_tokens(const PlanConfig& config, std::span<const int32_t> query_start_loc,
                    ScheduleCuts& cuts) {
  const bool fixed = config.schedule == Schedule::kFixed;
  const int32_t w = config.workspace_tokens;
  const int32_t split = fixed ? effective_split_tokens(config) : w;

  ChunkWriter piece(cuts);
  int32_t room = w;
  for (int32_t r = 0; r + 1 < static_cast<int32_t>(query_start_loc.size()); ++r) {
    const int32_t length = query_start_loc[r + 1] - query_start_loc[r];
    int32_t begin = 0;
    while (begin < length) {
      const int32_t whole = std::min(split, length - begin);
      const bool continues = !piece.empty() && piece.last_request() == r;
      if (room == 0 || continues || (fixed && whole > room)) {
        piece.close();
        room = w;
      }
      const int32_t rows = std::min(whole, room);
      piece.add({r, begin, begin + rows});
      room -= rows;
      begin += rows;
    }
  }
  piece.close();
}

}  // namespace mla
