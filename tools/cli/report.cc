#include "tools/cli/report.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>

#include "metadata/error.h"

namespace mla::cli {
namespace {

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

[[noreturn]] void refuse(const std::string& path) {
  throw_error(ErrorCode::kInvalidArgument, "can't write '{}': {}", path, std::strerror(errno));
}

}  // namespace

OutputFile::OutputFile(const std::string& path) : path_(path) {
  if (path.empty()) return;
  std::error_code unknown;  // what can't be looked up can't be opened either
  created_ = !std::filesystem::exists(path, unknown);
  errno = 0;
  const File file(std::fopen(path.c_str(), "a"));
  if (file == nullptr) refuse(path);
}

OutputFile::~OutputFile() {
  if (created_) std::remove(path_.c_str());
}

void OutputFile::write(const std::string& text) {
  created_ = false;
  File file(std::fopen(path_.c_str(), "w"));
  if (file == nullptr) refuse(path_);
  const bool written = std::fwrite(text.data(), 1, text.size(), file.get()) == text.size();
  if (std::fclose(file.release()) != 0 || !written) refuse(path_);
}

Progress::Progress(std::FILE* stream)
    : stream_(stream != nullptr && isatty(fileno(stream)) == 1 ? stream : nullptr) {}

void Progress::show(const std::string& line) {
  if (stream_ == nullptr) return;
  std::fputs(fmt::format("\r{:<{}}", line, shown_).c_str(), stream_);
  std::fflush(stream_);
  shown_ = line.size();
}

void Progress::clear() {
  if (shown_ == 0) return;
  std::fputs(fmt::format("\r{:<{}}\r", "", shown_).c_str(), stream_);
  std::fflush(stream_);
  shown_ = 0;
}

std::string json_text(const nlohmann::ordered_json& json) {
  // Words of the command line stand in results and errors, and need not be UTF-8.
  constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
  return json.dump(2, ' ', /*ensure_ascii=*/false, kReplace) + '\n';
}

}  // namespace mla::cli
