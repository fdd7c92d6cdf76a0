#include "parallel/in_process_communicator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <latch>
#include <numeric>

#include "tests/parallel/ranks.h"

namespace mla::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int32_t kSizes[] = {1, 2, 3, 5, 8};

/// What rank `from` sends to rank `to` in a round.
int32_t word(int32_t from, int32_t to, int32_t round) { return round * 10000 + from * 100 + to; }

TEST(InProcessCommunicatorTest, EveryBlockArrives) {
  constexpr int32_t kWords = 3;
  for (const int32_t size : kSizes) {
    InProcessGroup group(size);
    const auto outcomes = run_ranks(size, [&](int32_t rank) {
      const auto communicator = group.join(rank);
      ASSERT_EQ(communicator->rank(), rank);
      ASSERT_EQ(communicator->size(), size);
      for (int32_t round = 0; round < 20; ++round) {
        std::vector<int32_t> send(size * kWords), all(size * kWords, -1);
        for (int32_t i = 0; i < size * kWords; ++i) send[i] = word(rank, i / kWords, round);
        communicator->all_to_all(send.data(), all.data(), kWords * 4, {});
        for (int32_t i = 0; i < size * kWords; ++i) {
          ASSERT_EQ(all[i], word(i / kWords, rank, round));
        }
        communicator->all_gather(send.data(), all.data(), kWords * 4, {});
        for (int32_t i = 0; i < size * kWords; ++i) ASSERT_EQ(all[i], word(i / kWords, 0, round));

        // In place, and the sources change as soon as the call returns.
        std::vector<int32_t> own(size, -1);
        own[rank] = word(rank, rank, round);
        communicator->all_gather(&own[rank], own.data(), 4, {});
        for (int32_t r = 0; r < size; ++r) ASSERT_EQ(own[r], word(r, r, round));

        int32_t value = rank;
        communicator->broadcast(&value, 4, round % size, {});
        ASSERT_EQ(value, round % size);
      }
    });
    for (const RankOutcome& outcome : outcomes) EXPECT_EQ(outcome.message, "");
    for (int32_t rank = 1; rank < size; ++rank) EXPECT_EQ(group.calls(rank), group.calls(0));
    EXPECT_EQ(group.calls(0).size(), 80u);
    EXPECT_EQ(group.calls(0)[0], (CollectiveCall{Collective::kAllToAll, kWords * 4}));
  }
}

TEST(InProcessCommunicatorTest, ABarrierHoldsEverybodyBack) {
  constexpr int32_t kSize = 4;
  InProcessGroup group(kSize);
  std::atomic<int32_t> arrived = 0;
  run_ranks(kSize, [&](int32_t rank) {
    const auto communicator = group.join(rank);
    for (int32_t round = 1; round <= 50; ++round) {
      ++arrived;
      communicator->barrier({});
      ASSERT_GE(arrived.load(), round * kSize);
      communicator->barrier({});
    }
  });
}

TEST(InProcessCommunicatorTest, HostExchangesAreNotOnTheList) {
  InProcessGroup group(3);
  run_ranks(3, [&](int32_t rank) {
    const auto communicator = group.join(rank);
    const auto mine = static_cast<std::byte>(rank + 7);
    std::vector<std::byte> all(3);
    communicator->exchange_host({&mine, 1}, all);
    for (int32_t r = 0; r < 3; ++r) ASSERT_EQ(all[r], static_cast<std::byte>(r + 7));
  });
  EXPECT_TRUE(group.calls(0).empty());
}

/// Expects an error of communication on every rank but `lost`, within the limit and some more.
void expect_failure(const std::vector<RankOutcome>& outcomes, int32_t lost,
                    steady_clock::time_point begin, milliseconds limit) {
  for (int32_t rank = 0; rank < static_cast<int32_t>(outcomes.size()); ++rank) {
    if (rank == lost) continue;
    EXPECT_TRUE(outcomes[rank].communication_error) << rank << ": " << outcomes[rank].message;
  }
  EXPECT_LT(steady_clock::now() - begin, limit + std::chrono::seconds(20));
}

TEST(InProcessCommunicatorTest, ARankThatNeverComesIsAnErrorOnAllOthers) {
  constexpr milliseconds kLimit(1000);
  InProcessGroup group(4, kLimit);
  std::latch started(3);  // on a busy machine threads start far apart
  const auto begin = steady_clock::now();
  const auto outcomes = run_ranks(4, [&](int32_t rank) {
    if (rank == 2) return;
    started.arrive_and_wait();
    group.join(rank)->barrier({});
  });
  expect_failure(outcomes, 2, begin, kLimit);
  EXPECT_GE(steady_clock::now() - begin, kLimit);
  EXPECT_NE(outcomes[0].message.find("rank 2"), std::string::npos) << outcomes[0].message;
}

TEST(InProcessCommunicatorTest, ARankThatLeavesIsNoticedAtOnce) {
  InProcessGroup group(4, std::chrono::minutes(10));
  const auto begin = steady_clock::now();
  const auto outcomes = run_ranks(4, [&](int32_t rank) {
    const auto communicator = group.join(rank);
    communicator->barrier({});
    if (rank == 1) throw std::runtime_error("lost");
    communicator->barrier({});
    communicator->barrier({});
  });
  expect_failure(outcomes, 1, begin, milliseconds(0));
  EXPECT_NE(outcomes[0].message.find("rank 1 left"), std::string::npos) << outcomes[0].message;
}

TEST(InProcessCommunicatorTest, RanksOfAnotherOpinionAllGetTheError) {
  for (const size_t bytes : {4u, 8u}) {
    InProcessGroup group(3, std::chrono::minutes(10));
    const auto outcomes = run_ranks(3, [&](int32_t rank) {
      const auto communicator = group.join(rank);
      std::vector<int32_t> send(6), receive(6);
      if (rank == 1 && bytes == 4) {
        communicator->all_to_all(send.data(), receive.data(), 4, {});
      } else {
        communicator->all_gather(send.data(), receive.data(), rank == 1 ? bytes : 4, {});
      }
    });
    for (const RankOutcome& outcome : outcomes) {
      EXPECT_TRUE(outcome.communication_error);
      EXPECT_NE(outcome.message.find("rank 1 called"), std::string::npos) << outcome.message;
    }
  }
}

TEST(InProcessCommunicatorTest, AnAbortReachesWaitersAndLaterCalls) {
  InProcessGroup group(3, std::chrono::minutes(10));
  const auto outcomes = run_ranks(3, [&](int32_t rank) {
    const auto communicator = group.join(rank);
    if (rank == 2) {
      communicator->abort("asked to");
      communicator->wait({});
    } else {
      communicator->barrier({});
    }
  });
  for (const RankOutcome& outcome : outcomes) {
    EXPECT_TRUE(outcome.communication_error);
    EXPECT_EQ(outcome.message, "asked to");
  }
}

TEST(InProcessCommunicatorTest, RefusesWhatCannotBe) {
  EXPECT_THROW(InProcessGroup(0), Error);
  EXPECT_THROW(InProcessGroup(2, milliseconds(0)), Error);
  InProcessGroup group(1);
  EXPECT_THROW(group.join(1), Error);
  EXPECT_THROW(group.join(-1), Error);
  const auto communicator = group.join(0);
  EXPECT_THROW(group.join(0), Error);
  int32_t value = 0;
  EXPECT_THROW(communicator->broadcast(&value, 4, 1, {}), Error);
  std::byte all[3] = {};
  EXPECT_THROW(communicator->exchange_host({all, 1}, all), Error);
  EXPECT_FALSE(communicator->capturable());
}

}  // namespace
}  // namespace mla::test
