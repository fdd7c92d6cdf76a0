#include "tools/cli/table.h"

#include <fmt/format.h>

#include <algorithm>

namespace mla::cli {

std::string Table::to_string() const {
  std::vector<size_t> widths;
  for (size_t c = 0; c < columns_.size(); ++c) {
    size_t width = columns_[c].header.size();
    for (const std::vector<std::string>& row : rows_) width = std::max(width, row[c].size());
    widths.push_back(width);
  }
  std::string text;
  const auto add_line = [&](const auto& cell) {
    std::string line;
    for (size_t c = 0; c < columns_.size(); ++c) {
      if (c > 0) line += "  ";
      line += columns_[c].align == Align::kRight ? fmt::format("{:>{}}", cell(c), widths[c])
                                                 : fmt::format("{:<{}}", cell(c), widths[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  };
  add_line([&](size_t c) { return columns_[c].header; });
  add_line([&](size_t c) { return std::string(widths[c], '-'); });
  for (const std::vector<std::string>& row : rows_) {
    add_line([&](size_t c) { return row[c]; });
  }
  return text;
}

std::string with_commas(int64_t value) {
  std::string text = fmt::format("{}", value);
  const size_t first = value < 0 ? 1 : 0;
  for (size_t i = text.size(); i > first + 3;) {
    i -= 3;
    text.insert(i, 1, ',');
  }
  return text;
}

std::string bytes_text(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

}  // namespace mla::cli
