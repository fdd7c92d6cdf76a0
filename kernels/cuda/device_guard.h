// Makes a device current for a scope.
#ifndef KERNELS_CUDA_DEVICE_GUARD_H_
#define KERNELS_CUDA_DEVICE_GUARD_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/check.h"

namespace mla::cuda {

/// The calling thread's current device is `device` while the guard lives, and then what it was.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device) {
      check_cuda(cudaSetDevice(device), "cudaSetDevice");
      changed_ = true;
    }
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_DEVICE_GUARD_H_
