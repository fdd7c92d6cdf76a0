// Host memory of any extent that is only backed where it is touched: rows that lie more than 2^32
// elements apart, on a machine of any size.
#ifndef TESTS_SUPPORT_SPARSE_MEMORY_H_
#define TESTS_SUPPORT_SPARSE_MEMORY_H_

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace mla::test {

class SparseMemory {
 public:
  explicit SparseMemory(size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  ~SparseMemory() {
    if (valid()) munmap(data_, bytes_);
  }

  /// False where the system doesn't hand out that much address space.
  bool valid() const { return data_ != MAP_FAILED; }
  void* data() const { return data_; }
  template <typename T>
  T* at(int64_t index) const {
    return static_cast<T*>(data_) + index;
  }

 private:
  size_t bytes_;
  void* data_;
};

}  // namespace mla::test

#endif  // TESTS_SUPPORT_SPARSE_MEMORY_H_
