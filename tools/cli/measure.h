// Timing of work on a backend's stream.
#ifndef TOOLS_CLI_MEASURE_H_
#define TOOLS_CLI_MEASURE_H_

#include <cstdint>
#include <functional>

#include "kernels/backend.h"

namespace mla::cli {

/// Median milliseconds of one call of `enqueue`, over batches of calls between two waits for the
/// stream, so that the wait and the launches' latency spread over a batch. About `seconds` are
/// spent, at least three calls. `enqueue(i)` gets the number of the call, to rotate buffers.
double measure_ms(Backend& backend, Stream stream, double seconds,
                  const std::function<void(int64_t i)>& enqueue);

}  // namespace mla::cli

#endif  // TOOLS_CLI_MEASURE_H_
