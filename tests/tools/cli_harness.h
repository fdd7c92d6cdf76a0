// engine_cli called as a function, with what it wrote.
#ifndef TESTS_TOOLS_CLI_HARNESS_H_
#define TESTS_TOOLS_CLI_HARNESS_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/cli/cli.h"

namespace mla::test {

struct CliResult {
  int exit_code = -1;
  std::string out;
  std::string err;

  /// All of stdout as one JSON value; fails the test where it is none.
  nlohmann::json json() const;
};

/// `line` is split at blanks; '' stands for an empty word.
CliResult run_cli(const std::string& line, cli::BackendDecorator decorate_backend = nullptr);

/// Dimensions for which everything takes milliseconds, odd on purpose.
inline const std::string kSmallModel = " --heads 3 --nope 24 --rope 8 --vdim 16 --lora 40";

/// A file that is removed with this object.
class TempFile {
 public:
  TempFile();
  ~TempFile();
  TempFile(const TempFile&) = delete;
  TempFile& operator=(const TempFile&) = delete;
  const std::string& path() const { return path_; }
  bool exists() const;
  std::string content() const;
  void write(const std::string& text) const;

 private:
  std::string path_;
};

/// The names of an object's members, in alphabetical order.
std::vector<std::string> keys_of(const nlohmann::json& object);

}  // namespace mla::test

#endif  // TESTS_TOOLS_CLI_HARNESS_H_
