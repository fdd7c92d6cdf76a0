// Where results go: people's tables and JSON on stdout, JSON and traces in files.
#ifndef TOOLS_CLI_REPORT_H_
#define TOOLS_CLI_REPORT_H_

#include <cstdio>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace mla::cli {

/// A file that is known to be writable before the work that fills it begins.
class OutputFile {
 public:
  OutputFile() = default;
  /// Throws kInvalidArgument unless `path` can be opened for writing; its content stays as it is
  /// until write(). The empty path stands for no file.
  explicit OutputFile(const std::string& path);
  /// Removes the file if this object made it and nothing was written.
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  bool wanted() const { return !path_.empty(); }
  /// Replaces the content. Throws kInvalidArgument where the disk refuses.
  void write(const std::string& text);

 private:
  std::string path_;
  bool created_ = false;
};

/// A line that says how far long work is, on a terminal only; it is gone when the work is done.
class Progress {
 public:
  /// `stream` is written to only where it is a terminal.
  explicit Progress(std::FILE* stream);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const std::string& line);
  void clear();

 private:
  std::FILE* stream_;  // null: not a terminal
  size_t shown_ = 0;
};

/// Fields in the order they were given; two spaces a level, a final line end.
std::string json_text(const nlohmann::ordered_json& json);

}  // namespace mla::cli

#endif  // TOOLS_CLI_REPORT_H_
