// Tables for people, in plain text.
#ifndef TOOLS_CLI_TABLE_H_
#define TOOLS_CLI_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace mla::cli {

class Table {
 public:
  enum class Align { kLeft, kRight };
  struct Column {
    std::string header;
    Align align = Align::kRight;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  /// As many cells as columns.
  void add_row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  /// A header, a rule and the rows, each line ended; columns as wide as their widest cell.
  std::string to_string() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

/// 1234567 as "1,234,567".
std::string with_commas(int64_t value);
/// "576 B", "1.5 KiB", "3.2 GiB".
std::string bytes_text(double bytes);

}  // namespace mla::cli

#endif  // TOOLS_CLI_TABLE_H_
