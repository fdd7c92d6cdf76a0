#include "kernels/cuda/block_uploader.h"

#include <algorithm>
#include <cstring>

#include "kernels/cuda/check.h"
#include "kernels/cuda/device_guard.h"

namespace mla::cuda {

CudaBlockUploader::CudaBlockUploader(int device, size_t capacity_bytes) : device_(device) {
  const DeviceGuard guard(device_);
  try {
    reserve(std::max<size_t>(capacity_bytes, 256));
  } catch (...) {
    release();
    throw;
  }
}

CudaBlockUploader::~CudaBlockUploader() {
  int previous = 0;
  if (cudaGetDevice(&previous) != cudaSuccess || cudaSetDevice(device_) != cudaSuccess) return;
  release();
  cudaSetDevice(previous);
}

void CudaBlockUploader::reserve(size_t bytes) {
  for (Slot& slot : slots_) {
    check_cuda(cudaMallocHost(reinterpret_cast<void**>(&slot.pinned), bytes), "cudaMallocHost");
    check_cuda(cudaEventCreateWithFlags(&slot.copied, cudaEventDisableTiming), "cudaEventCreate");
  }
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&block_), bytes), "cudaMalloc");
  capacity_ = bytes;
}

void CudaBlockUploader::release() noexcept {
  for (Slot& slot : slots_) {
    if (slot.copied != nullptr) {
      cudaEventSynchronize(slot.copied);  // the copy reads what is freed next
      cudaEventDestroy(slot.copied);
    }
    if (slot.pinned != nullptr) cudaFreeHost(slot.pinned);
    slot = {};
  }
  if (block_ != nullptr) cudaFree(block_);
  block_ = nullptr;
  capacity_ = 0;
}

const std::byte* CudaBlockUploader::upload(std::span<const std::byte> block, Stream stream) {
  const DeviceGuard guard(device_);
  if (block.size() > capacity_) {
    // Work that reads the old block may be under way on any stream.
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    const size_t bytes = std::max(block.size(), capacity_ * 2);
    release();
    reserve(bytes);
  }
  if (block.empty()) return block_;
  Slot& slot = slots_[next_];
  next_ = (next_ + 1) % kRing;
  check_cuda(cudaEventSynchronize(slot.copied), "cudaEventSynchronize");
  std::memcpy(slot.pinned, block.data(), block.size());
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  check_cuda(cudaMemcpyAsync(block_, slot.pinned, block.size(), cudaMemcpyHostToDevice, handle),
             "copying a plan to the device");
  check_cuda(cudaEventRecord(slot.copied, handle), "cudaEventRecord");
  return block_;
}

}  // namespace mla::cuda
