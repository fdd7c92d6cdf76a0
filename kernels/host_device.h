// Marks functions that both the host compiler and nvcc's device pass compile.
#ifndef KERNELS_HOST_DEVICE_H_
#define KERNELS_HOST_DEVICE_H_

#if defined(__CUDACC__)
#define MLA_HOST_DEVICE __host__ __device__
#else
#define MLA_HOST_DEVICE
#endif

#endif  // KERNELS_HOST_DEVICE_H_
