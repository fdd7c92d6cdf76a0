#include "metadata/plan.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "metadata/error.h"
#include "metadata/schedule.h"

namespace mla {

// The block is a vector of bytes; its arrays are aligned to 16.
static_assert(__STDCPP_DEFAULT_NEW_ALIGNMENT__ >= 16);

/// Fills a StepPlan; the steps of build() are its methods, top to bottom.
class PlanBuilder {
 public:
  PlanBuilder(const PlanConfig& config, const Batch& batch, const ShapeClass& shape_class,
              const PlanShare* share, StepPlan& plan)
      : config_(config), batch_(batch), class_(shape_class), share_(share), plan_(plan) {}

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
    plan_.block_size_ = 0;
    plan_.query_start_loc_ = {};
    plan_.context_start_loc_ = {};
    plan_.block_table_ = {};
    plan_.block_table_stride_ = 0;
    plan_.num_row_blocks_ = 1;
    plan_.num_out_rows_ = 0;
    plan_.context_row_starts_ = {};
    plan_.new_token_assembly_ = {};
    plan_.packing_slots_ = {};
    plan_.hash_ = 0;
  }

  void build(const HostBlockTable* table) {
    validate_plan_config(config_);
    validate_class();
    validate_share();
    validate_batch(batch_);
    if (table != nullptr) validate_table(*table);
    set_step();
    copy_block_table(table);
    share_ == nullptr ? add_chunks() : add_shared_chunks();
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

  /// Appends an array to the block. The caller writes its first `size` elements; those from there
  /// to `capacity` are zero.
  template <typename T>
  BlockArray<T> add_array(int64_t size, int64_t capacity) {
    constexpr size_t kAlignment = 16;
    constexpr size_t kMaxBytes = size_t{1} << 30;  // a quarter of what an offset could reach
    const size_t offset = (plan_.block_size_ + kAlignment - 1) / kAlignment * kAlignment;
    const size_t used_end = offset + static_cast<size_t>(size) * sizeof(T);
    const size_t end = offset + static_cast<size_t>(capacity) * sizeof(T);
    if (end > kMaxBytes) {
      throw_error(ErrorCode::kInvalidArgument,
                  "the plan's block needs {} bytes or more, the limit is {}", end, kMaxBytes);
    }
    if (end > plan_.block_.size()) plan_.block_.resize(end);
    std::byte* const block = plan_.block_.data();
    std::fill(block + plan_.block_size_, block + offset, std::byte{0});
    std::fill(block + used_end, block + end, std::byte{0});
    plan_.block_size_ = end;
    return {static_cast<uint32_t>(offset), static_cast<int32_t>(size)};
  }
  template <typename T>
  BlockArray<T> add_array(int64_t size) {
    return add_array<T>(size, size);
  }

  template <typename T>
  BlockArray<T> add_copy(std::span<const T> values) {
    const auto array = add_array<T>(static_cast<int64_t>(values.size()));
    std::ranges::copy(values, data(array));
    return array;
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
    // Pieces of new tokens stand at fixed rows in a class, which cuts inside requests would move.
    if (class_.enabled() && config_.schedule == Schedule::kFixed &&
        tokens > effective_split_tokens(config_)) {
      throw_error(ErrorCode::kUnsupported,
                  "the shape class is for {} new tokens; with the fixed schedule at most "
                  "split_tokens, {}, are served",
                  tokens, effective_split_tokens(config_));
    }
  }

  void validate_share() const {
    if (share_ == nullptr) return;
    if (class_.enabled() || config_.path != PathPolicy::kExpand) {
      throw_error(ErrorCode::kUnsupported,
                  "a context-parallel share is planned for the expand path only, and for no shape "
                  "class");
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
    const int64_t entries = class_.enabled() ? int64_t{class_.max_requests} + 2 : r + 1;
    plan_.query_start_loc_ = add_array<int32_t>(r + 1, entries);
    plan_.context_start_loc_ = add_array<int32_t>(r + 1, entries);
    int32_t* query_start_loc = data(plan_.query_start_loc_);
    int32_t* context_start_loc = data(plan_.context_start_loc_);
    query_start_loc[0] = context_start_loc[0] = 0;
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
    plan_.num_out_rows_ = plan_.num_query_tokens_;
    plan_.context_row_starts_ = plan_.query_start_loc_;
    if (share_ != nullptr) set_share();
  }

  void set_share() {
    plan_.num_row_blocks_ = share_->row_blocks;
    plan_.context_row_starts_ = add_copy(share_->context_row_starts);
    plan_.num_out_rows_ = 0;
    for (const QueryRows& rows : share_->new_token_rows) plan_.num_out_rows_ += rows.length;
    if (share_->padded_new_tokens == 0) return;
    plan_.new_token_assembly_ = add_assembly(share_->padded_new_tokens, batch_.num_query_tokens());
    std::ranges::copy(share_->new_token_sources, data(plan_.new_token_assembly_.sources));
    plan_.packing_slots_ = add_array<int64_t>(plan_.num_out_rows_);
    std::iota(data(plan_.packing_slots_), data(plan_.packing_slots_) + plan_.num_out_rows_,
              int64_t{0});
  }

  /// The caller writes the sources.
  RowAssembly add_assembly(int32_t padded_rows, int32_t rows) {
    const int32_t bounds[] = {0, 0, rows};
    RowAssembly assembly{.padded_rows = padded_rows, .bounds = {}, .sources = {}};
    assembly.bounds = add_copy(std::span<const int32_t>(bounds));
    assembly.sources = add_array<int32_t>(rows);
    return assembly;
  }

  void copy_block_table(const HostBlockTable* table) {
    int64_t stride = max_used_pages_;
    if (class_.enabled()) {
      check_capacity("pages in a block table row", stride, class_.max_pages);
      stride = class_.max_pages;
    }
    if (table == nullptr && !class_.enabled()) return;
    plan_.block_table_stride_ = static_cast<int32_t>(stride);
    plan_.block_table_ = add_array<int32_t>(0, request_capacity() * stride);
    if (table == nullptr) return;
    plan_.block_table_.size = static_cast<int32_t>(num_requests() * stride);
    if (max_used_pages_ == 0) return;
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
      bool none = true;
      for (int32_t r = 0; r < num_requests(); ++r) {
        plan_.context_lens_[r] = plan_.paths_[r] == path ? batch_.context_lens[r] : 0;
        none &= plan_.context_lens_[r] == 0;
      }
      if (none) continue;
      plan_.cuts_.clear();
      cut_contexts(config_, plan_.context_lens_, plan_.cuts_);
      if (class_.enabled()) {
        check_capacity("chunks",
                       static_cast<int64_t>(plan_.num_chunks_ + plan_.cuts_.chunks.size()),
                       class_.max_chunks);
      }
      for (const ChunkCut& cut : plan_.cuts_.chunks) {
        add_chunk(cut, plan_.cuts_.spans, path, /*here=*/true);
      }
    }
    add_chunk_slots();
  }

  void add_shared_chunks() {
    const std::span<const ChunkCut> cuts = share_->cuts->chunks;
    for (size_t i = 0; i < cuts.size(); ++i) {
      const bool here = share_->chunk_owners.empty() || share_->chunk_owners[i] == share_->rank;
      add_chunk(cuts[i], share_->cuts->spans, Path::kExpand, here);
      if (share_->assemble_chunks) assemble(plan_.chunks_.back(), cuts[i]);
    }
  }

  /// Every rank sends its rows of the chunk's spans, span by span. A chunk that no new token of any
  /// rank sees is not sent.
  void assemble(Chunk& chunk, const ChunkCut& cut) {
    const auto spans = std::span(share_->cuts->spans)
                           .subspan(static_cast<size_t>(cut.span_begin),
                                    static_cast<size_t>(cut.span_end - cut.span_begin));
    if (std::ranges::none_of(
            spans, [&](const Span& span) { return batch_.query_len(span.request) > 0; })) {
      return;
    }
    const int32_t n = chunk.request_end - chunk.request_begin;
    chunk.stored_starts = add_array<int32_t>(n);
    chunk.stored_cu_seq_lens = add_array<int32_t>(n + 1);
    int32_t* const starts = data(chunk.stored_starts);
    int32_t* const cu_seq_lens = data(chunk.stored_cu_seq_lens);
    std::fill_n(starts, n, 0);
    std::fill_n(cu_seq_lens, n + 1, 0);
    for (const Span& span : spans) {
      const int32_t j = span.request - chunk.request_begin;
      starts[j] = local_length(span.begin, config_.shard);
      cu_seq_lens[j + 1] = local_span_length(span.begin, span.end, config_.shard);
    }
    std::partial_sum(cu_seq_lens, cu_seq_lens + n + 1, cu_seq_lens);
    chunk.stored_rows = cu_seq_lens[n];

    const int32_t world = config_.shard.world;
    int32_t padded = 0;
    for (int32_t rank = 0; rank < world; ++rank) {
      const ContextShard shard{world, rank, config_.shard.interleave};
      int32_t rows = 0;
      for (const Span& span : spans) rows += local_span_length(span.begin, span.end, shard);
      padded = std::max(padded, rows);
    }
    chunk.assembly = add_assembly(padded, chunk.seq_tot);
    plan_.next_rows_.resize(static_cast<size_t>(world));
    for (int32_t rank = 0; rank < world; ++rank) plan_.next_rows_[rank] = rank * padded;
    int32_t* source = data(chunk.assembly.sources);
    for (const Span& span : spans) {
      for (int32_t t = span.begin; t < span.end; ++t) {
        *source++ = plan_.next_rows_[owner_rank(t, config_.shard)]++;
      }
    }
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

  /// A chunk over [begin, end) whose arrays the caller writes.
  Chunk& add_chunk_arrays(int32_t begin, int32_t end, int64_t num_items) {
    const int32_t n = end - begin;
    const int64_t capacity = class_.enabled() ? class_.max_requests : n;
    Chunk& chunk = plan_.chunks_.emplace_back();
    chunk.request_begin = begin;
    chunk.request_end = end;
    chunk.starts = add_array<int32_t>(n, capacity);
    chunk.seq_lens = add_array<int32_t>(n, capacity);
    chunk.cu_seq_lens = add_array<int32_t>(n + 1, capacity + 1);
    chunk.counts = add_array<ChunkCounts>(1);
    chunk.items =
        add_array<AttentionItem>(num_items, class_.enabled() ? class_.max_requests : num_items);
    return chunk;
  }

  /// `here`: whether this rank attends it; else it has no items.
  void add_chunk(const ChunkCut& cut, std::span<const Span> all_spans, Path path, bool here) {
    const std::span<const Span> spans = all_spans.subspan(
        static_cast<size_t>(cut.span_begin), static_cast<size_t>(cut.span_end - cut.span_begin));
    const int32_t begin = class_.enabled() ? 0 : cut.request_begin;
    const int32_t end = class_.enabled() ? num_requests() : cut.request_end;
    const int32_t n = end - begin;

    const int64_t most_items =
        path == Path::kExpand ? expanded_items(spans) : absorbed_items(spans);
    Chunk& chunk = add_chunk_arrays(begin, end, most_items);
    ++plan_.num_chunks_;
    chunk.path = path;
    chunk.pass_begin = chunk.pass_end = static_cast<int32_t>(plan_.passes_.size());
    chunk.token_begin = batch_.query_start_loc[begin];
    chunk.token_end = batch_.query_start_loc[end];

    int32_t* const starts = data(chunk.starts);
    int32_t* const seq_lens = data(chunk.seq_lens);
    int32_t* const cu_seq_lens = data(chunk.cu_seq_lens);
    AttentionItem* const items = data(chunk.items);
    AttentionItem* item = items;
    const int32_t* const query_start_loc = batch_.query_start_loc.data();
    const bool whole = share_ != nullptr && share_->assemble_chunks;
    const ContextShard shard = whole ? ContextShard{} : config_.shard;
    int32_t longest_query = 0;
    int32_t j = 0;
    int32_t rows = 0;
    int32_t longest = 0;
    bool some_empty = false;
    const auto append = [&](int32_t start, int32_t length) {
      starts[j] = start;
      seq_lens[j] = length;
      cu_seq_lens[j] = rows;
      rows += length;
      longest = std::max(longest, length);
      some_empty |= length == 0;
      ++j;
    };
    for (const Span& span : spans) {
      while (begin + j < span.request) append(0, 0);
      const int32_t start = local_length(span.begin, shard);
      const int32_t length = local_length(span.end, shard) - start;
      const int32_t q_begin = query_start_loc[span.request];
      const int32_t q_len = query_start_loc[span.request + 1] - q_begin;
      if (length > 0 && q_len > 0 && here) {
        longest_query = std::max(longest_query, q_len);
        if (share_ != nullptr) {
          for (const QueryRows& query : rows_of(share_->context_rows, span.request)) {
            *item++ = {query.q_row, query.length, rows, length, kUnmasked, query.out_row};
          }
        } else if (path == Path::kExpand) {
          *item++ = {q_begin, q_len, rows, length, kUnmasked, q_begin};
        } else {
          item = write_absorbed_items(chunk, {q_begin, q_len, rows, length}, item);
        }
      }
      append(start, length);
    }
    while (j < n) append(0, 0);
    std::fill(cu_seq_lens + n, cu_seq_lens + (class_.enabled() ? class_.max_requests : n) + 1,
              rows);
    chunk.seq_tot = rows;
    chunk.max_seq_len = longest;
    chunk.max_query_len =
        path == Path::kExpand ? longest_query : std::min(longest_query, kAbsorbRows);
    chunk.has_empty_context = some_empty;
    set_num_items(chunk, item - items, most_items);
    *data(chunk.counts) = {n, rows, chunk.items.size, 0};
  }

  /// Gives back what a chunk's items, the last array of the block so far, were allotted too much.
  void set_num_items(Chunk& chunk, int64_t num_items, int64_t allotted) {
    chunk.items.size = static_cast<int32_t>(num_items);
    if (class_.enabled()) {
      AttentionItem* const items = data(chunk.items);
      std::fill(items + num_items, items + allotted, AttentionItem{0, 0, 0, 0, 0, 0});
    } else {
      plan_.block_size_ =
          chunk.items.offset + static_cast<size_t>(num_items) * sizeof(AttentionItem);
    }
  }

  static std::span<const QueryRows> rows_of(std::span<const QueryRows> all, int32_t request) {
    const auto begin = std::ranges::lower_bound(all, request, {}, &QueryRows::request);
    const auto end = std::ranges::upper_bound(begin, all.end(), request, {}, &QueryRows::request);
    return {begin, end};
  }

  /// Items of an expanded chunk where every span has keys on this rank.
  int64_t expanded_items(std::span<const Span> spans) const {
    if (share_ == nullptr) return static_cast<int64_t>(spans.size());
    size_t items = 0;
    for (const Span& span : spans) items += rows_of(share_->context_rows, span.request).size();
    return static_cast<int64_t>(items);
  }

  /// Items of an absorbed chunk where every span has keys on this rank.
  int64_t absorbed_items(std::span<const Span> spans) const {
    int64_t items = 0;
    for (const Span& span : spans) {
      items += (int64_t{batch_.query_len(span.request)} + kAbsorbRows - 1) / kAbsorbRows;
    }
    return items;
  }

  /// Cuts one request's item to at most kAbsorbRows query rows each.
  AttentionItem* write_absorbed_items(Chunk& chunk, const AttentionItem& whole,
                                      AttentionItem* item) {
    for (int64_t first = 0; first < whole.q_len; first += kAbsorbRows) {
      const auto q_begin = static_cast<int32_t>(whole.q_begin + first);
      const auto q_len = static_cast<int32_t>(std::min<int64_t>(kAbsorbRows, whole.q_len - first));
      const int32_t row = q_begin - pass_of(chunk, item, q_begin, q_len);
      *item++ = {row, q_len, whole.k_begin, whole.k_len, kUnmasked, row};
    }
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
      const size_t begin = plan_.block_size_;
      add_chunk_arrays(0, num_requests(), 0);
      std::byte* const block = plan_.block_.data();
      std::fill(block + begin, block + plan_.block_size_, std::byte{0});
    }
  }

  /// A piece whose final items and counts the caller writes. One request at most continues after
  /// it, since rows are contiguous.
  NewTokenPiece& add_piece_arrays(int64_t num_items) {
    NewTokenPiece& piece = plan_.pieces_.emplace_back();
    piece.carried_items = add_array<AttentionItem>(0, 1);
    piece.final_items =
        add_array<AttentionItem>(num_items, class_.enabled() ? class_.max_requests : num_items);
    piece.counts = add_array<ChunkCounts>(1);
    return piece;
  }

  void add_new_token_pieces() {
    plan_.cuts_.clear();
    cut_new_tokens(config_, batch_.query_start_loc, plan_.cuts_);
    for (const ChunkCut& cut : plan_.cuts_.chunks) {
      share_ == nullptr ? add_piece(cut) : add_shared_piece(cut);
    }
    add_piece_slots();
  }

  void add_piece(const ChunkCut& cut) {
    NewTokenPiece& piece = add_piece_arrays(cut.span_end - cut.span_begin);
    ++plan_.num_pieces_;
    const auto row = [&](int32_t r, int32_t position) {
      return batch_.query_start_loc[r] + position;
    };
    const Span& first = plan_.cuts_.spans[cut.span_begin];
    const Span& last = plan_.cuts_.spans[cut.span_end - 1];
    piece.row_begin = row(first.request, first.begin);
    piece.row_end = row(last.request, last.end);
    piece.out_row_begin = piece.row_begin;
    piece.out_row_end = piece.row_end;

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

  /// Of the piece's keys, the rank's queries inside their range see those before them; its later
  /// queries of the same request see all.
  void add_shared_piece(const ChunkCut& cut) {
    const auto spans = std::span(plan_.cuts_.spans)
                           .subspan(static_cast<size_t>(cut.span_begin),
                                    static_cast<size_t>(cut.span_end - cut.span_begin));
    const auto row = [&](int32_t r, int32_t position) {
      return batch_.query_start_loc[r] + position;
    };
    const int32_t row_begin = row(spans.front().request, spans.front().begin);
    std::vector<AttentionItem>& carried = plan_.carried_items_;
    std::vector<AttentionItem>& final = plan_.final_items_;
    carried.clear();
    final.clear();
    for (const Span& span : spans) {
      const int32_t k_begin = row(span.request, span.begin) - row_begin;
      for (const QueryRows& rows : rows_of(share_->new_token_rows, span.request)) {
        const int32_t end = rows.position + rows.length;
        const auto add = [&](std::vector<AttentionItem>& items, int32_t from, int32_t to,
                             int32_t k_len, int32_t causal_offset) {
          if (from >= to) return;
          const int32_t skipped = from - rows.position;
          items.push_back({rows.q_row + skipped, to - from, k_begin, k_len, causal_offset,
                           rows.out_row + skipped});
        };
        const int32_t from = std::max(rows.position, span.begin);
        const int32_t to = std::min(end, span.end);
        add(final, from, to, to - span.begin, from - span.begin);
        add(carried, std::max(rows.position, span.end), end, span.end - span.begin, kUnmasked);
      }
    }

    NewTokenPiece& piece = plan_.pieces_.emplace_back();
    ++plan_.num_pieces_;
    piece.row_begin = row_begin;
    piece.row_end = row(spans.back().request, spans.back().end);
    if (!final.empty()) {
      piece.out_row_begin = final.front().out_row;
      piece.out_row_end = final.back().out_row + final.back().q_len;
    }
    for (const std::vector<AttentionItem>* items : {&carried, &final}) {
      for (const AttentionItem& item : *items) {
        piece.max_query_len = std::max(piece.max_query_len, item.q_len);
        piece.max_seq_len = std::max(piece.max_seq_len, item.k_len);
      }
    }
    piece.carried_items = add_copy(std::span<const AttentionItem>(carried));
    piece.final_items = add_copy(std::span<const AttentionItem>(final));
    piece.counts = add_array<ChunkCounts>(1);
    *data(piece.counts) = {static_cast<int32_t>(spans.size()), piece.row_end - piece.row_begin,
                           piece.carried_items.size, piece.final_items.size};
  }

  void add_piece_slots() {
    if (!class_.enabled()) return;
    const int64_t w = config_.workspace_tokens;
    const int64_t slots = (class_.max_query_tokens + w - 1) / w;  // all but the last piece are full
    while (static_cast<int64_t>(plan_.pieces_.size()) < slots) {
      *data(add_piece_arrays(0).counts) = {};
    }
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
  const PlanShare* share_;
  StepPlan& plan_;
  int64_t max_used_pages_ = 0;  // of one request, where a table was given
};

void build_plan(const PlanConfig& config, const Batch& batch, const HostBlockTable* table,
                StepPlan& plan, const ShapeClass& shape_class, const PlanShare* share) {
  PlanBuilder builder(config, batch, shape_class, share, plan);
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
  PlanBuilder builder(config, empty, shape_class, /*share=*/nullptr, plan);
  builder.clear();
  builder.build_empty_class();
  return static_cast<int64_t>(plan.block().size());
}

}  // namespace mla
