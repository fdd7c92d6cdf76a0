// An executor with threads of its own, for programs that have none to lend.
#ifndef KERNELS_CPU_THREAD_POOL_H_
#define KERNELS_CPU_THREAD_POOL_H_

#include <memory>

#include "kernels/executor.h"

namespace mla {

/// `num_threads` workers, the calling thread counted as one; 0: as many as the machine has cores.
/// Calls of parallel_for from several threads take turns. Throws kDevice where the system has no
/// more threads.
std::unique_ptr<Executor> make_thread_pool(int num_threads = 0);

}  // namespace mla

#endif  // KERNELS_CPU_THREAD_POOL_H_
