#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "kernels/cpu/ops.h"
#include "kernels/cpu/vector_ops.h"
#include "kernels/validate.h"
#include "metadata/error.h"

namespace mla {
namespace {

constexpr std::align_val_t kAlignment{256};

/// Plans are read where they were built.
class HostBlockUploader final : public BlockUploader {
 public:
  const std::byte* upload(std::span<const std::byte> block, Stream) override {
    return block.data();
  }
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(Executor& executor) : executor_(executor) {}

  std::string_view name() const override { return "cpu"; }

  std::string device_description() const override {
    return fmt::format("CPU, {} worker{}, {}", executor_.num_workers(),
                       executor_.num_workers() == 1 ? "" : "s", cpu::vector_target());
  }

  std::string attention_kernel(const ModelDims& dims, DType dtype, Path path) const override {
    validate_dims(dims);
    if (dtype != DType::kBFloat16 && dtype != DType::kFloat16) {
      throw_error(ErrorCode::kUnsupported, "attention takes bf16 or fp16, not {}",
                  dtype_name(dtype));
    }
    return fmt::format("blocked, {} path, float32 GEMM, {} softmax", path_name(path),
                       cpu::vector_target());
  }

  bool supports_path(const ModelDims&, Path) const override { return true; }

  void* allocate(size_t bytes) override { return ::operator new(bytes, kAlignment); }
  void deallocate(void* data) noexcept override { ::operator delete(data, kAlignment); }
  void copy_to_device(void* device, const void* host, size_t bytes, Stream) override {
    if (bytes > 0) std::memcpy(device, host, bytes);
  }
  void copy_to_host(void* host, const void* device, size_t bytes, Stream) override {
    if (bytes > 0) std::memcpy(host, device, bytes);
  }
  void fill_bytes(void* device, uint8_t value, size_t bytes, Stream) override {
    if (bytes > 0) std::memset(device, value, bytes);
  }
  void synchronize(Stream) override {}
  std::unique_ptr<BlockUploader> make_block_uploader(size_t) override {
    return std::make_unique<HostBlockUploader>();
  }

  size_t scratch_bytes(const ScratchLimits& limits) const override {
    const ModelDims& dims = limits.dims;
    const int workers = executor_.num_workers();
    return std::max({
        cpu::expand_scratch_bytes(dims, workers),
        cpu::attention_scratch_bytes(dims.qk_head_dim(), dims.v_head_dim, limits.max_requests,
                                     workers),
        cpu::attention_scratch_bytes(dims.latent_dim(), dims.kv_lora_rank, limits.max_requests,
                                     workers),
    });
  }

  void write_latent_cache(const WriteLatentCacheParams& p, const OpContext&) override {
    validate(p);
    cpu::write_latent_cache(p, executor_);
  }
  void gather_latent(const GatherLatentParams& p, const OpContext&) override {
    validate(p);
    cpu::gather_latent(p, executor_);
  }
  void expand(const ExpandParams& p, const OpContext& context) override {
    validate(p);
    check_scratch(context, cpu::expand_scratch_bytes(p.dims, executor_.num_workers()));
    cpu::expand(p, executor_, context.scratch);
  }
  void absorb_query(const AbsorbQueryParams& p, const OpContext& context) override {
    validate(p);
    check_scratch(context, cpu::expand_scratch_bytes(p.dims, executor_.num_workers()));
    cpu::absorb_query(p, executor_, context.scratch);
  }
  void project_value(const ProjectValueParams& p, const OpContext& context) override {
    validate(p);
    check_scratch(context, cpu::expand_scratch_bytes(p.dims, executor_.num_workers()));
    cpu::project_value(p, executor_, context.scratch);
  }
  void prefill_attention(const PrefillAttentionParams& p, const OpContext& context) override {
    validate(p);
    check_scratch(
        context, cpu::attention_scratch_bytes(p.qk_nope_head_dim + p.qk_rope_head_dim, p.v_head_dim,
                                              p.num_items.capacity, executor_.num_workers()));
    cpu::prefill_attention(p, executor_, context.scratch);
  }
  void mask_empty_context(const MaskEmptyContextParams& p, const OpContext&) override {
    validate(p);
    cpu::mask_empty_context(p, executor_);
  }
  void merge_attn_states(const MergeAttnStatesParams& p, const OpContext&) override {
    validate(p);
    cpu::merge_attn_states(p, executor_);
  }
  void clear_partial(const ClearPartialParams& p, const OpContext&) override {
    validate(p);
    cpu::clear_partial(p, executor_);
  }

 private:
  static void check_scratch(const OpContext& context, size_t needed) {
    if (context.scratch.size() < needed) {
      throw_error(ErrorCode::kInvalidArgument, "scratch has {} bytes, this call needs {}",
                  context.scratch.size(), needed);
    }
    if (reinterpret_cast<uintptr_t>(context.scratch.data()) % 256 != 0) {
      throw_error(ErrorCode::kInvalidArgument, "scratch is at {}, must be aligned to 256 bytes",
                  static_cast<const void*>(context.scratch.data()));
    }
  }

  Executor& executor_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(Executor& executor) {
  return std::make_unique<CpuBackend>(executor);
}

}  // namespace mla
