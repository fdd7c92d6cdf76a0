// A backend that passes every call on: the base of those that watch or alter another.
#ifndef KERNELS_FORWARDING_BACKEND_H_
#define KERNELS_FORWARDING_BACKEND_H_

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "kernels/backend.h"

namespace mla {

class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(Backend& backend) : backend_(backend) {}
  explicit ForwardingBackend(std::unique_ptr<Backend> backend)
      : backend_(*backend), owned_(std::move(backend)) {}

  std::string_view name() const override { return backend_.name(); }
  std::string device_description() const override { return backend_.device_description(); }
  std::string attention_kernel(const ModelDims& dims, DType dtype, Path path) const override {
    return backend_.attention_kernel(dims, dtype, path);
  }
  bool supports_path(const ModelDims& dims, Path path) const override {
    return backend_.supports_path(dims, path);
  }

  void* allocate(size_t bytes) override { return backend_.allocate(bytes); }
  void deallocate(void* data) noexcept override { backend_.deallocate(data); }
  void copy_to_device(void* device, const void* host, size_t bytes, Stream stream) override {
    backend_.copy_to_device(device, host, bytes, stream);
  }
  void copy_to_host(void* host, const void* device, size_t bytes, Stream stream) override {
    backend_.copy_to_host(host, device, bytes, stream);
  }
  void fill_bytes(void* device, uint8_t value, size_t bytes, Stream stream) override {
    backend_.fill_bytes(device, value, bytes, stream);
  }
  void synchronize(Stream stream) override { backend_.synchronize(stream); }
  std::unique_ptr<BlockUploader> make_block_uploader(size_t capacity_bytes) override {
    return backend_.make_block_uploader(capacity_bytes);
  }
  size_t scratch_bytes(const ScratchLimits& limits) const override {
    return backend_.scratch_bytes(limits);
  }

  void write_latent_cache(const WriteLatentCacheParams& params, const OpContext& context) override {
    backend_.write_latent_cache(params, context);
  }
  void gather_latent(const GatherLatentParams& params, const OpContext& context) override {
    backend_.gather_latent(params, context);
  }
  void expand(const ExpandParams& params, const OpContext& context) override {
    backend_.expand(params, context);
  }
  void absorb_query(const AbsorbQueryParams& params, const OpContext& context) override {
    backend_.absorb_query(params, context);
  }
  void project_value(const ProjectValueParams& params, const OpContext& context) override {
    backend_.project_value(params, context);
  }
  void prefill_attention(const PrefillAttentionParams& params, const OpContext& context) override {
    backend_.prefill_attention(params, context);
  }
  void mask_empty_context(const MaskEmptyContextParams& params, const OpContext& context) override {
    backend_.mask_empty_context(params, context);
  }
  void merge_attn_states(const MergeAttnStatesParams& params, const OpContext& context) override {
    backend_.merge_attn_states(params, context);
  }
  void clear_partial(const ClearPartialParams& params, const OpContext& context) override {
    backend_.clear_partial(params, context);
  }

 protected:
  Backend& backend_;

 private:
  std::unique_ptr<Backend> owned_;  // null where the caller keeps it
};

}  // namespace mla

#endif  // KERNELS_FORWARDING_BACKEND_H_
