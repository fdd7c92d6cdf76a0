#include "metadata/plan.h"

#include <algorithm>
#include <limits>

#include "metadata/error.h"
#include "metadata/schedule.h"

namespace mla {

// The block is a vector of bytes; its arrays are aligned to 16.
static_assert(__STDCPP_DEFAULT_NEW_ALIGNMENT__ >= 16);

std::string_view schedule_name(Schedule schedule) {
  switch (schedule) {
    case Schedule::kPacked:
      return "packed";
    case Schedule::kUniform:
      return "uniform";
    case Schedule::kFixed:
      return "fixed";
  }
  throw_error(ErrorCode::kInvalidArgument, "unknown schedule {}", static_cast<int>(schedule));
}

Schedule find_schedule(std::string_view name) {
  for (Schedule schedule : {Schedule::kPacked, Schedule::kUniform, Schedule::kFixed}) {
    if (schedule_name(schedule) == name) return schedule;
  }
  throw_error(ErrorCode::kInvalidArgument, "unknown schedule '{}'; known: packed, uniform, fixed",
              name);
}

std::string_view path_name(Path path) { return path == Path::kExpand ? "expand" : "absorb"; }

PathPolicy find_path_policy(std::string_view name) {
  if (name == "auto") return PathPolicy::kAuto;
  if (name == "expand") return PathPolicy::kExpand;
  if (name == "absorb") return PathPolicy::kAbsorb;
  throw_error(ErrorCode::kInvalidArgument, "unknown path '{}'; known: auto, expand, absorb", name);
}

Path cheaper_path(const ModelDims& dims, int32_t query_len, int32_t context_len) {
  // Multiply-adds of one head; in double, since the products pass 2^63.
  const double q = query_len;
  const double k = context_len;
  const double projection = double(dims.kv_lora_rank) * dims.kv_head_dim();
  const double expand = k * projection + q * k * (dims.qk_head_dim() + dims.v_head_dim);
  const double absorb = q * projection + q * k * (dims.latent_dim() + dims.kv_lora_rank);
  return absorb < expand ? Path::kAbsorb : Path::kExpand;
}

void validate_plan_config(const PlanConfig& config) {
  validate_dims(config.dims);
  validate_shard(config.shard);
  if (config.page_size < 1) {
    throw_error(ErrorCode::kInvalidArgument, "page_size is {}, at least 1 is needed",
                config.page_size);
  }
  if (config.workspace_tokens < config.page_size) {
    throw_error(ErrorCode::kInvalidArgument,
                "workspace_tokens is {}; one page, {} tokens, is its least",
                config.workspace_tokens, config.page_size);
  }
  if (config.split_tokens < 0 || config.split_tokens % config.page_size != 0 ||
      config.split_tokens > config.workspace_tokens) {
    throw_error(ErrorCode::kInvalidArgument,
                "split_tokens is {}; it must be a multiple of the page size {} up to "
                "workspace_tokens {}",
                config.split_tokens, config.page_size, config.workspace_tokens);
  }
  schedule_name(config.schedule);
}

int32_t effective_split_tokens(const PlanConfig& config) {
  if (config.split_tokens > 0) return config.split_tokens;
  constexpr int32_t kDefaultSplit = 4096;
  const int32_t most = std::min(config.workspace_tokens, kDefaultSplit);
  // A page above the default is the least there is; W holds one.
  return std::max(most - most % config.page_size, config.page_size);
}

/// Fills a StepPlan; the steps of build() are its methods, top to bottom.
class PlanBuilder {
 public:
  PlanBuilder(const PlanConfig& config, const Batch& batch, const ShapeClass& shape_class,
              StepPlan& plan)
      : config_(config), batch_(batch), class_(shape_class), plan_(plan) {}

  void clear() {
    plan_.config_ = config_;
    plan_.shape_class_ = class_;
    plan_.num_requests_ = 0;
    plan_.num_query_tokens_ = 0;
    plan_.num_context_tokens_ = 0;
    plan_.max_query_len_ = 0;
    plan_.num_chunks_ = 0;
    plan_.num_pieces_ = 0;
    plan_.chunks_.clear();
    plan_.pieces_.clear();
    plan_.passes_.clear();
    plan_.block_.clear();
    plan_.query_start_loc_ = {};
    plan_.context_start_loc_ = {};
    plan_.block_table_ = {};
    plan_.block_table_stride_ = 0;
    plan_.hash_ = 0;
  }

  void build(const HostBlockTable* table) {
    validate_plan_config(config_);
    validate_class();
    validate_batch(batch_);
    if (table != nullptr) validate_table(*table);
    set_step();
    copy_block_table(table);
    add_chunks();
    add_new_token_pieces();
    set_hash();
  }

  /// The block of a plan of the class, without a batch.
  void build_empty_class() {
    validate_plan_config(config_);
    validate_class();
    set_step();
    copy_block_table(nullptr);
    add_chunk_slots();
    add_piece_slots();
  }

 private:
  int32_t num_requests() const { return batch_.num_requests(); }
  int64_t request_capacity() const {
    return class_.enabled() ? class_.max_requests : num_requests();
  }

  /// Appends an array of `capacity` zeros to the block; `size` of them are in use.
  template <typename T>
  BlockArray<T> add_array(int64_t size, int64_t capacity) {
    constexpr size_t kAlignment = 16;
    const size_t offset = (plan_.block_.size() + kAlignment - 1) / kAlignment * kAlignment;
    const size_t end = offset + static_cast<size_t>(capacity) * sizeof(T);
    constexpr size_t kMaxBytes = std::numeric_limits<uint32_t>::max();
    if (end > kMaxBytes) {
      throw_error(ErrorCode::kInvalidArgument,
                  "the plan's block needs {} bytes or more, the limit is {}", end, kMaxBytes);
    }
    plan_.block_.resize(end);
    return {static_cast<uint32_t>(offset), static_cast<int32_t>(size)};
  }

  /// The array's address until the block next grows.
  template <typename T>
  T* data(BlockArray<T> array) {
    return reinterpret_cast<T*>(plan_.block_.data() + array.offset);
  }

  void check_capacity(const char* what, int64_t value, int64_t capacity) {
    if (value > capacity) {
      throw_error(ErrorCode::kInvalidArgument,
                  "the step has {} {}, its shape class is for at most {}", value, what, capacity);
    }
  }

  void validate_class() {
    const auto [requests, tokens, chunks, pages] = class_;
    if (requests < 0 || tokens < 0 || chunks < 0 || pages < 0) {
      throw_error(ErrorCode::kInvalidArgument,
                  "the shape class is for {} requests, {} new tokens, {} chunks and {} pages; none "
                  "may be below 0",
                  requests, tokens, chunks, pages);
    }
    if (!class_.enabled() && class_ != ShapeClass{}) {
      throw_error(
          ErrorCode::kInvalidArgument,
          "the shape class has max_requests 0; at least 1 is needed, or no capacity at all");
    }
    if (class_.enabled() && config_.path != PathPolicy::kExpand) {
      throw_error(ErrorCode::kUnsupported, "a shape class plans the expand path only");
    }
  }

  void validate_table(const HostBlockTable& table) {
    int64_t pages = 0;
    for (int32_t i = 0; i < num_requests(); ++i) pages = std::max(pages, used_pages(i));
    if (num_requests() > table.num_requests || pages > table.max_pages) {
      throw_error(ErrorCode::kInvalidArgument,
                  "the block table has {} rows of {} pages; the batch needs {} of {}",
                  table.num_requests, table.max_pages, num_requests(), pages);
    }
    if (table.row_stride < table.max_pages || (pages > 0 && table.data == nullptr)) {
      throw_error(ErrorCode::kInvalidArgument,
                  "the block table's data is {} and its row stride {}; a row has {} pages",
                  table.data == nullptr ? "null" : "given", table.row_stride, table.max_pages);
    }
    max_used_pages_ = pages;
  }

  void set_step() {
    const int32_t r = num_requests();
    if (class_.enabled()) {
      check_capacity("requests", r, class_.max_requests);
      check_capacity("new tokens", batch_.num_query_tokens(), class_.max_query_tokens);
    }
    plan_.num_requests_ = r;
    plan_.num_query_tokens_ = batch_.num_query_tokens();
    const int32_t entries = class_.enabled() ? class_.max_requests + 2 : r + 1;
    plan_.query_start_loc_ = add_array<int32_t>(r + 1, entries);
    plan_.context_start_loc_ = add_array<int32_t>(r + 1, entries);
    int32_t* query_start_loc = data(plan_.query_start_loc_);
    int32_t* context_start_loc = data(plan_.context_start_loc_);
    for (int32_t i = 0; i < r; ++i) {
      query_start_loc[i + 1] = batch_.query_start_loc[i + 1];
      context_start_loc[i + 1] =
          context_start_loc[i] + local_length(batch_.context_lens[i], config_.shard);
      plan_.max_query_len_ = std::max(plan_.max_query_len_, batch_.query_len(i));
    }
    plan_.num_context_tokens_ = context_start_loc[r];
    std::fill(query_start_loc + r, query_start_loc + entries, query_start_loc[r]);
    std::fill(context_start_loc + r, context_start_loc + entries, context_start_loc[r]);
    if (class_.enabled()) query_start_loc[entries - 1] = class_.max_query_tokens;
  }

  void copy_block_table(const HostBlockTable* table) {
    int64_t stride = max_used_pages_;
    if (class_.enabled()) {
      check_capacity("pages in a block table row", stride, class_.max_pages);
      stride = class_.max_pages;
    }
    if (table == nullptr && !class_.enabled()) return;
    plan_.block_table_stride_ = static_cast<int32_t>(stride);
    plan_.block_table_ = add_array<int32_t>(table == nullptr ? 0 : num_requests() * stride,
                                            request_capacity() * stride);
    if (table == nullptr || max_used_pages_ == 0) return;
    int32_t* rows = data(plan_.block_table_);
    for (int32_t i = 0; i < num_requests(); ++i) {
      std::copy_n(table->data + i * table->row_stride, used_pages(i), rows + i * stride);
    }
  }

  int64_t used_pages(int32_t r) const {
    const int64_t length = local_length(batch_.context_lens[r], config_.shard);
    return (length + config_.page_size - 1) / config_.page_size;
  }

  void add_chunks() {
    plan_.paths_.resize(static_cast<size_t>(num_requests()));
    plan_.context_lens_.resize(static_cast<size_t>(num_requests()));
    for (int32_t r = 0; r < num_requests(); ++r) plan_.paths_[r] = path_of(r);
    for (Path path : {Path::kExpand, Path::kAbsorb}) {
      for (int32_t r = 0; r < num_requests(); ++r) {
        plan_.context_lens_[r] = plan_.paths_[r] == path ? batch_.context_lens[r] : 0;
      }
      plan_.cuts_.clear();
      cut_contexts(config_, plan_.context_lens_, plan_.cuts_);
      if (class_.enabled()) {
        check_capacity("chunks",
                       static_cast<int64_t>(plan_.num_chunks_ + plan_.cuts_.chunks.size()),
                       class_.max_chunks);
      }
      for (const ChunkCut& cut : plan_.cuts_.chunks) add_chunk(cut, path);
    }
    add_chunk_slots();
  }

  Path path_of(int32_t r) const {
    switch (config_.path) {
      case PathPolicy::kExpand:
        return Path::kExpand;
      case PathPolicy::kAbsorb:
        return Path::kAbsorb;
      case PathPolicy::kAuto:
        return cheaper_path(config_.dims, batch_.query_len(r), batch_.context_lens[r]);
    }
    throw_error(ErrorCode::kInvalidArgument, "unknown path policy {}",
                static_cast<int>(config_.path));
  }

  /// A chunk over [begin, end) with its arrays allocated and zero.
  Chunk& add_empty_chunk(int32_t begin, int32_t end, int64_t num_items) {
    const int32_t n = end - begin;
    const int64_t capacity = class_.enabled() ? class_.max_requests : n;
    Chunk& chunk = plan_.chunks_.emplace_back();
    chunk.request_begin = begin;
    chunk.request_end = end;
    chunk.starts = add_array<int32_t>(n, capacity);
    chunk.seq_lens = add_array<int32_t>(n, capacity);
    chunk.cu_seq_lens = add_array<int32_t>(n + 1, capacity + 1);
    chunk.items =
        add_array<AttentionItem>(num_items, class_.enabled() ? class_.max_requests : num_items);
    chunk.counts = add_array<ChunkCounts>(1, 1);
    return chunk;
  }

  void add_chunk(const ChunkCut& cut, Path path) {
    const std::span<const Span> spans =
        std::span(plan_.cuts_.spans)
            .subspan(static_cast<size_t>(cut.span_begin),
                     static_cast<size_t>(cut.span_end - cut.span_begin));
    const int32_t begin = class_.enabled() ? 0 : cut.request_begin;
    const int32_t end = class_.enabled() ? num_requests() : cut.request_end;

    int64_t num_items = 0;
    for (const Span& span : spans) num_items += items_of(span, path);

    Chunk& chunk = add_empty_chunk(begin, end, num_items);
    ++plan_.num_chunks_;
    chunk.path = path;
    chunk.pass_begin = chunk.pass_end = static_cast<int32_t>(plan_.passes_.size());
    chunk.token_begin = batch_.query_start_loc[begin];
    chunk.token_end = batch_.query_start_loc[end];

    int32_t* starts = data(chunk.starts);
    int32_t* seq_lens = data(chunk.seq_lens);
    for (const Span& span : spans) {
      starts[span.request - begin] = local_length(span.begin, config_.shard);
      seq_lens[span.request - begin] = local_span_length(span.begin, span.end, config_.shard);
    }

    int32_t* cu_seq_lens = data(chunk.cu_seq_lens);
    AttentionItem* item = data(chunk.items);
    for (int32_t j = 0; j < end - begin; ++j) {
      cu_seq_lens[j + 1] = cu_seq_lens[j] + seq_lens[j];
      chunk.max_seq_len = std::max(chunk.max_seq_len, seq_lens[j]);
      chunk.has_empty_context |= seq_lens[j] == 0;
      if (seq_lens[j] > 0) item = write_items(chunk, begin + j, cu_seq_lens[j], seq_lens[j], item);
    }
    chunk.seq_tot = cu_seq_lens[end - begin];
    std::fill(cu_seq_lens + (end - begin),
              cu_seq_lens + (class_.enabled() ? class_.max_requests + 1 : end - begin + 1),
              chunk.seq_tot);
    *data(chunk.counts) = {end - begin, chunk.seq_tot, chunk.items.size, 0};
  }

  /// Query rows that one item of the path takes at most.
  int32_t item_rows(Path path, int32_t query_len) const {
    return path == Path::kAbsorb ? std::min(query_len, kAbsorbRows) : query_len;
  }

  int64_t items_of(const Span& span, Path path) const {
    const int32_t q = batch_.query_len(span.request);
    if (q == 0 || local_span_length(span.begin, span.end, config_.shard) == 0) return 0;
    const int32_t rows = item_rows(path, q);
    return (int64_t{q} + rows - 1) / rows;
  }

  AttentionItem* write_items(Chunk& chunk, int32_t r, int32_t k_begin, int32_t k_len,
                             AttentionItem* item) {
    const int32_t q_len = batch_.query_len(r);
    if (q_len == 0) return item;
    const int32_t rows = item_rows(chunk.path, q_len);
    for (int64_t first = 0; first < q_len; first += rows) {
      const auto q_begin = static_cast<int32_t>(batch_.query_start_loc[r] + first);
      const auto n = static_cast<int32_t>(std::min<int64_t>(rows, q_len - first));
      const int32_t row =
          chunk.path == Path::kAbsorb ? q_begin - pass_of(chunk, item, q_begin, n) : q_begin;
      *item++ = {row, n, k_begin, k_len, kUnmasked, row};
    }
    chunk.max_query_len = std::max(chunk.max_query_len, rows);
    return item;
  }

  /// Takes rows [q_begin, q_begin + n) into the chunk's last pass, or into a new one where they
  /// don't fit; returns the pass's first row.
  int32_t pass_of(Chunk& chunk, const AttentionItem* item, int32_t q_begin, int32_t n) {
    if (chunk.pass_end == chunk.pass_begin ||
        q_begin + n - plan_.passes_.back().row_begin > kAbsorbRows) {
      AbsorbPass& pass = plan_.passes_.emplace_back();
      pass.row_begin = q_begin;
      pass.items.offset =
          static_cast<uint32_t>(reinterpret_cast<const std::byte*>(item) - plan_.block_.data());
      ++chunk.pass_end;
    }
    AbsorbPass& pass = plan_.passes_.back();
    pass.row_end = q_begin + n;
    pass.max_query_len = std::max(pass.max_query_len, n);
    ++pass.items.size;
    return pass.row_begin;
  }

  void add_chunk_slots() {
    while (plan_.chunks_.size() < static_cast<size_t>(class_.max_chunks)) {
      add_empty_chunk(0, num_requests(), 0);
    }
  }

  /// One request at most continues after a piece, since rows are contiguous.
  NewTokenPiece& add_empty_piece(int64_t num_items) {
    NewTokenPiece& piece = plan_.pieces_.emplace_back();
    piece.carried_items = add_array<AttentionItem>(0, 1);
    piece.final_items =
        add_array<AttentionItem>(num_items, class_.enabled() ? class_.max_requests : num_items);
    piece.counts = add_array<ChunkCounts>(1, 1);
    return piece;
  }

  void add_new_token_pieces() {
    plan_.cuts_.clear();
    cut_new_tokens(config_, batch_.query_start_loc, plan_.cuts_);
    for (const ChunkCut& cut : plan_.cuts_.chunks) add_piece(cut);
    add_piece_slots();
  }

  void add_piece(const ChunkCut& cut) {
    NewTokenPiece& piece = add_empty_piece(cut.span_end - cut.span_begin);
    ++plan_.num_pieces_;
    const auto row = [&](int32_t r, int32_t position) {
      return batch_.query_start_loc[r] + position;
    };
    const Span& first = plan_.cuts_.spans[cut.span_begin];
    const Span& last = plan_.cuts_.spans[cut.span_end - 1];
    piece.row_begin = row(first.request, first.begin);
    piece.row_end = row(last.request, last.end);

    AttentionItem* item = data(piece.final_items);
    for (int32_t i = cut.span_begin; i < cut.span_end; ++i) {
      const Span& span = plan_.cuts_.spans[i];
      const int32_t q_begin = row(span.request, span.begin);
      const int32_t q_len = span.end - span.begin;
      *item++ = {q_begin, q_len, q_begin - piece.row_begin, q_len, 0, q_begin};
      piece.max_query_len = std::max(piece.max_query_len, q_len);
      piece.max_seq_len = std::max(piece.max_seq_len, q_len);
    }
    const int32_t request_end = batch_.query_start_loc[last.request + 1];
    if (request_end > piece.row_end) {
      const int32_t k_begin = row(last.request, last.begin) - piece.row_begin;
      piece.carried_items.size = 1;
      *data(piece.carried_items) = {piece.row_end, request_end - piece.row_end,
                                    k_begin,       last.end - last.begin,
                                    kUnmasked,     piece.row_end};
      piece.max_query_len = std::max(piece.max_query_len, request_end - piece.row_end);
    }
    *data(piece.counts) = {cut.span_end - cut.span_begin, piece.row_end - piece.row_begin,
                           piece.carried_items.size, piece.final_items.size};
  }

  /// An upper bound of the pieces of a step of the class: a piece ends where it is full (two
  /// neighbours hold more than W rows) or, with kFixed, at a cut of one request.
  int64_t class_pieces() const {
    const int64_t rows = class_.max_query_tokens;
    const int64_t w = config_.workspace_tokens;
    if (config_.schedule != Schedule::kFixed) return (rows + w - 1) / w;
    return rows == 0 ? 0 : 1 + 2 * rows / w + rows / effective_split_tokens(config_);
  }

  void add_piece_slots() {
    if (!class_.enabled()) return;
    while (static_cast<int64_t>(plan_.pieces_.size()) < class_pieces()) add_empty_piece(0);
  }

  /// FNV-1a (Fowler, Noll, Vo), taking 32 bits at a time.
  void set_hash() {
    uint64_t hash = 0xcbf29ce484222325u;
    const auto mix = [&hash](int64_t value) {
      hash = (hash ^ static_cast<uint32_t>(value)) * 0x100000001b3u;
    };
    const ModelDims& dims = config_.dims;
    const int32_t split_tokens =
        config_.schedule == Schedule::kFixed ? effective_split_tokens(config_) : 0;
    for (int32_t value :
         {dims.num_heads, dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim,
          dims.kv_lora_rank, config_.workspace_tokens, config_.page_size,
          static_cast<int32_t>(config_.schedule), split_tokens, static_cast<int32_t>(config_.path),
          config_.shard.world, config_.shard.interleave, class_.max_requests,
          class_.max_query_tokens, class_.max_chunks, class_.max_pages, num_requests()}) {
      mix(value);
    }
    for (int32_t r = 0; r < num_requests(); ++r) {
      mix(batch_.query_len(r));
      mix(batch_.context_lens[r]);
    }
    plan_.hash_ = hash;
  }

  const PlanConfig& config_;
  const Batch& batch_;
  const ShapeClass& class_;
  StepPlan& plan_;
  int64_t max_used_pages_ = 0;  // of one request, where a table was given
};

void build_plan(const PlanConfig& config, const Batch& batch, const HostBlockTable* table,
                StepPlan& plan, const ShapeClass& shape_class) {
  PlanBuilder builder(config, batch, shape_class, plan);
  builder.clear();
  try {
    builder.build(table);
  } catch (...) {
    builder.clear();
    throw;
  }
}

int64_t plan_block_bytes(const PlanConfig& config, const ShapeClass& shape_class) {
  StepPlan plan;
  const Batch empty;
  PlanBuilder builder(config, empty, shape_class, plan);
  builder.clear();
  builder.build_empty_class();
  return static_cast<int64_t>(plan.block().size());
}

}  // namespace mla
