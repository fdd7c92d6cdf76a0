// The one error type of the project.
//
//   throw_error(ErrorCode::kInvalidArgument, "workspace_tokens is {}, the page size {} is its
//   least", w, page);
//
// A message names the value that was refused and the limit it broke.
#ifndef METADATA_ERROR_H_
#define METADATA_ERROR_H_

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace mla {

enum class ErrorCode {
  kInvalidArgument,  // a value that the caller can correct
  kUnsupported,      // valid, but not served by this build or this device
  kDevice,           // a CUDA call failed, or there is no device
  kCommunication,    // a rank was lost, late or of another opinion
};

/// Thrown by every function of the C++ API. Nothing was launched or written when the code is
/// kInvalidArgument or kUnsupported.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

template <typename... Args>
[[noreturn]] void throw_error(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace mla

#endif  // METADATA_ERROR_H_
