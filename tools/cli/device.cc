#include "tools/cli/device.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "metadata/error.h"

#ifdef MLA_HAVE_CUDA
#include "kernels/cuda/cuda_backend.h"
#endif

namespace mla::cli {
namespace {

std::unique_ptr<Backend> make_cuda() {
#ifdef MLA_HAVE_CUDA
  return make_cuda_backend();
#else
  throw_error(ErrorCode::kDevice, "this build has no CUDA backend");
#endif
}

/// Bytes that a new allocation may hope for: the machine's, or what is left of the control group's.
double available_bytes() {
  double available = std::numeric_limits<double>::infinity();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    std::istringstream fields(line);
    std::string key;
    double kib = 0.0;
    if (fields >> key >> kib && key == "MemAvailable:") available = kib * 1024;
  }
  std::ifstream limit_file("/sys/fs/cgroup/memory.max");
  std::ifstream used_file("/sys/fs/cgroup/memory.current");
  double limit = 0.0;
  double used = 0.0;
  if (limit_file >> limit && used_file >> used) available = std::min(available, limit - used);
  return available;
}

}  // namespace

Device make_device(const Options& options) {
  Device device;
  device.executor = make_thread_pool(options.threads);
  if (options.backend == "cuda") {
    device.backend = make_cuda();
  } else if (options.backend == "auto") {
    try {
      device.backend = make_cuda();
      device.choice = "auto: a CUDA device is usable";
    } catch (const Error& error) {
      device.choice = fmt::format("auto: {}", error.what());
    }
  }
  if (device.backend == nullptr) device.backend = make_cpu_backend(*device.executor);
  return device;
}

void check_memory(const Backend& backend, double bytes) {
  if (backend.name() != "cpu") return;
  const double available = available_bytes();
  if (bytes > available) {
    throw_error(ErrorCode::kInvalidArgument,
                "this batch needs {:.1f} GiB of memory, the machine has {:.1f} GiB left",
                bytes / 0x1p30, available / 0x1p30);
  }
}

std::string driver_version() {
  // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep ..."
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  std::getline(file, line);
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    if (std::count(word.begin(), word.end(), '.') >= 1 && word[0] >= '0' && word[0] <= '9') {
      return word;
    }
  }
  return {};
}

}  // namespace mla::cli
