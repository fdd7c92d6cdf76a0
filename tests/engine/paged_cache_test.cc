#include "engine/paged_cache.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "tests/support/test_backend.h"

namespace mla::test {
namespace {

class PagedCacheTest : public BackendTest {};

TEST_F(PagedCacheTest, AllocatorHandsOutEveryPageOnce) {
  PageAllocator allocator(10);
  std::vector<int32_t> pages;
  allocator.allocate(4, pages);
  allocator.allocate(0, pages);
  allocator.allocate(6, pages);
  EXPECT_EQ(allocator.num_free(), 0);
  EXPECT_EQ(std::set<int32_t>(pages.begin(), pages.end()).size(), 10u);
  EXPECT_EQ(*std::ranges::min_element(pages), 0);
  EXPECT_EQ(*std::ranges::max_element(pages), 9);
  expect_refused([&] { allocator.allocate(1, pages); }, "a page of an empty pool");
  EXPECT_EQ(pages.size(), 10u);
}

TEST_F(PagedCacheTest, ARefusedReleaseChangesNothing) {
  PageAllocator allocator(4);
  std::vector<int32_t> pages;
  allocator.allocate(3, pages);
  for (const int32_t bad : {-1, 4, 3, pages[0]}) {  // out of range, not allocated, twice
    const std::vector<int32_t> released = {pages[0], bad};
    expect_refused([&] { allocator.release(released); }, "page " + std::to_string(bad));
    EXPECT_EQ(allocator.num_free(), 1);
  }
  allocator.release(pages);
  EXPECT_EQ(allocator.num_free(), 4);
  pages.clear();
  allocator.allocate(4, pages);
  EXPECT_EQ(std::set<int32_t>(pages.begin(), pages.end()).size(), 4u);
}

TEST_F(PagedCacheTest, RandomRequestsNeverShareASlot) {
  constexpr int32_t kPages = 40;
  const int32_t page_size = random_int(1, 7);
  PagedRequests paged(kPages, page_size);
  struct Live {
    int32_t id, length;
  };
  std::vector<Live> live;
  for (int round = 0; round < 300; ++round) {
    if (live.empty() || random_chance(0.3)) {
      live.push_back({paged.add(), 0});
    } else if (random_chance(0.2)) {
      const size_t i = random_int(0, static_cast<int32_t>(live.size()) - 1);
      paged.remove(live[i].id);
      live.erase(live.begin() + i);
    } else {
      Live& request = live[random_int(0, static_cast<int32_t>(live.size()) - 1)];
      const int32_t length = request.length + random_int(0, 3 * page_size);
      const int32_t free = paged.num_free_pages();
      const auto held = static_cast<int32_t>(paged.pages(request.id).size());
      const int32_t needed = (length + page_size - 1) / page_size;
      if (needed - held > free) {
        expect_refused([&] { paged.grow(request.id, length); }, "growing past the pool");
        ASSERT_EQ(paged.num_free_pages(), free);
        ASSERT_EQ(static_cast<int32_t>(paged.pages(request.id).size()), held);
      } else {
        paged.grow(request.id, length);
        request.length = length;
      }
    }

    std::set<int64_t> slots;
    size_t tokens = 0, pages = 0;
    std::vector<int32_t> ids, storage;
    for (const Live& request : live) {
      ids.push_back(request.id);
      tokens += request.length;
      pages += paged.pages(request.id).size();
      for (int32_t t = 0; t < request.length; ++t) slots.insert(paged.slot(request.id, t));
    }
    ASSERT_EQ(slots.size(), tokens);
    ASSERT_TRUE(slots.empty() || (*slots.begin() >= 0 && *slots.rbegin() < kPages * page_size));
    ASSERT_EQ(paged.num_free_pages() + pages, static_cast<size_t>(kPages));
    ASSERT_EQ(std::set<int32_t>(ids.begin(), ids.end()).size(), ids.size());

    const HostBlockTable table = paged.block_table(ids, storage);
    ASSERT_EQ(table.num_requests, static_cast<int32_t>(ids.size()));
    for (size_t r = 0; r < ids.size(); ++r) {
      const std::span<const int32_t> expected = paged.pages(ids[r]);
      for (int32_t i = 0; i < table.max_pages; ++i) {
        ASSERT_EQ(table.data[r * table.row_stride + i],
                  i < static_cast<int32_t>(expected.size()) ? expected[i] : -1);
      }
    }
  }
}

TEST_F(PagedCacheTest, StorageGivesEveryLayerItsOwnAlignedPages) {
  const ModelDims dims{1, 24, 8, 40, 48};
  for (const int32_t page_size : {1, 3, 16}) {  // 56 bytes a row: pages need padding
    const LatentCacheStorage storage(backend(), dims, KvCacheFormat::kFp8E4M3, 0.5f, 7, page_size,
                                     3);
    for (int32_t i = 0; i < 3; ++i) {
      const LatentCache layer = storage.layer(i);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(layer.data) % 16, 0u);
      EXPECT_EQ(layer.page_stride % 16, 0);
      EXPECT_GE(layer.page_stride, page_size * 56);
      EXPECT_LT(layer.page_stride, page_size * 56 + 16);
      EXPECT_EQ(layer.num_pages, 7);
      EXPECT_EQ(layer.page_size, page_size);
      EXPECT_EQ(layer.scale, 0.5f);
      EXPECT_EQ(static_cast<std::byte*>(layer.data),
                static_cast<std::byte*>(storage.layer(0).data) + i * 7 * layer.page_stride);
    }
  }
  expect_refused(
      [&] { LatentCacheStorage(backend(), dims, KvCacheFormat::kFp8DsMla, 1.0f, 1, 1, 1); },
      "fp8_ds_mla with L = 48");
  expect_refused(
      [&] { LatentCacheStorage(backend(), dims, KvCacheFormat::kFp8E4M3, NAN, 1, 1, 1); },
      "a scale of NaN");
  expect_refused([&] { LatentCacheStorage(backend(), dims, KvCacheFormat::kBf16, 1.0f, 0, 1, 1); },
                 "a cache without pages");
  expect_refused([&] { PageAllocator(-1); }, "-1 pages");
  expect_refused([&] { PagedRequests(4, 0); }, "page size 0");
}

TEST_F(PagedCacheTest, UnknownRequestsPositionsAndLayersAreRefused) {
  PagedRequests paged(6, 4);
  const int32_t removed = paged.add();
  const int32_t kept = paged.add();
  paged.grow(removed, 5);
  paged.grow(kept, 5);
  paged.remove(removed);
  std::vector<int32_t> storage;
  for (const int32_t id : {-1, removed, 2}) {
    const std::vector<int32_t> ids = {kept, id};
    expect_refused([&] { paged.grow(id, 1); }, "grow");
    expect_refused([&] { paged.remove(id); }, "remove");
    expect_refused([&] { paged.pages(id); }, "pages");
    expect_refused([&] { paged.slot(id, 0); }, "slot");
    expect_refused([&] { paged.block_table(ids, storage); }, "block_table");
  }
  EXPECT_EQ(paged.num_free_pages(), 4);
  EXPECT_NE(paged.add(), paged.add()) << "an id that was removed twice is given out twice";
  for (const int32_t position : {-1, 8}) {
    expect_refused([&] { paged.slot(kept, position); }, "position");
  }
  EXPECT_NO_THROW(paged.slot(kept, 7));

  const ModelDims dims{3, 24, 8, 40, 48};
  const LatentCacheStorage cache(backend(), dims, KvCacheFormat::kBf16, 1.0f, 2, 4, 3);
  EXPECT_NO_THROW(cache.layer(2));
  for (const int32_t layer : {-1, 3}) expect_refused([&] { cache.layer(layer); }, "layer");
  constexpr int32_t kHuge = 2147483647;  // 2^31 * 2^31 * 112 * 2^31 bytes wrap around to a few
  expect_refused(
      [&] { LatentCacheStorage(backend(), dims, KvCacheFormat::kBf16, 1.0f, kHuge, kHuge, kHuge); },
      "a cache beyond 64 bits");
}

}  // namespace
}  // namespace mla::test
