#include "tools/cli/trace.h"

#include <fmt/format.h>

#include "kernels/forwarding_backend.h"

namespace mla::cli {

using nlohmann::ordered_json;

void Trace::begin(std::string name, std::string category, ordered_json args) {
  open_.push_back(category);
  ordered_json event{{"name", std::move(name)}, {"cat", std::move(category)}, {"ph", "B"}};
  event["pid"] = 1;
  event["tid"] = 1;
  if (!args.is_null()) event["args"] = std::move(args);
  event["ts"] = now_us();  // last, so that making the event counts to the span around it
  events_.push_back(std::move(event));
}

void Trace::end() {
  events_.push_back({{"ph", "E"}, {"pid", 1}, {"tid", 1}, {"ts", now_us()}});
  open_.pop_back();
}

void Trace::end_to(size_t depth) {
  while (open_.size() > depth) end();
}

ordered_json Trace::to_json() const {
  ordered_json names = ordered_json::array();
  names.push_back({{"name", "process_name"},
                   {"ph", "M"},
                   {"pid", 1},
                   {"tid", 1},
                   {"args", {{"name", "engine_cli"}}}});
  for (const ordered_json& event : events_) names.push_back(event);
  return {{"traceEvents", std::move(names)}, {"displayTimeUnit", "ms"}};
}

namespace {

class TracingBackend final : public ForwardingBackend {
 public:
  TracingBackend(std::unique_ptr<Backend> backend, Trace& trace)
      : ForwardingBackend(std::move(backend)), trace_(trace) {}

  void write_latent_cache(const WriteLatentCacheParams& params, const OpContext& context) override {
    begin_layer();
    Op op(*this, "write_latent_cache", context, {{"tokens", params.num_tokens.capacity}});
    backend_.write_latent_cache(params, context);
  }
  void gather_latent(const GatherLatentParams& params, const OpContext& context) override {
    gathered_ = params.latent.data;
    begin_chunk(fmt::format("chunk {}", num_chunks_++), params.num_rows.capacity);
    Op op(*this, "gather_latent", context, {{"rows", params.num_rows.capacity}});
    backend_.gather_latent(params, context);
  }
  void expand(const ExpandParams& params, const OpContext& context) override {
    if (params.latent.data != gathered_) {
      begin_chunk(fmt::format("new tokens {}", num_pieces_++), params.num_rows.capacity);
    }
    Op op(*this, "expand", context, {{"rows", params.num_rows.capacity}});
    backend_.expand(params, context);
  }
  void absorb_query(const AbsorbQueryParams& params, const OpContext& context) override {
    Op op(*this, "absorb_query", context, {{"tokens", params.num_rows.capacity}});
    backend_.absorb_query(params, context);
  }
  void project_value(const ProjectValueParams& params, const OpContext& context) override {
    Op op(*this, "project_value", context, {{"tokens", params.num_rows.capacity}});
    backend_.project_value(params, context);
  }
  void prefill_attention(const PrefillAttentionParams& params, const OpContext& context) override {
    Op op(*this, "prefill_attention", context,
          {{"items", params.num_items.capacity},
           {"max_q_len", params.max_q_len},
           {"max_k_len", params.max_k_len}});
    backend_.prefill_attention(params, context);
  }
  void mask_empty_context(const MaskEmptyContextParams& params, const OpContext& context) override {
    Op op(*this, "mask_empty_context", context, {{"requests", params.num_requests.capacity}});
    backend_.mask_empty_context(params, context);
  }
  void merge_attn_states(const MergeAttnStatesParams& params, const OpContext& context) override {
    Op op(*this, "merge_attn_states", context, {{"tokens", params.num_tokens.capacity}});
    backend_.merge_attn_states(params, context);
  }
  void clear_partial(const ClearPartialParams& params, const OpContext& context) override {
    Op op(*this, "clear_partial", context, {{"tokens", params.num_tokens.capacity}});
    backend_.clear_partial(params, context);
  }

 private:
  /// An op's span, from an idle stream to an idle stream.
  class Op {
   public:
    Op(TracingBackend& backend, const char* name, const OpContext& context, ordered_json args)
        : backend_(backend), context_(context) {
      backend_.synchronize(context_.stream);
      backend_.trace_.begin(name, "op", std::move(args));
    }
    // An op that throws ends the command: its failure is reported there, not while unwinding.
    ~Op() {
      try {
        backend_.synchronize(context_.stream);
      } catch (...) {
      }
      backend_.trace_.end();
    }
    Op(const Op&) = delete;
    Op& operator=(const Op&) = delete;

   private:
    TracingBackend& backend_;
    const OpContext& context_;
  };

  /// A layer opens with the write of its cache, outside its chunks.
  void begin_layer() {
    close_chunk();
    num_chunks_ = 0;
    num_pieces_ = 0;
    gathered_ = nullptr;
  }
  void begin_chunk(std::string name, int64_t rows) {
    close_chunk();
    if (trace_.innermost() == "layer") trace_.begin(std::move(name), "chunk", {{"rows", rows}});
  }
  void close_chunk() {
    if (trace_.innermost() == "chunk") trace_.end();
  }

  Trace& trace_;
  const void* gathered_ = nullptr;
  int num_chunks_ = 0;
  int num_pieces_ = 0;
};

}  // namespace

std::unique_ptr<Backend> make_tracing_backend(std::unique_ptr<Backend> backend, Trace& trace) {
  return std::make_unique<TracingBackend>(std::move(backend), trace);
}

}  // namespace mla::cli
