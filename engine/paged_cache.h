// A paged latent cache with its page allocator, for hosts that have none.
#ifndef ENGINE_PAGED_CACHE_H_
#define ENGINE_PAGED_CACHE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "metadata/batch.h"
#include "metadata/model.h"

namespace mla {

/// Hands out page ids. Not thread-safe.
class PageAllocator {
 public:
  explicit PageAllocator(int32_t num_pages);

  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  /// Appends `count` ids to `pages`. Throws kInvalidArgument, taking none, where fewer are free.
  void allocate(int32_t count, std::vector<int32_t>& pages);
  /// Gives ids back; throws kInvalidArgument for an id out of range or not allocated.
  void release(std::span<const int32_t> pages);

 private:
  std::vector<int32_t> free_;
  std::vector<bool> allocated_;
};

/// The pages of a set of requests: their block table and where their next tokens go. Every method
/// throws kInvalidArgument for an id that add() did not give out or that was removed since.
class PagedRequests {
 public:
  PagedRequests(int32_t num_pages, int32_t page_size);

  /// A request id for a new, empty request; ids of removed requests are reused.
  int32_t add();
  /// Makes the request's pages hold `length` tokens. Throws kInvalidArgument where too few pages
  /// are free; the request is then as it was.
  void grow(int32_t request, int32_t length);
  void remove(int32_t request);

  std::span<const int32_t> pages(int32_t request) const;
  /// page * page_size + offset. Throws kInvalidArgument for a position that no page holds yet.
  int64_t slot(int32_t request, int32_t position) const;
  int32_t page_size() const { return page_size_; }
  int32_t num_free_pages() const { return allocator_.num_free(); }

  /// The table of `requests`, in that order, into `storage` (resized; unused entries are -1).
  HostBlockTable block_table(std::span<const int32_t> requests,
                             std::vector<int32_t>& storage) const;

 private:
  void check_request(int32_t request) const;

  PageAllocator allocator_;
  int32_t page_size_;
  std::vector<std::vector<int32_t>> pages_;
  std::vector<bool> in_use_;  // [as pages_]
  std::vector<int32_t> free_requests_;
};

/// Memory for `num_layers` caches of `num_pages` pages.
class LatentCacheStorage {
 public:
  LatentCacheStorage(Backend& backend, const ModelDims& dims, KvCacheFormat format, float scale,
                     int32_t num_pages, int32_t page_size, int32_t num_layers);
  /// Throws kInvalidArgument for an index that is not in [0, num_layers).
  LatentCache layer(int32_t index) const;

 private:
  DeviceBuffer memory_;
  LatentCache first_layer_;
  size_t layer_bytes_ = 0;
  int32_t num_layers_ = 0;
};

}  // namespace mla

#endif  // ENGINE_PAGED_CACHE_H_
