// Trace events in the format that Chrome and Perfetto open: nested spans on one time line.
#ifndef TOOLS_CLI_TRACE_H_
#define TOOLS_CLI_TRACE_H_

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace mla::cli {

class Trace {
 public:
  /// Opens a span within the one that is open; `category`: "step", "layer", "chunk" or "op".
  void begin(std::string name, std::string category, nlohmann::ordered_json args = nullptr);
  /// Closes the innermost span.
  void end();
  /// Closes spans until `depth` are open.
  void end_to(size_t depth);
  size_t depth() const { return open_.size(); }
  /// Category of the innermost open span; empty where none is open.
  std::string innermost() const { return open_.empty() ? std::string() : open_.back(); }

  nlohmann::ordered_json to_json() const;

 private:
  double now_us() const {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start_)
        .count();
  }

  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::vector<nlohmann::ordered_json> events_;
  std::vector<std::string> open_;  // categories, outermost first
};

/// A span while in scope; nothing where `trace` is null.
class TraceSpan {
 public:
  TraceSpan(Trace* trace, std::string name, std::string category,
            nlohmann::ordered_json args = nullptr)
      : trace_(trace) {
    if (trace_ == nullptr) return;
    depth_ = trace_->depth();
    trace_->begin(std::move(name), std::move(category), std::move(args));
  }
  ~TraceSpan() {
    if (trace_ != nullptr) trace_->end_to(depth_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  Trace* trace_;
  size_t depth_ = 0;
};

/// A backend whose ops make spans, and wait for their stream to tell how long they took. A gather
/// opens the span of its chunk; an expansion of rows that no gather made opens that of a piece of
/// new tokens. Both last until the next or the end of the layer; outside a layer there are none.
/// `trace` must outlive the backend.
std::unique_ptr<Backend> make_tracing_backend(std::unique_ptr<Backend> backend, Trace& trace);

}  // namespace mla::cli

#endif  // TOOLS_CLI_TRACE_H_
