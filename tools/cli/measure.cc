#include "tools/cli/measure.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace mla::cli {
namespace {

constexpr int kBatches = 10;
constexpr int kLeastBatches = 3;

/// From an idle stream to an idle stream. The one place that tells the time: a device's own events
/// would go here.
double batch_ms(Backend& backend, Stream stream, int64_t calls,
                const std::function<void(int64_t)>& enqueue, int64_t first) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < calls; ++i) enqueue(first + i);
  backend.synchronize(stream);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

}  // namespace

double measure_ms(Backend& backend, Stream stream, double seconds,
                  const std::function<void(int64_t i)>& enqueue) {
  backend.synchronize(stream);
  batch_ms(backend, stream, 1, enqueue, 0);  // first touches, lazy loading
  const double once = std::max(batch_ms(backend, stream, 1, enqueue, 1), 1e-3);
  const double budget = seconds * 1e3;
  const auto calls = std::max<int64_t>(1, static_cast<int64_t>(budget / kBatches / once));
  const int batches = std::clamp(static_cast<int>(budget / (once * static_cast<double>(calls))),
                                 kLeastBatches, kBatches);
  std::vector<double> times;
  int64_t first = 2;
  for (int b = 0; b < batches; ++b, first += calls) {
    times.push_back(batch_ms(backend, stream, calls, enqueue, first) / static_cast<double>(calls));
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace mla::cli
