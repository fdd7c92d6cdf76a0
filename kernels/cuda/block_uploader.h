// Carries plan blocks to a CUDA device.
#ifndef KERNELS_CUDA_BLOCK_UPLOADER_H_
#define KERNELS_CUDA_BLOCK_UPLOADER_H_

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <span>

#include "kernels/backend.h"

namespace mla::cuda {

/// Blocks go through a ring of pinned ones into one block of device memory. An upload waits only
/// where the block of kRing uploads ago has not been copied yet.
class CudaBlockUploader final : public BlockUploader {
 public:
  CudaBlockUploader(int device, size_t capacity_bytes);
  ~CudaBlockUploader() override;
  CudaBlockUploader(const CudaBlockUploader&) = delete;
  CudaBlockUploader& operator=(const CudaBlockUploader&) = delete;

  const std::byte* upload(std::span<const std::byte> block, Stream stream) override;

 private:
  static constexpr size_t kRing = 4;

  struct Slot {
    std::byte* pinned = nullptr;
    cudaEvent_t copied = nullptr;
  };
  void reserve(size_t bytes);
  void release() noexcept;

  int device_;
  size_t capacity_ = 0;
  std::array<Slot, kRing> slots_;
  size_t next_ = 0;
  std::byte* block_ = nullptr;  // in device memory
};

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_BLOCK_UPLOADER_H_
