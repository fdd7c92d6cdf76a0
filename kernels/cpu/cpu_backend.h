// The CPU backend: every op in portable C++, vectorised by run-time dispatch.
#ifndef KERNELS_CPU_CPU_BACKEND_H_
#define KERNELS_CPU_CPU_BACKEND_H_

#include <memory>

#include "kernels/backend.h"
#include "kernels/executor.h"

namespace mla {

/// `executor` must outlive the backend. Concurrent op calls share it.
std::unique_ptr<Backend> make_cpu_backend(Executor& executor);

}  // namespace mla

#endif  // KERNELS_CPU_CPU_BACKEND_H_
