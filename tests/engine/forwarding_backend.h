// A backend that passes everything on: what tests derive from to watch or disturb an engine.
#ifndef TESTS_ENGINE_FORWARDING_BACKEND_H_
#define TESTS_ENGINE_FORWARDING_BACKEND_H_

#include <memory>
#include <string>
#include <string_view>

#include "kernels/backend.h"

namespace mla::test {

class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(Backend& backend) : backend_(backend) {}

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
  void write_latent_cache(const WriteLatentCacheParams& p, const OpContext& c) override {
    backend_.write_latent_cache(p, c);
  }
  void gather_latent(const GatherLatentParams& p, const OpContext& c) override {
    backend_.gather_latent(p, c);
  }
  void expand(const ExpandParams& p, const OpContext& c) override { backend_.expand(p, c); }
  void absorb_query(const AbsorbQueryParams& p, const OpContext& c) override {
    backend_.absorb_query(p, c);
  }
  void project_value(const ProjectValueParams& p, const OpContext& c) override {
    backend_.project_value(p, c);
  }
  void prefill_attention(const PrefillAttentionParams& p, const OpContext& c) override {
    backend_.prefill_attention(p, c);
  }
  void mask_empty_context(const MaskEmptyContextParams& p, const OpContext& c) override {
    backend_.mask_empty_context(p, c);
  }
  void merge_attn_states(const MergeAttnStatesParams& p, const OpContext& c) override {
    backend_.merge_attn_states(p, c);
  }
  void clear_partial(const ClearPartialParams& p, const OpContext& c) override {
    backend_.clear_partial(p, c);
  }

 protected:
  Backend& backend_;
};

}  // namespace mla::test

#endif  // TESTS_ENGINE_FORWARDING_BACKEND_H_
