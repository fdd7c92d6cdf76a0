#include "tests/tools/cli_harness.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

namespace mla::test {
namespace {

/// An anonymous file that collects what is written to it.
class Capture {
 public:
  Capture() : file_(std::tmpfile()) {}
  ~Capture() { std::fclose(file_); }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  std::FILE* file() { return file_; }
  std::string content() {
    std::string text(static_cast<size_t>(std::ftell(file_)), '\0');
    std::rewind(file_);
    EXPECT_EQ(std::fread(text.data(), 1, text.size(), file_), text.size());
    return text;
  }

 private:
  std::FILE* file_;
};

}  // namespace

nlohmann::json CliResult::json() const {
  nlohmann::json parsed = nlohmann::json::parse(out, nullptr, /*allow_exceptions=*/false);
  EXPECT_FALSE(parsed.is_discarded()) << "stdout is not JSON alone:\n" << out << "stderr: " << err;
  return parsed;
}

CliResult run_cli(const std::string& line, cli::BackendDecorator decorate_backend) {
  std::vector<std::string> words{"engine_cli"};
  std::istringstream stream(line);
  for (std::string word; stream >> word;) words.push_back(word == "''" ? "" : word);
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());

  Capture out;
  Capture err;
  CliResult result;
  result.exit_code = cli::run_cli(
      static_cast<int>(argv.size()), argv.data(),
      {.out = out.file(), .err = err.file(), .decorate_backend = std::move(decorate_backend)});
  result.out = out.content();
  result.err = err.content();
  return result;
}

TempFile::TempFile() {
  static int count = 0;
  path_ = testing::TempDir() + "cli_test_" + std::to_string(count++);
  std::filesystem::remove(path_);
}

TempFile::~TempFile() { std::filesystem::remove(path_); }

bool TempFile::exists() const { return std::filesystem::exists(path_); }

std::string TempFile::content() const {
  std::ifstream file(path_);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void TempFile::write(const std::string& text) const { std::ofstream(path_) << text; }

std::vector<std::string> keys_of(const nlohmann::json& object) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.push_back(key);
  return keys;
}

}  // namespace mla::test
