// Runs a function on every rank of a group, a thread each.
#ifndef TESTS_PARALLEL_RANKS_H_
#define TESTS_PARALLEL_RANKS_H_

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "metadata/error.h"

namespace mla::test {

/// What a rank's function threw: empty where nothing.
struct RankOutcome {
  bool communication_error = false;
  std::string message;
};

inline std::vector<RankOutcome> run_ranks(int32_t size, const std::function<void(int32_t)>& body) {
  std::vector<RankOutcome> outcomes(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&body, rank, &outcome = outcomes[rank]] {
      try {
        body(rank);
      } catch (const Error& error) {
        outcome = {error.code() == ErrorCode::kCommunication, error.what()};
      } catch (const std::exception& error) {
        outcome = {false, error.what()};
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

}  // namespace mla::test

#endif  // TESTS_PARALLEL_RANKS_H_
