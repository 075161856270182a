/* A CUDA runtime without a GPU. It reports one device of the compute capability in CUDA_STUB_CAPABILITY ("9.0"), serves
 * device memory from the host's and executes nothing, so that PyTorch can be asked which kernels it would choose.
 * `kernel_choice.py` compiles it together with functions that do nothing in place of all others of the runtime. */

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ANSWER(name, ...) cudaError_t CUDARTAPI name(__VA_ARGS__)

static const size_t MEMORY = (size_t)80 << 30;

static int capability(int minor) {
    const char *text = getenv("CUDA_STUB_CAPABILITY");
    return atoi(minor ? strchr(text, '.') + 1 : text);
}

ANSWER(cudaGetDeviceCount, int *count) { *count = 1; return cudaSuccess; }
ANSWER(cudaGetDevice, int *device) { *device = 0; return cudaSuccess; }
ANSWER(cudaDriverGetVersion, int *version) { *version = CUDART_VERSION; return cudaSuccess; }
ANSWER(cudaRuntimeGetVersion, int *version) { *version = CUDART_VERSION; return cudaSuccess; }
ANSWER(cudaMemGetInfo, size_t *available, size_t *total) { *available = *total = MEMORY; return cudaSuccess; }
ANSWER(cudaGetDeviceProperties, struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    snprintf(found->name, sizeof found->name, "stub of compute capability %s", getenv("CUDA_STUB_CAPABILITY"));
    found->major = capability(0);
    found->minor = capability(1);
    found->totalGlobalMem = MEMORY;
    found->multiProcessorCount = 132;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsPerMultiProcessor = 2048;
    found->regsPerBlock = 65536;
    found->sharedMemPerBlock = 49152;
    found->sharedMemPerBlockOptin = 232448;
    return cudaSuccess;
}
ANSWER(cudaDeviceGetAttribute, int *value, enum cudaDeviceAttr which, int device) {
    *value = which == cudaDevAttrComputeCapabilityMajor   ? capability(0)
             : which == cudaDevAttrComputeCapabilityMinor ? capability(1)
             : which == cudaDevAttrMultiProcessorCount    ? 132
                                                          : 0;
    return cudaSuccess;
}
ANSWER(cudaDeviceGetStreamPriorityRange, int *least, int *greatest) { *least = *greatest = 0; return cudaSuccess; }
ANSWER(cudaMalloc, void **pointer, size_t bytes) {
    *pointer = aligned_alloc(512, (bytes + 511) / 512 * 512);
    return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}
ANSWER(cudaFree, void *pointer) { free(pointer); return cudaSuccess; }
ANSWER(cudaStreamIsCapturing, cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
const char *CUDARTAPI cudaGetErrorString(cudaError_t error) { return "an error of the stub"; }
const char *CUDARTAPI cudaGetErrorName(cudaError_t error) { return "stub"; }
