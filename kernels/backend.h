// What a device must be able to do: hold memory, and run the ops. The CPU and the CUDA backend
// implement this interface, and every suite runs against both.
//
// Ops are ordered by their stream, allocate nothing, copy nothing to or from the host and never
// wait. All pointers in params are backend memory. Each op checks its params before it launches
// (throws kInvalidArgument or kUnsupported: nothing was written) and checks every launch (kDevice).
//
// Thread-safety: a backend is immutable; ops may be called from any thread, on distinct scratch.
#ifndef KERNELS_BACKEND_H_
#define KERNELS_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "kernels/expand.h"
#include "kernels/latent_cache.h"
#include "kernels/merge_attn_states.h"
#include "kernels/prefill_attention.h"
#include "metadata/model.h"
#include "metadata/plan.h"

namespace mla {

/// A cudaStream_t on the CUDA backend; the CPU backend runs ops before they return.
struct Stream {
  void* handle = nullptr;
};

/// What every op call takes beside its params.
struct OpContext {
  Stream stream;
  std::span<std::byte> scratch;  // backend memory, at least scratch_bytes(); 256-byte aligned
};

/// Bounds that size the scratch memory of ops.
struct ScratchLimits {
  ModelDims dims;
  int32_t max_query_tokens = 0;
  int32_t max_rows = 0;      // rows of one chunk or new-token piece
  int32_t max_requests = 0;  // items of one attention launch
};

/// Carries plan blocks to the device through a ring of pinned host blocks (at least 2, each guarded
/// by an event), so that the host can build plan n+1 while plan n is still being copied.
class BlockUploader {
 public:
  virtual ~BlockUploader() = default;

  /// Returns the block's address in backend memory, valid for work enqueued on `stream` until the
  /// next upload. The address stays the same as long as blocks fit `capacity_bytes`, so captured
  /// graphs may hold it; a larger block makes the ring grow, which waits for the device once. The
  /// CPU backend copies nothing and returns the host address.
  virtual const std::byte* upload(std::span<const std::byte> block, Stream stream) = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string_view name() const = 0;  // "cpu", "cuda"
  virtual std::string device_description() const = 0;
  /// Which attention kernel serves the dimensions, for people to read; throws kUnsupported.
  virtual std::string attention_kernel(const ModelDims& dims, DType dtype, Path path) const = 0;
  virtual bool supports_path(const ModelDims& dims, Path path) const = 0;

  // Memory. Allocations are 256-byte aligned and not initialised; copies are stream-ordered.
  virtual void* allocate(size_t bytes) = 0;
  virtual void deallocate(void* data) noexcept = 0;
  virtual void copy_to_device(void* device, const void* host, size_t bytes, Stream stream) = 0;
  virtual void copy_to_host(void* host, const void* device, size_t bytes, Stream stream) = 0;
  virtual void fill_bytes(void* device, uint8_t value, size_t bytes, Stream stream) = 0;
  virtual void synchronize(Stream stream) = 0;
  virtual std::unique_ptr<BlockUploader> make_block_uploader(size_t capacity_bytes) = 0;

  /// Scratch that suffices for every op within the limits.
  virtual size_t scratch_bytes(const ScratchLimits& limits) const = 0;

  virtual void write_latent_cache(const WriteLatentCacheParams&, const OpContext&) = 0;
  virtual void gather_latent(const GatherLatentParams&, const OpContext&) = 0;
  virtual void expand(const ExpandParams&, const OpContext&) = 0;
  virtual void absorb_query(const AbsorbQueryParams&, const OpContext&) = 0;
  virtual void project_value(const ProjectValueParams&, const OpContext&) = 0;
  virtual void prefill_attention(const PrefillAttentionParams&, const OpContext&) = 0;
  virtual void mask_empty_context(const MaskEmptyContextParams&, const OpContext&) = 0;
  virtual void merge_attn_states(const MergeAttnStatesParams&, const OpContext&) = 0;
  virtual void clear_partial(const ClearPartialParams&, const OpContext&) = 0;
};

/// Backend memory that frees itself.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(Backend& backend, size_t bytes)
      : backend_(&backend), data_(bytes == 0 ? nullptr : backend.allocate(bytes)), bytes_(bytes) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceBuffer() {
    if (data_ != nullptr) backend_->deallocate(data_);
  }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  std::span<std::byte> span() const { return {static_cast<std::byte*>(data_), bytes_}; }

 private:
  void swap(DeviceBuffer& other) noexcept {
    std::swap(backend_, other.backend_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  Backend* backend_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace mla

#endif  // KERNELS_BACKEND_H_
