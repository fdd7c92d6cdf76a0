#include "parallel/in_process_communicator.h"

#include <fmt/format.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>

#include "metadata/error.h"

namespace mla {

/// What a rank brings to a call.
struct Offer {
  CollectiveCall call;
  int32_t root = 0;
  const std::byte* send = nullptr;

  bool matches(const Offer& other) const { return call == other.call && root == other.root; }
  std::string describe() const {
    return fmt::format("{} of {} bytes from root {}", collective_name(call.collective), call.bytes,
                       root);
  }
};

class InProcessGroup::State {
 public:
  State(int32_t size, std::chrono::milliseconds time_limit)
      : time_limit_(time_limit), ranks_(static_cast<size_t>(size)) {}

  int32_t size() const { return static_cast<int32_t>(ranks_.size()); }

  void join(int32_t rank) {
    const std::lock_guard lock(mutex_);
    if (rank < 0 || rank >= size()) {
      throw_error(ErrorCode::kInvalidArgument, "rank {} is outside [0, {})", rank, size());
    }
    if (ranks_[rank].joined) {
      throw_error(ErrorCode::kInvalidArgument, "rank {} has joined before", rank);
    }
    ranks_[rank].joined = true;
  }

  void leave(int32_t rank) {
    const std::lock_guard lock(mutex_);
    ranks_[rank].left = true;
    changed_.notify_all();
  }

  void abort(std::string_view reason) noexcept {
    const std::lock_guard lock(mutex_);
    fail(std::string(reason));
  }

  void check() {
    const std::lock_guard lock(mutex_);
    throw_if_failed();
  }

  std::vector<CollectiveCall> calls(int32_t rank) const {
    const std::lock_guard lock(mutex_);
    return ranks_.at(static_cast<size_t>(rank)).calls;
  }

  /// Meets all ranks, has `copy(source rank, its send)` read what each sent, and parts when all
  /// have read. Once all have met, none leaves before the last has read: an abort meanwhile shows
  /// in the next call.
  template <typename Copy>
  void meet(int32_t rank, const Offer& offer, const Copy& copy) {
    std::unique_lock lock(mutex_);
    throw_if_failed();
    Rank& own = ranks_[rank];
    own.offer = offer;
    if (offer.call.collective != Collective::kHostExchange) own.calls.push_back(offer.call);
    const int64_t number = ++own.entered;
    changed_.notify_all();
    wait_for_entry(lock, rank, number);
    check_offers();

    lock.unlock();
    for (int32_t r = 0; r < size(); ++r) copy(r, ranks_[r].offer.send);
    lock.lock();

    own.finished = number;
    changed_.notify_all();
    changed_.wait(lock, [&] { return first_behind(&Rank::finished, number) < 0; });
  }

 private:
  struct Rank {
    bool joined = false;
    bool left = false;
    int64_t entered = 0;  // calls begun and calls done
    int64_t finished = 0;
    Offer offer;
    std::vector<CollectiveCall> calls;
  };

  /// The first failure is the one that all ranks report.
  void fail(std::string reason) {
    if (failure_.empty()) failure_ = std::move(reason);
    changed_.notify_all();
  }

  void throw_if_failed() const {
    if (!failure_.empty()) throw_error(ErrorCode::kCommunication, "{}", failure_);
  }

  /// The first rank that has not come as far, or -1.
  int32_t first_behind(int64_t Rank::*progress, int64_t number) const {
    for (int32_t r = 0; r < size(); ++r) {
      if (ranks_[r].*progress < number) return r;
    }
    return -1;
  }

  void wait_for_entry(std::unique_lock<std::mutex>& lock, int32_t rank, int64_t number) {
    const std::string_view call = collective_name(ranks_[rank].offer.call.collective);
    const auto deadline = std::chrono::steady_clock::now() + time_limit_;
    bool late = false;
    for (int32_t missing; (missing = first_behind(&Rank::entered, number)) >= 0;) {
      if (late) {
        fail(fmt::format("rank {} waited {} ms for rank {} in {}", rank, time_limit_.count(),
                         missing, call));
      }
      for (int32_t r = 0; r < size(); ++r) {
        if (ranks_[r].left && ranks_[r].entered < number) {
          fail(fmt::format("rank {} left while rank {} waited for it in {}", r, rank, call));
        }
      }
      throw_if_failed();
      late = changed_.wait_until(lock, deadline) == std::cv_status::timeout;
    }
  }

  void check_offers() {
    for (int32_t r = 1; r < size(); ++r) {
      if (ranks_[r].offer.matches(ranks_[0].offer)) continue;
      fail(fmt::format("rank {} called {}, rank 0 {}", r, ranks_[r].offer.describe(),
                       ranks_[0].offer.describe()));
    }
    throw_if_failed();
  }

  const std::chrono::milliseconds time_limit_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Rank> ranks_;
  std::string failure_;
};

class InProcessCommunicator final : public Communicator {
 public:
  InProcessCommunicator(std::shared_ptr<InProcessGroup::State> state, int32_t rank)
      : state_(std::move(state)), rank_(rank) {}
  ~InProcessCommunicator() override { state_->leave(rank_); }

  int32_t rank() const override { return rank_; }
  int32_t size() const override { return state_->size(); }

  void all_gather(const void* send, void* receive, size_t block_bytes, Stream) override {
    gather_blocks(Collective::kAllGather, send, receive, block_bytes);
  }

  void all_to_all(const void* send, void* receive, size_t block_bytes, Stream) override {
    meet(Collective::kAllToAll, block_bytes, 0, send, [&](int32_t r, const std::byte* theirs) {
      copy(block(receive, r, block_bytes), theirs + rank_ * block_bytes, block_bytes);
    });
  }

  void broadcast(void* data, size_t bytes, int32_t root, Stream) override {
    if (root < 0 || root >= size()) {
      throw_error(ErrorCode::kInvalidArgument, "root {} is outside [0, {})", root, size());
    }
    meet(Collective::kBroadcast, bytes, root, data, [&](int32_t r, const std::byte* theirs) {
      if (r == root && r != rank_) copy(static_cast<std::byte*>(data), theirs, bytes);
    });
  }

  void barrier(Stream) override {
    meet(Collective::kBarrier, 0, 0, nullptr, [](int32_t, const std::byte*) {});
  }

  void exchange_host(std::span<const std::byte> mine, std::span<std::byte> all) override {
    if (all.size() != mine.size() * static_cast<size_t>(size())) {
      throw_error(ErrorCode::kInvalidArgument, "{} bytes for {} ranks' {}", all.size(), size(),
                  mine.size());
    }
    gather_blocks(Collective::kHostExchange, mine.data(), all.data(), mine.size());
  }

  void wait(Stream) override { state_->check(); }
  void abort(std::string_view reason) noexcept override { state_->abort(reason); }
  bool capturable() const override { return false; }

 private:
  static std::byte* block(void* memory, int32_t r, size_t bytes) {
    return static_cast<std::byte*>(memory) + static_cast<size_t>(r) * bytes;
  }
  static void copy(std::byte* to, const std::byte* from, size_t bytes) {
    if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
  }

  template <typename Copy>
  void meet(Collective collective, size_t bytes, int32_t root, const void* send,
            const Copy& copy_from) {
    state_->meet(rank_, {{collective, bytes}, root, static_cast<const std::byte*>(send)},
                 copy_from);
  }

  void gather_blocks(Collective collective, const void* send, void* receive, size_t bytes) {
    meet(collective, bytes, 0, send, [&](int32_t r, const std::byte* theirs) {
      copy(block(receive, r, bytes), theirs, bytes);
    });
  }

  std::shared_ptr<InProcessGroup::State> state_;
  int32_t rank_;
};

InProcessGroup::InProcessGroup(int32_t size, std::chrono::milliseconds time_limit) {
  if (size < 1) throw_error(ErrorCode::kInvalidArgument, "a group of {} ranks, at least 1", size);
  if (time_limit.count() <= 0) {
    throw_error(ErrorCode::kInvalidArgument, "the time limit is {} ms, at least 1",
                time_limit.count());
  }
  state_ = std::make_shared<State>(size, time_limit);
}

std::unique_ptr<Communicator> InProcessGroup::join(int32_t rank) {
  state_->join(rank);
  return std::make_unique<InProcessCommunicator>(state_, rank);
}

std::vector<CollectiveCall> InProcessGroup::calls(int32_t rank) const {
  return state_->calls(rank);
}

}  // namespace mla
