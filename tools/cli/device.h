// The backend that a command runs on.
#ifndef TOOLS_CLI_DEVICE_H_
#define TOOLS_CLI_DEVICE_H_

#include <functional>
#include <memory>
#include <string>

#include "kernels/backend.h"
#include "kernels/executor.h"
#include "tools/cli/options.h"

namespace mla::cli {

using BackendDecorator = std::function<std::unique_ptr<Backend>(std::unique_ptr<Backend>)>;

struct Device {
  std::unique_ptr<Executor> executor;  // of the CPU backend, the inputs and the oracle
  std::unique_ptr<Backend> backend;
  std::string choice;  // why `auto` chose it; empty where it was named
};

/// Throws kDevice where CUDA is asked for by name and can't be had.
Device make_device(const Options& options);

/// Throws kInvalidArgument where the CPU backend would need more than this machine has left;
/// CUDA's own allocations say so themselves.
void check_memory(const Backend& backend, double bytes);

/// The CUDA driver's version; empty where there is none.
std::string driver_version();

}  // namespace mla::cli

#endif  // TOOLS_CLI_DEVICE_H_
