#include "engine/paged_cache.h"

#include <algorithm>
#include <cmath>

#include "metadata/error.h"

namespace mla {
namespace {

/// Pages start on 16-byte boundaries, whatever the size of a row.
int64_t page_stride_bytes(int32_t page_size, int32_t row_bytes) {
  return (int64_t{page_size} * row_bytes + 15) / 16 * 16;
}

}  // namespace

PageAllocator::PageAllocator(int32_t num_pages) {
  if (num_pages < 0) {
    throw_error(ErrorCode::kInvalidArgument, "num_pages is {}, at least 0", num_pages);
  }
  allocated_.resize(num_pages, false);
  free_.reserve(num_pages);
  for (int32_t page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

void PageAllocator::allocate(int32_t count, std::vector<int32_t>& pages) {
  if (count < 0 || count > num_free()) {
    throw_error(ErrorCode::kInvalidArgument, "{} pages are asked for, {} are free", count,
                num_free());
  }
  pages.reserve(pages.size() + count);
  for (int32_t i = 0; i < count; ++i) {
    pages.push_back(free_.back());
    allocated_[free_.back()] = true;
    free_.pop_back();
  }
}

void PageAllocator::release(std::span<const int32_t> pages) {
  const auto num_pages = static_cast<int32_t>(allocated_.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    const int32_t page = pages[i];
    const bool in_range = page >= 0 && page < num_pages;
    if (in_range && allocated_[page]) {
      allocated_[page] = false;
      continue;
    }
    for (const int32_t taken_back : pages.first(i)) allocated_[taken_back] = true;
    throw_error(ErrorCode::kInvalidArgument, "page {} is released but {}", page,
                in_range ? "not allocated" : fmt::format("the cache has {} pages", num_pages));
  }
  free_.insert(free_.end(), pages.begin(), pages.end());
}

PagedRequests::PagedRequests(int32_t num_pages, int32_t page_size)
    : allocator_(num_pages), page_size_(page_size) {
  if (page_size < 1) {
    throw_error(ErrorCode::kInvalidArgument, "page_size is {}, at least 1", page_size);
  }
}

int32_t PagedRequests::add() {
  if (!free_requests_.empty()) {
    const int32_t request = free_requests_.back();
    free_requests_.pop_back();
    in_use_[request] = true;
    return request;
  }
  pages_.emplace_back();
  in_use_.push_back(true);
  return static_cast<int32_t>(pages_.size()) - 1;
}

void PagedRequests::check_request(int32_t request) const {
  if (request >= 0 && request < static_cast<int64_t>(pages_.size()) && in_use_[request]) return;
  throw_error(ErrorCode::kInvalidArgument,
              "there is no request {}: {} ids were given out, {} of "
              "them are removed",
              request, pages_.size(), free_requests_.size());
}

void PagedRequests::grow(int32_t request, int32_t length) {
  check_request(request);
  std::vector<int32_t>& pages = pages_[request];
  const auto held = static_cast<int64_t>(pages.size());
  const int64_t needed = (int64_t{length} + page_size_ - 1) / page_size_;
  if (needed > held) allocator_.allocate(static_cast<int32_t>(needed - held), pages);
}

void PagedRequests::remove(int32_t request) {
  check_request(request);
  allocator_.release(pages_[request]);
  pages_[request].clear();
  in_use_[request] = false;
  free_requests_.push_back(request);
}

std::span<const int32_t> PagedRequests::pages(int32_t request) const {
  check_request(request);
  return pages_[request];
}

int64_t PagedRequests::slot(int32_t request, int32_t position) const {
  check_request(request);
  const auto held = static_cast<int64_t>(pages_[request].size()) * page_size_;
  if (position < 0 || position >= held) {
    throw_error(ErrorCode::kInvalidArgument, "request {} has no slot for position {}: it holds {}",
                request, position, held);
  }
  return int64_t{pages_[request][position / page_size_]} * page_size_ + position % page_size_;
}

HostBlockTable PagedRequests::block_table(std::span<const int32_t> requests,
                                          std::vector<int32_t>& storage) const {
  size_t max_pages = 0;
  for (const int32_t request : requests) {
    check_request(request);
    max_pages = std::max(max_pages, pages_[request].size());
  }
  storage.assign(requests.size() * max_pages, -1);
  for (size_t r = 0; r < requests.size(); ++r) {
    std::ranges::copy(pages_[requests[r]], storage.begin() + r * max_pages);
  }
  return {.data = storage.data(),
          .num_requests = static_cast<int32_t>(requests.size()),
          .max_pages = static_cast<int32_t>(max_pages),
          .row_stride = static_cast<int64_t>(max_pages)};
}

LatentCacheStorage::LatentCacheStorage(Backend& backend, const ModelDims& dims,
                                       KvCacheFormat format, float scale, int32_t num_pages,
                                       int32_t page_size, int32_t num_layers) {
  if (num_pages < 1 || page_size < 1 || num_layers < 1) {
    throw_error(ErrorCode::kInvalidArgument,
                "a cache of {} pages of {} tokens in {} layers: each at least 1", num_pages,
                page_size, num_layers);
  }
  if (!(std::isfinite(scale) && scale > 0.0f)) {
    throw_error(ErrorCode::kInvalidArgument, "the cache's scale is {}, must be finite and positive",
                scale);
  }
  first_layer_ = {.data = nullptr,
                  .format = format,
                  .scale = scale,
                  .num_pages = num_pages,
                  .page_size = page_size,
                  .page_stride = page_stride_bytes(page_size, kv_cache_row_bytes(format, dims))};
  constexpr double kMaxBytes = 0x1p62;
  if (double(num_pages) * double(first_layer_.page_stride) * num_layers > kMaxBytes) {
    throw_error(ErrorCode::kInvalidArgument,
                "a cache of {} pages of {} tokens in {} layers takes more than 2^62 bytes",
                num_pages, page_size, num_layers);
  }
  layer_bytes_ = static_cast<size_t>(num_pages) * first_layer_.page_stride;
  num_layers_ = num_layers;
  memory_ = DeviceBuffer(backend, layer_bytes_ * num_layers);
  first_layer_.data = memory_.data();
}

LatentCache LatentCacheStorage::layer(int32_t index) const {
  if (index < 0 || index >= num_layers_) {
    throw_error(ErrorCode::kInvalidArgument, "the cache has no layer {}: it has {}", index,
                num_layers_);
  }
  LatentCache cache = first_layer_;
  cache.data = memory_.span().subspan(layer_bytes_ * index, layer_bytes_).data();
  return cache;
}

}  // namespace mla
