// What the torch glue asks of the runtime: copies, the device's architecture, the text of an error.
#include "api.h"
#include "simt.cuh"

using namespace mdcp::cuda;

int mdcp_cuda_to_device(void* device, const void* host, int64_t bytes, void* stream) {
  return copy_to_device(device, host, bytes, stream);
}

int mdcp_cuda_to_host(void* host, const void* device, int64_t bytes, void* stream) {
  return copy_to_host(host, device, bytes, stream);
}

int mdcp_cuda_architecture(void) { return device_architecture(); }

const char* mdcp_cuda_error_text(int code) {
  switch (code) {
    case MDCP_CUDA_BAD_DTYPE:
      return "no kernel for these dtypes";
    case MDCP_CUDA_BAD_HEAD_DIM:
      return "no kernel for this head dim (1 to 256)";
    case MDCP_CUDA_BAD_ALIGNMENT:
      return "rows must start at multiples of 16 bytes";
    case MDCP_CUDA_BAD_ARGUMENT:
      return "sizes or options contradict each other";
    default:
      return runtime_error_text(code);
  }
}
