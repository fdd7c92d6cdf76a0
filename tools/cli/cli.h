// engine_cli as a function, so that tests can call it.
#ifndef TOOLS_CLI_CLI_H_
#define TOOLS_CLI_CLI_H_

#include <cstdio>

#include "tools/cli/device.h"

namespace mla::cli {

enum ExitCode : int {
  kRight = 0,
  kVerificationFailed = 1,
  kBadInput = 2,       // bad arguments or input, or an option that is not supported
  kDeviceFailure = 3,  // a device or communication failure, or none there
};

struct Environment {
  std::FILE* out = stdout;
  std::FILE* err = stderr;
  BackendDecorator decorate_backend;  // null: the backend as it is
};

/// Runs one command line and returns its exit code. Results go to `out`, one line of error to
/// `err`.
int run_cli(int argc, const char* const* argv, const Environment& environment = {});

}  // namespace mla::cli

#endif  // TOOLS_CLI_CLI_H_
