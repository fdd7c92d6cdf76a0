#include "kernels/cuda/cublas_loader.h"

#include <dlfcn.h>

#include <cstdlib>
#include <vector>

namespace mla::cuda {
namespace {

std::vector<std::string> candidates() {
  // The version that the headers are of comes first; the functions in use are the same in both.
  const std::vector<std::string> names = {"libcublasLt.so.13", "libcublasLt.so.12"};
  std::vector<std::string> paths = names;
  const char* const home = std::getenv("CUDA_HOME");
  for (const std::string& folder :
       {std::string(home == nullptr ? "" : home), std::string("/usr/local/cuda")}) {
    if (folder.empty()) continue;
    for (const std::string& name : names) paths.push_back(folder + "/lib64/" + name);
  }
  return paths;
}

void* open_library() {
  std::string tried;
  for (const std::string& path : candidates()) {
    if (void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    tried += (tried.empty() ? "" : ", ") + path;
  }
  throw_error(ErrorCode::kDevice, "cuBLASLt can't be loaded; tried {}", tried);
}

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw_error(ErrorCode::kDevice, "cuBLASLt has no {}", name);
}

CublasLt load() {
  void* const library = open_library();
  CublasLt lt;
  find(library, "cublasLtCreate", lt.Create);
  find(library, "cublasLtDestroy", lt.Destroy);
  find(library, "cublasLtGetVersion", lt.GetVersion);
  find(library, "cublasLtGetStatusName", lt.GetStatusName);
  find(library, "cublasLtMatmulDescCreate", lt.MatmulDescCreate);
  find(library, "cublasLtMatmulDescDestroy", lt.MatmulDescDestroy);
  find(library, "cublasLtMatmulDescSetAttribute", lt.MatmulDescSetAttribute);
  find(library, "cublasLtMatrixLayoutCreate", lt.MatrixLayoutCreate);
  find(library, "cublasLtMatrixLayoutDestroy", lt.MatrixLayoutDestroy);
  find(library, "cublasLtMatrixLayoutSetAttribute", lt.MatrixLayoutSetAttribute);
  find(library, "cublasLtMatmulPreferenceCreate", lt.MatmulPreferenceCreate);
  find(library, "cublasLtMatmulPreferenceDestroy", lt.MatmulPreferenceDestroy);
  find(library, "cublasLtMatmulPreferenceSetAttribute", lt.MatmulPreferenceSetAttribute);
  find(library, "cublasLtMatmulAlgoGetHeuristic", lt.MatmulAlgoGetHeuristic);
  find(library, "cublasLtMatmul", lt.Matmul);
  return lt;
}

}  // namespace

const CublasLt& load_cublas_lt() {
  static const CublasLt lt = load();
  return lt;
}

}  // namespace mla::cuda
