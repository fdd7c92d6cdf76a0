#include "kernels/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <nvtx3/nvtx3.hpp>

#include "kernels/cuda/block_uploader.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/device_guard.h"
#include "kernels/cuda/empty_rows.h"
#include "kernels/cuda/expand.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/generic_attention.h"
#include "kernels/cuda/latent_cache.h"
#include "kernels/cuda/merge_attn_states.h"
#include "kernels/cuda/sm90/prefill_attention.h"
#include "kernels/validate.h"
#include "metadata/error.h"

namespace mla {
namespace {

using cuda::DeviceGuard;

cudaStream_t handle(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }
cudaStream_t handle(const OpContext& context) { return handle(context.stream); }

/// The runtime's way of writing 13.0: 13000.
std::string cuda_version(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

cudaDeviceProp find_device(int device) {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    throw_error(ErrorCode::kDevice, "there is no CUDA driver on this machine");
  }
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) {
    throw_error(ErrorCode::kDevice, "the driver serves CUDA {}, this program needs {}",
                cuda_version(driver), cuda_version(CUDART_VERSION));
  }
  if (error != cudaErrorNoDevice) check_cuda(error, "cudaGetDeviceCount");
  if (device < 0 || device >= count) {
    throw_error(ErrorCode::kDevice, "there is no CUDA device {}: this machine shows {}", device,
                count);
  }
  cudaDeviceProp properties;
  check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  if (properties.major < 8) {
    throw_error(ErrorCode::kDevice, "{} has compute capability {}.{}, at least 8.0 is needed",
                properties.name, properties.major, properties.minor);
  }
  return properties;
}

class CudaBackend final : public Backend {
 public:
  /// The device is current.
  CudaBackend(int device, const cudaDeviceProp& properties)
      : device_(device), properties_(properties) {}

  std::string_view name() const override { return "cuda"; }

  std::string device_description() const override {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    return fmt::format(
        "{} (device {}), {} multiprocessors, compute capability {}.{}, {} GiB, "
        "driver for CUDA {}",
        properties_.name, device_, properties_.multiProcessorCount, properties_.major,
        properties_.minor, properties_.totalGlobalMem >> 30, cuda_version(driver));
  }

  std::string attention_kernel(const ModelDims& dims, DType dtype, Path path) const override {
    if (path == Path::kAbsorb) {
      throw_error(ErrorCode::kUnsupported, "there is no absorbed attention on CUDA");
    }
    if (hopper_has(dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim, dtype)) {
      return "warp-specialised wgmma for Hopper (sm_90a)";
    }
    if (cuda::supports_generic_attention(dims.qk_head_dim(), dims.v_head_dim, dtype)) {
      return "mma.sync, 64 x 64 tiles (sm_80 and later)";
    }
    throw_error(ErrorCode::kUnsupported, "no CUDA attention for dims {}, {}, {} in {}",
                dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim, dtype_name(dtype));
  }

  bool supports_path(const ModelDims& dims, Path path) const override {
    return path == Path::kExpand &&
           cuda::supports_generic_attention(dims.qk_head_dim(), dims.v_head_dim, DType::kBFloat16);
  }

  void* allocate(size_t bytes) override {
    const DeviceGuard guard(device_);
    void* data = nullptr;
    const cudaError_t error = cudaMalloc(&data, bytes);
    if (error != cudaSuccess) {
      cudaGetLastError();  // running out of memory concerns nobody else
      check_cuda(error, fmt::format("allocating {} bytes on the device", bytes).c_str());
    }
    return data;
  }
  void deallocate(void* data) noexcept override { cudaFree(data); }

  void copy_to_device(void* device, const void* host, size_t bytes, Stream stream) override {
    const DeviceGuard guard(device_);
    check_cuda(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, handle(stream)),
               "copying to the device");
  }
  void copy_to_host(void* host, const void* device, size_t bytes, Stream stream) override {
    const DeviceGuard guard(device_);
    check_cuda(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, handle(stream)),
               "copying to the host");
  }
  void fill_bytes(void* device, uint8_t value, size_t bytes, Stream stream) override {
    const DeviceGuard guard(device_);
    check_cuda(cudaMemsetAsync(device, value, bytes, handle(stream)), "filling device memory");
  }
  void synchronize(Stream stream) override {
    const DeviceGuard guard(device_);
    check_cuda(cudaStreamSynchronize(handle(stream)), "the work on the stream");
  }
  std::unique_ptr<BlockUploader> make_block_uploader(size_t capacity_bytes) override {
    return std::make_unique<cuda::CudaBlockUploader>(device_, capacity_bytes);
  }

  size_t scratch_bytes(const ScratchLimits& limits) const override {
    const ModelDims& dims = limits.dims;
    if (!hopper_has(dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim,
                    DType::kBFloat16)) {
      return 0;
    }
    return sm90::prefill_attention_scratch_bytes(dims.num_heads, dims.v_head_dim,
                                                 limits.max_requests, limits.max_rows);
  }

  void write_latent_cache(const WriteLatentCacheParams& p, const OpContext& context) override {
    const nvtx3::scoped_range range("write_latent_cache");
    validate(p);
    const DeviceGuard guard(device_);
    cuda::write_latent_cache(p, handle(context));
  }
  void gather_latent(const GatherLatentParams& p, const OpContext& context) override {
    const nvtx3::scoped_range range("gather_latent");
    validate(p);
    const DeviceGuard guard(device_);
    cuda::gather_latent(p, handle(context));
  }
  void expand(const ExpandParams& p, const OpContext& context) override {
    const nvtx3::scoped_range range("expand");
    validate(p);
    const DeviceGuard guard(device_);
    cuda::expand(p, gemm_, handle(context));
  }
  void absorb_query(const AbsorbQueryParams& p, const OpContext& context) override {
    const nvtx3::scoped_range range("absorb_query");
    validate(p);
    if (p.absorbed.dtype != DType::kBFloat16) {
      throw_error(ErrorCode::kUnsupported, "absorbed queries are {} on CUDA, not {}",
                  dtype_name(DType::kBFloat16), dtype_name(p.absorbed.dtype));
    }
    const DeviceGuard guard(device_);
    cuda::absorb_query(p, gemm_, handle(context));
  }
  void project_value(const ProjectValueParams& p, const OpContext& context) override {
    const nvtx3::scoped_range range("project_value");
    validate(p);
    const DeviceGuard guard(device_);
    cuda::project_value(p, handle(context));
  }
  void prefill_attention(const PrefillAttentionParams& p, const OpContext& context) override {
    const nvtx3::scoped_range range("prefill_attention");
    validate(p);
    if (p.q.dtype == DType::kFloat32) {
      throw_error(ErrorCode::kUnsupported, "there is no attention with float32 queries on CUDA");
    }
    const DeviceGuard guard(device_);
    if (properties_.major == 9 && sm90::supports_prefill_attention(p)) {
      sm90::prefill_attention(p, context.scratch, properties_.multiProcessorCount, handle(context));
    } else {
      cuda::generic_attention(p, handle(context));
    }
  }
  void mask_empty_context(const MaskEmptyContextParams& p, const OpContext& context) override {
    const nvtx3::scoped_range range("mask_empty_context");
    validate(p);
    const DeviceGuard guard(device_);
    cuda::mask_empty_context(p, properties_.multiProcessorCount, handle(context));
  }
  void merge_attn_states(const MergeAttnStatesParams& p, const OpContext& context) override {
    const nvtx3::scoped_range range("merge_attn_states");
    validate(p);
    const DeviceGuard guard(device_);
    cuda::merge_attn_states(p, properties_.multiProcessorCount, handle(context));
  }
  void clear_partial(const ClearPartialParams& p, const OpContext& context) override {
    const nvtx3::scoped_range range("clear_partial");
    validate(p);
    const DeviceGuard guard(device_);
    cuda::clear_partial(p, handle(context));
  }

 private:
  bool hopper_has(int32_t p, int32_t rr, int32_t v, DType dtype) const {
    return properties_.major == 9 && sm90::supports_prefill_attention(p, rr, v, dtype);
  }

  int device_;
  cudaDeviceProp properties_;
  cuda::Gemm gemm_;
};

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(int device) {
  const cudaDeviceProp properties = find_device(device);
  const DeviceGuard guard(device);
  return std::make_unique<CudaBackend>(device, properties);
}

}  // namespace mla
